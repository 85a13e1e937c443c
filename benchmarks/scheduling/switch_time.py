"""How long a running engine takes to go over to another job's policy of the same base model: ``python -m benchmarks.scheduling.switch_time --json FILE``.

**World.**  One real vLLM engine on the CPU (34 M parameters, bf16, nothing else on its device), the node agent's own weight loop
(``rose.coserve.links.WeightLoop``) over host copies in memory, a relay process, and two runs that publish policies which differ in 5 % of
the elements of each tensor.  The engine is sent to and fro; before every second switch the run that it goes to publishes one more
version, so that its copy on the host is one behind.  Four turns are under way whenever a switch is ordered.

**Figures**, over :data:`NUM_SWITCHES` switches after the first to each run:

- ``switch_s``: from the order to the first token of a turn of the new run, that the engine has stamped with that run; ``switch_p95_s``.
- ``pull_s``: the first switch to the second run, of which nothing is on the host, as the node says it in its heartbeat.
- ``commit_s``: what the node says that the others took, the same way.
- ``mixed``: turns that were asked of one run and have a token that is stamped with another; and switches after which a scan of the
  engine's memory does not give the state hashes that the run published.

**Bar**, written before the first run: median of ``switch_s`` at most 1 s, ``mixed`` 0.  An engine of another architecture is another process
(``benchmarks/coserving/activation.py``); none is switched to here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.lib.report import Report
from benchmarks.weight_transfer.weights_nodes import Run, RunningEngine
from rose.coserve.links import WeightLoop, open_copies
from rose.coserve.node_config import EngineConfig, NodeConfig, WeightsLink
from rose.policy.stop_reasons import OTHER_RUN
from rose.shared_memory import SharedMemorySweep
from rose.weights.publisher import WeightPublisher
from rose.weights.warmup import warm_up
from rose.wire.turns import ASKED_RUN
from tests.engine_launcher import EngineServer
from tests.plugin.weights_kit import Tensors, change
from tests.tiny_model import write_tiny_model

NUM_SWITCHES = 40
NUM_TURNS = 4
RUNS = ("job-a", "job-b")
MODEL: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 640,
    "num_heads": 10,
    "num_kv_heads": 2,
    "head_size": 64,
    "intermediate_size": 1728,
}
PROMPT = [7, 30, 99, 181, 12, 240, 5, 66]


class Agents:
    """Turns of whichever run is wanted, one after the other; each asks its engine for that run by name."""

    def __init__(self, server: EngineServer) -> None:
        self._server = server
        self.wanted = RUNS[0]
        self.num_mixed = self.num_turns = self.num_refused = 0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(NUM_TURNS)]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while not self._over.is_set():
            if not self.turn(self.wanted, 48):
                time.sleep(0.02)  # a scheduler would not have placed it here

    def turn(self, run: str, max_tokens: int) -> bool:
        """A turn of ``run``; False: the engine has other weights."""
        sampling: dict[str, Any] = {
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "extra_args": {ASKED_RUN: run},
        }
        answer = self._server.post(
            "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling}
        )
        answer.raise_for_status()
        (choice,) = answer.json()["choices"]
        stamps = {stamp["version"].partition("@")[0] for stamp in choice["weight_versions"] or ()}
        self.num_turns += 1
        self.num_mixed += bool(stamps - {run})
        refused = choice["stop_reason"] == OTHER_RUN and not choice["token_ids"]
        self.num_refused += refused
        return not refused

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def measure(args: argparse.Namespace, report: Report, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(summary, details)."""
    weights = write_tiny_model(folder / "model", seed=1, **MODEL)
    held: dict[str, Tensors] = {run: change(weights, seed=at) for at, run in enumerate(RUNS)}
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as ends:
        run = ends.enter_context(Run(folder))
        publishers = {
            name: WeightPublisher(lambda name=name: held[name], run.store, name, 1) for name in RUNS
        }
        states = {name: dict(each.publish(1).state) for name, each in publishers.items()}
        server = ends.enter_context(run.server(folder / "model", "node", ROSE_WEIGHT_RUN="base"))
        place = run.nodes_folder("node")
        link = WeightsLink(relay_url=run.relay.url, run_id=RUNS[0], directory=place, poll_s=0.5)
        config = NodeConfig(
            node_id="node",
            dir=place,
            engine=EngineConfig(model=str(server.model_dir), port=server.port, max_model_len=128),
            weights=link,
        )
        engine = RunningEngine(config, server.node_token, {}, lambda path: 0)
        run.loop.call(engine.attach())
        loop = WeightLoop(link, place, engine, open_copies(config, link, run.relay.tokens))

        async def begin() -> asyncio.Task[None]:
            return asyncio.ensure_future(loop.run())

        async def order(name: str) -> None:
            loop.follow(name)

        async def end() -> None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await engine.detach()

        following = run.loop.call(begin())
        ends.callback(lambda: run.loop.call(end()))
        agents = Agents(server)
        ends.callback(agents.end)
        until(lambda: engine.run == RUNS[0], loop)
        wrong = 0
        for number in range(args.switches + 2):
            name = RUNS[(number + 1) % 2]
            is_behind = number % 4 >= 2
            if is_behind:
                held[name] = change(held[name], seed=100 + number, fraction=0.01)
                states[name] = dict(publishers[name].publish(number + 2).state)
            began_s = time.monotonic()
            agents.wanted = name
            run.loop.call(order(name))
            until(lambda name=name: engine.run == name, loop)
            ran_s = time.monotonic()
            while not agents.turn(name, 1):
                time.sleep(0.001)
            rows.append(
                {
                    "run": name,
                    "is_behind": is_behind,
                    "switch_s": time.monotonic() - began_s,
                    "in_force_s": ran_s - began_s,
                    "pull_s": loop.pull_s,
                    "commit_s": loop.commit_s,
                }
            )
            until(
                lambda name=name: (
                    loop.newest is not None and str(loop.newest) == str(publishers[name].published)
                ),
                loop,
            )
            until(lambda: str(engine.version) == str(loop.newest), loop)
            (rank,) = server.get("/rose/weights/hash").json()["ranks"]
            wrong += rank["hashes"] != states[name] or rank["run"] != name
            report.progress("switches", number, args.switches + 2)
        agents.end()
        for publisher in publishers.values():
            publisher.close()
    later = rows[2:]
    seconds = sorted(row["switch_s"] for row in later)
    summary = {
        "switch_s": statistics.median(seconds),
        "switch_p95_s": seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))],
        "switch_max_s": seconds[-1],
        "switch_behind_s": statistics.median(row["switch_s"] for row in later if row["is_behind"]),
        "commit_s": statistics.median(row["commit_s"] for row in later),
        "pull_s": rows[0]["pull_s"],
        "first_switch_s": rows[0]["switch_s"],
        "megabytes": sum(each.numel() * each.element_size() for each in weights.values()) / 1e6,
        "switches": len(later),
        "turns": agents.num_turns,
        "refused": agents.num_refused,
        "mixed": agents.num_mixed + wrong,
    }
    return summary, {"rows": rows}


def until(condition: Callable[[], bool], loop: WeightLoop, timeout_s: float = 120.0) -> None:
    """Raises:
    RuntimeError: It has not become so in time; with what the loop says.
    """
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            raise RuntimeError(f"the engine did not get its weights in time: {loop.error or loop.last}")
        time.sleep(0.002)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write summary and every switch here")
    parser.add_argument("--switches", type=int, default=NUM_SWITCHES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warm_up()  # as set-up does
    report = Report("switch_time")
    with SharedMemorySweep(), tempfile.TemporaryDirectory(prefix="rose-switch-") as folder:
        summary, details = measure(args, report, Path(folder))
    report.finish(summary, details, args.json)
    return 0 if summary["switch_s"] <= 1.0 and summary["mixed"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
