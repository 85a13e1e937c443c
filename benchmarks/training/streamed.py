"""What it brings to begin a step with the groups that are complete: real scheduler and loops on engines that take time, with stragglers.

    python benchmarks/training/streamed.py --json FILE                              # five pairs a mode, about 80 minutes
    python benchmarks/training/streamed.py --pairs 1 --steps 2 --modes synchronous  # to see that it runs

Engines, environments and their stragglers are those of ``benchmarks.training.throughput`` (two dedicated engines, 12 groups of 8, no redundant episodes).  The trainer is paced: it
takes ``TOKEN_S`` for each sampled token, when it is given it, and ``UPDATE_S`` for the update at the end; no CPU, so that the machine's other half does not judge.
``TOKEN_S`` is set so that a synchronous step as ever is rollouts for 79 % of its time, the middle of the 70 to 87 % that the paper gives for real jobs: a step that was
looked at on the way (one seed) sampled 13,900 tokens in 32 s.
A pair is the same job twice, steps as ever and streamed, in turns, the one that goes first alternating; its seed (0, 1, ...) draws conversations and latencies.

*Same updates.*  What the streamed trainer was given, part by part and in that order, is given to the real trainer on a tiny model (fp32), and as a whole to
another: after each step, gradients of both have to be equal within 2e-5 of each tensor's largest entry, and weights within 2e-5.  It is judged before any time is.

*Bar*, written before it was run: in each mode the median over pairs of ``step_s`` as ever over streamed is above 1, the whole 95 % interval (bootstrap over
pairs) included.  The simulator said 1.29 for cells of its own; nothing here has to meet that.

Keys: ``ratio_MODE``, ``ratio_low_MODE``, ``ratio_high_MODE``, and of the proof ``num_steps_equal`` and ``worst_gradient`` (difference over the largest entry).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from benchmarks.lib.report import Report
from benchmarks.training.driver import VOCAB
from benchmarks.training.throughput import Case, Loop, Setting
from rose.evaluation.statistics import median_ratio
from rose.train.batch import TrainingSequence
from rose.train.trainer import TorchTrainer, TrainerParams
from tests.tiny_model import write_tiny_model

TOKEN_S = 0.0006
UPDATE_S = 0.3
TOLERANCE = 2e-5


class Proof:
    """Two real trainers on one tiny model: one is given parts, the other the whole."""

    def __init__(self, folder: Path) -> None:
        write_tiny_model(folder, vocab_size=VOCAB)
        params = TrainerParams(
            learning_rate=1e-4,
            num_epochs=1,
            minibatch_sequences=1 << 16,
            adam_epsilon=1e-4,
            policy_dtype="float32",
            streamed="gradients",
        )
        self._streamed, self._whole = _Recording(folder, params), _Recording(folder, params)
        self.worst = 0.0
        self.num_steps = 0

    def check(self, parts: list[list[TrainingSequence]]) -> None:
        """Raises:
        RuntimeError: The two updates differ.
        """
        samples = [one for part in parts for one in part]
        for part in parts:
            self._streamed.begin(part)
        report = self._streamed.step(samples)
        if self._whole.step(samples).num_updates != report.num_updates or report.num_begun_in_vain:
            raise RuntimeError("the streamed step is not the one on the whole batch")
        for name, gradient in self._whole.gradients.items():
            largest = float(gradient.abs().max())
            apart = float((gradient - self._streamed.gradients[name]).abs().max())
            self.worst = max(self.worst, apart / max(largest, 1e-9))
        pairs = zip(self._streamed.masters, self._whole.masters, strict=True)
        moved_apart = max(float((one.detach() - other.detach()).abs().max()) for one, other in pairs)
        if self.worst > TOLERANCE or moved_apart > TOLERANCE:
            raise RuntimeError(f"gradients differ by {self.worst:.1e}, weights by {moved_apart:.1e}")
        self.num_steps += 1


class _Recording(TorchTrainer):
    def __init__(self, model_path: Path, params: TrainerParams) -> None:
        super().__init__(model_path, params)
        self.gradients: dict[str, torch.Tensor] = {}

    def _update(self, limit: float) -> float:
        self.gradients = {name: one.clone() for name, one in self._policy.gradients().items()}
        return super()._update(limit)


def sequence_of(table: dict[str, Any]) -> TrainingSequence:
    table["allowed"] = [None if one is None else tuple(one) for one in table["allowed"]]
    told: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in table.items()
    }
    return TrainingSequence(**told)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where results go")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="counted ones of an asynchronous arm")
    parser.add_argument("--modes", default="synchronous,asynchronous")
    parser.add_argument(
        "--proven", type=int, default=1, help="steps of each streamed arm that are taken again"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("streamed steps")
    setting = Setting(num_steps=options.steps, train_s=UPDATE_S, token_s=TOKEN_S)
    runs: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rose-bench-") as folder:
        proof = Proof(Path(folder) / "model")
        for mode in options.modes.split(","):
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for seed in range(options.pairs):
                for streamed in (False, True) if seed % 2 == 0 else (True, False):
                    record = Path(folder) / f"{mode}-{seed}.jsonl" if streamed else None
                    case = Case(
                        mode=mode, fleet="dedicated", stragglers=True, no_spare=True, streamed=streamed
                    )
                    found = Loop(setting, report, record).measure(case, seed)
                    seconds[streamed].append(found["step_s"])
                    runs.append({"seed": seed, **found})
                    print(f"{seed} {case.name:52} {found['step_s']:7.2f} s a step", flush=True)
                    if record is not None:
                        with record.open() as file:
                            for line, _ in zip(file, range(options.proven), strict=False):
                                proof.check([[sequence_of(one) for one in part] for part in json.loads(line)])
            ratio, low, high = median_ratio(np.array(seconds[False]), np.array(seconds[True]))
            ends = {"": ratio, "_low": low, "_high": high}
            summary |= {f"ratio{end}_{mode}": round(value, 3) for end, value in ends.items()}
    summary |= {"num_steps_equal": proof.num_steps, "worst_gradient": proof.worst}
    details = {"setting": {"token_s": TOKEN_S, "update_s": UPDATE_S, "pairs": options.pairs}, "runs": runs}
    report.finish(summary, details, options.json)


if __name__ == "__main__":
    main()
