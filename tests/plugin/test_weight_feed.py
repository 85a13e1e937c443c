"""What feeds a stock server: the version asked for, by the cheapest file, or the reason why not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.errors import CapacityError, ConfigError, Gone, NotAuthentic, RequestError, WrongBase
from rose.lineage import Lineage
from rose.signatures import SigningKey
from rose.weights.publisher import WeightPublisher
from rose.weights.sealed import SealedStore
from rose.weights.store import FileStore
from rose.weights.update import UpdateFile
from tests.weights.subscriber.kit import PARAMS, V
from tests.weights.toy import ToyTrainer
from vllm_plugin import weight_feed
from vllm_plugin.weight_feed import ANY, FeedInfo, WeightFeed, open_copy, read_info

KEY, OTHER = SigningKey.generate(), SigningKey.generate()
NOBODY = Lineage("", V("0.0"))


class World:
    """A run in a folder, and who follows it."""

    def __init__(self, folder: Path) -> None:
        self.info = FeedInfo(
            store=str(folder / "store"), run="run", directory=str(folder / "copy"), public_key=KEY.public
        )
        self.trainer = ToyTrainer(1)
        self.feed = WeightFeed(open_copy(self.info), "run")

    def publish(self, attempt: int, *versions: int, key: SigningKey = KEY) -> None:
        store = SealedStore(FileStore(Path(self.info.store)), key=key)
        publisher = WeightPublisher(self.trainer.tensors, store, "run", attempt, PARAMS)
        for version in versions:
            self.trainer.step()
            publisher.publish(version)
        publisher.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(weight_feed, "POLL_S", 600.0)  # closing ends a poll
    world = World(tmp_path)
    yield world
    world.feed.close()


def base_of(path: Path) -> str | None:
    with UpdateFile(path) as file:
        return None if file.base is None else str(file.base)


def test_the_engines_own_version_is_the_base_where_it_is_of_the_run(world: World) -> None:
    world.publish(1, 0)
    assert base_of(world.feed.take(V("1.0"), NOBODY, None, 30)) is None
    world.publish(2, 0, 1)
    held = Lineage("run", V("2.0"))
    world.feed.take(V("2.1"), held, "2.0", 30)
    assert base_of(world.feed.take(V("2.1"), Lineage("other", V("2.0")), None, 30)) is None
    assert base_of(world.feed.take(V("2.1"), held, ANY, 30)) is None


def test_a_version_may_be_asked_for_before_it_is_published(world: World) -> None:
    with pytest.raises(CapacityError, match=r"1\.0 did not come within 0 s; the copy is at None"):
        world.feed.take(V("1.0"), NOBODY, None, 0)
    world.publish(1, 0)
    assert world.feed.take(V("1.0"), NOBODY, None, 30).exists()


def test_what_another_signed_is_refused_until_the_trainer_publishes_again(world: World) -> None:
    world.publish(1, 0, key=OTHER)
    with pytest.raises(NotAuthentic, match="which is not pinned here"):
        world.feed.take(V("1.0"), NOBODY, None, 30)
    world.publish(2, 0)
    assert world.feed.take(V("2.0"), NOBODY, None, 30).exists()


def test_a_version_that_is_past_and_a_wrong_base_are_refused(world: World) -> None:
    world.publish(1, 0, 1)
    world.feed.take(V("1.1"), NOBODY, None, 30)
    with pytest.raises(Gone, match=r"the run is at 1\.1 already, past 1\.0"):
        world.feed.take(V("1.0"), NOBODY, None, 30)
    with pytest.raises(WrongBase, match=r"the engine is at run@1\.0, not at 1\.7"):
        world.feed.take(V("1.1"), Lineage("run", V("1.0")), "1.7", 30)


def test_two_servers_of_one_machine_share_the_copy(world: World) -> None:
    second = WeightFeed(open_copy(world.info), "run")
    world.publish(1, 0)
    try:
        assert second.take(V("1.0"), NOBODY, None, 30) == world.feed.take(V("1.0"), NOBODY, None, 30)
    finally:
        second.close()


def test_a_feed_that_is_opened_beside_another_takes_its_copy_over(world: World) -> None:
    world.publish(1, 0)
    world.feed.take(V("1.0"), NOBODY, None, 30)
    first, second = world.feed, open_copy(world.info)
    first.close()
    world.feed = WeightFeed(second, "run")
    world.publish(2, 0)
    assert world.feed.take(V("2.0"), NOBODY, None, 30).exists()


def test_a_feed_that_is_closed_gives_its_directory_back(world: World) -> None:
    world.publish(1, 0)
    world.feed.take(V("1.0"), NOBODY, None, 30)
    world.feed.close()
    world.feed = WeightFeed(open_copy(world.info), "run")
    assert world.feed.take(V("1.0"), NOBODY, None, 30).exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("store", ""),
        ("run", "a/b"),
        ("directory", "copy"),
        ("threads", 0),
        ("public_key", ""),
        ("token_file", "/no"),
    ],
)
def test_what_is_missing_or_wrong_is_named(tmp_path: Path, field: str, value: object) -> None:
    info = FeedInfo(store="/s", run="run", directory=str(tmp_path / "copy"), public_key=KEY.public)
    setattr(info, field, value)
    with pytest.raises((ConfigError, RequestError)) as refused:
        open_copy(info)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("table", "field"),
    [({"store": 1}, "store"), ({"token": "x"}, "token"), ([], "FeedInfo"), ({"signed": "no"}, "signed")],
)
def test_what_is_posted_is_read_field_by_field(table: object, field: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_info(FeedInfo, table)
    assert refused.value.field == field
