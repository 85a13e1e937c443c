"""Prefix keys by version, on vLLM's own requests and block hashes; the real engine is in ``test_weights_engine``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from vllm_plugin.prefix import PrefixKeys

BLOCK = 16


@dataclass
class Scheduler:
    """The three collections that the keys look at."""

    requests: dict[str, Request] = field(default_factory=dict)
    waiting: list[Request] = field(default_factory=list)
    kv_holding_waiting: list[Request] = field(default_factory=list)


@dataclass
class Output:
    request_id: str
    finish_reason: str | None = "stop"
    kv_transfer_params: dict[str, Any] | None = None


@dataclass
class Outputs:
    outputs: list[Output]


class World:
    def __init__(self) -> None:
        init_none_hash(sha256)
        self.scheduler = Scheduler()
        self.keys = PrefixKeys(self.scheduler)
        self.commit("1.0", "reset")

    def add(self, name: str, *, salt: str | None = None, computed: int = 0) -> Request:
        request = Request(
            request_id=name,
            prompt_token_ids=list(range(3 * BLOCK)),
            sampling_params=SamplingParams(max_tokens=4),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.keys.on_add(request)
        self.scheduler.requests[name] = request
        if not computed:
            self.scheduler.waiting.append(request)
        request.num_computed_tokens = computed
        return request

    def commit(self, version: str, kv: str) -> None:
        self.keys.on_commit({"version": version, "kv": kv})

    def context(self, name: str) -> dict[str, Any]:
        output = Output(name)
        self.keys.on_output({0: Outputs([output])})
        assert output.kv_transfer_params is not None
        return output.kv_transfer_params["rose"]


@pytest.fixture
def world() -> World:
    return World()


def test_requests_of_one_version_share_prefixes_and_of_two_do_not(world: World) -> None:
    first, second = world.add("a", computed=1), world.add("b", computed=1)
    assert len(hashes_of(first)) == 3
    assert hashes_of(first) == hashes_of(second)
    world.commit("1.1", "salt")
    assert set(hashes_of(world.add("c"))).isdisjoint(hashes_of(first))


def hashes_of(request: Request) -> list[Any]:
    return list(request.block_hashes)


def test_a_waiting_request_is_keyed_anew_and_a_running_one_keeps_its_context(world: World) -> None:
    waiting, running = world.add("waiting"), world.add("running", computed=20)
    before = hashes_of(running)
    world.commit("1.1", "salt")
    assert hashes_of(running) == before
    assert hashes_of(waiting) == hashes_of(world.add("new"))
    assert set(hashes_of(waiting)).isdisjoint(before)
    assert world.context("waiting") == {"prefix_version": "1.1", "kv_mixed": False}
    assert world.context("running") == {"prefix_version": "1.0", "kv_mixed": True}


def test_reset_mixes_nothing_and_keep_changes_no_key(world: World) -> None:
    before = hashes_of(world.add("running", computed=20))
    world.commit("1.1", "reset")
    assert world.context("running")["kv_mixed"] is False
    under_1_1 = hashes_of(world.add("before keep"))
    world.commit("1.2", "keep")
    kept = world.add("after keep")
    assert hashes_of(kept) == under_1_1
    assert set(hashes_of(kept)).isdisjoint(before)
    assert world.context("after keep") == {"prefix_version": "1.1", "kv_mixed": True}
    world.commit("1.3", "salt")
    world.add("after salt")
    assert world.context("after salt") == {"prefix_version": "1.3", "kv_mixed": False}


def test_a_trajectory_may_keep_the_prefixes_it_began_with(world: World) -> None:
    began = world.add("turn 1", salt="rose:1.0")
    world.commit("1.1", "salt")
    later = world.add("turn 2", salt="rose:1.0")
    assert hashes_of(later) == hashes_of(began)
    assert world.context("turn 2") == {"prefix_version": "1.0", "kv_mixed": True}


def test_a_callers_own_salt_still_isolates(world: World) -> None:
    mine, other = world.add("a", salt="tenant-1"), world.add("b", salt="tenant-2")
    assert set(hashes_of(mine)).isdisjoint(hashes_of(other))
    world.commit("1.1", "salt")
    assert hashes_of(mine) == hashes_of(world.add("c", salt="tenant-1"))


def test_only_the_last_output_says_it_and_records_do_not_pile_up(world: World) -> None:
    world.add("a")
    early = Output("a", finish_reason=None)
    world.keys.on_output({0: Outputs([early])})
    assert early.kv_transfer_params is None
    for number in range(500):  # ended without an output
        world.add(f"gone {number}")
        world.scheduler.requests.pop(f"gone {number}")
    assert len(world.keys._turns) < 100
