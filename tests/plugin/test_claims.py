"""What production claims back from a loan is what requests wait for that only lack blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode, NodeState
from tests.plugin import harness
from tests.plugin.conftest import ON_NEWEST
from tests.plugin.stand_in import Beating, eventually
from tests.tiny_model import write_tiny_model

LENT_PAGES = 12
SEATS = 4


@pytest.fixture
def options() -> dict[str, Any]:
    """Arguments of the engine's."""
    return {}


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> Iterator[Any]:
    """Four seats, and 12 of 16 pages lent, which nobody gives back."""
    node = tmp_path / "node"
    node.mkdir(mode=0o700)
    write_tiny_model(tmp_path / "model")
    config = harness.engine_config(tmp_path / "model", **options)  # before there is a role
    monkeypatch.setenv("ROSE_DIR", str(node))
    monkeypatch.setenv("ROSE_ROLE", "serving")
    from vllm_plugin.scheduler import ServingScheduler

    rank, agent = harness.write_rank(node, "serving", mapped=False), Beating(NodeDir(node).node_writer())
    agent.write(NodeState(mode=Mode.ON, lend_pages=LENT_PAGES, has_serving=1))
    config.scheduler_config.max_num_seqs = SEATS
    scheduler = harness.build(ServingScheduler, config)
    scheduler.rose_attach(harness.engine())

    def lent() -> bool:
        scheduler.rose.before_schedule()
        return len(scheduler.rose.balloon.inflated) == LENT_PAGES

    eventually(lent, "the loan is out")
    yield scheduler
    scheduler.rose.stop()
    rank.close()
    agent.close()


def claim(scheduler: Any) -> int:
    scheduler.rose.before_schedule()
    return scheduler.rose.steps.claim_chunks


def seats_taken(scheduler: Any) -> None:
    for number in range(SEATS):
        scheduler.add_request(harness.request(f"runs{number}", num_tokens=5, max_tokens=50))
    harness.step(scheduler)
    assert len(scheduler.running) == SEATS


def set_status(name: str) -> Callable[[Any], None]:
    def change(scheduler: Any) -> None:
        from vllm.v1.request import RequestStatus

        for request in scheduler.waiting:
            request.status = RequestStatus[name]

    return change


def paused(scheduler: Any) -> None:
    from vllm.v1.core.sched.interface import PauseState

    scheduler._pause_state = PauseState.PAUSED_NEW


def add_many(scheduler: Any) -> None:
    """More than is free: 300 prompts of three blocks, with 128 of 512 blocks usable."""
    for number in range(300):
        scheduler.add_request(harness.request(f"waits{number}", num_tokens=300))


@pytest.mark.parametrize(
    "lacks",
    [
        seats_taken,
        set_status("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"),
        set_status("WAITING_FOR_REMOTE_KVS"),
        set_status("WAITING_FOR_STREAMING_REQ"),
        paused,
    ],
    ids=["a seat", "a grammar", "remote KV", "its client", "the end of a pause"],
)
def test_what_waits_for_something_else_claims_nothing(scheduler: Any, lacks: Callable[[Any], None]) -> None:
    if lacks is seats_taken:
        seats_taken(scheduler)
        add_many(scheduler)
    else:
        add_many(scheduler)
        lacks(scheduler)
    assert claim(scheduler) == 0


def test_those_that_vllm_puts_back_in_front_hide_nobody(scheduler: Any) -> None:
    """A hundred that wait for a grammar, and behind them prompts that only lack blocks."""
    from vllm.v1.request import RequestStatus

    scheduler.max_num_active_reqs = 64
    for number in range(100):
        scheduler.add_request(harness.request(f"grammar{number}", num_tokens=5))
    for request in scheduler.waiting:
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    add_many(scheduler)
    assert claim(scheduler) == 3


