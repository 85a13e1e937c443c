"""What harvested engines bring to a train loop: real scheduler, loops and environment managers on engines that only take time.

One arm is a mode (synchronous or asynchronous), a fleet, and whether environments have stragglers (a lognormal latency added to
each of their steps).  Against these each group starts one redundant episode; one more arm shows the synchronous loop without.  Fleets: *dedicated*, *harvested* (the same engines beside bursts of production, see
``benchmarks.training.engines``), and *both*.  The trainer takes a fixed time per step.

*Gain.*  Pools add up if ``both = dedicated + harvested`` in tokens per second, each measured alone in the same asynchronous
loop.  The bar is a gain of at least 0.9 of that::

    both / dedicated - 1  >=  0.9 * harvested / dedicated

*Plain.*  Two more arms are without what the scheduler does for a queue that is longer than its slots: ``oldest_first_s`` (a turn is
as old as its group) and ``affine_wait_s`` (a turn waits a moment for a slot where its prefix is).

*Size of the job.*  A step is 96 trajectories, three for each slot of the dedicated engines and one and a half of all.  The bound of
staleness counts steps, and a trajectory takes the same time however many engines there are: of a job so small that the larger fleet
takes a step in a fraction of its longest trajectory, more and more is too old when it is done.

Tokens are those that were trained on, between the end of the first step counted and the end of the last; beside them, those
that engines sampled in that time (``engine_gain_over_limit``), with what came too late.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib.arms import Arm
from benchmarks.lib.report import Report
from benchmarks.training import probe
from benchmarks.training.engines import Bursts, EngineSpec, PoolSpec, Steps, to_json
from rose.auth import Tokens
from rose.testing.toy_recipe import TOY_RECIPE

NUM_ENGINES = 2
"""Of each tier."""
CAP = 16
"""Turns per engine, as in the paper."""
BAR = 0.9
SPARE = 1
"""Episodes that a group starts beyond its eight where there are stragglers; the slowest is dropped."""
STRAGGLERS = {"median_s": 0.2, "sigma": 1.2}
"""One step in a hundred takes sixteen times the median: 3.3 s, where an answer takes 1.3 s."""
WARM_STEPS = {"synchronous": 1, "asynchronous": 4}
"""Not counted: the buffer fills, and the scheduler learns how fast its workers are."""
MAX_STANDSTILL_S = 2.5
"""A run in which the whole machine stood still for longer is none."""
MAX_TRIES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    mode: str
    fleet: str
    stragglers: bool = False
    alpha: int = 4
    plain: bool = False
    """Without the two settings of the scheduler that are for long queues."""
    no_spare: bool = False
    """Stragglers without redundant episodes."""
    streamed: bool | None = None
    """Of ``benchmarks.training.streamed``: whether steps begin with the groups that are complete."""

    @property
    def name(self) -> str:
        ends = [name for name in ("stragglers", "plain", "no_spare", "streamed") if getattr(self, name)]
        return "_".join((self.mode, self.fleet, *ends))

    @property
    def redundant_episodes(self) -> int:
        return SPARE if self.stragglers and not self.no_spare else 0


CASES = [
    Case(mode=mode, fleet=fleet, stragglers=stragglers)
    for stragglers in (False, True)
    for mode, fleet in (
        ("synchronous", "dedicated"),
        ("asynchronous", "dedicated"),
        ("asynchronous", "harvested"),
        ("asynchronous", "both"),
    )
] + [
    *(Case(mode="asynchronous", fleet=fleet, plain=True) for fleet in ("dedicated", "both")),
    Case(mode="synchronous", fleet="dedicated", stragglers=True, no_spare=True),
]


GAIN_ARMS = tuple(f"asynchronous_{fleet}" for fleet in ("dedicated", "harvested", "both"))
"""What the gain from harvesting is made of; with stragglers, those of that ending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all arms of a run share."""

    steps: Steps = field(default_factory=Steps)
    bursts: Bursts = field(default_factory=Bursts)
    num_steps: int = 4
    """Counted ones; half of it in a synchronous arm, whose steps are alike, and twice where both fleets share a step."""
    train_s: float = 1.5
    token_s: float = 0.0
    """Of the trainer, for each sampled token, beside ``train_s``."""
    num_groups: int = 12
    group_size: int = 8


class Loop:
    """Runs arms, one at a time."""

    def __init__(self, setting: Setting, report: Report, record: Path | None = None) -> None:
        self._setting = setting
        self._record = record
        """File for what the trainer was given."""
        self._report = report
        self._arms: list[Arm] = []

    def measure(self, case: Case, seed: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="rose-bench-") as folder:
            try:
                return self._measure(Path(folder), case, seed)
            finally:
                for arm in reversed(self._arms):
                    arm.end()
                self._arms.clear()

    def _measure(self, folder: Path, case: Case, seed: int) -> dict[str, Any]:
        setting = self._setting
        tokens, head = folder / "tokens.toml", folder / "head"
        Tokens.generate().save(tokens)
        scheduler_settings = {
            "port": 0,
            "seed": seed,
            **({"oldest_first_s": 0.0, "affine_wait_s": 0.0} if case.plain else {}),
            "cap_dedicated": CAP,
            "cap_harvested": CAP,
            "timeouts": {"stall_s": 60.0, "suspect_s": 5.0, "dead_s": 20.0},
        }
        scheduler = self._start(
            folder,
            "scheduler",
            {"settings": scheduler_settings, "token_file": str(tokens), "journal": str(folder / "journal")},
        )
        pool = PoolSpec(
            scheduler=scheduler.url,
            token_file=str(tokens),
            probe_file=str(folder / "engines.jsonl"),
            head_file=str(head),
            run="bench",
            engines=self._engines(case.fleet, seed),
        )
        (folder / "engines.json").write_text(to_json(pool))
        self._arms.append(
            Arm(
                "engines",
                [sys.executable, "-m", "benchmarks.training.engines", str(folder / "engines.json")],
            )
        )
        num_counted = setting.num_steps if case.mode == "asynchronous" else -(-setting.num_steps // 2)
        num_counted *= 2 if case.fleet == "both" else 1
        num_steps = WARM_STEPS[case.mode] + num_counted
        job: dict[str, Any] = {
            "job": "bench",
            "model": str(folder),
            "num_steps": num_steps,
            "output_dir": str(folder / "out"),
            "scheduler": {"url": scheduler.url},
            "weights": {"directory": str(folder)},
            "log": {"tensorboard": False},
            "env": {
                "kind": "benchmarks.training.envs:scripted",
                "settings": {"turns_median": 3.0, "seed": seed},
                "latency": STRAGGLERS if case.stragglers else {},
            },
            "rollout": {
                "mode": case.mode,
                "alpha": case.alpha,
                "num_groups": setting.num_groups,
                "group_size": setting.group_size,
                "redundant_episodes": case.redundant_episodes,
                "max_tokens": 256,
            },
            "trainer": TOY_RECIPE,
        }
        if case.streamed is not None:
            one_update = {
                "num_epochs": 1,
                "minibatch_sequences": 1 << 16,
                "stream_groups": "gradients" if case.streamed else "off",
            }
            job |= {"trainer": {**TOY_RECIPE, **one_update}}
            job["rollout"]["on_stale"] = "mask"
        spec = {
            "job": job,
            "token_file": str(tokens),
            "head_file": str(head),
            "train_s": setting.train_s,
            "token_s": setting.token_s,
            "record_file": str(self._record) if self._record else "",
            "probe_file": str(folder / "driver.jsonl"),
        }
        (folder / "driver.json").write_text(json.dumps(spec))
        driver = Arm(
            "driver", [sys.executable, "-m", "benchmarks.training.driver", str(folder / "driver.json")]
        )
        self._arms.append(driver)
        metrics = folder / "out" / "metrics.jsonl"
        while driver.process.poll() is None:
            for arm in self._arms[:-1]:
                if arm.process.poll() is not None:
                    self._fail(arm)
            done = len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
            self._report.progress(case.name, done, num_steps)
            time.sleep(0.2)
        if driver.process.returncode != 0:
            self._fail(driver)
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        return self._found(folder, case, records)

    def _found(self, folder: Path, case: Case, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        num_warm = WARM_STEPS[case.mode]
        start_s, counted = records[num_warm - 1]["end_s"], records[num_warm:]
        end_s = counted[-1]["end_s"]
        seconds = end_s - start_s
        windows = {
            name: probe.read(folder / f"{name}.jsonl", start_s - probe.LINE_S, end_s + probe.LINE_S)
            for name in ("engines", "scheduler", "driver")
        }
        engines = windows["engines"]
        num_engines = NUM_ENGINES * (2 if case.fleet == "both" else 1)
        tiers: dict[str, int] = {}
        for record in counted:
            for tier, counts in record["tiers"].items():
                tiers[tier] = tiers.get(tier, 0) + counts["tokens"]
        total = sum(tiers.values())
        trained = sum(record["num_tokens"] for record in counted)
        parts = {
            name: statistics.fmean(record[f"{name}_s"] for record in counted)
            for name in ("rollout", "train", "checkpoint", "publish", "step")
        }
        # end to end, because what the pump does between two calls of a step belongs to neither
        whole_s = seconds / len(counted)
        other_s = whole_s - sum(parts[name] for name in ("rollout", "train", "checkpoint", "publish"))
        return {
            "case": case.name,
            "tokens_per_s": round(trained / seconds, 1),
            "leased_tokens_per_s": round(total / seconds, 1),
            "trajectories_per_s": round(sum(one["num_trajectories"] for one in counted) / seconds, 2),
            "step_s": round(whole_s, 3),
            "parts_s": {
                **{name: round(parts[name], 3) for name in ("rollout", "train", "checkpoint", "publish")},
                "other": round(other_s, 3),
            },
            "harvested_share": round(tiers.get("harvested", 0) / total, 3),
            "engine_busy": round(engines.counts["busy_s"] / engines.seconds / num_engines, 3),
            "engine_tokens_per_s": round(engines.counts["num_tokens"] / engines.seconds, 1),
            "engine_lost_s": round(engines.counts["lost_s"], 2),
            "batch_mean": round(engines.counts["num_tokens"] / max(1, engines.counts["num_steps"]), 2),
            "prompt_reused": round(engines.counts["num_reused"] / max(1, engines.counts["num_prompt"]), 3),
            "cut_requests": engines.counts["num_cut"],
            "num_trajectories": sum(one["num_trajectories"] for one in counted),
            "lag_max": max(one["lag_max"] for one in counted),
            "num_stale": sum(one["num_stale"] for one in counted),
            "step_times_s": [round(one["step_s"], 2) for one in counted],
            "cpu": {name: round(window.cpu_s / window.seconds, 3) for name, window in windows.items()},
            "standstill_s": round(max(max(window.lags_s) for window in windows.values()), 2),
            "lag_ms": {name: window.lag_ms() for name, window in windows.items()},
        }

    def _engines(self, fleet: str, seed: int) -> list[EngineSpec]:
        setting = self._setting
        found: list[EngineSpec] = []
        for index in range(NUM_ENGINES):
            if fleet in ("dedicated", "both"):
                found.append(EngineSpec(name=f"d{index}", steps=setting.steps))
            if fleet in ("harvested", "both"):
                found.append(
                    EngineSpec(
                        name=f"h{index}",
                        tier="harvested",
                        steps=setting.steps,
                        bursts=setting.bursts,
                        seed=seed * 100 + index,
                    )
                )
        return found

    def _start(self, folder: Path, kind: str, spec: dict[str, Any]) -> Arm:
        path = folder / f"{kind}.json"
        path.write_text(json.dumps({**spec, "probe_file": str(folder / f"{kind}.jsonl")}))
        arm = Arm(kind, [sys.executable, "-m", "benchmarks.training.processes", kind, str(path)])
        self._arms.append(arm)
        return arm

    def _fail(self, arm: Arm) -> None:
        arm.log.seek(0)
        raise RuntimeError(f"{arm.name} ended: {arm.log.read()[-3000:]}")


def gain_of(tokens_per_s: Mapping[str, float], stragglers: bool) -> dict[str, float]:
    """The gain from harvesting, and what the pools measured alone would allow."""
    end = "_stragglers" if stragglers else ""
    dedicated, harvested, both = (tokens_per_s[f"{arm}{end}"] for arm in GAIN_ARMS)
    gain, limit = both / dedicated - 1.0, harvested / dedicated
    return {"gain": gain, "limit": limit, "gain_over_limit": gain / limit}


def measure(
    setting: Setting, repeats: int, only: Sequence[str] | None, cache: Path | None, report: Report
) -> dict[str, Any] | None:
    """All arms, interleaved and repeated.  ``cache`` keeps finished arms; with ``only``, None where neither scenario (with
    stragglers, without) is complete yet.

    A run is judged by the median over repeats of each arm's tokens per second.
    """
    known: dict[tuple[str, int], dict[str, Any]] = {}
    key = json.dumps(asdict(setting), sort_keys=True)
    if cache is not None and cache.exists():
        for line in cache.read_text().splitlines():
            entry = json.loads(line)
            if entry["setting"] == key:
                known[(entry["found"]["case"], entry["seed"])] = entry["found"]
    loop = Loop(setting, report)
    for seed in range(repeats):
        for case in CASES:
            wanted = only is None or case.name in only or f"{case.name}:{seed}" in only
            if (case.name, seed) in known or not wanted:
                continue
            for _ in range(MAX_TRIES):
                found = loop.measure(case, seed)
                if found["standstill_s"] <= MAX_STANDSTILL_S:
                    break
                print(f"{case.name}: stood still for {found['standstill_s']:.1f} s, once more", flush=True)
            else:
                raise RuntimeError(f"{case.name}: the machine is too busy to measure on")
            known[(case.name, seed)] = found
            print(f"{seed} {case.name:36} {found['tokens_per_s']:8.0f} tokens/s", flush=True)
            if cache is not None:
                with cache.open("a") as file:
                    file.write(json.dumps({"setting": key, "seed": seed, "found": found}) + "\n")
    if not any(_complete(known, repeats, end) for end in ("", "_stragglers")):
        return None
    return summarise(setting, known, repeats, report)


def _complete(known: Mapping[tuple[str, int], Any], repeats: int, end: str) -> bool:
    """Whether the arms of a scenario that its gain is made of have been measured."""
    return all((arm + end, seed) in known for arm in GAIN_ARMS for seed in range(repeats))


def summarise(
    setting: Setting, runs: Mapping[tuple[str, int], Mapping[str, Any]], repeats: int, report: Report
) -> dict[str, Any]:
    middle: dict[str, Mapping[str, Any]] = {}
    for case in CASES:
        if any((case.name, seed) not in runs for seed in range(repeats)):
            continue
        own = sorted(
            (runs[(case.name, seed)] for seed in range(repeats)), key=lambda one: one["tokens_per_s"]
        )
        middle[case.name] = own[(len(own) - 1) // 2]
    rates = {name: float(one["tokens_per_s"]) for name, one in middle.items()}
    sampled = {name: float(one["engine_tokens_per_s"]) for name, one in middle.items()}
    summary: dict[str, Any] = {}
    ends = [end for end in ("", "_stragglers") if _complete(runs, repeats, end)]
    for end in ends:
        found = gain_of(rates, bool(end))
        summary |= {
            f"async_tokens_per_s{end}": rates[f"asynchronous_dedicated{end}"],
            f"harvested_alone_tokens_per_s{end}": rates[f"asynchronous_harvested{end}"],
            f"async_harvest_tokens_per_s{end}": rates[f"asynchronous_both{end}"],
            f"harvest_gain{end}": round(found["gain"], 3),
            f"harvest_gain_limit{end}": round(found["limit"], 3),
            f"harvest_gain_over_limit{end}": round(found["gain_over_limit"], 3),
            f"engine_gain_over_limit{end}": round(gain_of(sampled, bool(end))["gain_over_limit"], 3),
        }
        synchronous = rates.get(f"synchronous_dedicated{end}")
        if synchronous is not None:
            summary[f"sync_tokens_per_s{end}"] = synchronous
            summary[f"async_over_sync{end}"] = round(rates[f"asynchronous_dedicated{end}"] / synchronous, 3)
    spare, none = (rates.get(f"synchronous_dedicated_stragglers{end}") for end in ("", "_no_spare"))
    if spare is not None and none is not None:
        summary["sync_spare_over_none_stragglers"] = round(spare / none, 3)
    summary["harvest_gain_over_limit_bar"] = BAR
    for fleet in ("dedicated", "both"):
        name = f"asynchronous_{fleet}"
        if f"{name}_plain" in rates and name in rates:
            summary[f"{fleet}_plain_tokens_per_s"] = rates[f"{name}_plain"]
            summary[f"{fleet}_over_plain"] = round(rates[name] / rates[f"{name}_plain"], 3)
    report.table(
        (
            "arm",
            "tokens/s",
            "step s",
            "rollout",
            "train",
            "ckpt",
            "publish",
            "other",
            "busy",
            "batch",
            "reused",
            "cuts",
        ),
        [
            (
                name,
                one["tokens_per_s"],
                one["step_s"],
                *(one["parts_s"][part] for part in ("rollout", "train", "checkpoint", "publish", "other")),
                one["engine_busy"],
                one["batch_mean"],
                one["prompt_reused"],
                one["cut_requests"],
            )
            for name, one in middle.items()
        ],
        title="train loop on timed engines",
    )
    for end in ends:
        ratio = summary[f"harvest_gain_over_limit{end}"]
        word = "meets" if ratio >= BAR else "MISSES"
        print(
            f"gain from harvesting{end.replace('_', ', ')}: {ratio:.3f} of what the pools alone allow; {word} {BAR}"
        )
    details = {
        "setting": asdict(setting),
        "step_model": "rose.policy.admission.StepModel",
        "cap": CAP,
        "engines_per_tier": NUM_ENGINES,
        "stragglers": STRAGGLERS,
        "redundant_episodes": SPARE,
        "repeats": repeats,
        "runs": [{"seed": seed, **one} for (_, seed), one in runs.items()],
    }
    return {"summary": summary, "details": details}
