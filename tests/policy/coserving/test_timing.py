"""When production's work must start: the live board and the simulated one say the same of the same situation."""

from __future__ import annotations

import math

import pytest

from rose.policy.coserving.timing import age_s, encoder_steps, is_late, latest_start, prompt_work_s


def test_a_prompt_is_read_in_steps_that_others_decode_in() -> None:
    # 8,000 tokens in chunks of 2,048 are four steps; ten neighbours decode in each.
    step_s = 0.010 + 10 * 0.0005
    work_s = prompt_work_s(8000, chunk_tokens=2048, decode_step_s=step_s, prefill_token_s=0.0002)
    assert work_s == pytest.approx(4 * step_s + 1.6)


def test_a_prompt_of_one_chunk_is_one_step() -> None:
    assert prompt_work_s(512, chunk_tokens=512, decode_step_s=1.0, prefill_token_s=0.0) == 1.0
    assert prompt_work_s(513, chunk_tokens=512, decode_step_s=1.0, prefill_token_s=0.0) == 2.0


def test_work_has_to_start_so_early_that_it_ends_in_time() -> None:
    assert latest_start(100.0, 0.5, 0.2) == pytest.approx(100.3)
    assert latest_start(7_000, 500, 200) == 7_300  # nanoseconds stay whole


def test_late_is_longer_than_promised_and_without_a_promise_nothing_is() -> None:
    assert [is_late(took, 0.5) for took in (0.4, 0.5, 0.6)] == [False, False, True]
    assert not is_late(10**12, 0)


def test_images_are_encoded_whole_as_many_as_a_step_has_room_for() -> None:
    assert encoder_steps([], 100) == 0
    assert encoder_steps([60], 100) == 1
    assert encoder_steps([60, 40], 100) == 1
    assert encoder_steps([60, 50, 50], 100) == 2
    assert encoder_steps([60, 60, 60], 100) == 3


def test_an_encoder_comes_before_the_prompt_that_has_its_images() -> None:
    text_s = prompt_work_s(512, chunk_tokens=512, decode_step_s=1.0, prefill_token_s=0.0)
    assert (
        prompt_work_s(512, chunk_tokens=512, decode_step_s=1.0, prefill_token_s=0.0, encoder_s=0.5)
        == text_s + 0.5
    )


def test_a_stamp_from_the_future_is_as_old_as_can_be() -> None:
    assert age_s(10.0, 12.5) == 2.5
    assert age_s(10.0, 9.9) == pytest.approx(-0.1)  # the clock was read first
    assert age_s(10_000.0, 5.0) == math.inf
    assert math.isinf(age_s(math.inf, 5.0))
