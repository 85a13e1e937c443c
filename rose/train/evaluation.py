"""What is played to find out what a policy can do, and what that says.

An evaluation is up to four :class:`Part`: held-out tasks, and the first of the training tasks, each played greedily and sampled, all by one version of the
weights.  Training less held out is the *gap*: what was learned of these tasks alone.  One evaluation says little, because a policy that is being trained
jumps from version to version: :class:`Recent` keeps the mean over the last ones.  It evens out the versions and not the tasks, which are the same each time.

*pass@k* is the chance that at least one of ``k`` episodes of a task succeeds.  With ``c`` successes among ``n`` episodes it is estimated as
``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021), which is unbiased; ``1 - (1 - c / n) ** k`` is not.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rose.train.train_config import EvalSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalEpisode:
    """One episode of an evaluation."""

    task_index: int
    reward: float
    success: bool
    num_turns: int
    versions: tuple[str, ...]
    """Weight versions that its tokens were sampled with."""
    task_kind: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Tasks of one kind, played in one way."""

    name: str
    of_training: bool
    temperature: float
    episodes_per_task: int


HELD_OUT = "held_out"
"""Name of the part that every evaluation has; its figures stand at the top of what is told, those of the others under their names."""


def parts_of(settings: EvalSettings, temperature: float) -> tuple[Part, ...]:
    """What an evaluation plays.

    Args:
        temperature: At which training samples.
    """
    ways = [(HELD_OUT, "training", settings.temperature, settings.episodes_per_task)]
    if settings.sampled_episodes:
        ways.append(("sampled", "sampled_training", temperature, settings.sampled_episodes))
    found: list[Part] = []
    for held_out, training, heat, count in ways:
        found.append(Part(name=held_out, of_training=False, temperature=heat, episodes_per_task=count))
        if settings.num_training_tasks:
            found.append(Part(name=training, of_training=True, temperature=heat, episodes_per_task=count))
    return tuple(found)


def told_of(episodes: Mapping[str, Sequence[Sequence[EvalEpisode]]], ks: Sequence[int]) -> dict[str, Any]:
    """Everything that an evaluation says; flat for the held-out tasks, a table under its name for any other part, and the gaps.

    Args:
        episodes: Of each part, by who played them; each of these numbers its tasks for itself.
        ks: Of pass@k, told of a part that has as many episodes of each task.
    """
    parts = {name: _summary_of(played, ks) for name, played in episodes.items()}
    told = {**parts[HELD_OUT], **{name: one for name, one in parts.items() if name != HELD_OUT}}
    for gap, training, held_out in (
        ("gap", "training", HELD_OUT),
        ("sampled_gap", "sampled_training", "sampled"),
    ):
        if training in parts:
            told[gap] = parts[training]["success_rate"] - parts[held_out]["success_rate"]
    return told


def pass_at_k(count: int, num_successes: int, k: int) -> float:
    """Of ``count`` episodes of one task; ``k`` of them at most."""
    return 1.0 - math.comb(count - num_successes, k) / math.comb(count, k)


def _summary_of(players: Sequence[Sequence[EvalEpisode]], ks: Sequence[int]) -> dict[str, Any]:
    """The means of a part, and those of each task of a job that has several."""
    by_task: dict[tuple[int, str, int], list[EvalEpisode]] = {}
    for index, played in enumerate(players):
        for score in played:
            by_task.setdefault((index, score.task_kind, score.task_index), []).append(score)
    kinds = sorted({kind for _, kind, _ in by_task} - {""})
    of_kind = {
        name: _means([one for (_, kind, _), one in by_task.items() if kind == name], ks) for name in kinds
    }
    return {**_means(list(by_task.values()), ks), **({"tasks": of_kind} if of_kind else {})}


def _means(tasks: Sequence[Sequence[EvalEpisode]], ks: Sequence[int]) -> dict[str, float]:
    scores = [score for task in tasks for score in task]
    count = max(1, len(scores))
    fewest = min(map(len, tasks), default=0)
    passed = {
        f"pass_at_{k}": _mean(pass_at_k(len(task), sum(score.success for score in task), k) for task in tasks)
        for k in ks
        if k <= fewest
    }
    return {
        "num_episodes": len(scores),
        "success_rate": sum(score.success for score in scores) / count,
        "reward_mean": sum(score.reward for score in scores) / count,
        "turns_mean": sum(score.num_turns for score in scores) / count,
        **passed,
    }


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / max(1, len(found))


class Recent:
    """Success and gaps over the last evaluations of a run, those that a death has undone left out.

    Args:
        over: How many versions count at most.
    """

    def __init__(self, over: int) -> None:
        self._over = over
        self._rows: list[tuple[int, tuple[tuple[str, int], ...], dict[str, float]]] = []
        """Step, what was played, what came of it; steps rise."""

    def add(self, step: int, told: Mapping[str, Any]) -> dict[str, float]:
        """Means with this evaluation, of the version that ``step`` made, and ``num_versions``, how many it is the mean of.

        Evaluations of this step and later ones ended with their attempt.  Those that played something else (another number of tasks or episodes) are
        not counted in.
        """
        parts = {name: told if name == HELD_OUT else told.get(name) for name in (HELD_OUT, *_OTHERS)}
        known = {name: part for name, part in parts.items() if isinstance(part, Mapping)}
        played = tuple((name, int(part["num_episodes"])) for name, part in known.items())
        figures = {
            "success_rate" if name == HELD_OUT else f"{name}_success_rate": float(part["success_rate"])
            for name, part in known.items()
        }
        figures |= {gap: float(told[gap]) for gap in ("gap", "sampled_gap") if gap in told}
        self._rows = (
            [row for row in self._rows if row[0] < step][-(self._over - 1) :] if self._over > 1 else []
        )
        self._rows.append((step, played, figures))
        same = [row[2] for row in self._rows if row[1] == played]
        return {"num_versions": len(same), **{name: _mean(row[name] for row in same) for name in figures}}


_OTHERS = ("training", "sampled", "sampled_training")


def told_in_short(told: Mapping[str, Any]) -> str:
    """For a line on a terminal."""
    notes = [
        f"pass@{name.removeprefix('pass_at_')} {value:.2f}"
        for name, value in told.items()
        if name.startswith("pass_at_")
    ]
    if "gap" in told:
        notes.append(f"training {told['training']['success_rate']:.2f}, gap {told['gap']:+.2f}")
    if "sampled" in told:
        gap = f", gap {told['sampled_gap']:+.2f}" if "sampled_gap" in told else ""
        notes.append(f"sampled {told['sampled']['success_rate']:.2f}{gap}")
    recent = told.get("recent") or {}
    if recent.get("num_versions", 0) > 1:
        gap = f", gap {recent['gap']:+.2f}" if "gap" in recent else ""
        notes.append(f"last {recent['num_versions']} versions {recent['success_rate']:.2f}{gap}")
    return f"{told['success_rate']:.2f}" + (f" ({'; '.join(notes)})" if notes else "")
