"""Policy updates end to end: real trainer -> real relay -> two real vLLM engines, each version timed from publish to
acknowledged.

* ``versions``: :class:`rose.train.trainer.TorchTrainer` takes RL steps at ``--lr`` from a bf16 start on the sorting task
  of ``rl_checkpoints.py``; two engines sample the answers, and go on sampling while every other update arrives ("busy").
  Every version is published to a relay process, pulled by each engine's node, staged and committed.  The sections of
  every version are counted by kind.  Then a third engine starts from the base model, joins late with an empty folder, and must be where the
  others are: state hashes of all engines' memory against the trainer's own weights, and greedy tokens and log-probs
  against a server that was freshly started with the trainer's exported checkpoint.
* ``large``: the same path with 197 M parameters and generated steps of the same density, for what a GB costs in each
  phase; and an engine that starts beside a host copy that is current (activation).
* ``recovery``: processes killed and a copy damaged in that path, and the time until the engine runs the newest version.

The times to expect of 8B, 32B and 235B models are *derived* from these figures and those of ``weights_terms.py``, by
``weights_expected.py``.
Everything shares the cores that the process may use: trainer, relay, nodes, engines.  One core: ``taskset -c 1``.

    python benchmarks/weight_transfer/weights_live.py --json FILE [--parts versions large recovery]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from benchmarks.lib.report import Report, write
from benchmarks.weight_transfer import weights_data as data
from benchmarks.weight_transfer.rl_checkpoints import ANSWER_TOKENS, MODEL, make_base, problem
from benchmarks.weight_transfer.weights_nodes import PHASES, RUN, Run, Sampler, row_of, timed_publish
from benchmarks.weight_transfer.weights_parts import measure_large, measure_recovery
from rose.shared_memory import SharedMemorySweep
from rose.train.batch import TrainingSequence
from rose.train.trainer import TorchTrainer, TrainerParams
from rose.weights import statehash
from rose.weights.params import WeightsParams
from rose.weights.publisher import PublishReport, WeightPublisher
from rose.weights.source import collect
from rose.weights.warmup import warm_up
from tests.engine_launcher import EngineServer
from tests.tiny_model import write_tokenizer

NUM_GREEDY = 8


def greedy(server: EngineServer) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of greedy answers to fixed prompts."""
    rng = np.random.default_rng(77)
    found = []
    for _ in range(NUM_GREEDY):
        prompt, _ = problem(rng)
        choice = server.generate(prompt, max_tokens=ANSWER_TOKENS, logprobs=1)["choices"][0]
        found.append((choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]))
    return found


# --- versions ---------------------------------------------------------------------------------------------


