"""Production's steps are learned from in the background: all that a rollout engine steers by, else a few."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_plugin.step_learning import FITTED_UNWATCHED, StepLearner


@pytest.mark.parametrize(("watched", "learned"), [(True, 20), (False, FITTED_UNWATCHED)])
def test_without_anybody_who_asks_only_the_last_few_steps_are_fitted(watched: bool, learned: int) -> None:
    learner, seen = StepLearner(), list[int]()
    learner.model = SimpleNamespace(observe=lambda **step: seen.append(step["prefill_tokens"]))  # type: ignore[assignment]
    learner.measured.extend((number, 1, 0, 0.01) for number in range(20))

    learner.learn(watched=watched)

    assert seen == list(range(20 - learned, 20))
    assert not learner.measured
