"""Images on vLLM's real scheduler: what the encoder does is work of its step, and the board counts it before a first token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.units import NS_PER_S
from tests.plugin import harness
from tests.plugin.test_board_turns import Device

BUDGET = 64
IMAGES = [(10, 30), (50, 30), (90, 20)]
"""Of a prompt of 110 tokens.  The third is beyond what a step encodes."""
HOUR_NS = 3600 * NS_PER_S


@pytest.fixture
def device(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Production with two requests that decode, watched by a rollout engine."""
    node = tmp_path / "n"
    node.mkdir(mode=0o700)
    monkeypatch.setenv("ROSE_DIR", str(node))
    monkeypatch.setenv("ROSE_ROLE", "serving")
    device = Device(config, node)
    harness.give_encoder(device.scheduler, BUDGET)
    for name in ("a", "b"):
        device.scheduler.add_request(harness.request(name, max_tokens=50))
    harness.step(device.scheduler)
    yield device
    device.close()


def test_an_image_is_encoded_in_the_step_that_comes_to_it_and_counts_there(device: Device) -> None:
    device.scheduler.add_request(harness.request("c", 110, images=IMAGES))

    output = device.scheduler.schedule()

    assert output.scheduled_encoder_inputs == {"c": [0, 1]}  # the prompt stops before the third
    assert device.side.steps.oldest == (90, 2, 60)
    harness.answer(device.scheduler, output)
    assert device.side.learner.measured[-1][:3] == (90, 2, 60)
    output = device.scheduler.schedule()
    assert device.side.steps.oldest == (20, 2, 20)
    harness.answer(device.scheduler, output)
    output = device.scheduler.schedule()
    assert device.side.steps.oldest == (0, 3, 0)
    assert device.side.failed is None


@pytest.mark.parametrize(("images", "steps"), [(IMAGES[:1], 0), (IMAGES[:2], 0), (IMAGES, 1)])
def test_production_must_start_earlier_where_a_prompt_has_images(
    device: Device, images: list[tuple[int, int]], steps: int
) -> None:
    """What is taken off a first token's time is the encoder's, and the steps that the images do not fit into together."""
    side = device.side
    side._board.slo_ttft_ns = HOUR_NS

    def work_ns(request: Any) -> int:
        return side._board._prompt_ns(request, 110, 2)

    text = work_ns(harness.request("text", 110))
    expected = sum(size for _, size in images) * side.learner.model.encoder_token_s
    expected += steps * side.learner.model.predict(0, 2)
    request = harness.request("c", 110, images=images)
    assert work_ns(request) - text == pytest.approx(expected * NS_PER_S, rel=1e-3)

    device.scheduler.add_request(request)
    side._board.write(busy=False)
    board = device.node.serving_board().read()
    assert board is not None
    assert board.waiting_tokens == 110
    request.num_computed_tokens = images[-1][0] + images[-1][1]  # nothing is left to be encoded
    assert work_ns(request) == text


def test_steps_with_images_teach_what_an_encoder_takes(device: Device) -> None:
    side, before = device.side, device.side.learner.model.encoder_token_s
    side.learner.measured.append((100, 2, 100, 1.0))
    side.rounds.round()
    assert side.learner.model.encoder_token_s > before
