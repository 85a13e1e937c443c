"""A turn book and short words for what happens to it."""

from __future__ import annotations

import random
from typing import Any

from rose.policy import turn_events as te
from rose.policy.fleet import FleetParams
from rose.policy.routing import make_policy
from rose.policy.turns import TurnBook
from rose.policy.worker import Tier


def book_of(
    policy: str = "sticky_least_loaded", *, fleet: FleetParams | None = None, **params: Any
) -> TurnBook:
    return TurnBook(make_policy(policy, random.Random(0)), te.TurnParams(**params), fleet or FleetParams())


_seq = {"n": 0}


def join(
    book: TurnBook,
    name: str,
    tier: Tier,
    at_s: float = 0.0,
    incarnation: str = "1",
    *,
    for_tail: bool = False,
    **beat: Any,
) -> None:
    book.handle(
        te.WorkerRegistered(
            at_s=at_s,
            worker_id=name,
            incarnation=incarnation,
            tier=tier,
            model="m",
            max_model_len=1000,
            for_tail=for_tail,
        )
    )
    hear(book, name, at_s, incarnation=incarnation, **beat)


def hear(book: TurnBook, name: str, at_s: float, **fields: Any) -> list[te.Action]:
    _seq["n"] += 1
    beat = {"incarnation": "1", "seq": _seq["n"], "version": (1, 0), "state": "ready", **fields}
    return book.handle(te.WorkerHeartbeat(at_s=at_s, worker_id=name, **beat))


def submit(book: TurnBook, name: str, at_s: float = 0.0, **fields: Any) -> list[te.Action]:
    spec = {"trajectory_id": f"t-{name}", "job": "j", "model": "m", "num_prompt_tokens": 10, "max_tokens": 8}
    return book.handle(te.TurnSubmitted(at_s=at_s, turn_id=name, **{**spec, **fields}))


def tokens(book: TurnBook, name: str, attempt: int, *ids: int, at_s: float = 0.1) -> list[te.Action]:
    return book.handle(
        te.TokensArrived(
            at_s=at_s, turn_id=name, attempt=attempt, token_ids=ids, logprobs=tuple(-float(i) for i in ids)
        )
    )


def end(
    book: TurnBook, name: str, attempt: int, reason: str = "stop", at_s: float = 0.2, **fields: Any
) -> Any:
    return book.handle(
        te.AttemptEnded(at_s=at_s, turn_id=name, attempt=attempt, finish_reason=reason, **fields)
    )


def dispatches(actions: list[te.Action]) -> list[te.Dispatch]:
    return [action for action in actions if isinstance(action, te.Dispatch)]


def ended(actions: list[te.Action]) -> te.TurnEnded:
    (found,) = [action for action in actions if isinstance(action, te.TurnEnded)]
    return found
