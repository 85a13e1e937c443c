"""The equivalence gate: is what a trainer is leased the same, whoever played it?  Frozen policies, three fleets of real vLLM engines.

    python benchmarks/training/equivalence.py --json FILE                  # all of it; start it again to go on
    python benchmarks/training/equivalence.py --json FILE --only 0.5       # one level
    python benchmarks/training/equivalence.py --json FILE --pilot          # a few steps of each fleet at 0.5: tokens a second, hours of the whole; judges nothing
    python benchmarks/training/equivalence.py --json FILE --quick          # one step of one fleet, to see that it runs; judges nothing
    python benchmarks/training/equivalence.py --json FILE --judge          # from what was leased so far; plays nothing

It has been run once, on 2026-11-27 (``benchmarks/results/training/equivalence``; docs/evidence.md says what came of it).  What follows was written
before.

*Policies* that succeed in about 0.2, 0.5 and 0.9 of their sampled episodes, made once (``frozen_policies.py``).  *Task*: FrozenLake in one
answer, eight boards of 6x6: one turn of 36 tokens.  *Fleets*, in turn, level by level: ``dedicated``, one engine; ``harvested``, the same and one
beside a production engine, under bursty traffic, which takes its memory back, and whose harvesting is switched off and on again besides,
:data:`SWITCH_S` seconds or up to half as much more after the last time, as soon as the harvested engine decodes for 16 requests: bursts alone, and switches
at any moment (none of 512 turns in a pilot of four steps; every 4 seconds 16 of 512; every second, by a program that takes a second to start, 21), cut too
few to say much; ``uncut``, two engines that nobody cuts.  *Loop*:
asynchronous, ``alpha = 1``, ``on_stale = "cancel"``, eight groups of 16 a step; the trainer takes no update, and publishes a version of the
same weights after each step.

*Counts*: at each level each fleet is leased :data:`STEPS` steps, 5,120 episodes, of which the bar asks for 5,000; no more are added.  At least
500 of the harvested fleet's turns have to be **really cut** there: the engine gave their memory back in the middle, by its own stop reason, and they went on with their
tokens.  Turns that the scheduler moved for speed are told apart.  With fewer the level is not judged.  Seeds: of engines, scheduler and traffic :func:`seed_of`, another for each start; of the boards 0.

*Bar*, at each level, of harvested against dedicated and of harvested against uncut: the 95 % interval of each of these lies within its margin
(:class:`~benchmarks.training.equivalence_sums.Bar`):

==================  ==================================================================================  ==============
success             of leased episodes, difference                                                      -0.03 to 0.03
length              moves walked an episode, ratio (all answers have 36 tokens)                         0.9 to 1.1
lag                 versions between a token and the step that leased it, difference of means           -0.25 to 0.25
actions             total variation of the distribution of moves, mean over the 36 cells                up to 0.04
gradient_cosine     of the mean gradients of the loss (GRPO, at the frozen weights)                     0.9 and more
gradient_norm       ratio of their lengths                                                              0.8 to 1.25
cut_success         of the cut turns, less the other fleet's on the same boards                         -0.1 to 0.1
==================  ==================================================================================  ==============

A level is *equivalent* where all are within, *different* where one lies wholly outside, else *undecided*.  **The gate is met where all three
levels are equivalent.**  Uncut against dedicated is shown beside, with the same figures: it says what a second engine does, cut or not, and is no part of
the bar.  Success by board, groups given up as stale, turns that moved and tokens of two versions are told and not judged.

What it can see: where fleets are equal, success at 0.5 lies within in about four runs of five (its interval is 0.018 to each side, on boards that succeed
between 0.08 and 0.79); at 0.2 and 0.9 nearly always.  A difference of 0.05 hardly ever does.  The margins of length and gradient were chosen by the noise of the policy at 0.5, sampled in torch
(48 groups; fleets drawn from it, which are equal, have intervals of 0.045, 0.05 and 0.12 to each side), before any two fleets were compared.

What was leased lies beside FILE, a line for each group (``FILE.groups.jsonl``); each step's is written at once, so that nothing is lost with Ctrl-C.

Keys: ``LEVEL.verdict``, ``LEVEL.reason``, and for each pair of fleets ``LEVEL.OURS_OTHER.FIGURE`` with ``_low``, ``_high`` and ``_within``; ``LEVEL.FLEET.KEY`` counts; ``met``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.report import Report, machine, write
from benchmarks.training.equivalence_sums import BAR, FLEETS, Group, judge
from rose.demo.demo_config import DemoConfig
from rose.errors import RoseError

LEVELS = (0.2, 0.5, 0.9)
STEPS = 40
GROUPS_PER_STEP, GROUP_SIZE, TOKENS = 8, 16, 36
SWITCH_S = 1.0
TRAFFIC = {"burst_every_s": 6.0}
"""Of production; else the demo's."""
START_TIMEOUT_S = 900.0
"""Of one program: a machine with other work on it is slow, and no less right."""
PILOT_LEVEL = 0.5
PILOT_STEPS = 4
"""The first one's time is that of a start too."""


