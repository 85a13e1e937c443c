"""Does a job learn as well where one of its engines is cut?  Whole training runs on the gate's fleets of real vLLM engines, in pairs.

    python benchmarks/training/learning_fleets.py --json FILE                  # all of it; start it again to go on
    python benchmarks/training/learning_fleets.py --json FILE --pilot          # on a seed of its own, which is not judged
    python benchmarks/training/learning_fleets.py --json FILE --steps 3 --seeds 1    # to see that it runs

*Task*: FrozenLake in one answer on 64 boards of 6x6, so one turn of 36 tokens; the policy has read careless plans of other boards
(``rose.demo.pretrain``) and reaches the goal now and then.  *Recipe*: GRPO with the step guard as it is by default, an asynchronous loop with ``alpha = 1``.
*Fleets* (``fleets.py``), one after the other on the same two cores, in another order for each seed: ``dedicated``, one engine; ``harvested``, the
same and one beside production, which is cut by bursts and by an operator; ``again``, the dedicated one once more with other seeds of engines and scheduler (A/A).
A seed is a start, 64 boards and 256 boards held out, the same for its three runs.

*Measured*: each of the last ten versions plays, in torch, the 256 held-out boards and the 64 training boards, four sampled episodes of each and one greedy.  A run's figure
is the mean over the ten.

**Bar**: the 95 % interval (Student's t over pairs) of held-out success, harvested less dedicated, lies within 0.05 to each side: *as well*; wholly
outside: *different*; else *undecided*.  A harvested run of whose tokens less than a twentieth is harvested says nothing: the runs of all its kind are taken
again once its cause is known, and what was run is told.  The same of the A/A pairs stands beside it and is no part of the bar, and so do success on training boards and greedy play.
No pair is added after a look.

A finished run is written to FILE at once, and one that is there already is not taken again.

Keys: ``verdict``, ``pairs``, and for both ``harvested`` and ``again``: ``ARM.FIGURE`` (difference to dedicated) with ``_low`` and ``_high``; ``ARM.FIGURE_mean`` of each
arm; ``harvested.turns_cut`` (by the engine's own count), ``ARM.harvested_share`` of tokens, ``ARM.lag_mean``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.report import Report, machine, write
from benchmarks.training.fleets import HARVESTED, Fleet, FleetPlan, engine_counts, play
from benchmarks.training.frozen_policies import success_on
from rose.auth import Tokens
from rose.demo import programs
from rose.demo.demo_config import DemoConfig
from rose.demo.pretrain import PLANNER, PretrainParams, ensure_pretrained
from rose.errors import RoseError
from rose.evaluation.statistics import mean_interval
from rose.train.batch import TrainingSequence
from rose.train.build import trainer_params
from rose.train.envs.frozenlake import FrozenLakeParams
from rose.train.envs.frozenlake_plan import LakePlanFamily
from rose.train.loop import train_with
from rose.train.protocol import TrainReport
from rose.train.train_config import TrainConfig
from rose.train.trainer import TorchTrainer
from rose.train.workers import Parts
from tests.train.local_actors import LocalActors

ARMS = ("dedicated", HARVESTED, "again")
SEEDS = (0, 1, 2, 3, 4, 5)
PILOT_SEEDS = (900,)
STEPS = 60
NUM_GROUPS, GROUP_SIZE = 16, 8
SIZE, NUM_BOARDS, NUM_HELD_OUT = 6, 64, 256
LAST_VERSIONS, EPISODES = 10, 4
AT_ONCE = 64
"""Boards that are played together: with all of them, most of the time goes into memory."""
MARGIN = 0.05
SWITCH_S = 3.0
TRAFFIC = {"burst_every_s": 6.0}
PRODUCTION = {"kv_cache_bytes": 64 * 2**20}
"""A burst takes up to 29 pages of 2 MiB within a reclaim.  Of the demo's 36 that leaves seven for an hour, and no turn was cut in one of the first
two harvested runs (``learning_fleets-small/2026-11-28.json``, which has all that was run with it)."""
SEATS = 64
"""Of each engine: no time is measured here, and a step takes a third less than with the demo's."""
START = PretrainParams(num_updates=600, careless=0.25)
NUM_READ = 2048
"""Boards whose plans the start has read; none is a training or held-out board."""
RECIPE: Mapping[str, Any] = {
    "algorithm": "grpo",
    "learning_rate": 1e-3,
    "adam_epsilon": 1e-2,
    "minibatch_sequences": 64,
    "num_epochs": 1,
    "aggregation": "token",
    "clip_high": 0.28,
    "kl_weight": 0.0,
    "entropy_weight": 0.0,
    "keep_checkpoints": 1,
}
FIGURES = ("held_out", "held_out_greedy", "training", "training_greedy")


def lakes(seed: int, num_boards: int = NUM_BOARDS) -> FrozenLakeParams:
    return FrozenLakeParams(size=SIZE, num_maps=num_boards, max_start_distance=2 * SIZE - 2, seed=seed)


