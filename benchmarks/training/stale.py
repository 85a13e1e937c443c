"""``on_stale = wait | mask | cancel``, compared on what they cost: learning, time, and which lengths are left to learn from.

Each rule trains the demo's policy on FrozenLake in the asynchronous loop, for the same number of steps, with the same seeds, with
environments that have stragglers (a lognormal latency on each of their steps, so long episodes are late).  Everything is the real
thing but for the engines' runtime, see ``benchmarks.training.small_runs``.

*Bias by length.*  Of all trajectories that ended, in quarters by their number of turns: which share was trained on.  A rule that
is blind to length has the same share in each quarter; ``long_over_all`` is the share of the longest quarter over that of all.

Success is that of held-out maps, played greedily by the last version, and the mean of the last five steps in training.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.lib.report import Report
from benchmarks.training import small_runs
from rose.demo.models import POLICY, ensure_model
from rose.policy.samples import STALE_RULES
from rose.testing.toy_recipe import TOY_RECIPE

QUARTERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    num_steps: int = 24
    alpha: int = 1
    num_groups: int = 4
    group_size: int = 8
    num_maps: int = 4
    latency_median_s: float = 0.02
    latency_sigma: float = 1.8
    num_engines: int = 2
    hidden_size: int = 64
    """Of the policy: half the demo's, so that the trainer's steps are as short as the episodes."""


def measure(setting: Setting, seeds: Sequence[int], report: Report) -> dict[str, Any]:
    """All rules, interleaved by seed."""
    runs: list[dict[str, Any]] = []
    for seed in seeds:
        for rule in STALE_RULES:
            runs.append(_one(setting, rule, seed, report))
            told = runs[-1]
            print(
                f"seed {seed} {rule:7} success {told['success_last']:.2f} (held out {told['success_held_out']:.2f}), "
                f"{told['seconds']:.0f} s, left out {told['left_out']:.2f}",
                flush=True,
            )
    summary: dict[str, Any] = {
        "num_seeds": len(seeds),
        "num_steps": setting.num_steps,
        "alpha": setting.alpha,
    }
    rows: list[tuple[Any, ...]] = []
    for rule in STALE_RULES:
        mine = [run for run in runs if run["rule"] == rule]
        keys = (
            "success_last",
            "success_held_out",
            "seconds",
            "left_out",
            "long_over_all",
            "turns_trained_over_all",
        )
        for key in keys:
            summary[f"{rule}_{key}"] = round(statistics.fmean(run[key] for run in mine), 3)
        for quarter in range(QUARTERS):
            shares = [run["trained_by_quarter"][quarter] for run in mine]
            summary[f"{rule}_trained_q{quarter + 1}"] = round(statistics.fmean(shares), 3)
        rows.append((rule, *(summary[f"{rule}_{key}"] for key in keys)))
    report.table(
        ("on_stale", "success", "held out", "s", "left out", "long/all", "turns trained/all"),
        rows,
        title=f"what is too old (alpha {setting.alpha}), {len(seeds)} seeds, {setting.num_steps} steps",
    )
    return {"summary": summary, "details": {"setting": _table(setting), "runs": runs}}


def _one(setting: Setting, rule: str, seed: int, report: Report) -> dict[str, Any]:
    model = ensure_model(
        replace(
            POLICY,
            hidden_size=setting.hidden_size,
            intermediate_size=2 * setting.hidden_size,
            num_heads=2,
            num_kv_heads=1,
        ),
        seed=seed,
    )
    job = {
        "num_steps": setting.num_steps,
        "env": {
            "settings": {"num_maps": setting.num_maps, "seed": seed},
            "latency": {"median_s": setting.latency_median_s, "sigma": setting.latency_sigma},
        },
        "rollout": {
            "mode": "asynchronous",
            "alpha": setting.alpha,
            "on_stale": rule,
            "num_groups": setting.num_groups,
            "group_size": setting.group_size,
        },
        "trainer": {**TOY_RECIPE, "keep_checkpoints": 1},
        "eval": {"at_end": True, "num_tasks": 32},
    }

    def progress(record: Mapping[str, Any]) -> None:
        report.progress(f"{rule}, seed {seed}", record["step"] + 1, setting.num_steps)

    with tempfile.TemporaryDirectory(prefix="rose-bench-") as folder:
        found = small_runs.train(
            Path(folder), model, job, num_engines=setting.num_engines, seed=seed, progress=progress
        )
    records, ended = found["records"], found["trajectories"]
    trained = [one for one in ended if one["trained"]]
    left_out = [
        one for one in ended if one["state"] == "stale" or (one["state"] == "consumed" and not one["trained"])
    ]
    shares = trained_by_quarter(ended)
    share = len(trained) / (len(trained) + len(left_out))
    return {
        "rule": rule,
        "seed": seed,
        "seconds": round(found["seconds"], 1),
        "success_first": records[0]["success_rate"],
        "success_last": statistics.fmean(record["success_rate"] for record in records[-5:]),
        "success_held_out": records[-1]["eval"]["success_rate"],
        "num_ended": len(ended),
        "num_trained": len(trained),
        "left_out": round(1.0 - share, 4),
        "lag_max": max(one["lag"] for one in trained),
        "trained_by_quarter": shares,
        "long_over_all": round(shares[-1] / share, 4),
        "turns_trained_over_all": round(_turns(trained) / _turns([*trained, *left_out]), 4),
        "rollout_s": round(sum(record["rollout_s"] for record in records), 2),
        "train_s": round(sum(record["train_s"] for record in records), 2),
        "success_curve": [round(record["success_rate"], 4) for record in records],
    }


def trained_by_quarter(ended: Sequence[Mapping[str, Any]]) -> list[float]:
    """Share that was trained on, by quarter of the number of turns, shortest first; ties are shared out between quarters.

    Trajectories that nobody has asked for yet when a run ends count for nobody.
    """
    decided = [one for one in ended if one["state"] != "finished"]
    lengths = sorted(one["num_turns"] for one in decided)
    trained = sorted(one["num_turns"] for one in decided if one["trained"])
    shares: list[float] = []
    for quarter in range(QUARTERS):
        low, high = quarter * len(lengths) / QUARTERS, (quarter + 1) * len(lengths) / QUARTERS
        ended_here = taken_here = 0.0
        at = 0
        for length in sorted(set(lengths)):
            count = lengths.count(length)
            inside = max(0.0, min(high, at + count) - max(low, at))
            ended_here += inside
            taken_here += inside * trained.count(length) / count
            at += count
        shares.append(round(taken_here / ended_here, 4) if ended_here else 0.0)
    return shares


def _turns(trajectories: Sequence[Mapping[str, Any]]) -> float:
    return statistics.fmean(one["num_turns"] for one in trajectories)


def _table(setting: Setting) -> dict[str, Any]:
    return {name: getattr(setting, name) for name in Setting.__slots__}
