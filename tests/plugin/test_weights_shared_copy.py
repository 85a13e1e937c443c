"""Engines that share a host copy stream whole versions from files that its keeper deletes: nothing is lost by that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.weights.file_store import FileStore
from rose.weights.params import WeightsParams
from rose.weights.publisher import WeightPublisher
from rose.weights.shared_copy import SharedCopy
from rose.weights.subscriber import WeightSubscriber
from tests.plugin.rank_kit import commit_all
from tests.plugin.weights_kit import TinyLlama, change, memory_of, same_memory, specs_of
from tests.weights.test_shared_copy import keeper_process
from tests.weights.test_stores import V
from vllm_plugin import rank_weights
from vllm_plugin.plan_recorder import record
from vllm_plugin.rank_weights import RankWeights


class Engine:
    """That streams whole versions, one tensor in each slice."""

    def __init__(self) -> None:
        weights = TinyLlama.weights(seed=99)
        self.model = TinyLlama()
        self.model.load_weights(weights.items())
        plan = record(self.model, specs_of(weights))
        self.rank = RankWeights(plan, V("0.0"), streams=True)

    def stage(self, path: Path, version: str) -> None:
        self.rank.prefetch(str(path), V(version))
        self.rank.join()
        assert self.rank.report()["phase"] == "staged"


class World:
    """A run of a small model in a folder, and one host copy of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights = TinyLlama.weights()
        self.publisher = WeightPublisher(
            lambda: self.weights, FileStore(folder / "store"), "run", 1, WeightsParams(anchor_every=1000)
        )
        self.copy: SharedCopy | None = None

    def publish(self, version: int) -> None:
        self.weights = change(self.weights, seed=version, fraction=0.01)
        self.publisher.publish(version)

    def open_copy(self) -> SharedCopy:
        def subscribe() -> WeightSubscriber:
            return WeightSubscriber(FileStore(self.folder / "store"), "run", self.folder / "copy")

        self.copy = SharedCopy("run", self.folder / "copy", subscribe)
        return self.copy

    def holds(self, engine: Engine) -> bool:
        fresh = TinyLlama()
        fresh.load_weights(self.weights.items())
        return same_memory(memory_of(fresh), memory_of(engine.model))

    def close(self) -> None:
        self.publisher.close()
        if self.copy is not None:
            self.copy.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(rank_weights, "STREAM_SLICE_S", 0.0)
    world = World(tmp_path)
    yield world
    world.close()


@pytest.mark.parametrize("slices_before", [0, 1, 5])
def test_an_engine_streams_on_when_the_keeper_is_killed_and_the_next_one_clears_up(
    world: World, slices_before: int
) -> None:
    world.publish(0)
    with keeper_process(world.folder) as keeper:
        copy = world.open_copy()
        assert copy.poll(20) == V("1.0")
        engine, path = Engine(), copy.fetch(V("1.0"), None)
        engine.stage(path, "1.0")
        for _ in range(slices_before):
            engine.rank.commit(V("1.0"))
        keeper.kill()
        keeper.wait(20)
    half = path.with_name(f".{path.name}.7.tmp")
    half.write_bytes(b"of a keeper that was killed while it wrote")
    copy.poll(0)
    assert copy.keeps
    assert not path.exists()
    assert not half.exists()
    commit_all(engine.rank, V("1.0"))
    assert engine.rank.finish() == V("1.0")
    assert world.holds(engine)
    other = (
        Engine()
    )  # that was told the file's name, and had not opened it: it is refused, and its agent asks again
    other.rank.prefetch(str(path), V("1.0"))
    other.rank.join()
    assert other.rank.report()["error"]["code"] == "section_corrupt"
    assert copy.fetch(V("1.0"), None) == path
    other.stage(path, "1.0")
    commit_all(other.rank, V("1.0"))
    assert world.holds(other)


def test_an_engine_streams_on_when_its_neighbours_ask_for_more_files_than_are_kept(world: World) -> None:
    copy = world.open_copy()
    for version in range(8):
        world.publish(version)
        assert copy.poll(20) == V(f"1.{version}")
    engine, path = Engine(), copy.fetch(V("1.7"), None)
    engine.stage(path, "1.7")
    engine.rank.commit(V("1.7"))
    for base in range(1, 7):
        copy.fetch(V("1.7"), V(f"1.{base}"))
    assert not path.exists()
    commit_all(engine.rank, V("1.7"))
    assert engine.rank.finish() == V("1.7")
    assert world.holds(engine)
