"""Publishing in the background, and how a publisher ends: closed, forked, or with its program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rose.errors import RoseError, WeightsError
from rose.proc import free_port
from rose.weights.file_store import FileStore
from rose.weights.publisher import WeightPublisher
from rose.weights.subscriber import WeightSubscriber
from tests.weights.publisher.kit import FlakyStore, V, holds
from tests.weights.toy import ToyTrainer


def test_a_background_publish_holds_the_weights_of_the_call(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    futures = []
    frozen = ToyTrainer(1)
    for version in range(4):
        futures.append(publisher.publish_async(version))
        trainer.step()  # at once, while the copy is on its way
        if version < 3:
            frozen.step()
    publisher.close()
    assert [future.result().version.version for future in futures] == [0, 1, 2, 3]
    assert holds(reader, frozen)


def test_a_background_failure_is_in_its_future_and_the_next_is_right(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore, reader: WeightSubscriber
) -> None:
    publisher.publish(0)
    trainer.step()
    store.fail_at = lambda method, argument: "before" if method == "set_head" else None
    with pytest.raises(RoseError, match="cut off"):
        publisher.publish_async(1).result()
    store.fail_at = lambda method, argument: None
    trainer.step()
    publisher.publish_async(2).result()
    publisher.close()
    assert holds(reader, trainer)


def test_after_close_nothing_is_published(publisher: WeightPublisher, store: FlakyStore) -> None:
    publisher.publish(0)
    publisher.close()
    for publish in (publisher.publish, publisher.publish_async):
        with pytest.raises(WeightsError, match="is closed"):
            publish(1)
    head = store.get_head("run")
    assert head is not None
    assert head.identity == V("1.0")


def test_after_close_a_reader_leaves_its_directory_alone(
    publisher: WeightPublisher, store: FlakyStore, tmp_path: Any
) -> None:
    reader = WeightSubscriber(store, "run", tmp_path / "closed")
    reader.close()
    publisher.publish(0)
    with pytest.raises(WeightsError, match="is closed"):
        reader.poll(0)


def test_a_fork_publishes_nothing(publisher: WeightPublisher) -> None:
    publisher.publish(0)
    child = os.fork()
    if child == 0:
        try:
            publisher.publish_async(1)
        except WeightsError as error:
            os._exit(0 if error.field == "publisher" else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


AT_THE_END = """
import sys
import numpy as np
from rose.weights.publisher import WeightPublisher
from rose.weights.stores import open_store
from rose.weights.params import WeightsParams
many = {str(n): np.ones(9, np.float32) for n in range(9)}
store = open_store(sys.argv[1], patience_s=3600)
publisher = WeightPublisher(lambda: many, store, "run", 1, WeightsParams(num_threads=2, bucket_bytes=1 << 10))
publisher.publish_async(0)
if sys.argv[2] == "closed":
    try:
        raise KeyboardInterrupt
    finally:
        publisher.close()
if sys.argv[2] == "interrupted":
    raise KeyboardInterrupt
"""


def end_of_a_trainer(store: str, how: str) -> subprocess.CompletedProcess[str]:
    asked = [sys.executable, "-c", AT_THE_END, store, how]
    return subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("how", ["over", "interrupted", "closed"])
def test_a_program_that_ends_gives_a_relay_that_is_away_up(how: str) -> None:
    """The store itself would try for an hour."""
    done = end_of_a_trainer(f"http://127.0.0.1:{free_port()}", how)
    assert "1.0 was not published: relay" in done.stderr
    assert ("KeyboardInterrupt" in done.stderr) == (how != "over")


@pytest.mark.parametrize("how", ["over", "interrupted", "closed"])
def test_a_program_that_ends_finishes_what_it_publishes_in_the_background(how: str, tmp_path: Path) -> None:
    end_of_a_trainer(str(tmp_path), how)
    head = FileStore(tmp_path).get_head("run")
    assert head is not None
    assert head.identity == V("1.0")


def test_a_background_failure_that_nobody_asks_for_is_logged(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore, caplog: pytest.LogCaptureFixture
) -> None:
    publisher.publish(0)
    trainer.step()
    store.fail_at = lambda method, argument: "before"
    publisher.publish_async(1)
    publisher.close()
    assert "1.1 was not published: cut off" in caplog.text