def measure_versions(
    args: argparse.Namespace, report: Report, folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(summary, details)."""
    base = folder / "base"
    if args.base is None:
        make_base(base, steps=150, seed=0)
    else:
        shutil.copytree(args.base, base)
    write_tokenizer(base, MODEL["vocab_size"])
    trainer = TorchTrainer(base, TrainerParams(learning_rate=args.lr, max_grad_norm=1.0))
    groups: queue.Queue[list[TrainingSequence]] = queue.Queue(2 * args.groups)
    rows: list[dict[str, Any]] = []
    losses: list[dict[str, float]] = []
    checks: dict[str, bool] = {}
    with Run(folder) as run, contextlib.ExitStack() as both:
        publisher = WeightPublisher(
            trainer.module, run.store, RUN, 1, WeightsParams(anchor_every=args.anchor_every)
        )
        servers = [both.enter_context(run.server(base, name)) for name in ("a", "b")]
        samplers = [Sampler(server, f"engine-{n}", groups, seed=n) for n, server in enumerate(servers)]
        nodes = [
            both.enter_context(run.node(server, name, lambda path, sampler=sampler: sampler.in_flight))
            for server, name, sampler in zip(servers, ("a", "b"), samplers, strict=True)
        ]

        def publish(number: int) -> PublishReport:
            found = timed_publish(lambda: publisher.publish(number, step=number, lr=args.lr))
            marks = [node.wait_for(str(found.report.version)) for node in nodes]
            rows.append(row_of(run, found, marks))
            report.progress("versions", number, args.versions)
            return found.report

        publish(0)
        for sampler in samplers:
            sampler.start()
        for number in range(1, args.versions + 1):
            for sampler in samplers:
                sampler.wake()
            batch = [sample for _ in range(args.groups) for sample in take(groups, samplers)]
            for sampler in samplers:  # the cores are shared: the step is not what is measured
                sampler.rest()
            step = trainer.step(batch, single_update=True)
            if number % 2 == 0:  # every other version meets turns in flight
                for sampler in samplers:
                    sampler.wake()
            last = publish(number)
            losses.append(
                {
                    "step": number,
                    "reward": float(np.mean([sample.reward for sample in batch])),
                    "entropy": step.entropy,
                    "mismatch_kl": step.mismatch_kl,
                    "num_tokens": step.num_tokens,
                    "seconds": step.seconds,
                }
            )
        for sampler in samplers:
            sampler.end()

        # The trainer's weights, hashed from what it holds, not from what it published.
        truth = {
            each.spec.name: statehash.to_hex(statehash.hash_bits(each.bits(0, each.spec.num_elements)))
            for each in collect(trainer.module)
        }
        checks["publisher_state_is_the_trainers"] = dict(last.state) == truth
        checks["both_engines_hold_the_trainers_weights"] = all(node.hashes() == truth for node in nodes)
        said = [greedy(server) for server in servers]
        checks["both_engines_say_the_same"] = said[0] == said[1]
        report.progress("a late engine joins", 0, 1)
        with run.server(base, "late") as late, run.node(late, "late") as node:
            mark = node.wait_for(str(last.version))
            join = {
                "server_start_s": late.start_s,
                "join_s": mark["acknowledged_at"] - node.began_at,
                "copied_s": mark["copied_at"] - node.began_at,
                "written_s": mark["written_at"] - mark["copied_at"],
                "staged_s": mark["staged_at"] - mark["written_at"],
                "committed_s": mark["acknowledged_at"] - mark["staged_at"],
                "pause_s": mark["pause_s"],
                "versions_behind": args.versions,
            }
            checks["late_engine_holds_the_trainers_weights"] = node.hashes() == truth
            said.append(greedy(late))
        report.progress("a fresh server for comparison", 0, 1)
        both.close()
        trainer.export(folder / "export")
        with run.server(folder / "export", "fresh", ROSE_WEIGHT_VERSION=str(last.version)) as fresh:
            (rank,) = fresh.get("/rose/weights/hash").json()["ranks"]
            checks["fresh_server_holds_the_trainers_weights"] = rank["hashes"] == truth
            expected_answers = greedy(fresh)
        checks["all_engines_say_what_a_fresh_server_says"] = said == [expected_answers] * len(said)
    publisher.close()
    return summary_of_versions(rows, join, checks, samplers), {
        "lr": args.lr,
        "model": MODEL,
        "loss_tokens_per_step": losses[0]["num_tokens"],
        "anchor_every": args.anchor_every,
        "rows": rows,
        "steps": losses,
        "late_engine": join,
        "checks": checks,
        "greedy_prompts": NUM_GREEDY,
    }


def take(groups: queue.Queue[list[TrainingSequence]], samplers: list[Sampler]) -> list[TrainingSequence]:
    while True:
        for sampler in samplers:
            if sampler.error is not None:
                raise sampler.error
        try:
            return groups.get(timeout=1.0)
        except queue.Empty:
            continue


def summary_of_versions(
    rows: list[dict[str, Any]], join: Mapping[str, float], checks: Mapping[str, bool], samplers: list[Sampler]
) -> dict[str, Any]:
    deltas = [row for row in rows if row["kind"] == "delta"]
    kinds = Counter[str]()
    for row in deltas:
        kinds.update(row["sections"])

    busy = [row for row in deltas if row["turns_in_flight"] > 0]
    idle = [row for row in deltas if row["turns_in_flight"] == 0]

    def median(key: str, chosen: list[dict[str, Any]] = deltas) -> float:
        return float(np.median([row[key] for row in chosen]))

    return {
        "num_versions": len(rows) - 1,
        "num_deltas": len(deltas),
        "num_versions_all_planes": sum(set(row["sections"]) == {"planes"} for row in deltas),
        "sections_planes": kinds["planes"],
        "sections_raw": kinds["raw"],
        "density_first": deltas[0]["density"],
        "density_last": deltas[-1]["density"],
        "bytes_dense": rows[0]["bytes_dense"],
        "bytes_sent_median": median("bytes_sent"),
        "dense_over_sent": rows[0]["bytes_dense"] / median("bytes_sent"),
        "bytes_per_change": sum(row["bytes_sent"] for row in deltas)
        / sum(row["num_changed"] for row in deltas),
        "commit_ms_median": 1e3 * median("commit_in_pause_s"),
        **{
            f"{key}_{name}": value
            for name, chosen in (("idle", idle), ("busy", busy))
            for key, value in (
                ("versions", len(chosen)),
                ("pause_ms_median", 1e3 * median("pause_s", chosen)),
                ("pause_ms_max", 1e3 * max(row["pause_s"] for row in chosen)),
                ("acknowledged_s_median", median("acknowledged_s", chosen)),
                ("acknowledged_s_max", max(row["acknowledged_s"] for row in chosen)),
                *((f"{phase}_s_median", median(f"{phase}_s", chosen)) for phase in PHASES),
            )
        },
        "answers": sum(sampler.num_answers for sampler in samplers),
        "answers_of_several_versions": sum(sampler.num_mixed for sampler in samplers),
        "late_join_s": join["join_s"],
        **checks,
        "all_checks": all(checks.values()),
    }


def show_rows(report: Report, rows: list[dict[str, Any]], title: str) -> None:
    columns = ("version", "kind", "density", "bytes_sent", "publish_s", "copy_s", "write_s", "stage_s", "commit_s",
               "acknowledged_s", "pause_s", "turns_in_flight")  # fmt: skip
    report.table(
        ("sections", *columns),
        ([str(row["sections"]), *(row[key] for key in columns)] for row in rows),
        title=title,
    )


PARTS = {"versions": measure_versions, "large": measure_large, "recovery": measure_recovery}


# --- all --------------------------------------------------------------------------------------------------


def summary_of(details: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value for name in PARTS if name in details for key, value in details[name]["summary"].items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=Path, help="write summary and details here; parts it has already are kept"
    )
    parser.add_argument(
        "--parts", nargs="*", choices=list(PARTS), default=list(PARTS), help="none: only sum up anew"
    )
    parser.add_argument(
        "--base", type=Path, help="base/ of a folder of rl_checkpoints.py; made anew without it"
    )
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--versions", type=int, default=24)
    parser.add_argument("--groups", type=int, default=4, help="groups of 8 answers of 32 tokens a step")
    parser.add_argument("--anchor-every", type=int, default=10)
    parser.add_argument("--large", choices=sorted(data.SHAPES), default="200M")
    parser.add_argument("--large-versions", type=int, default=5)
    parser.add_argument("--activations", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warm_up()  # as set-up does
    report = Report("weights_live")
    details: dict[str, Any] = {}
    if args.json and args.json.exists():
        details = json.loads(args.json.read_text())["details"]
    for part in args.parts:
        with SharedMemorySweep(), tempfile.TemporaryDirectory(prefix="rose-weights-live-") as folder:
            found, details[part] = PARTS[part](args, report, Path(folder))
        details[part]["summary"] = found
        if "rows" in details[part]:
            show_rows(report, details[part]["rows"], part)
        if args.json:  # an interrupted run keeps what it measured
            write(args.json, "weights_live", summary_of(details), details)
    summary = summary_of(details)
    report.finish(summary, details, args.json)
    failed = [
        key
        for key in ("all_checks", "large_hashes_are_the_trainers", "recovery_hashes_are_the_trainers")
        if not summary.get(key, True)
    ]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
