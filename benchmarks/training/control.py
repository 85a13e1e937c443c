"""The control path alone: 2,000 environments at once, engines that answer at once or are not the point.

Real are the scheduler (its own process, journal and all) and the environment manager (its own process, one
:class:`~rose.train.env_manager.EnvManager`); the engines are the scheduler's fake ones, many in one process.  Episodes have a few
turns each; the observation of each turn is 200 tokens and its answer about 24.

- *saturated*: environments take no time, so that a turn waits only for other turns: turns per CPU second of each side.
- *paced*: environments think so long that half of the saturated rate is asked for: the event-loop lag that a run would see.

Lag is told twice: as it was (processes share a core here: a wait for it counts), and the part that the loop's own work explains.
In the saturated run it is the length of a pass of the loop over everything that is ready, and with 2,000 clients that ask again at
once that comes in convoys; ``gc_max_ms`` says which part of it a collection can be.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.arms import Arm
from benchmarks.lib.report import Report
from benchmarks.training import probe
from benchmarks.training.engines import EngineSpec, PoolSpec, to_json
from rose.auth import Tokens
from rose.testing.toy_recipe import TOY_RECIPE

GROUP_SIZE = 16
MAX_TOKENS = 64
NUM_ENGINES = 32
"""Times the scheduler's cap of 64 per worker: every one of 2,000 turns has a place."""
LOAD = 0.5
"""Of the saturated rate, when paced."""


class Control:
    """One measurement of the control path.

    Args:
        folder: For sockets, journal and lines; not removed here.
        num_envs: Environments at once.
        seconds: Length of the window that is measured.
    """

    def __init__(self, folder: Path, num_envs: int, seconds: float, report: Report) -> None:
        self._folder = folder
        self._num_envs = num_envs
        self._seconds = seconds
        self._report = report
        self._arms: list[Arm] = []

    def measure(self, name: str, think_s: float) -> dict[str, Any]:
        """Run until the window is full; figures per process."""
        folder = self._folder / name
        folder.mkdir(parents=True)
        try:
            return self._measure(folder, name, think_s)
        finally:
            self._end()

    def _measure(self, folder: Path, name: str, think_s: float) -> dict[str, Any]:
        tokens = folder / "tokens.toml"
        Tokens.generate().save(tokens)
        settings = {"port": 0, "timeouts": {"stall_s": 120.0}, "limits": {"max_trajectories": 10**6}}
        scheduler = self._start(
            folder,
            "scheduler",
            {"settings": settings, "token_file": str(tokens), "journal": str(folder / "journal")},
        )
        self._start_engines(folder, scheduler.url, tokens)
        # Enough groups that nobody runs out within the window, however fast it goes.
        num_groups = 40 * self._num_envs // GROUP_SIZE
        settle_s = 2.0
        job = {
            "job": "control",
            "model": str(folder),
            "scheduler": {"url": scheduler.url},
            "weights": {"directory": str(folder)},
            "env": {
                "kind": "benchmarks.training.envs:scripted",
                "settings": {
                    "turns_median": 8.0,
                    "turns_sigma": 0.3,
                    "think_s": think_s,
                    "stagger_s": think_s,
                },
                "concurrency": self._num_envs,
            },
            "rollout": {"group_size": GROUP_SIZE, "max_tokens": MAX_TOKENS},
            "trainer": TOY_RECIPE,
        }
        self._start(
            folder,
            "manager",
            {"job": job, "token_file": str(tokens), "num_groups": num_groups, "wait_s": settle_s},
        )
        empty = {one: self._last(folder, one)["rss"] for one in ("scheduler", "manager")}
        self._wait_for_all_open(folder, name)
        # One think time more, or all would still be in their first turn.
        time.sleep(think_s)
        start_s = time.monotonic()
        while (now_s := time.monotonic()) < start_s + self._seconds:
            self._report.progress(f"control path, {name}", round(now_s - start_s), round(self._seconds))
            self._check()
            time.sleep(0.5)
        found: dict[str, Any] = {"think_s": round(think_s, 2)}
        windows = {
            one: probe.read(folder / f"{one}.jsonl", start_s, time.monotonic())
            for one in ("scheduler", "manager", "engines")
        }
        turns = windows["manager"].counts["turns"]
        open_now = self._last(folder, "manager")
        found["envs_open"] = open_now["started"] - open_now["ended"]
        found["turns"] = turns
        found["turns_per_s"] = round(turns / windows["manager"].seconds, 1)
        for one, window in windows.items():
            rate = turns / windows["manager"].seconds * window.seconds / window.cpu_s
            found[one] = {
                "turns_per_cpu_s": round(rate, 1),
                "cpu_share": round(window.cpu_s / window.seconds, 3),
                "rss_mb": round(window.rss_bytes / 2**20, 1),
                **window.lag_ms(),
            }
            if one in empty:
                grown = window.rss_bytes - empty[one]
                found[one]["kb_per_env"] = round(grown / found["envs_open"] / 2**10, 1)
        print(f"{name}: {found['turns_per_s']} turns/s, scheduler {found['scheduler']}", flush=True)
        return found

    def bare_client(self) -> float:
        """Requests per CPU second of the least possible client, with answers of the same size from memory."""
        folder = self._folder / "client"
        folder.mkdir(parents=True)
        try:
            upstream = Arm(
                "upstream", [sys.executable, "-m", "benchmarks.scheduling.gateway_fakes", "upstream", "1"]
            )
            self._arms.append(upstream)
            spec = {"url": upstream.url, "turns": 8, "max_tokens": MAX_TOKENS, "concurrency": self._num_envs}
            self._start(folder, "client", spec)
            time.sleep(2.0)
            start_s = time.monotonic()
            time.sleep(min(8.0, self._seconds))
            self._check()
            window = probe.read(folder / "client.jsonl", start_s, time.monotonic())
            return window.counts["turns"] / window.cpu_s
        finally:
            self._end()

    def _start(self, folder: Path, kind: str, spec: dict[str, Any]) -> Arm:
        path = folder / f"{kind}.json"
        path.write_text(json.dumps({**spec, "probe_file": str(folder / f"{kind}.jsonl")}))
        arm = Arm(kind, [sys.executable, "-m", "benchmarks.training.processes", kind, str(path)])
        self._arms.append(arm)
        return arm

    def _start_engines(self, folder: Path, url: str, tokens: Path) -> None:
        pool = PoolSpec(
            scheduler=url,
            token_file=str(tokens),
            probe_file=str(folder / "engines.jsonl"),
            run="control",
            engines=[EngineSpec(name=f"e{i}", steps=None, mean_tokens=24) for i in range(NUM_ENGINES)],
        )
        (folder / "engines.json").write_text(to_json(pool))
        command = [sys.executable, "-m", "benchmarks.training.engines", str(folder / "engines.json")]
        self._arms.append(Arm("engines", command))

    def _last(self, folder: Path, kind: str) -> dict[str, Any]:
        until_s = time.monotonic() + 60
        while not (found := probe.lines(folder / f"{kind}.jsonl")):
            if time.monotonic() > until_s:
                raise RuntimeError(f"{kind} tells nothing")
            time.sleep(0.1)
        return found[-1]

    def _wait_for_all_open(self, folder: Path, name: str) -> None:
        until_s = time.monotonic() + 180
        while (line := self._last(folder, "manager"))["started"] - line["ended"] < self._num_envs:
            self._check()
            if time.monotonic() > until_s:
                raise RuntimeError(f"{name}: only {line['started']} environments began in 180 s")
            time.sleep(0.25)

    def _check(self) -> None:
        for arm in self._arms:
            if arm.process.poll() is not None:
                arm.log.seek(0)
                raise RuntimeError(f"{arm.name} ended: {arm.log.read()[-2000:]}")

    def _end(self) -> None:
        for arm in reversed(self._arms):
            arm.end()
        self._arms.clear()