def start_of(seed: int) -> Path:
    """The policy that a seed's runs begin with."""
    return ensure_pretrained(PLANNER, lakes(100_000 + seed, NUM_READ), START, seed=seed)


class KeepingTrainer(TorchTrainer):
    """Keeps what the last versions were.

    Attributes:
        kept: Rounded weights after each of the last steps.
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config.model, trainer_params(config))
        self.kept: deque[dict[str, Any]] = deque(maxlen=LAST_VERSIONS)

    def step(
        self,
        samples: Sequence[TrainingSequence],
        *,
        learning_rate: float | None = None,
        single_update: bool = False,
    ) -> TrainReport:
        report = super().step(samples, learning_rate=learning_rate, single_update=single_update)
        self.kept.append({name: one.clone() for name, one in self.rounded_model.state_dict().items()})
        return report


def play_versions(
    model: Any, versions: Sequence[Mapping[str, Any]], folder: Path, seed: int
) -> dict[str, float]:
    """Mean success over versions, sampled and greedy, on held-out and training boards."""
    import torch

    family = LakePlanFamily(lakes(seed))
    boards = {"held_out": family.held_out_tasks(NUM_HELD_OUT), "training": family.tasks()}
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    torch.set_num_threads(2)  # its engines are gone
    for number, weights in enumerate(versions):
        model.load_state_dict(weights)
        for name, tasks in boards.items():
            maps = [task["map"] for task in tasks]
            sampled: list[float] = []
            for first in range(0, len(maps), AT_ONCE):
                some, draws = maps[first : first + AT_ONCE], 1000 * (1000 * seed + number) + first
                sampled += success_on(model, folder, some, num_episodes=EPISODES, seed=draws)
            greedy = success_on(model, folder, maps, num_episodes=1, seed=0, greedy=True)
            found[name].append(statistics.fmean(sampled))
            found[f"{name}_greedy"].append(statistics.fmean(greedy))
    return {name: round(statistics.fmean(values), 4) for name, values in found.items()}


def job_of(plan: FleetPlan, seed: int, num_steps: int) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "job": programs.JOB,
            "seed": seed,
            "num_steps": num_steps,
            "model": plan.policy_model,
            "output_dir": plan.train_dir,
            "scheduler": {"url": plan.config.url("scheduler"), "model": programs.POLICY_MODEL},
            "weights": {"relay_url": plan.config.url("relay"), "run_id": programs.RUN_ID},
            "env": {
                "kind": "frozenlake_plan",
                "settings": {"size": SIZE, "num_maps": NUM_BOARDS, "max_start_distance": 2 * SIZE - 2, "seed": seed},
            },
            "rollout": {
                "mode": "asynchronous",
                "alpha": 1,
                "num_groups": NUM_GROUPS,
                "group_size": GROUP_SIZE,
                "max_tokens": SIZE**2,
            },
            "trainer": dict(RECIPE),
            "log": {"tensorboard": False, "page": False},
        }
    )  # fmt: skip


def one_run(arm: str, seed: int, num_steps: int, base_port: int, logs: Path) -> dict[str, Any]:
    """Train once on a fleet, then have the last versions play."""
    folder, records, trainers = start_of(seed), [], []
    counts: dict[str, int] = {}
    began_s = time.monotonic()

    def told(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {arm}, seed {seed}: {text}", flush=True)

    def make_trainer(config: TrainConfig) -> KeepingTrainer:
        import torch

        torch.set_num_threads(config.trainer.num_threads)
        trainers.append(KeepingTrainer(config))
        return trainers[-1]

    async def train(plan: FleetPlan, tokens: Tokens) -> None:
        def told_step(record: Mapping[str, Any]) -> None:
            if "event" in record:
                return
            records.append(dict(record))
            counts.update(engine_counts(plan))
            told(f"step {len(records)} of {num_steps}: success {record['sampled_success_rate']:.2f}")

        actors = LocalActors(job_of(plan, seed, num_steps), tokens, Parts(make_trainer=make_trainer))
        try:
            await train_with(actors, told_step)
        finally:
            await actors.close()

    engines_seed = 10 * seed + ARMS.index(arm)
    config = DemoConfig.model_validate(
        {
            "seed": engines_seed,
            "base_port": base_port,
            "out": logs / f"{seed}-{arm}",
            "start_timeout_s": 900.0,
            "traffic": TRAFFIC,
            "production": PRODUCTION,
            "rollout": {"max_num_seqs": SEATS},
            "job": {"num_groups": NUM_GROUPS, "group_size": GROUP_SIZE},
        }
    )
    fleet = Fleet(name=HARVESTED if arm == HARVESTED else "dedicated", policy=folder, switch_s=SWITCH_S)
    play(config, fleet, train, told)
    trained_s = time.monotonic() - began_s
    found = play_versions(trainers[-1].rounded_model, list(trainers[-1].kept), folder, seed)
    tiers = [record["tiers"] for record in records]
    tokens = sum(tier["tokens"] for one in tiers for tier in one.values())
    run = {
        "arm": arm,
        "seed": seed,
        "steps": num_steps,
        "engines_seed": engines_seed,
        "commit": str(machine()["commit"]),
        **found,
        "success": [round(record["sampled_success_rate"], 4) for record in records],
        "lag_mean": round(statistics.fmean(record["lag_mean"] for record in records), 4),
        "harvested_share": round(sum(one.get(HARVESTED, {"tokens": 0})["tokens"] for one in tiers) / max(1, tokens), 4),
        "turns_resumed": sum(record["num_resumed_turns"] for record in records),
        "turns_cut": counts.get("cut_requests", 0),
        "num_starved": sum(record.get("num_starved", 0) for record in records),
        "trained_s": round(trained_s, 1),
        "seconds": round(time.monotonic() - began_s, 1),
    }  # fmt: skip
    told(
        f"{run['success'][0]:.2f} -> {statistics.fmean(run['success'][-LAST_VERSIONS:]):.2f} sampled in training; last versions: "
        f"held out {run['held_out']:.3f} (greedy {run['held_out_greedy']:.3f}), training boards {run['training']:.3f}; "
        f"{run['turns_cut']} turns cut, {run['harvested_share']:.0%} harvested, {run['seconds']:.0f} s"
    )
    return run


def verdict_of(low: float, high: float) -> str:
    if low >= -MARGIN and high <= MARGIN:
        return "as well"
    return "different" if low > MARGIN or high < -MARGIN else "undecided"


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    by_seed: dict[int, dict[str, Mapping[str, Any]]] = {}
    for run in runs:
        by_seed.setdefault(run["seed"], {})[run["arm"]] = run
    summary: dict[str, Any] = {"verdict": "undecided", "pairs": 0}
    for arm in ARMS:
        own = [run for run in runs if run["arm"] == arm]
        for name in (*FIGURES, "lag_mean", "harvested_share", "trained_s") if own else ():
            summary[f"{arm}.{name}_mean"] = round(statistics.fmean(run[name] for run in own), 4)
    for arm in (HARVESTED, "again"):
        pairs = [both for both in by_seed.values() if {"dedicated", arm} <= set(both)]
        if arm == HARVESTED:
            summary["pairs"] = len(pairs)
            summary["harvested.turns_cut"] = sum(both[arm]["turns_cut"] for both in pairs)
        for name in FIGURES if len(pairs) > 1 else ():
            mean, half = mean_interval([both[arm][name] - both["dedicated"][name] for both in pairs])
            summary[f"{arm}.{name}"] = round(mean, 4)
            summary[f"{arm}.{name}_low"] = round(mean - half, 4)
            summary[f"{arm}.{name}_high"] = round(mean + half, 4)
            if (arm, name) == (HARVESTED, "held_out") and len(pairs) == len(SEEDS):
                summary["verdict"] = verdict_of(mean - half, mean + half)
    return summary


def order_of(seed: int) -> Sequence[str]:
    """The arms of a seed: each comes first, second and last as often."""
    first = seed % len(ARMS)
    return (*ARMS[first:], *ARMS[:first])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where results go, and what is gone on from")
    parser.add_argument("--pilot", action="store_true", help="on seeds of its own; not judged")
    parser.add_argument("--seeds", type=int, help="only the first so many")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run later than that")
    parser.add_argument("--base-port", type=int, default=18670)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir(), "rose-learning"))
    args = parser.parse_args()
    report, started_s = Report("learning_fleets"), time.monotonic()
    runs: list[dict[str, Any]] = []
    if args.json.exists():
        runs = json.loads(args.json.read_text())["details"]["runs"]
    args.json.parent.mkdir(parents=True, exist_ok=True)
    seeds = (PILOT_SEEDS if args.pilot else SEEDS)[: args.seeds]

    def save() -> dict[str, Any]:
        summary = summarise(runs) | ({"trial": "pilot"} if args.pilot else {})
        details = {
            "seeds": list(seeds),
            "commits": sorted({run["commit"] for run in runs}),
            "recipe": dict(RECIPE),
            "runs": runs,
        }
        write(args.json, "learning_fleets", summary, details, seconds=time.monotonic() - started_s)
        return summary

    code = 0
    try:
        for seed in seeds:
            for arm in order_of(seed):
                known = any(
                    (run["arm"], run["seed"], run["steps"]) == (arm, seed, args.steps) for run in runs
                )
                if known or time.monotonic() - started_s > 60.0 * args.minutes:
                    continue
                runs.append(one_run(arm, seed, args.steps, args.base_port, args.logs))
                save()
    except KeyboardInterrupt:
        print("stopped; finished runs are kept, start it again to go on", flush=True)
        code = 130
    except RoseError as error:
        print(f"error: {error}\nfinished runs are kept, start it again to go on", flush=True)
        code = 1
    report.table(("key", "value"), save().items(), title="learning_fleets")
    print(f"wrote {args.json}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
