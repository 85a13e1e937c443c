"""Weight updates on a real server: the same as a server freshly started, or nothing at all.

One server per kind of model (tied and untied embeddings); every test starts from the state the last one left.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rose.auth import bearer
from rose.coserve.engine import RolloutEngine
from rose.coserve.links import WeightLoop
from rose.coserve.node_config import EngineConfig, NodeConfig, WeightsLink
from rose.coserve.policies import PolicyCopies
from rose.policy.stop_reasons import OTHER_RUN
from rose.testing.memory_store import MemoryStore
from rose.weights.publisher import WeightPublisher
from rose.weights.subscriber import WeightSubscriber
from rose.wire.http_client import open_client
from rose.wire.turns import ASKED_RUN
from tests.engine_launcher import EngineServer
from tests.plugin.weights_kit import RUN, change, make_update
from tests.plugin.weights_server import FAULTS, PROMPT, Policy, dedicated, turn
from tests.tiny_model import VOCAB_SIZE, write_tiny_model, write_weights

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]


@pytest.fixture(
    scope="module",
    params=[pytest.param(True, id="tied"), pytest.param(False, marks=pytest.mark.conformance, id="untied")],
)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    policy = Policy(tmp_path_factory.mktemp("policy"), tied=request.param)
    env = {
        "ROSE_WEIGHTS_DIR": str(policy.folder),
        "VLLM_SERVER_DEV_MODE": "1",
        "ROSE_WEIGHT_RUN": RUN,
    }
    with dedicated(policy.folder / "model", env=env, args=[FAULTS]) as policy.server:
        yield policy


def test_every_tensor_of_the_checkpoint_has_a_place(policy: Policy) -> None:
    status = policy.server.get("/rose/status").json()
    (rank,) = status["ranks"]
    assert status["vocab_size"] == VOCAB_SIZE  # what may come in, without the padding
    assert status["max_num_seqs"] == 8
    assert status["logprobs_mode"] == "processed_logprobs"
    assert rank["fallback"] == {}
    assert rank["holes"] == []
    assert policy.holds(policy.weights)
    assert VOCAB_SIZE % 64  # the embedding is padded in memory, and the padding not hashed


def test_no_parameter_was_packed_away(policy: Policy) -> None:
    assert int(policy.rpc("smallest_parameter")[0]) > 0


def test_an_updated_server_equals_one_started_with_the_new_weights(policy: Policy) -> None:
    new = change(policy.weights, seed=11)
    old_turn = turn(policy.server)
    body = policy.update(new)

    staged = policy.stage(body)
    assert (staged.status_code, staged.json()["state"]) == (200, "staged")
    assert turn(policy.server) == old_turn  # staging changes nothing

    committed = policy.commit(body)
    assert committed.status_code == 200, committed.text
    assert committed.json()["version"] == f"1.{policy.number + 1}"
    assert 0 < committed.json()["commit_s"] < committed.json()["pause_s"] < 60
    policy.became(new)

    fresh_dir = policy.folder / "fresh"
    write_tiny_model(fresh_dir, tied=policy.tied)
    write_weights(fresh_dir, new)
    env = {"ROSE_WEIGHT_VERSION": policy.version, "ROSE_WEIGHT_RUN": RUN}
    with dedicated(fresh_dir, env=env) as fresh:
        (rank,) = fresh.get("/rose/weights/hash").json()["ranks"]
        expected = turn(fresh)
    assert rank == {"run": RUN, "version": policy.version, "hashes": policy.hashes()}
    assert turn(policy.server) == expected
    assert expected != old_turn


def test_a_dense_update_without_a_base_is_taken_in_any_state(policy: Policy) -> None:
    new = change(policy.weights, seed=12)
    body = policy.update(new, base=None)
    assert policy.stage(body).status_code == 200
    assert policy.commit(body).status_code == 200
    policy.became(new)
    assert policy.holds(new)


def running(server: EngineServer) -> bool:
    for line in server.get("/metrics").text.splitlines():
        if line.startswith("vllm:num_requests_running"):
            return float(line.split()[-1]) > 0
    return False


class Background(threading.Thread):
    """A turn in flight; ``start`` returns once the engine decodes it."""

    def __init__(self, server: EngineServer, **body: Any) -> None:
        super().__init__()
        self.server, self.body, self.answer = server, body, {}

    def start(self) -> None:
        super().start()
        while self.is_alive() and not running(self.server):
            pass

    def run(self) -> None:
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 450, "ignore_eos": True}} | self.body
        self.answer = self.server.post("/inference/v1/generate", body).json()


def under_way(policy: Policy, kv: str, seed: int) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """The answer to a turn during which new weights came, the label of the old ones, and what a turn found cached just before.

    Where the turn is over before the commit: once more, with other weights.
    """
    for number in range(10):
        _, context = follow(policy.server)
        new = change(policy.weights, seed=seed + 1000 * number)
        body = policy.update(new)
        old_label = policy.label
        assert policy.stage(body).status_code == 200
        greedy = {"max_tokens": 450, "temperature": 0.0, "ignore_eos": True}
        request = Background(policy.server, sampling_params=greedy)
        request.start()
        assert policy.commit(body, kv=kv).status_code == 200
        request.join()
        policy.became(new)
        if len(request.answer["choices"][0]["weight_versions"]) > 1:
            return request.answer, old_label, context
    raise AssertionError("never: a commit under a turn")


def test_a_turn_in_flight_goes_on_under_the_new_version_and_says_so(policy: Policy) -> None:
    answer, old_label, _ = under_way(policy, "reset", seed=21)

    assert answer["kv_transfer_params"]["rose"]["kv_mixed"] is False
    choice = answer["choices"][0]
    first, second = choice["weight_versions"]
    assert (first["version"], second["version"]) == (old_label, policy.label)
    assert 0 == first["start"] < first["end"] == second["start"] < second["end"] == 450
    # The rest is what the new weights say after those tokens: nothing of the old KV cache is left.
    cut = second["start"]
    rest = policy.server.generate(PROMPT + choice["token_ids"][:cut], max_tokens=8)
    assert rest["choices"][0]["token_ids"] == choice["token_ids"][cut : cut + 8]


LONG = [(i * 37) % 240 + 6 for i in range(200)]


def follow(server: EngineServer, **body: Any) -> tuple[list[float], dict[str, Any]]:
    """Log-probs of the tokens after a long prompt, and what the answer says of its context."""
    sampling = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
    answer = server.post("/inference/v1/generate", {"token_ids": LONG, "sampling_params": sampling} | body)
    answer.raise_for_status()
    table = answer.json()
    content = table["choices"][0]["logprobs"]["content"]
    return [entry["logprob"] for entry in content], table["kv_transfer_params"]["rose"]


@pytest.mark.parametrize("kv", ["salt", "reset", "keep"])
def test_a_commit_decides_what_becomes_of_cached_prefixes(policy: Policy, kv: str) -> None:
    new = change(policy.weights, seed=60)
    old_version = policy.version
    follow(policy.server)  # its keys and values are cached now
    body = policy.update(new)
    assert policy.stage(body).status_code == 200
    committed = policy.commit(body, kv=kv)
    assert committed.json()["kv"] == kv
    policy.became(new)

    found, context = follow(policy.server)
    exact, _ = follow(policy.server, cache_salt=f"nothing cached {kv}")
    off = max(abs(a - b) for a, b in zip(found, exact, strict=True))
    if kv == "keep":
        assert off > 0.01  # the prompt's keys and values are the old weights'
        assert context["prefix_version"] != policy.version
        assert context["kv_mixed"] is True
    else:
        assert off == 0.0
        assert context == {"prefix_version": policy.version, "kv_mixed": False}
    if kv == "salt":  # a trajectory may keep the prefixes it began with, and its turns say so
        follow(policy.server, cache_salt=f"rose:{old_version}")
        _, own = follow(policy.server, cache_salt=f"rose:{old_version}")
        assert own == {"prefix_version": old_version, "kv_mixed": True}


def test_a_turn_in_flight_keeps_its_context_under_salt_and_says_so(policy: Policy) -> None:
    answer, _, context = under_way(policy, "salt", seed=61)

    assert len(answer["choices"][0]["weight_versions"]) == 2
    assert answer["kv_transfer_params"]["rose"] == context | {"kv_mixed": True}


def refused(policy: Policy, answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The answer is one clear error, and the engine runs what it ran."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    assert "\n" not in error["message"]
    assert policy.holds(policy.weights)
    answers = policy.server.generate(PROMPT, max_tokens=2)  # and it does run: nobody left it paused
    assert answers["choices"][0]["weight_versions"][0]["version"] == policy.label
    return error


def test_a_wrong_base_is_refused(policy: Policy) -> None:
    ahead = change(policy.weights, seed=31)
    other = make_update(
        policy.folder / "other", ahead, change(ahead, seed=32), base="1.7", target="1.8"
    )  # fmt: skip
    body = {"path": str(other), "attempt": 1, "version": 8}
    refused(policy, policy.stage(body), 409, "wrong_base")
    refused(policy, policy.commit(body), 409, "weights")


def test_a_corrupt_update_is_refused(policy: Policy) -> None:
    body = policy.update(change(policy.weights, seed=33))
    raw = bytearray(Path(body["path"]).read_bytes())
    raw[-5] ^= 0x20
    Path(body["path"]).write_bytes(raw)
    refused(policy, policy.stage(body), 409, "section_corrupt")


def test_a_failed_commit_is_undone_to_the_bit_and_can_be_repeated(policy: Policy) -> None:
    before = turn(policy.server)
    new = change(policy.weights, seed=34)
    body = policy.update(new)
    assert policy.stage(body).status_code == 200
    policy.rpc("spoil_next_write", 0)
    refused(policy, policy.commit(body), 409, "weights")
    assert turn(policy.server) == before

    assert policy.stage(body).status_code == 200
    assert policy.commit(body, kv="keep").status_code == 200
    policy.became(new)
    assert policy.holds(new)


def test_a_repeated_commit_changes_nothing(policy: Policy) -> None:
    new = change(policy.weights, seed=35)
    body = policy.update(new)
    policy.stage(body)
    assert policy.commit(body).json()["repeated"] is False
    policy.became(new)
    assert policy.commit(body).json() | {"repeated": True} == policy.commit(body).json()
    refused(policy, policy.stage(body), 409, "version_refused")


def ask(policy: Policy, run: str) -> dict[str, Any]:
    """A turn that was placed here for the sake of ``run``'s weights."""
    sampling = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, "extra_args": {ASKED_RUN: run}}
    answer = policy.server.post("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling})
    answer.raise_for_status()
    return answer.json()["choices"][0]


def test_a_turn_that_asks_for_another_run_is_refused_by_the_engine(policy: Policy) -> None:
    assert policy.server.get("/rose/status").json()["run"] == RUN

    refused = ask(policy, "another")

    assert (refused["finish_reason"], refused["stop_reason"]) == ("abort", OTHER_RUN)
    assert not refused["token_ids"]
    assert len(ask(policy, RUN)["token_ids"]) == 4


def test_weights_of_another_run_end_what_the_one_before_samples(policy: Policy) -> None:
    new = change(policy.weights, seed=37)
    path = make_update(policy.folder / "another", policy.weights, new, base=None, target="1.1", run="another")
    body = {"path": str(path), "attempt": 1, "version": 1, "run": "another"}
    sampling = {"max_tokens": 450, "ignore_eos": True, "extra_args": {ASKED_RUN: RUN}}
    request = Background(policy.server, sampling_params=sampling)
    assert policy.stage(body).status_code == 200
    request.start()

    assert policy.commit(body, run="another").status_code == 200

    request.join()
    (choice,) = request.answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", OTHER_RUN)
    assert [stamp["version"] for stamp in choice["weight_versions"]] == [policy.label]
    assert policy.holds(new)
    assert not ask(policy, RUN)["token_ids"]
    assert [stamp["version"] for stamp in ask(policy, "another")["weight_versions"]] == ["another@1.1"]

    back = policy.update(policy.weights, base=None) | {"run": RUN}
    assert policy.stage(back).status_code == 200
    assert policy.commit(back, run=RUN).status_code == 200
    policy.became(policy.weights)
    assert policy.holds(policy.weights)
    assert len(ask(policy, RUN)["token_ids"]) == 4


class Attached(RolloutEngine):
    """A server that is up already, as the node's weight loop sees it."""

    def __init__(self, config: NodeConfig, token: str) -> None:
        super().__init__(config)
        self.token = token

    @property
    def running(self) -> bool:
        return True

    async def attach(self) -> None:
        self._client = open_client(bearer(self.token))
        await self.refresh_status()
        self.state = "ready"


async def test_a_node_takes_a_running_engine_to_another_run_and_back(
    policy: Policy, record_property: Callable[[str, object], None]
) -> None:
    """Same base model: the engine runs on, and only its weights change; each time the bits are the run's own."""
    store, folder = MemoryStore(), policy.folder / "copies"
    policies = {"job-a": change(policy.weights, seed=71), "job-b": change(policy.weights, seed=72)}
    for run, tensors in policies.items():
        publisher = WeightPublisher(lambda tensors=tensors: tensors, store, run, 1)
        publisher.publish(1)
        publisher.close()
    link = WeightsLink(relay_url="http://nobody:1", run_id="job-a", directory=folder, poll_s=0.2)
    engine_config = EngineConfig(
        model=str(policy.folder / "model"), host="127.0.0.1", port=policy.server.port, max_model_len=128
    )
    config = NodeConfig(node_id="n", dir=policy.folder / "node", engine=engine_config, weights=link)
    engine = Attached(config, policy.server.node_token)
    copies = PolicyCopies("job-a", folder, lambda run, place: WeightSubscriber(store, run, place), most=2)
    loop = WeightLoop(link, folder, engine, copies)
    await engine.attach()
    following = asyncio.create_task(loop.run())
    try:
        for number, run in enumerate(("job-a", "job-b", "job-a", "job-b")):
            loop.follow(run)
            async with asyncio.timeout(60):
                while engine.run != run:  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0.01)
            assert await asyncio.to_thread(policy.holds, policies[run])
            answer = await asyncio.to_thread(ask, policy, run)
            assert [stamp["version"] for stamp in answer["weight_versions"]] == [f"{run}@1.1"]
            if number:
                record_property("switch_s", loop.commit_s)
        assert loop.num_switches == 4
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        assert engine._client is not None
        await engine._client.aclose()
        back = policy.update(policy.weights, base=None) | {"run": RUN}
        assert policy.stage(back).status_code == 200
        assert policy.commit(back, run=RUN).status_code == 200
        policy.became(policy.weights)


