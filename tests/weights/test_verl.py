"""verl's checkpoint engine over ROSE, between an actor of two ranks and two workers of a replica.

A stand-in has what ``verl/checkpoint_engine/base.py`` declares at commit 1dda039b (0.10.0.dev, August 2026): the registry, and the
six abstract methods with their names and parameters.  Where verl is installed (``make others``: 0.9.1) all is done with its own classes
too.  They are driven as ``CheckpointEngineManager.update_weights`` does it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from rose.auth import Tokens
from rose.errors import ConfigError, WeightsError
from rose.signatures import PublicKeys
from rose.testing.relay_thread import RelayThread
from rose.weights.file_store import FileStore

pytest.importorskip("torch")
import torch

from tests.tiny_model import write_tiny_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "verl_engine.py"
BASE = "verl.checkpoint_engine.base"
Pairs = list[tuple[str, torch.Tensor]]


class CheckpointEngine(ABC):
    wire_format = "named_tensors"

    @abstractmethod
    def prepare(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> Any: ...

    @abstractmethod
    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]: ...


class CheckpointEngineRegistry:
    known: ClassVar[dict[str, type[Any]]] = {}

    @staticmethod
    def register(backend: str) -> Any:
        def wrapper(cls: type[Any]) -> type[Any]:
            CheckpointEngineRegistry.known[backend] = cls
            return cls

        return wrapper

    @classmethod
    def get(cls, backend: str) -> type[Any]:
        return cls.known[backend]


@pytest.fixture(params=["stand-in", "verl"])
def base(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``verl.checkpoint_engine.base``."""
    if request.param == "verl":
        return pytest.importorskip(BASE, reason="verl is not installed")
    module: Any = ModuleType(BASE)
    module.CheckpointEngine, module.CheckpointEngineRegistry = CheckpointEngine, CheckpointEngineRegistry
    for name in ("verl", "verl.checkpoint_engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, BASE, module)
    return module


@pytest.fixture
def engine(base: Any) -> Any:
    """The class that verl's registry has under ``rose`` once ``custom_backend_module`` is imported."""
    spec = importlib.util.spec_from_file_location("verl_engine", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return base.CheckpointEngineRegistry.get("rose")


@pytest.fixture
def kwargs(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """verl's ``engine_kwargs`` for a relay that takes what the actor signs."""
    tokens = Tokens.generate()
    tokens.save(tmp_path / "tokens.toml")
    trusted = PublicKeys.parse(tokens.public_key)
    with RelayThread(FileStore(tmp_path / "relay", durable=False), tokens, trusted=trusted) as relay:
        yield {
            "store": relay.url,
            "run_id": "verl",
            "attempt": 1,
            "token_file": str(tmp_path / "tokens.toml"),
            "directory": str(tmp_path / "copy"),
        }


class Actor:
    """One rank.  Its tensors are made one at a time, in one buffer, as gathered parameters are."""

    def __init__(self, engine: Any, rank: int) -> None:
        self.engine, self.num_made = engine, 0
        self.is_master = rank == 0

    def parameters(self, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(max(each.numel() for each in weights.values()), dtype=torch.bfloat16)
        for name, each in weights.items():
            self.num_made += 1
            yield name, buffer[: each.numel()].copy_(each.reshape(-1)).view(each.shape)
            buffer.fill_(torch.nan)


async def received(engine: Any, step: int) -> Pairs:
    return [pair async for pair in engine.receive_weights(global_steps=step)]


async def update(
    actors: list[Actor], workers: list[Any], weights: dict[str, torch.Tensor], step: int
) -> tuple[list[dict[str, float]], list[Pairs]]:
    """``CheckpointEngineManager.update_weights``: both sides at once, between the topology and the end."""
    everybody = [*(actor.engine for actor in actors), *workers]
    metadata = [each.prepare() for each in everybody]
    for topology in type(everybody[0]).build_topology(len(actors), len(workers), metadata):
        assert topology == {}
    for each in everybody:
        each.init_process_group()
    sent = asyncio.gather(
        *(actor.engine.send_weights(actor.parameters(weights), global_steps=step) for actor in actors)
    )
    found = asyncio.gather(*(received(worker, step) for worker in workers))
    result = await sent, await found
    for each in everybody:
        each.finalize()
    return result


async def test_replicas_have_every_bit_of_what_the_actor_has(
    engine: Any, kwargs: dict[str, Any], tmp_path: Path
) -> None:
    weights = write_tiny_model(tmp_path / "model", seed=3)
    extra = {
        "lm_head.weight": weights["model.embed_tokens.weight"]
    }  # tied: verl yields it, checkpoints lack it
    actors = [
        Actor(engine(1 << 20, is_master=rank == 0, leave_out=tuple(extra), **kwargs), rank)
        for rank in range(2)
    ]
    workers = [engine(bucket_size=1 << 20, **kwargs) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for step in (0, 1, 2, 7):
        metrics, found = await update(actors, workers, weights | extra, step)
        assert metrics[1] == {}
        assert (metrics[0]["rose/density"] < 0.1) == (step > 0)
        for pairs in found:
            assert len(pairs) == len(weights)
            assert dict(pairs).keys() == weights.keys()
            for name, tensor in pairs:
                assert tensor.dtype == torch.bfloat16
                assert torch.equal(tensor.view(torch.int16), weights[name].view(torch.int16)), (step, name)
        again = await received(workers[0], step)  # a replica that is asked twice
        assert len(again) == len(weights)
        weights = {
            name: torch.where(torch.rand(each.shape, generator=generator) < 0.02, -each, each)
            for name, each in weights.items()
        }
    assert [actor.num_made for actor in actors] == [4 * (len(weights) + 1)] * 2
    for each in (*(actor.engine for actor in actors), *workers):
        each.close()


async def test_what_is_missing_is_named(engine: Any, kwargs: dict[str, Any]) -> None:
    actor = engine(1 << 20, is_master=True, **kwargs)
    with pytest.raises(ConfigError, match="global_steps"):
        await actor.send_weights(iter([]))
    with pytest.raises(ConfigError, match=r"engine_kwargs\.rose\.directory"):
        await received(engine(1 << 20, **{**kwargs, "directory": ""}), 0)
    late = engine(1 << 20, timeout_s=0.1, **kwargs)
    with pytest.raises(WeightsError, match=r"1\.5.*did not come within 0\.1 s"):
        await received(late, 5)
    late.close()


def test_every_method_has_the_parameters_that_verl_passes(base: Any, engine: Any) -> None:
    assert not inspect.isabstract(engine)
    assert base.CheckpointEngine.__abstractmethods__ == CheckpointEngine.__abstractmethods__
    for name in CheckpointEngine.__abstractmethods__:
        theirs = list(inspect.signature(getattr(base.CheckpointEngine, name)).parameters)
        assert list(inspect.signature(getattr(engine, name)).parameters) == theirs, name
