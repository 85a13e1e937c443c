"""Weight transfer taken out of ROSE: a stock ``vllm serve`` without a role, fed through vLLM's own routes from a real relay."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from rose.auth import Tokens
from rose.signatures import SigningKey
from rose.weights.file_store import FileStore
from rose.weights.http_store import HttpStore
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.sealed import SealedStore
from rose.weights.store import Buffer, ObjectStore
from tests.engine_launcher import ROOT, EngineServer, run_module
from tests.plugin.weights_kit import Tensors, change
from tests.plugin.weights_server import PROMPT
from tests.tiny_model import write_tiny_model, write_weights
from tests.weights.relay_process import RelayProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

RUN = "example"
STOCK = ['--weight-transfer-config={"backend": "rose"}']
DEV = {"VLLM_SERVER_DEV_MODE": "1"}


def stock(model: Path, *args: str, spawns: bool = False) -> EngineServer:
    return EngineServer(model, env=DEV, args=[*STOCK, *args], spawns=spawns)


def said(server: EngineServer) -> tuple[list[str], list[float]]:
    """Greedy tokens after a prompt, and their log-probs."""
    body = {"model": str(server.model_dir), "prompt": PROMPT, "max_tokens": 24, "temperature": 0.0}
    body |= {"ignore_eos": True, "logprobs": 0, "return_tokens_as_token_ids": True}
    answer = server.post("/v1/completions", body)
    answer.raise_for_status()
    found = answer.json()["choices"][0]["logprobs"]
    return found["tokens"], found["token_logprobs"]


def memory(server: EngineServer) -> dict[str, str]:
    """vLLM's own checksum of every parameter."""
    answer = server.post("/weight_checker", {"action": "checksum"})
    answer.raise_for_status()
    return answer.json()["checksums"]


class World:
    """A relay that checks nothing, a trainer's key, and what its weights are."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, folder / "model"
        self.weights: Tensors = write_tiny_model(self.model, seed=3)
        whole = Tokens.generate()
        self.key = SigningKey.parse(whole.publish_key)
        self.relay = RelayProcess(folder / "relay", replace(whole, public_key="", publish_key=""))
        self.token_file, self.reader_file = folder / "tokens.toml", folder / "reader.toml"
        whole.save(self.token_file)
        whole.only(["relay", "public_key"]).save(self.reader_file)

    @property
    def files(self) -> Path:
        return self.folder / "relay/relay"

    @property
    def head(self) -> Path:
        return self.files / "runs" / RUN / "head.json"

    def publish(
        self, attempt: int, version: int, store: ObjectStore | None = None, key: SigningKey | None = None
    ) -> None:
        """What the trainer has, as a version of its own; ``key``: somebody else's."""
        plain = store or HttpStore(self.relay.url, self.relay.tokens.publish)
        sealed = SealedStore(plain, key=key or self.key)
        publisher = WeightPublisher(lambda: self.weights, sealed, RUN, attempt, WeightsParams(collect=False))
        publisher.publish(version)
        publisher.close()

    def info(self, **fields: Any) -> dict[str, Any]:
        table = {"store": self.relay.url, "run": RUN, "directory": str(self.folder / "copy")}
        return {"init_info": table | {"token_file": str(self.reader_file)} | fields}


class Update:
    """vLLM's session around one update; a connection for each call, as vLLM closes one on which it answered 500."""

    def __init__(self, server: EngineServer, attempt: Any, version: int, **fields: Any) -> None:
        def post(path: str, body: object = None) -> httpx.Response:
            return httpx.post(server.url + path, json=body, timeout=60)

        assert post("/pause?mode=wait").status_code == 200
        assert post("/start_weight_update").status_code == 200
        info = {"attempt": attempt, "version": version} | fields
        self.answer = post("/update_weights", {"update_info": info})
        self.finished = post("/finish_weight_update", {"weight_version": f"{attempt}.{version}"})
        assert post("/resume").status_code == 200

    @property
    def reason(self) -> str:
        assert self.answer.status_code == 500, self.answer.text
        return self.answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("stock"))
    with world.relay:
        yield world


