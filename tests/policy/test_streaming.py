"""Which jobs may begin a step before its batch is complete."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose.policy.streaming import StepShape, Streamed, StreamedSetting, chosen, refusal_of

EXACT = StepShape(
    num_epochs=1, minibatch_sequences=16, batch_sequences=16, scale_advantages="group", on_stale="mask"
)


def test_a_step_of_one_update_may_begin_with_its_gradients() -> None:
    assert refusal_of("gradients", EXACT) is None
    assert refusal_of("gradients", replace(EXACT, scale_advantages="none", on_stale="cancel")) is None


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_epochs": 2}, "trainer.num_epochs"),
        ({"minibatch_sequences": 15}, "trainer.minibatch_sequences"),
        ({"scale_advantages": "batch"}, "trainer.scale_advantages"),
    ],
)
def test_what_is_not_exact_is_refused_for_gradients_alone(change: dict[str, int | str], field: str) -> None:
    step = StepShape(**{**{name: getattr(EXACT, name) for name in EXACT.__slots__}, **change})
    refused = refusal_of("gradients", step)
    assert refused is not None
    assert refused.field == field
    assert "log_probs" in refused.fix
    assert refusal_of("log_probs", step) is None


@pytest.mark.parametrize("on_stale", ["wait", None])
def test_a_rule_that_looks_at_the_whole_batch_is_not_asked_in_parts(on_stale: str | None) -> None:
    refused = refusal_of("log_probs", replace(EXACT, on_stale=on_stale))
    assert refused is not None
    assert refused.field == "rollout.on_stale"
    assert refusal_of("off", replace(EXACT, on_stale=on_stale)) is None


def test_a_device_that_is_lent_meanwhile_computes_nothing() -> None:
    refused = refusal_of("log_probs", replace(EXACT, lends_device=True))
    assert refused is not None
    assert refused.field == "lend.node_dir"


@pytest.mark.parametrize(
    ("setting", "num_epochs", "is_synchronous", "expected"),
    [
        ("auto", 1, True, "gradients"),
        ("auto", 1, False, "off"),
        ("auto", 2, True, "off"),
        ("off", 1, True, "off"),
        ("log_probs", 2, False, "log_probs"),
    ],
)
def test_auto_is_gradients_where_they_are_exact_and_waited_for(
    setting: StreamedSetting, num_epochs: int, is_synchronous: bool, expected: Streamed
) -> None:
    step = replace(EXACT, num_epochs=num_epochs)
    assert chosen(setting, step, is_synchronous=is_synchronous) == expected