def test_weights_of_another_run_are_taken_only_by_its_name(policy: Policy) -> None:
    """A version number says nothing across runs: a newer one of another run is no newer version of this one."""
    new = change(policy.weights, seed=38)
    path = make_update(policy.folder / "newer", policy.weights, new, base=None, target="1.999", run="another")

    refused(policy, policy.stage({"path": str(path), "attempt": 1, "version": 999}), 409, "wrong_base")


def test_a_discarded_update_is_not_committed(policy: Policy) -> None:
    body = policy.update(change(policy.weights, seed=36))
    assert policy.stage(body).status_code == 200
    assert policy.server.post("/rose/weights/discard", {}).status_code == 200
    refused(policy, policy.commit(body), 409, "weights")


def test_aborted_requests_end_with_their_tokens(policy: Policy) -> None:
    choice: dict[str, Any] = {}
    for number in range(10):  # where it is over before it is aborted: once more
        request = Background(policy.server, request_id=f"turn-{number}")
        request.start()
        named = [f"turn-{number}", "nobody"]
        assert policy.server.post("/rose/abort", {"request_ids": named}).status_code == 200
        request.join()
        choice = request.answer["choices"][0]
        if choice["finish_reason"] != "length":
            break
    assert choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) < 450


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/rose/weights/stage", {"path": "/etc/passwd", "attempt": 1, "version": 1}, 403, "path"),
        ("/rose/weights/stage", {"path": "/no/such", "attempt": 1, "version": 1}, 404, "path"),
        ("/rose/weights/stage", {"path": "x\0", "attempt": 1, "version": 1}, 400, "path"),
        ("/rose/weights/stage", {"path": "", "attempt": 1}, 400, "body"),
        ("/rose/weights/stage", {"path": "", "attempt": 1, "version": 1, "wait_s": 1e9}, 400, "wait_s"),
        ("/rose/weights/commit", {"attempt": -1, "version": 1}, 400, "attempt"),
        ("/rose/weights/commit", {"attempt": "1", "version": 1}, 400, "attempt"),
        ("/rose/weights/commit", {"attempt": 1, "version": 1, "kv": "sweep"}, 400, "kv"),
        ("/rose/weights/commit", {"attempt": 1, "version": 1, "vers": 1}, 400, "body"),
        ("/rose/abort", {"request_ids": ["x"] * 5000}, 413, "request_ids"),
        ("/rose/abort", {"request_ids": ["x" * 300_000]}, 413, "body"),
        ("/rose/abort", [1], 400, "body"),
    ],
)
def test_bad_input_is_refused_with_the_field_named(
    policy: Policy, path: str, body: Any, status: int, param: str
) -> None:
    answer = policy.server.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_a_link_that_leads_out_of_the_folder_is_refused(policy: Policy, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    link = policy.folder / "link"
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path / "secret")
    answer = policy.stage({"path": str(link), "attempt": 1, "version": 99})
    assert answer.status_code == 403


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer nonsense-nonsense"}])
def test_no_route_answers_without_the_node_token(policy: Policy, header: dict[str, str]) -> None:
    for method, path in (
        ("GET", "/rose/status"),
        ("GET", "/rose/weights/hash"),
        ("POST", "/rose/weights/stage"),
        ("POST", "/rose/weights/commit"),
        ("POST", "/rose/weights/discard"),
        ("POST", "/rose/abort"),
    ):
        answer = httpx.request(method, policy.server.url + path, headers=header)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "unauthorized"
    assert policy.server.node_token not in policy.server.log_tail(10_000)