class Store:
    """What was leased so far, a line for each group and, last of its step, one for the step.

    A step that was torn by a death is no step: the file is cut behind the last whole one.  A trial has a file of its own, so that nothing of it is
    ever judged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = []
        found: list[dict[str, Any]] = []
        length = read = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            if not line.endswith(b"\n"):
                break
            found.append(json.loads(line))
            read += len(line)
            if found[-1]["kind"] == "step":
                self.lines += found
                found, length = [], read
        if path.exists() and path.stat().st_size != length:
            os.truncate(path, length)

    def add(self, rows: Sequence[Mapping[str, Any]], step: Mapping[str, Any], **names: Any) -> None:
        """A step's groups and its counts, in one write."""
        new = [{"kind": "group", **names, **row} for row in rows] + [{"kind": "step", **names, **step}]
        with self.path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in new))
        self.lines += new

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self.lines if one["kind"] == kind]

    def of(self, kind: str, level: str, fleet: str) -> list[dict[str, Any]]:
        return [one for one in self.of_kind(kind) if (one["level"], one["fleet"]) == (level, fleet)]

    def parts(self, level: str, fleet: str) -> dict[int, list[dict[str, Any]]]:
        """Steps by the start that they were of."""
        found: dict[int, list[dict[str, Any]]] = {}
        for one in self.of("step", level, fleet):
            found.setdefault(one["part"], []).append(one)
        return found


def seed_of(level: str, fleet: str, part: int) -> int:
    """Of engines, scheduler and traffic; another one for every start."""
    return 1000 * (1 + LEVELS.index(float(level))) + 100 * FLEETS.index(fleet) + part


def summarise(store: Store, levels: Sequence[str]) -> dict[str, Any]:
    """Every figure of what was leased so far, and what is said of each level."""
    summary: dict[str, Any] = {}
    for level in levels:
        rows = {fleet: store.of("group", level, fleet) for fleet in FLEETS}
        groups = {fleet: [Group.from_json(row) for row in found] for fleet, found in rows.items()}
        for fleet in FLEETS:
            if rows[fleet]:
                summary |= {
                    f"{level}.{fleet}.{name}": value for name, value in counts(store, level, fleet).items()
                }
        if not any(groups.values()):
            continue
        found = judge(groups)
        summary[f"{level}.verdict"], summary[f"{level}.reason"] = found.verdict, found.reason
        for (ours, other), figures in found.pairs.items():
            for name, one in figures.items():
                key = f"{level}.{ours}_{other}.{name}"
                summary |= {
                    key: round(one.value, 4),
                    f"{key}_low": round(one.low, 4),
                    f"{key}_high": round(one.high, 4),
                    f"{key}_within": one.verdict == "within",
                }
    summary["met"] = bool(levels) and all(summary.get(f"{level}.verdict") == "equivalent" for level in levels)
    return summary