def measure(folder: Path, num_envs: int, seconds: float, repeats: int, report: Report) -> dict[str, Any]:
    """Both loads and the bare client, repeated in turn; medians by the rate of the saturated runs."""
    control = Control(folder, num_envs, seconds, report)
    runs: list[dict[str, Any]] = []
    for number in range(repeats):
        saturated = control.measure(f"saturated-{number}", 0.0)
        paced = control.measure(f"paced-{number}", num_envs / (LOAD * saturated["turns_per_s"]))
        client = control.bare_client()
        share = saturated["manager"]["turns_per_cpu_s"] / client
        runs.append({"saturated": saturated, "paced": paced, "client": client, "share_of_client": share})
    runs.sort(key=lambda run: run["saturated"]["manager"]["turns_per_cpu_s"])
    middle = runs[len(runs) // 2]
    saturated, paced = middle["saturated"], middle["paced"]
    summary: dict[str, Any] = {
        "environments": num_envs,
        "env_turns_per_cpu_s": saturated["manager"]["turns_per_cpu_s"],
        "scheduler_turns_per_cpu_s": saturated["scheduler"]["turns_per_cpu_s"],
        "turns_per_s_saturated": saturated["turns_per_s"],
        "bare_client_requests_per_cpu_s": round(middle["client"], 1),
        "env_share_of_bare_client": round(middle["share_of_client"], 3),
        "turns_per_s_paced": paced["turns_per_s"],
    }
    for side in ("manager", "scheduler"):
        name = "env" if side == "manager" else side
        summary[f"{name}_rss_mb"] = paced[side]["rss_mb"]
        summary[f"{name}_kb_per_env"] = paced[side]["kb_per_env"]
        for load, told in (("saturated", saturated), ("paced", paced)):
            for label in (
                "lag_p50_ms",
                "lag_p99_ms",
                "lag_max_ms",
                "own_lag_p50_ms",
                "own_lag_p99_ms",
                "own_lag_max_ms",
                "gc_max_ms",
            ):
                summary[f"{name}_{load}_{label}"] = told[side][label]
    rows = [
        (
            load,
            side,
            told[side]["turns_per_cpu_s"],
            told[side]["cpu_share"],
            told[side]["rss_mb"],
            *(told[side][f"lag_{label}_ms"] for label in ("p50", "p99", "max")),
            *(told[side][f"own_lag_{label}_ms"] for label in ("p99", "max")),
        )
        for load, told in (("saturated", saturated), ("paced", paced))
        for side in ("manager", "scheduler", "engines")
    ]
    header = ("load", "process", "turns/CPU-s", "CPU", "MB", "lag p50 ms", "p99", "max", "own p99", "own max")
    report.table(header, rows, title=f"control path, {num_envs} environments at once")
    return {"summary": summary, "details": {"runs": runs}}
