"""Rebuild the answer of a recorded turn, for a client that asks for it again.

Answers are not stored: text, tool calls and log-probs follow from a turn's ids, parsed again by the same routes.  The alternatives
of ``top_logprobs`` are not recorded, so a repeated answer has the sampled token alone there, as one has that asked for none.
"""

from __future__ import annotations

from rose.policy import turn_events as te
from rose.scheduler.dispatch import TurnHandle
from rose.scheduler.engine import TokenLogprob
from rose.scheduler.ids import unpack_ids, unpack_logprobs
from rose.scheduler.inflight_request import Finished, Replay
from rose.scheduler.prompts import Prompt
from rose.scheduler.records import TurnRecord
from rose.scheduler.trajectory import Trajectory


def finished_before(found: Replay) -> list[Finished]:
    """The turns of a recorded answer, one for each choice."""
    trajectory, turn = found.trajectory, found.turn
    assert trajectory is not None
    records = trajectory.turns[turn : turn + trajectory.turns[turn].num_choices]
    prompts: dict[int, Prompt] = {}
    return [_finished(trajectory, record, prompts) for record in records]


def _finished(trajectory: Trajectory, record: TurnRecord, prompts: dict[int, Prompt]) -> Finished:
    first = record.turn if record.prompt_of is None else record.prompt_of
    prompt = prompts.get(first)
    if prompt is None:
        prompt = prompts[first] = Prompt(
            token_ids=trajectory.prompt_ids(first), num_inherited=0, sampling_params={}, parent=record.parent
        )
    token_ids, logprobs = unpack_ids(record.token_ids), unpack_logprobs(record.logprobs)
    last = record.segments[-1] if record.segments else {}
    handle = TurnHandle(
        turn_id=record.id,
        prompt_ids=prompt.token_ids,
        sampling_params={},
        tier=last.get("tier", ""),
        worker_id=last.get("worker", ""),
        entries=[
            TokenLogprob(token_id=t, logprob=p, top_logprobs=[{"token_id": t, "logprob": p}])
            for t, p in zip(token_ids, logprobs, strict=True)
        ],
    )
    result = te.TurnResult(
        turn_id=record.id,
        trajectory_id=trajectory.id,
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        segments=(),
        spans=(),
        num_attempts=record.attempts,
        num_reclaims=0,
        num_cached_tokens=record.usage["cached"],
        num_recomputed_tokens=record.usage["recomputed"],
        submitted_at_s=0.0,
        first_dispatch_at_s=None,
        first_token_at_s=None,
        ended_at_s=0.0,
        kv_mixed=record.kv_mixed,
    )
    ended = te.TurnEnded(
        turn_id=record.id,
        outcome=te.TurnState.DONE,
        reason=record.finish_reason,
        result=result,
        stop_reason=record.stop_reason,
    )
    return Finished(
        ended=ended,
        handle=handle,
        prompt=prompt,
        turn=record.turn,
        fork=record.fork,
        created=record.created,
        summary={
            "versions": record.versions,
            "segments": record.segments,
            "usage": record.usage,
            "timing": record.timing,
            "attempts": record.attempts,
            "kv_mixed": record.kv_mixed,
        },
    )