def counts(store: Store, level: str, fleet: str) -> dict[str, Any]:
    """What a fleet was leased at a level, in numbers that nobody judges."""
    rows, steps = store.of("group", level, fleet), store.of("step", level, fleet)

    def total(lines: Sequence[Mapping[str, Any]], name: str) -> int:
        return sum(int(one.get(name, 0)) for one in lines)

    last = [part[-1] for part in store.parts(level, fleet).values()]
    by_board = {
        f"success_board_{board}": round(total(here, "wins") / total(here, "episodes"), 4)
        for board in sorted({row["board"] for row in rows})
        if (here := [row for row in rows if row["board"] == board])
    }
    return {
        "episodes": total(rows, "episodes"),
        "success": round(total(rows, "wins") / total(rows, "episodes"), 4),
        "tokens": total(rows, "tokens"),
        "lag_mean": round(total(rows, "lag") / total(rows, "tokens"), 4),
        "turns_cut": total(rows, "cut"),
        "turns_cut_8_tokens_each_side": total(rows, "deep"),
        "turns_moved": total(rows, "moved"),
        "turns_migrated": total(rows, "migrated"),
        "turns_of_two_versions": total(rows, "versions"),
        "turns_kv_mixed": total(rows, "mixed"),
        "trajectories_stale": total(rows, "stale"),
        "groups_given_up_as_stale": total(steps, "num_stale_groups"),
        "engine_cut_requests": sum(int(one.get("cut_requests", 0)) for one in last),
        "starts": len(last),
        "seconds": round(sum(float(one["seconds"]) for one in last), 1),
        **by_board,
    }


