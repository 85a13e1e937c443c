"""What feeds a stock server: the version asked for, by the cheapest file, or the reason why not."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose.errors import CapacityError, ConfigError, Gone, NotAuthentic, RequestError, WeightsError, WrongBase
from rose.lineage import Lineage
from rose.proc import free_port
from rose.signatures import SigningKey
from rose.weights.file_store import FileStore
from rose.weights.publisher import WeightPublisher
from rose.weights.sealed import SealedStore
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


class Polled:
    """A host copy whose polls end so, one after the other; after the last they only wait."""

    def __init__(self, path: Path, answers: list[Any]) -> None:
        self._path, self._answers = path, answers
        self.is_out, self._closed = threading.Event(), threading.Event()

    def poll(self, timeout_s: float) -> Any:
        if not self._answers:
            self.is_out.set()
            self._closed.wait()
            return None
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def fetch(self, *_: Any) -> Path:
        return self._path

    def close(self) -> None:
        self._closed.set()


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


def test_a_store_that_is_away_for_a_while_does_not_end_an_update(tmp_path: Path) -> None:
    """Longer than one poll."""
    away = CapacityError("relay cannot be reached")
    copy: Any = Polled(tmp_path, [away, away, V("1.0")])
    feed = WeightFeed(copy, "run")
    assert feed.take(V("1.0"), NOBODY, None, 60) == tmp_path
    feed.close()


def test_a_store_that_stays_away_is_named_when_the_time_is_over(tmp_path: Path) -> None:
    copy: Any = Polled(tmp_path, [CapacityError("relay cannot be reached")])
    feed = WeightFeed(copy, "run")
    copy.is_out.wait(30)
    with pytest.raises(
        CapacityError, match=r"1\.0 did not come within 0 s; the copy is at None: relay cannot be reached"
    ):
        feed.take(V("1.0"), NOBODY, None, 0)
    feed.close()


def test_a_store_that_nobody_serves_is_said_to_the_log_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    monkeypatch.setattr(weight_feed.logger, "warning", lambda *_: told.set())
    info = FeedInfo(f"http://127.0.0.1:{free_port()}", "run", str(tmp_path / "copy"), signed=False)
    feed = WeightFeed(open_copy(info), "run")
    assert told.wait(60), "before anybody asks for a version"
    feed.close()


def test_a_copy_that_was_deleted_is_said_and_made_anew_by_the_next_feed(world: World) -> None:
    world.publish(1, 0)
    world.feed.take(V("1.0"), NOBODY, None, 30)
    directory = Path(world.info.directory)
    shutil.rmtree(directory)
    world.publish(2, 0)
    with pytest.raises(WeightsError, match=rf"^{directory}: was deleted .*POST /init_weight_transfer_engine"):
        world.feed.take(V("2.0"), NOBODY, None, 30)
    world.feed.close()
    world.feed = WeightFeed(open_copy(world.info), "run")
    assert world.feed.take(V("2.0"), NOBODY, None, 30).exists()


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