@pytest.mark.parametrize(("seats", "chunks"), [(SEATS, 0), (64, 3)])
def test_those_count_that_have_a_seat(scheduler: Any, seats: int, chunks: int) -> None:
    """64 prompts of 300 tokens are 192 blocks, three each; with a watermark of 25 that is 90 more than the 127 that are usable: three
    chunks."""
    scheduler.max_num_active_reqs = seats
    add_many(scheduler)
    assert claim(scheduler) == chunks


@pytest.mark.parametrize("options", [{"enable_lora": True, "max_loras": 2}])
def test_what_waits_for_a_slot_for_its_adapter_claims_nothing(scheduler: Any) -> None:
    """Two slots, held by the adapters of those that run: of 300 that wait, those of other adapters lack a slot, not blocks."""
    scheduler.max_num_active_reqs = 64
    for adapter in (1, 2):
        scheduler.add_request(harness.request(f"runs{adapter}", 5, 50, adapter))
    harness.step(scheduler)
    for number in range(300):
        scheduler.add_request(harness.request(f"waits{number}", 300, adapter=3 + number % 7))
    assert claim(scheduler) == 0

    # 30 of an adapter that has a slot, and 30 without one: 180 blocks, behind those that lack something else.
    for number in range(30):
        scheduler.add_request(harness.request(f"held{number}", 300, adapter=2))
        scheduler.add_request(harness.request(f"none{number}", 300))
    assert claim(scheduler) == 3


@pytest.mark.parametrize("options", [{"enable_lora": True, "max_loras": 2}])
def test_a_free_slot_is_one_adapters(scheduler: Any) -> None:
    """Of ten adapters that wait, two get the slots: four requests of three blocks each, well within what is free."""
    scheduler.max_num_active_reqs = 64
    for number in range(400):
        scheduler.add_request(harness.request(f"waits{number}", 300, adapter=1 + number // 2))
    assert claim(scheduler) == 0


@pytest.mark.parametrize(("drafts", "chunks"), [(0, 0), (90, 1 if ON_NEWEST else 2)])
def test_slots_for_a_drafters_keys_are_claimed_with_the_prompts(
    scheduler: Any, drafts: int, chunks: int
) -> None:
    """30 prompts of 300 tokens are 90 blocks; with a watermark of 25 they fit in 127. With slots for 90 drafts, and as many for their
    keys, they are 120, by what vLLM itself asks its pool for: 150 of 0.31, which gives each prompt two blocks more."""
    scheduler.max_num_active_reqs = 30
    scheduler.num_spec_tokens = scheduler.num_lookahead_tokens = drafts
    add_many(scheduler)
    assert claim(scheduler) == chunks


@pytest.mark.parametrize(
    ("budget", "room", "begins", "chunks"),
    [(64, 64, 0, 0), (64 * 64, 64, 0, 0), (64, 64 * 64, 0, 0), (64 * 64, 64 * 64, 0, 3), (64, 64, 100, 3)],
    ids=["no room", "no room in its cache", "no time in a step", "room for all", "words before it"],
)
def test_what_waits_for_the_encoder_claims_nothing(
    scheduler: Any, budget: int, room: int, begins: int, chunks: int
) -> None:
    """64 prompts of 300 tokens, each with an image of 60: where only the first can be encoded, vLLM starts the first alone."""
    harness.give_encoder(scheduler, budget, room)
    scheduler.max_num_active_reqs = 64
    for number in range(300):
        scheduler.add_request(harness.request(f"waits{number}", 300, images=[(begins, 60)]))
    assert claim(scheduler) == chunks


def test_an_image_that_is_encoded_already_needs_no_room(scheduler: Any) -> None:
    harness.give_encoder(scheduler, 64)
    scheduler.max_num_active_reqs = 64
    scheduler.encoder_cache_manager.cached = {f"waits{number} 0": set() for number in range(300)}
    for number in range(300):
        scheduler.add_request(harness.request(f"waits{number}", 300, images=[(0, 60)]))
    assert claim(scheduler) == 3
