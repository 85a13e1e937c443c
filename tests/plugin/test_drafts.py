"""Speculative decoding on vLLM's real scheduler: drafts are work of a step, not a prompt, and the board tells of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.units import NS_PER_S
from tests.plugin import harness
from tests.plugin.test_board_turns import Device
from tests.tiny_model import write_tiny_model

NUM_DRAFTS = 4
NGRAM = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_max": 3}


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Production with two requests that decode, watched by a rollout engine."""
    write_tiny_model(tmp_path / "model")
    config = harness.engine_config(tmp_path / "model", speculative_config=NGRAM)  # before there is a role
    node = tmp_path / "n"
    node.mkdir(mode=0o700)
    monkeypatch.setenv("ROSE_DIR", str(node))
    monkeypatch.setenv("ROSE_ROLE", "serving")
    device = Device(config, node)
    for name in ("a", "b"):
        device.scheduler.add_request(harness.request(name, max_tokens=50))
    harness.step(device.scheduler)
    yield device
    device.close()


def draft(device: Device, **drafts: int) -> Any:
    """So many drafts for each request, and the step that verifies them, put together."""
    from vllm.v1.outputs import DraftTokenIds

    device.scheduler.update_draft_token_ids(
        DraftTokenIds(list(drafts), [[9] * count for count in drafts.values()])
    )
    return device.scheduler.schedule()


def verified(scheduler: Any, output: Any, accepted: int) -> None:
    """The end of that step: ``accepted`` of each request's drafts came out."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(output.num_scheduled_tokens)
    drafts = output.scheduled_spec_decode_tokens
    sampled = [[9] * (1 + min(accepted, len(drafts.get(one, ())))) for one in ids]
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=sampled
        ),
    )


def test_a_step_that_verifies_drafts_reads_no_prompt(device: Device) -> None:
    output = draft(device, a=NUM_DRAFTS)
    assert output.num_scheduled_tokens == {"a": 1 + NUM_DRAFTS, "b": 1}

    steps = device.side.steps
    assert steps.oldest == (NUM_DRAFTS, 2, 0)
    assert not steps.reads_prompt()
    board = device.node.serving_board().read()
    assert board is not None
    assert (board.busy, board.owes_first) == (1, 0)


@pytest.mark.parametrize("accepted", [0, 2, NUM_DRAFTS])
def test_whatever_comes_out_the_step_was_what_it_computed(device: Device, accepted: int) -> None:
    output = draft(device, a=NUM_DRAFTS, b=1)
    verified(device.scheduler, output, accepted)

    assert device.side.learner.measured[-1][:2] == (NUM_DRAFTS + 1, 2)
    assert len(device.scheduler.requests["a"].output_token_ids) == 2 + accepted
    assert device.side.failed is None


def test_a_prompt_beside_drafts_is_told_apart(device: Device) -> None:
    device.scheduler.add_request(harness.request("c", num_tokens=60))

    output = draft(device, a=2)

    assert output.num_scheduled_tokens == {"a": 3, "b": 1, "c": 60}
    assert device.side.steps.reads_prompt()
    assert device.side.steps.oldest == (62, 2, 0)


def test_production_must_start_earlier_where_its_steps_verify_drafts(device: Device) -> None:
    """The last token's time and the promise are the same: what is taken off them is a decode step, with its drafts."""
    side = device.side
    side._board.slo_tpot_ns = NS_PER_S

    def allowed_ns() -> int:
        """From the last token to the deadline."""
        side._board.write(busy=False)
        board = device.node.serving_board().read()
        assert board is not None
        return board.tpot_deadline_ns - side.steps.last_token_ns

    verified(device.scheduler, draft(device), 0)
    without_ns = allowed_ns()
    for _ in range(10):
        verified(device.scheduler, draft(device, a=NUM_DRAFTS, b=NUM_DRAFTS), 0)

    drafts = side.steps.drafts_per_decode * 2
    assert 0 < drafts < 2 * NUM_DRAFTS
    expected_ns = drafts * side.learner.model.prefill_token_s * NS_PER_S
    assert without_ns - allowed_ns() == pytest.approx(expected_ns, rel=0.01)
