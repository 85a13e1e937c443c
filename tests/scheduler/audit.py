"""What must hold after a run in which everything was killed: nothing lost, nothing twice, every token the right one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp

from rose.auth import Tokens, bearer
from rose.decisions.log import logs, replay
from rose.policy import turn_events as te
from rose.wire.addresses import Addresses


class Client:
    """Asks again until it is answered, as the OpenAI client does; of several addresses, the next where one does not answer."""

    def __init__(self, session: aiohttp.ClientSession, url: str, tokens: Tokens) -> None:
        self.session, self.addresses, self.tokens = session, Addresses(url), tokens

    async def post(self, path: str, body: Any, headers: dict[str, str], role: str = "environment") -> Any:
        for attempt in range(2000):
            retry = {
                "x-stainless-retry-count": str(attempt),
                **bearer(getattr(self.tokens, role)),
                **headers,
            }
            url = self.addresses.current
            try:
                async with self.session.post(url + path, json=body, headers=retry) as response:
                    if response.status == 200:
                        return await response.json()
                    assert response.status == 503, await response.text()  # only while the scheduler restarts
            except aiohttp.ClientError:
                pass
            self.addresses.leave(url)
            await asyncio.sleep(0.05)
        raise AssertionError("never answered")

    async def create(self, number: int, group_size: int = 2) -> str:
        """A trajectory; asked twice it is the same one."""
        body = {"job": "job", "group_id": f"g{number // group_size}", "group_size": group_size}
        headers = {"Idempotency-Key": f"create-{number}"}
        return (await self.post("/rose/v1/trajectories", body, headers))["id"]

    async def finish(self, name: str, reward: float) -> None:
        await self.post(f"/rose/v1/trajectories/{name}/finish", {"reward": reward}, {})

    async def trainer(self, path: str, body: Any) -> Any:
        return await self.post(path, body, {}, "trainer")

    async def status(self) -> Any:
        url = f"{self.addresses.current}/status"
        async with self.session.get(url, headers=bearer(self.tokens.trainer)) as response:
            return await response.json()


async def lease_all(
    client: Client,
    names: Iterable[str],
    *,
    num_turns: int,
    group_size: int = 2,
    undisturbed: Callable[[list[int]], Awaitable[list[int]]],
) -> list[dict[str, Any]]:
    """The trainer gets exactly ``names``, each token as ``undisturbed`` samples it; their turns.

    submitted = accepted + filtered + failed + cancelled + running: here all of them are accepted.
    """
    expected = sorted(names)
    lease = {
        "job": "job", "num_groups": len(expected) // group_size, "version": [0, 0], "ttl_s": 600,
        "prompts": "whole",
    }  # fmt: skip
    batch = await client.trainer("/rose/v1/batches/lease", lease)
    assert sorted(item["id"] for item in batch["trajectories"]) == expected
    turns: list[dict[str, Any]] = []
    for item in batch["trajectories"]:
        assert [turn["parent"] for turn in item["turns"]] == [None, *range(num_turns - 1)]
        for turn in item["turns"]:
            assert turn["token_ids"] == await undisturbed(turn["prompt_token_ids"])
            assert sum(segment["n"] for segment in turn["segments"]) == len(turn["token_ids"])
            assert len(turn["logprobs"]) == len(turn["token_ids"])
        turns.extend(item["turns"])
    await client.trainer(f"/rose/v1/batches/{batch['batch_id']}/ack", {"step": 1, "attempt": 0})
    counts = (await client.status())["trajectories"]
    assert {name: count for name, count in counts.items() if count} == {"consumed": len(expected)}
    return turns


def token_accounts(path: Path) -> list[Counter[str]]:
    """One account per life of the scheduler, oldest first, from its decision logs, which must replay to the same decisions.

    ``arrived`` from engines; of these ``fenced`` were of attempts that had been given up, ``kept`` went to turns; of the kept
    ``ended`` are in turns that ended, ``dropped`` in turns that had to start again, and ``open`` in turns that ran when the
    log ends.
    """
    found: list[Counter[str]] = []
    for log in logs(path, "decisions"):
        account: Counter[str] = Counter()

        def count(event: Any, actions: list[Any], account: Counter[str] = account) -> None:
            if isinstance(event, te.TokensArrived | te.AttemptEnded):
                account["arrived"] += len(event.token_ids)
            for action in actions:
                match action:
                    case te.Fenced():
                        account["fenced"] += action.num_tokens
                    case te.TokensKept():
                        account["kept"] += action.num_tokens
                    case te.TokensDropped():
                        account["dropped"] += action.num_tokens
                    case te.TurnEnded():
                        account["ended"] += len(action.result.token_ids)
                        account["recomputed"] += action.result.num_recomputed_tokens
                    case _:
                        pass

        assert replay(log, watch=count).difference is None
        account["open"] = account["kept"] - account["ended"] - account["dropped"]
        found.append(account)
    return found