def collect(
    store: Store,
    level: str,
    fleets: Sequence[str],
    num_steps: int,
    base_port: int,
    logs: Path,
) -> dict[str, Any]:
    """Play what is missing of a level; the policy that plays."""
    from benchmarks.training.equivalence_play import LAKES, PartOfRun, play_part
    from benchmarks.training.fleets import Fleet
    from benchmarks.training.frozen_policies import find_policy

    def told(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {level}: {text}", flush=True)

    commit = str(machine()["commit"])
    policy = find_policy(float(level), LAKES, told)
    told(f"the policy succeeds in {policy.success:.3f} of sampled episodes, by board {policy.by_board}")
    for fleet in fleets:
        done = sum(map(len, store.parts(level, fleet).values()))
        if done >= num_steps:
            continue
        part = max(store.parts(level, fleet), default=-1) + 1
        seed, started_s = seed_of(level, fleet, part), time.monotonic()

        def sink(
            rows: Sequence[Mapping[str, Any]],
            step: Mapping[str, Any],
            names: Mapping[str, Any] = {"level": level, "fleet": fleet, "part": part, "seed": seed},
            started_s: float = started_s,
        ) -> None:
            seconds = time.monotonic() - started_s
            store.add(rows, {**step, "whole_s": round(seconds, 2), "commit": commit}, **names)
            known = sum(map(len, store.parts(level, names["fleet"]).values()))
            won = sum(row["wins"] for row in rows) / sum(row["episodes"] for row in rows)
            cut = sum(row["cut"] for row in rows)
            told(
                f"{names['fleet']}, step {known} of {num_steps}, {step['seconds']:.0f} s: success {won:.2f}, {cut} turns cut"
            )

        config = DemoConfig.model_validate(
            {
                "seed": seed,
                "base_port": base_port,
                "out": logs / level,
                "start_timeout_s": START_TIMEOUT_S,
                "traffic": TRAFFIC,
                "job": {"num_groups": GROUPS_PER_STEP, "group_size": GROUP_SIZE},
            }
        )
        engines = Fleet(name=fleet, policy=policy.folder, switch_s=SWITCH_S)
        missing = PartOfRun(fleet=engines, num_steps=num_steps - done)
        play_part(config, missing, sink, lambda text, fleet=fleet: told(f"{fleet}: {text}"))
    return {"careless": policy.careless, "success": policy.success, "by_board": policy.by_board}


def trial_summary(store: Store, trial: str) -> dict[str, Any]:
    """Tokens a second by fleet, and, where all three are known, the hours that the whole would take at these."""
    level, whole_s = str(PILOT_LEVEL), 0.0
    summary: dict[str, Any] = {"trial": trial}
    for fleet in FLEETS:
        parts = list(store.parts(level, fleet).values())
        if not parts:
            continue
        first, last = parts[-1][0], parts[-1][-1]
        # What came before the first lease is the start; a first step alone counts with it.
        step_s = (
            (last["seconds"] - first["seconds"]) / (len(parts[-1]) - 1)
            if len(parts[-1]) > 1
            else last["seconds"]
        )
        start_s = first["whole_s"] - first["seconds"]
        tokens = GROUPS_PER_STEP * GROUP_SIZE * TOKENS
        found = counts(store, level, fleet)
        summary |= {
            f"{fleet}.tokens_per_s": round(tokens / step_s, 1),
            f"{fleet}.step_s": round(step_s, 2),
            f"{fleet}.start_s": round(start_s, 1),
            f"{fleet}.cut_share": round(found["turns_cut"] / found["episodes"], 4),
            **{f"{fleet}.{name}": value for name, value in found.items() if not name.startswith("success_")},
        }
        whole_s += len(LEVELS) * (start_s + STEPS * step_s)
    if all(store.parts(level, fleet) for fleet in FLEETS):
        summary["hours_of_the_whole"] = round(whole_s / 3600, 2)
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where results go, and what is gone on from")
    parser.add_argument("--only", action="append", metavar="LEVEL", help="0.2, 0.5 or 0.9")
    parser.add_argument("--fleets", default=",".join(FLEETS), help="comma-separated; to play them apart")
    parser.add_argument(
        "--pilot", action="store_true", help="a few steps of each fleet at one level; judges nothing"
    )
    parser.add_argument("--quick", action="store_true", help="one step of one fleet; judges nothing")
    parser.add_argument("--judge", action="store_true", help="play nothing")
    parser.add_argument("--base-port", type=int, default=18570)
    parser.add_argument("--logs", type=Path, default=Path("out/equivalence"))
    args = parser.parse_args()
    every = [str(level) for level in LEVELS]
    levels, fleets = args.only or every, args.fleets.split(",")
    for option, given, known in (("--only", levels, every), ("--fleets", fleets, FLEETS)):
        for name in given:
            if name not in known:
                parser.error(f"{option}: '{name}' is not one of {', '.join(known)}")
    trial = "quick" if args.quick else "pilot" if args.pilot else ""
    document = json.loads(args.json.read_text()) if args.json.exists() else {}
    earlier = document.get("summary", {})
    if trial and earlier and "trial" not in earlier:
        parser.error("--json: this file holds a run; name another for a trial")
    report, started_s = Report("equivalence"), time.monotonic()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    groups = args.json.with_suffix(f".{trial or 'groups'}.jsonl")
    if groups.exists() and (not earlier or ("trial" in earlier) != bool(trial)):
        groups.rename(groups.with_suffix(".old"))  # without its result it is of another run
    store = Store(groups)
    num_steps = {"quick": 1, "pilot": PILOT_STEPS}.get(trial, STEPS)
    if trial:
        levels, fleets = [str(PILOT_LEVEL)], fleets[:1] if args.quick else fleets
    policies: dict[str, Any] = {}
    if groups.exists():
        policies |= document["details"]["policies"]

    def save() -> dict[str, Any]:
        summary = trial_summary(store, trial) if trial else summarise(store, every)
        details = {
            "seeds": sorted({one["seed"] for one in store.lines}),
            "commits": sorted({one["commit"] for one in store.of_kind("step")}),
            "bar": asdict(BAR),
            "policies": policies,
        }
        write(args.json, "equivalence", summary, details, seconds=time.monotonic() - started_s)
        return summary

    code = 0
    save()
    try:
        for level in () if args.judge else levels:
            policies[level] = collect(store, level, fleets, num_steps, args.base_port, args.logs)
    except KeyboardInterrupt:
        print("stopped; what was leased is kept, start it again to go on", flush=True)
        code = 130
    except RoseError as error:
        print(f"error: {error}\nwhat was leased is kept, start it again to go on", flush=True)
        code = 1
    report.table(("key", "value"), save().items(), title="equivalence")
    print(f"wrote {args.json}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
