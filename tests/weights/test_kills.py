"""SIGKILLs at random instants over a trainer, relays and subscribers: the short form of ``benchmarks/weight_transfer/weights_kills.py``,
and that its judge would see what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.weight_transfer import weights_kills as kills
from benchmarks.weight_transfer.kills_world import (
    KEPT_CHECKPOINTS,
    Lines,
    digest,
    digest_of_copy,
    first_weights,
    load_checkpoint,
    save_checkpoint,
    step,
)
from rose.lineage import WeightVersion
from rose.testing.memory_store import MemoryStore
from rose.weights.host_copy import HostCopy
from rose.weights.publisher import WeightPublisher
from rose.weights.subscriber import WeightSubscriber
from tests.weights.toy import ToyTrainer


@pytest.mark.timeout(300)
def test_eight_kills_leave_nothing_wrong_and_nobody_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kills, "BOUND_S", 60.0)  # how soon is the benchmark's question
    blows = kills.schedule(
        7, 8, kills.PLAIN, ["publisher", "root", "leaf-0", "sub-0", "sub-2"]
    )  # three more at random
    found = kills.run(tmp_path, 7, blows)
    assert (found["wrong"], found["stuck"], found["fallen"]) == ([], [], [])
    assert found["kills"] == 8
    assert set(found["kills_by_victim"]) >= {"publisher", "root", "leaf-0", "sub-0", "sub-2"}
    assert min(found["compared"][of] for of in ("update", "copy")) >= 4 * len(blows)


def test_a_schedule_is_its_seeds_and_kills_everybody() -> None:
    blows = kills.schedule(1, 1000, kills.PLAIN)
    assert blows == kills.schedule(1, 1000, kills.PLAIN) != kills.schedule(2, 1000, kills.PLAIN)
    assert sum(blow.num_kills for blow in blows) == 1000
    assert {victim for blow in blows for victim in blow.victims} == set(kills.PLAIN)
    with_engine = kills.schedule(1, 50, kills.WITH_ENGINE, ["engine"] * 5)
    assert sum(blow.num_kills for blow in with_engine) == 50
    assert [blow.victims for blow in with_engine].count(("engine",)) == 5


@pytest.fixture
def judge(tmp_path: Path) -> kills.Judge:
    """1.0 and 1.1 are published."""
    lines = Lines(tmp_path / "published")
    lines.say(version="1.0", digest="a", state="A")
    lines.say(version="1.1", digest="b", state="B")
    return kills.Judge(tmp_path / "published", {"sub-0": tmp_path / "sub-0"}, ("sub-0",))


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ([("1.0", "a"), ("1.1", "b")], ""),
        ([("1.0", "b")], "update of 1.0 is b, published was a"),
        ([("1.2", "a")], "which nobody published"),
        ([("1.1", "b"), ("1.0", "a")], "went from 1.1 back to 1.0"),
    ],
)
def test_the_judge_sees_what_is_wrong(
    judge: kills.Judge, tmp_path: Path, said: list[tuple[str, str]], wrong: str
) -> None:
    lines = Lines(tmp_path / "sub-0")
    for version, of in said:
        lines.say(version=version, digest=of, of="update")
    judge.read()
    assert len(judge.wrong) == bool(wrong)
    assert wrong in "".join(judge.wrong)


def test_the_judge_waits_for_what_was_published_after_the_kill(judge: kills.Judge, tmp_path: Path) -> None:
    lines = Lines(tmp_path / "sub-0")
    killed_s = json.loads((tmp_path / "published").read_text().splitlines()[0])["at"]
    judge.expect(killed_s)
    lines.say(version="1.0", digest="a", of="update")
    judge.read()
    assert judge.missing() == ["sub-0"]
    lines.say(version="1.1", digest="b", of="copy")  # its engine has not got it
    judge.read()
    assert judge.missing() == ["sub-0"]
    lines.say(version="1.1", digest="b", of="update")
    with (tmp_path / "sub-0").open("a") as file:
        file.write('{"at": 1.0, "versio')  # not yet a line
    judge.read()
    assert (judge.missing(), judge.wrong) == ([], [])


def test_a_host_copy_is_read_from_outside_while_it_is_whole(tmp_path: Path) -> None:
    trainer, store = ToyTrainer(1), MemoryStore()
    publisher = WeightPublisher(trainer.tensors, store, "run", 1)
    publisher.publish(0)
    reader = WeightSubscriber(store, "run", tmp_path / "copy")
    assert digest_of_copy(tmp_path / "copy") is None
    assert reader.poll(0) == WeightVersion(1, 0)
    assert digest_of_copy(tmp_path / "copy") == ("1.0", digest(trainer.bits()))
    reader.close()
    publisher.close()
    path = tmp_path / "copy/weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert digest_of_copy(tmp_path / "copy") != ("1.0", digest(trainer.bits()))
    copy = HostCopy(tmp_path / "copy", "run")
    copy.begin()
    assert digest_of_copy(tmp_path / "copy") is None
    copy.close()


def test_a_checkpoint_is_what_was_saved_and_older_ones_are_kept(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    weights = first_weights(rng)
    types = {name: kind for name, (kind, _) in weights.items()}
    saved = []
    for version in range(KEPT_CHECKPOINTS + 3):
        step(weights, rng)
        save_checkpoint(tmp_path, version, weights)
        saved.append(digest({name: bits for name, (_, bits) in weights.items()}))
    assert len(set(saved)) == len(saved)
    for back in (0, 1, KEPT_CHECKPOINTS - 1):
        version, found = load_checkpoint(tmp_path, back, types)
        assert saved[version] == digest({name: bits for name, (_, bits) in found.items()})
        assert version == KEPT_CHECKPOINTS + 2 - back
