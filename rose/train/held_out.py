"""What held-out episodes say of a policy.

*pass@k* is the chance that at least one of ``k`` episodes of a task succeeds.  With ``c`` successes among ``n`` episodes it is estimated as
``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021), which is unbiased; ``1 - (1 - c / n) ** k`` is not.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rose.train.rollout import HeldOutEpisode


def pass_at_k(count: int, num_successes: int, k: int) -> float:
    """Of ``count`` episodes of one task; ``k`` of them at most."""
    return 1.0 - math.comb(count - num_successes, k) / math.comb(count, k)


def summary_of(parts: Sequence[Sequence[HeldOutEpisode]], ks: Sequence[int]) -> dict[str, Any]:
    """The means of an evaluation, and those of each task of a job that has several.

    Args:
        parts: Scores by who played them; each numbers its tasks for itself.
        ks: Of pass@k.
    """
    by_task: dict[tuple[int, str, int], list[HeldOutEpisode]] = {}
    for index, part in enumerate(parts):
        for score in part:
            by_task.setdefault((index, score.task_kind, score.task_index), []).append(score)
    kinds = sorted({kind for _, kind, _ in by_task} - {""})
    of_kind = {
        name: _means([one for (_, kind, _), one in by_task.items() if kind == name], ks) for name in kinds
    }
    return {**_means(list(by_task.values()), ks), **({"tasks": of_kind} if of_kind else {})}


def _means(tasks: Sequence[Sequence[HeldOutEpisode]], ks: Sequence[int]) -> dict[str, float]:
    scores = [score for task in tasks for score in task]
    count = max(1, len(scores))
    passed = {
        f"pass_at_{k}": _mean(pass_at_k(len(task), sum(score.success for score in task), k) for task in tasks)
        for k in ks
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


def told_in_short(summary: Mapping[str, Any]) -> str:
    """For a line on a terminal."""
    passed = [
        f"pass@{name.removeprefix('pass_at_')} {value:.2f}"
        for name, value in summary.items()
        if name.startswith("pass_at_")
    ]
    return f"{summary['success_rate']:.2f}" + (f" ({', '.join(passed)})" if passed else "")
