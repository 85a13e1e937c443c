"""Train an agent of your own, written against the OpenAI API and nothing else.

The agent below is plain: a loop of chat completions.  What makes it trainable is around it: open a trajectory, give the agent its
key, finish it with a reward.  The key lets the agent chat in this trajectory and do nothing else: it cannot reach its reward, nor
the trajectories of others, wherever it runs.  The scheduler records the exact tokens,
log-probs and weight versions of every turn, and a trainer leases them in whole groups::

    python examples/bring_your_own_agent.py --url http://127.0.0.1:8800 --job own --groups 4 --size 8

The role ``environment`` of the token file is enough for this; training itself needs ``trainer``: ``PUT /rose/v1/batches/NAME`` from a
framework of your own (docs/training.md).  ``rose train`` plays the episodes of its job itself, and cancels those that others play
under the same name: it is not for this.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
from typing import Any

import httpx
import openai

from rose.auth import Tokens


async def agent(client: openai.AsyncOpenAI, model: str, secret: int) -> tuple[bool, int]:
    """Guess a number in at most five turns; any agent that talks to a chat endpoint will do."""
    messages: list[dict[str, str]] = [{"role": "user", "content": "Guess my number from 0 to 9."}]
    for turn in range(5):
        answer = await client.chat.completions.create(
            model=model,
            messages=messages,  # type: ignore[arg-type]
            temperature=1.0,
            max_tokens=4,
        )
        text = answer.choices[0].message.content or ""
        if str(secret) in text:
            return True, turn + 1
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "No. Again."}]
    return False, 5


class Refused(Exception):
    """What the scheduler said against a call."""


def told(answer: httpx.Response) -> dict[str, Any]:
    """Its answer, or its words: httpx alone would say no more than the status."""
    if answer.is_error:
        try:
            error = answer.json()["error"]
            raise Refused(f"{error['param'] or answer.request.url.path}: {error['message']}")
        except (ValueError, KeyError, TypeError):
            answer.raise_for_status()
    return answer.json()


async def episode(url: str, token: str, model: str, job: str, group: str, size: int, secret: int) -> float:
    """One trajectory of a group: the same task for all its members."""
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600) as rose:
        body = {"job": job, "group_id": group, "group_size": size, "task": {"secret": secret}}
        opened = told(await rose.post("/rose/v1/trajectories", json=body))
        trajectory, key = opened["id"], opened["key"]
        try:
            # The key alone binds every call of this client to the trajectory.
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=600)
            async with client:
                success, turns = await agent(client, model, secret)
        except BaseException:
            # Half an episode must not be trained on, and a failed one is no zero.
            await rose.delete(f"/rose/v1/trajectories/{trajectory}")
            raise
        reward = 1.0 - 0.1 * (turns - 1) if success else 0.0
        body = {"reward": reward, "success": success, "info": {"turns": turns}}
        told(await rose.post(f"/rose/v1/trajectories/{trajectory}/finish", json=body))
        return reward


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8800", help="of rose-scheduler")
    parser.add_argument("--model", default="policy")
    parser.add_argument("--job", default="own")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--size", type=int, default=8, help="episodes per group")
    parser.add_argument("--token-file", default=None, help="default: the file named by ROSE_TOKEN_FILE")
    arguments = parser.parse_args()
    token = Tokens.load(arguments.token_file, ["environment"]).environment
    rng = random.Random(0)
    start = secrets.token_hex(4)  # groups of an earlier start may be there still, until they are trained on
    jobs = [
        episode(
            arguments.url, token, arguments.model, arguments.job, f"{start}-{index}", arguments.size, secret
        )
        for index in range(arguments.groups)
        for secret in [rng.randrange(10)]
        for _ in range(arguments.size)
    ]
    try:
        rewards = await asyncio.gather(*jobs)
    except Refused as refused:
        raise SystemExit(str(refused)) from None
    except openai.APIStatusError as refused:  # of a turn: no engine in time, say
        raise SystemExit(refused.message) from None
    print(f"{len(rewards)} episodes, mean reward {sum(rewards) / len(rewards):.2f}")


if __name__ == "__main__":
    asyncio.run(main())