@pytest.fixture(scope="module")
def server(world: World) -> Iterator[EngineServer]:
    # Spawned as the installed command's: that each of its processes knows the name is part of what is tried.
    with stock(world.model, spawns=True) as server:
        yield server


def fresh(world: World, name: str, weights: Tensors | Path) -> EngineServer:
    """A stock engine that loads these weights from disk."""
    folder = world.folder / name
    write_tiny_model(folder, seed=3)
    if isinstance(weights, Path):
        weights.replace(folder / "model.safetensors")
    else:
        write_weights(folder, weights)
    return stock(folder)


def test_the_example_brings_a_stock_server_to_what_a_fresh_one_loads(
    world: World, server: EngineServer
) -> None:
    before = said(server)
    saved = world.folder / "saved.safetensors"
    done = run_module(
        "examples.stock_vllm_weights", str(world.model), f"--server={server.url}", f"--store={world.relay.url}",
        f"--token-file={world.token_file}", f"--directory={world.folder / 'copy'}", f"--save={saved}",
        files={2: world.folder / "errors"},
    )  # fmt: skip
    assert done.returncode == 0, (world.folder / "errors").read_text()[-3000:]
    kinds = [line.split()[:2] for line in done.stdout.splitlines()]
    assert kinds == [["1.0", "anchor"], ["1.1", "delta"], ["1.2", "delta"]]
    assert server.get("/weight_info").json() == {"weight_version": "example@1.2"}

    now = said(server)
    assert now[0] != before[0]
    with fresh(world, "fresh", saved) as other:
        assert (now, memory(server)) == (said(other), memory(other))
    files = sorted(path.stem for path in (world.folder / "copy/updates").iterdir())
    assert files == ["1.0-from-any", "1.1-from-1.0", "1.2-from-1.1"]  # what came after the first was sparse


@pytest.fixture(scope="module")
def settled(world: World, server: EngineServer) -> EngineServer:
    """The server at 3.0."""
    assert server.post("/init_weight_transfer_engine", world.info()).status_code == 200
    world.publish(3, 0)
    accepted = Update(server, 3, 0)
    assert (accepted.answer.status_code, accepted.finished.status_code) == (200, 200), accepted.answer.text
    return server


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"attempt": 3, "version": 7, "timeout_s": 0.1}, "3.7 did not come within 0.1 s"),
        ({"attempt": 3, "version": 7, "base": "1.1"}, "base: the engine is at example@3.0, not at 1.1"),
        ({"attempt": 1, "version": 2}, "the run is at 3.0 already, past 1.2"),
        ({"attempt": -1, "version": 2}, "attempt: must be a whole number"),
        ({"attempt": "1", "version": 2}, "attempt: Expected `int`"),
        ({"attempt": 3, "version": 0, "path": "/etc/passwd"}, "path: is no field"),
        ({"attempt": 3, "version": 7, "timeout_s": 1e9}, "timeout_s: must be within"),
    ],
)
def test_an_update_that_makes_no_sense_is_refused(
    settled: EngineServer, fields: dict[str, Any], reason: str
) -> None:
    held = memory(settled)
    assert reason in Update(settled, **fields).reason
    assert memory(settled) == held


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"store": ""}, "store: is missing"),
        ({"directory": "copy"}, "directory: must be an absolute path"),
        ({"run": "../x"}, "run: '../x' needs"),
        ({"token": "secret"}, "token: is no field"),
        ({"token_file": "/no/such"}, "token_file: /no/such does not exist"),
        ({"public_key": "ed25519:x"}, "public_key: word 1 is not of the form"),
        ({"token_file": "", "public_key": ""}, "public_key: is needed"),
    ],
)
def test_init_info_is_checked_field_by_field(
    world: World, server: EngineServer, fields: dict[str, Any], reason: str
) -> None:
    answer = httpx.post(f"{server.url}/init_weight_transfer_engine", json=world.info(**fields))
    assert answer.status_code == 500
    assert reason in answer.json()["error"]["message"]


