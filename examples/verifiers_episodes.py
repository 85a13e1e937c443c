"""Play environments of ``verifiers`` (prime-rl's) on ROSE's engines: an episode is a trajectory, and its reward is the environment's.

Nothing of verifiers is patched.  It sends the id of its trace with every model call, as ``X-Session-ID``, so the trace is given the
trajectory's id when it is begun; a trajectory ends with the sum of the task's weighted rewards.  What is trained on, exact tokens
with their log-probs and weight versions, is what rose-scheduler recorded; a trainer leases it in whole groups::

    pip install . verifiers==0.4.0     # from a checkout, in an environment of their own: see docs/other-trainers.md
    python examples/verifiers_episodes.py --taskset my-taskset --url http://127.0.0.1:8800 --job own --groups 4 --size 8

An episode is one run of one agent: where an environment has several, or tries an agent again by itself, each run would have to be a
trajectory of its own, and it is refused.  The agent's program reaches verifiers' own server and no token of ROSE's.
"""

# pyright: reportMissingImports=false
# verifiers pins other versions of openai and mcp: it is in an environment of its own.

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
from typing import Any

import httpx
import verifiers.v1 as vf

from rose.auth import Tokens

TOKEN_NAME = "ROSE_AGENT_API_KEY"
"""verifiers takes API keys from variables, and hides those with API_KEY in their name from the programs that it runs here."""
WHOLE = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""The model's own distribution, whatever a task or a model's folder says: the recorded log-probs are of this one."""


class EpisodeFailed(Exception):
    """It has no reward, and is none of the trainer's."""


def endpoint(url: str, tokens: Tokens, *, model: str, max_tokens: int) -> vf.ModelContext:
    """The scheduler as verifiers' model, for all episodes of a job: one pool of connections."""
    os.environ[TOKEN_NAME] = tokens.agent
    client = vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var=TOKEN_NAME)
    return vf.ModelContext(model=model, client=client, sampling=vf.Sampling(max_tokens=max_tokens))


async def play(
    rose: httpx.AsyncClient,
    env: vf.Env[Any],
    task: vf.Task[Any, Any, Any],
    model: vf.ModelContext,
    *,
    job: str,
    group_id: str,
    group_size: int,
) -> vf.Trace[Any, Any, Any]:
    """One episode, as one trajectory of its task's group; call it within ``env.serving()``.

    Args:
        rose: A client with the scheduler's URL and the token of role environment.

    Raises:
        EpisodeFailed: The episode came to nothing.  Its trajectory is cancelled: a failure is no zero.
    """
    body = {"job": job, "group_id": group_id, "group_size": group_size, "sampling": WHOLE}
    opened = await rose.post("/rose/v1/trajectories", json={**body, "task": {"key": task.key}})
    trajectory: str = opened.raise_for_status().json()["id"]
    runs: list[vf.Trace[Any, Any, Any]] = []

    def begun(trace: vf.Trace[Any, Any, Any]) -> None:
        runs.append(trace)
        if len(runs) > 1:
            raise EpisodeFailed("an episode is one run of one agent here, and this one began another")
        trace.id = trajectory

    try:
        episode = await env.run_episode(task, model, on_trace=begun)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise EpisodeFailed("; ".join(f"{error.type}: {error.message}" for error in errors)[-2000:])
    except BaseException:
        await rose.delete(f"/rose/v1/trajectories/{trajectory}")
        raise
    (trace,) = episode.traces
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    body = {"reward": trace.reward, "info": {"rewards": rewards, "metrics": trace.metrics}}
    (await rose.post(f"/rose/v1/trajectories/{trajectory}/finish", json=body)).raise_for_status()
    return trace


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--taskset", required=True, help="an installed package of verifiers' kind")
    parser.add_argument("--harness", default=None, help="the agent's program; default: the taskset's own")
    parser.add_argument("--runtime", default="subprocess", help="where it runs: subprocess, docker, ...")
    parser.add_argument("--url", default="http://127.0.0.1:8800", help="of rose-scheduler")
    parser.add_argument("--model", default="policy", help="under which the engines serve it")
    parser.add_argument("--job", default="own", help="any but that of a running `rose train`")
    parser.add_argument("--groups", type=int, default=4, help="the taskset's first so many tasks")
    parser.add_argument("--size", type=int, default=8, help="episodes of each")
    parser.add_argument("--max-tokens", type=int, default=1024, help="per turn")
    parser.add_argument("--token-file", default=None, help="default: the file named by ROSE_TOKEN_FILE")
    args = parser.parse_args()
    tokens = Tokens.load(args.token_file, ["environment", "agent"])
    agent: dict[str, Any] = {"runtime": {"type": args.runtime}}
    if args.harness is not None:
        agent["harness"] = {"id": args.harness}
    env = vf.load_environment(vf.resolve_env_config({"taskset": {"id": args.taskset}, "agent": agent}))
    model = endpoint(args.url, tokens, model=args.model, max_tokens=args.max_tokens)
    headers = {"Authorization": f"Bearer {tokens.environment}"}
    name = secrets.token_hex(4)  # groups of an earlier run are complete
    async with env.serving(), httpx.AsyncClient(base_url=args.url, headers=headers, timeout=60) as rose:
        found = await asyncio.gather(
            *(
                play(rose, env, task, model, job=args.job, group_id=f"{name}-{at}", group_size=args.size)
                for at, task in enumerate(env.taskset.take(args.groups))
                for _ in range(args.size)
            ),
            return_exceptions=True,
        )
    played = [one for one in found if isinstance(one, vf.Trace)]
    mean = sum(trace.reward for trace in played) / max(1, len(played))
    print(f"{len(played)} episodes, mean reward {mean:.2f}")
    for error in sorted({str(one) for one in found if isinstance(one, BaseException)}):
        print(f"failed: {error}")


if __name__ == "__main__":
    asyncio.run(main())
