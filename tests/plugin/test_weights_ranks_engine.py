"""Weight updates on a real server of two tensor-parallel ranks: both change, or neither."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rose.weights import statehash
from tests.plugin.weights_kit import Tensors, change, state_hash
from tests.plugin.weights_server import FAULTS, Policy, dedicated, turn

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    policy = Policy(tmp_path_factory.mktemp("policy"), tied=False)
    env = {"ROSE_WEIGHTS_DIR": str(policy.folder), "ROSE_WEIGHTS_THREADS": "4", "VLLM_SERVER_DEV_MODE": "1"}
    args = ["--tensor-parallel-size=2", FAULTS]
    with dedicated(policy.folder / "model", env=env, args=args) as policy.server:
        yield policy


def hold(policy: Policy, weights: Tensors) -> bool:
    """Replicated tensors: both ranks hold the whole; the others: their parts add up."""
    first, second = (each["hashes"] for each in policy.server.get("/rose/weights/hash").json()["ranks"])
    assert first.keys() == second.keys() == weights.keys()
    for name, tensor in weights.items():
        parts = statehash.from_hex(first[name]), statehash.from_hex(second[name])
        whole = state_hash(tensor)
        if parts != (whole, whole) and statehash.add(*parts) != whole:
            return False
    return True


def phases(policy: Policy) -> list[Any]:
    return [rank["phase"] for rank in policy.server.get("/rose/status").json()["ranks"]]


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_both_ranks_reach_the_new_state(policy: Policy, dense: bool) -> None:
    assert hold(policy, policy.weights)
    new = change(policy.weights, seed=51 + dense)
    body = policy.update(new, dense=dense)
    assert policy.stage(body).status_code == 200
    assert policy.commit(body).status_code == 200
    policy.became(new)
    assert hold(policy, new)


def test_when_one_rank_fails_both_are_undone_and_the_engine_lives(policy: Policy) -> None:
    before = turn(policy.server)
    new = change(policy.weights, seed=53)
    body = policy.update(new)
    assert policy.stage(body).status_code == 200
    policy.rpc("spoil_next_write", 1)
    answer = policy.commit(body)
    assert answer.status_code == 409
    assert answer.json()["error"]["message"].startswith("rank 1: ")
    assert hold(policy, policy.weights)
    assert phases(policy) == ["failed", "failed"]
    assert turn(policy.server) == before

    assert policy.stage(body).status_code == 200
    assert policy.commit(body).status_code == 200
    policy.became(new)
    assert hold(policy, new)


def test_a_base_that_only_the_sum_of_the_ranks_disproves_is_refused(policy: Policy) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"  # cut by columns: no rank holds it whole
    other = policy.weights | {name: policy.weights[name].flip(0).contiguous()}
    new = other | {name: change({name: other[name]}, seed=54)[name]}
    actual, policy.weights = policy.weights, other
    body = policy.update(new)
    policy.weights = actual

    assert policy.stage(body).status_code == 200
    answer = policy.commit(body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "wrong_base")
    assert answer.json()["error"]["param"] == name
    assert hold(policy, actual)


def test_a_rank_that_dies_in_a_commit_ends_its_engine_and_no_turn_runs_on_half_a_version(
    policy: Policy,
) -> None:
    """Last: it ends the server."""
    body = policy.update(change(policy.weights, seed=55))
    assert policy.stage(body).status_code == 200
    policy.rpc("die_at_commit", 1)
    try:
        assert policy.commit(body).status_code >= 500
    except (httpx.NetworkError, httpx.RemoteProtocolError):
        pass  # the whole server is gone already; but no time-out: the commit is answered
    with pytest.raises((httpx.TransportError, httpx.HTTPStatusError)):
        policy.server.generate([7, 30, 99], max_tokens=2)
