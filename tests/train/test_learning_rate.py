"""The learning rate of each step of a job."""

from __future__ import annotations

import pytest

from rose.train.train_config import TrainConfig


def rates(num_steps: int, **trainer: object) -> list[float]:
    config = TrainConfig.model_validate(
        {
            "job": "j",
            "model": "m",
            "num_steps": num_steps,
            "weights": {"directory": "w"},
            "env": {"kind": "frozenlake"},
            "trainer": {"learning_rate": 1.0, "fine_tuning_steps": 0, **trainer},
        }
    )
    return [config.learning_rate_at(step) for step in range(num_steps)]


def test_a_rate_is_constant_unless_told_otherwise() -> None:
    assert rates(3) == [1.0, 1.0, 1.0]


def test_warm_up_rises_in_equal_parts_to_the_whole_rate() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("decay", "expected"),
    [("linear", [1.0, 0.75, 0.5, 0.25]), ("cosine", [1.0, 0.853553, 0.5, 0.146447])],
)
def test_decay_ends_above_zero(decay: str, expected: list[float]) -> None:
    assert rates(4, decay=decay) == pytest.approx(expected, abs=1e-6)


def test_decay_lies_between_warm_up_and_fine_tuning() -> None:
    found = rates(5, warmup_steps=2, decay="linear", fine_tuning_steps=1, fine_tuning_learning_rate=1e-6)
    assert found == [0.5, 1.0, 1.0, 0.5, 1e-6]


def test_a_job_may_be_all_warm_up_and_never_less_than_all() -> None:
    assert rates(3, decay="linear", warmup_steps=3)[-1] == 1.0
    with pytest.raises(ValueError, match=r"trainer\.warmup_steps \(5\) exceeds num_steps \(3\)"):
        rates(3, warmup_steps=5)