def test_the_pages_commands_are_the_ones_that_work(world: World, settled: EngineServer) -> None:
    world.weights = change(world.weights, seed=4)
    world.publish(4, 0)
    _, _, section = (ROOT / "docs/weights.md").read_text().partition("### Under a stock vLLM server\n")
    _, _, block = section.split("```")[1].partition("\npost() ")
    here = {
        "http://127.0.0.1:8000": settled.url,
        "http://relay:8470": world.relay.url,
        "my-run": RUN,
        "/var/cache/rose-copy": str(world.folder / "copy"),
        "/etc/rose/node.toml": str(world.reader_file),
        '"attempt": 1, "version": 17': '"attempt": 4, "version": 0',
    }
    for there, place in here.items():
        assert there in block
        block = block.replace(there, place)
    held = memory(settled)
    done = subprocess.run(["bash", "-euc", f"post() {block}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert settled.get("/weight_info").json() == {"weight_version": f"{RUN}@1.17"}
    assert memory(settled) != held


class Damaging(HttpStore):
    """A store whose objects arrive with a bit turned, and checksums of the transfer that fit."""

    def put_new(self, key: str, data: Buffer) -> None:
        raw = bytearray(data)
        if not key.endswith(".json"):
            raw[len(raw) // 2] ^= 0x10
        super().put_new(key, bytes(raw))


def test_what_is_damaged_or_signed_by_another_is_refused_with_the_reason(
    world: World, settled: EngineServer
) -> None:
    before, held = said(settled), memory(settled)
    world.weights = change(world.weights, seed=5)
    world.publish(5, 0, Damaging(world.relay.url, world.relay.tokens.publish))
    damaged = Update(settled, 5, 0).reason
    assert "example/5.0/" in damaged
    assert "damaged at rest, or replaced" in damaged
    assert (said(settled), memory(settled)) == (before, held)

    world.head.unlink()  # by whoever can write to the relay's folder
    world.publish(9, 0, FileStore(world.files), SigningKey.generate())
    assert "which is not pinned here" in Update(settled, 9, 0).reason
    assert (said(settled), memory(settled)) == (before, held)

    world.head.unlink()
    world.publish(6, 0)
    accepted = Update(settled, 6, 0)
    assert (accepted.answer.status_code, accepted.finished.status_code) == (200, 200), accepted.answer.text
    with fresh(world, "later", world.weights) as other:
        assert (said(settled), memory(settled)) == (said(other), memory(other))


def test_two_ranks_change_together_or_not_at_all(world: World) -> None:
    with stock(world.model, "--tensor-parallel-size=2") as pair:
        untold = Update(pair, 7, 0)
        assert "was not told where its weights come from" in untold.reason
        before, held = said(pair), memory(pair)
        assert pair.post("/init_weight_transfer_engine", world.info()).status_code == 200
        world.publish(7, 0, Damaging(world.relay.url, world.relay.tokens.publish))
        refused = Update(pair, 7, 0)
        assert "7.0/" in refused.reason
        assert (
            refused.finished.status_code == 500
        )  # the last rank has no session any more; the others' is closed by it
        assert (said(pair), memory(pair)) == (before, held)

        world.publish(8, 0)
        accepted = Update(pair, 8, 0)
        assert (accepted.answer.status_code, accepted.finished.status_code) == (200, 200), (
            accepted.answer.text
        )
        now = memory(pair)
        world.weights = change(world.weights, seed=6)
        world.publish(10, 0)
        assert Update(pair, 10, 0).answer.status_code == 200
        assert memory(pair) != now
