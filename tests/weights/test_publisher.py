"""WeightPublisher: what becomes a delta or an anchor, what is refused, and that failures lose nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rose.errors import CapacityError, ConfigError, RoseError, VersionRefused, WeightsError, WrongBase
from rose.lineage import WeightVersion
from rose.proc import free_port
from rose.weights import retention, statehash, stored_manifests
from rose.weights.buckets import Buckets
from rose.weights.file_store import FileStore
from rose.weights.manifest import Head
from rose.weights.params import WeightsParams
from rose.weights.publisher import PublishReport, WeightPublisher
from rose.weights.source import RawBits
from rose.weights.store import MemoryStore
from rose.weights.subscriber import WeightSubscriber
from rose.weights.warmup import warm_up
from tests.weights.toy import ToyTrainer

SMALL = WeightsParams(fragment_elements=65_536, bucket_bytes=1 << 16, anchor_every=1000)


def V(text: str) -> WeightVersion:
    return WeightVersion.parse(text)


class FlakyStore(MemoryStore):
    """A store that fails at a chosen call, before or after doing it (the answer is lost)."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_at: Callable[[str, Any], str | None] = lambda method, argument: None

    def put_new(self, key: str, data: Any) -> None:
        self._run("put_new", key, lambda: MemoryStore.put_new(self, key, data))

    def set_head(self, head: Head, *, expected: WeightVersion | None) -> None:
        self._run("set_head", head, lambda: MemoryStore.set_head(self, head, expected=expected))

    def _run(self, method: str, argument: Any, call: Callable[[], None]) -> None:
        when = self.fail_at(method, argument)
        if when == "before":
            raise CapacityError("cut off")
        call()
        if when == "after":
            raise CapacityError("answer lost")


@pytest.fixture
def trainer() -> ToyTrainer:
    return ToyTrainer(1)


@pytest.fixture
def store() -> FlakyStore:
    return FlakyStore()


@pytest.fixture
def publisher(trainer: ToyTrainer, store: FlakyStore) -> WeightPublisher:
    return WeightPublisher(trainer.tensors, store, "run", 1, SMALL)


@pytest.fixture
def reader(store: FlakyStore, tmp_path: Any) -> Any:
    subscriber = WeightSubscriber(store, "run", tmp_path / "reader")
    yield subscriber
    subscriber.close()


def holds(reader: WeightSubscriber, trainer: ToyTrainer) -> bool:
    """Whether the reader's copy is, bit by bit, what the trainer has."""
    reader.poll(0)
    expected = trainer.bits()
    found = {name: np.array(reader._host.bits(name)) for name in reader._host.specs}
    return found.keys() == expected.keys() and all(np.array_equal(found[n], expected[n]) for n in expected)


# --- kinds ------------------------------------------------------------------------------------------------


def test_the_first_version_is_an_anchor_and_the_next_a_small_delta(
    publisher: WeightPublisher, trainer: ToyTrainer
) -> None:
    first = publisher.publish(0)
    assert (first.kind, first.version, first.density) == ("anchor", V("1.0"), 1.0)
    assert first.bytes_sent == first.bytes_dense == sum(bits.nbytes for bits in trainer.bits().values())
    trainer.step()
    second = publisher.publish(1, step=7, lr=3e-7)
    assert second.kind == "delta"
    assert 0.005 < second.density < 0.02
    assert second.bytes_sent < 0.04 * second.bytes_dense
    assert publisher.published == V("1.1")


def test_the_report_counts_what_changed(publisher: WeightPublisher, trainer: ToyTrainer) -> None:
    publisher.publish(0)
    before = trainer.bits()
    trainer.step()
    report = publisher.publish(1)
    after = trainer.bits()
    assert report.num_changed == sum(int((before[n] != after[n]).sum()) for n in before)
    assert report.num_elements == sum(bits.size for bits in after.values())
    assert report.state == {n: statehash.to_hex(statehash.hash_bits(bits)) for n, bits in after.items()}


def test_nothing_changed_is_a_delta_without_objects(publisher: WeightPublisher) -> None:
    publisher.publish(0)
    report = publisher.publish(1)
    assert (report.kind, report.num_changed, report.bytes_sent) == ("delta", 0, 0)


def test_a_dense_step_becomes_an_anchor(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    publisher.publish(0)
    trainer.step()
    publisher.publish(1)
    trainer.step(lr=1e-2)
    report = publisher.publish(2)
    assert report.kind == "anchor"
    assert report.density > 0.25
    # Fragments that were sparse, or unchanged, travel too: an anchor is complete.
    assert holds(reader, trainer)


def test_a_dense_tensor_goes_raw_in_a_sparse_delta(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore, reader: WeightSubscriber
) -> None:
    publisher.publish(0)
    trainer.masters["model.layers.0.input_layernorm.weight"] *= -1
    trainer.step()
    assert publisher.publish(1).kind == "delta"
    record = stored_manifests.read(store, "run", V("1.1"), "delta")
    encodings = {section.tensor: section.encoding for section in record.sections}
    assert encodings["model.layers.0.input_layernorm.weight"] == "raw"
    assert encodings["model.embed_tokens.weight"] == "planes"
    assert encodings["codes"] == "planes"
    assert encodings["scales"] == "planes"
    assert encodings["counter"] == "raw"
    assert holds(reader, trainer)


def test_an_anchor_comes_besides_the_delta_every_n_versions(trainer: ToyTrainer, store: FlakyStore) -> None:
    params = WeightsParams(anchor_every=3, collect=False)
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, params)
    reports: list[PublishReport] = []
    for version in range(8):
        reports.append(publisher.publish(version))
        assert publisher.settle(30)
        trainer.step()
    assert [report.kind for report in reports] == ["anchor"] + ["delta"] * 7
    assert [report.bytes_anchor > 0 for report in reports] == [n in (4, 7) for n in range(8)]
    found = [key.removeprefix("run/") for key in store.list("run/") if key.endswith("anchor.json")]
    assert found == ["1.0/anchor.json", "1.3/anchor.json", "1.6/anchor.json"]
    assert stored_manifests.read(store, "run", V("1.5"), "delta").anchor == (1, 3)


def test_objects_stay_near_the_bucket_size(publisher: WeightPublisher, store: FlakyStore) -> None:
    publisher.publish(0)
    record = stored_manifests.read(store, "run", V("1.0"), "anchor")
    assert len(record.objects) > 3
    largest_section = max(section.nbytes for section in record.sections)
    assert all(reference.nbytes <= SMALL.bucket_bytes + largest_section for reference in record.objects)


def test_beyond_the_baseline_memory_is_some_buckets_and_the_compressed_delta(tmp_path: Path) -> None:
    megabyte = 1 << 20
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 15, 16 * megabyte, dtype=np.uint16)
    store = FileStore(tmp_path / "store", durable=False)
    params = WeightsParams(fragment_elements=1 << 18, bucket_bytes=megabyte, anchor_every=1000)
    warm_up()  # compilers need memory too
    publisher = WeightPublisher(lambda: {"w": RawBits(bits, "BF16")}, store, "run", 1, params)
    peaks: list[int] = []
    for version in range(2):
        tracemalloc.start()
        report = publisher.publish(version)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        bits[rng.integers(0, bits.size, bits.size // 100)] += 1
    assert report.kind == "delta"
    some = 8 * megabyte  # two buckets, the request that is being sent, and a fragment's own scratch
    assert bits.nbytes < peaks[0] < bits.nbytes + some
    assert peaks[1] < report.bytes_sent + some


def test_threads_change_nothing(store: FlakyStore) -> None:
    sent: list[list[str]] = []
    for num_threads in (1, 3):
        trainer, own = ToyTrainer(5), MemoryStore()
        params = WeightsParams(fragment_elements=65_536, bucket_bytes=1 << 16, num_threads=num_threads)
        publisher = WeightPublisher(trainer.tensors, own, "run", 1, params)
        for version in range(3):
            publisher.publish(version)
            trainer.step()
        sent.append(own.list("run/"))  # names of objects are hashes of their contents
    assert sent[0] == sent[1]


def test_a_torch_module_is_published_without_being_changed(
    store: FlakyStore, reader: WeightSubscriber
) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50, bias=False))
    module[1].weight = module[0].weight
    publisher = WeightPublisher(module, store, "run", 1)
    publisher.publish(0)
    with torch.no_grad():
        module[0].weight += 1e-6
    publisher.publish(1)
    reader.poll(0)
    assert list(reader._host.specs) == ["0.weight"]
    expected = module[0].weight.detach().to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(reader._host.bits("0.weight"), expected.reshape(-1))
    assert module[0].weight.dtype == torch.float32


# --- identity ---------------------------------------------------------------------------------------------


def test_the_same_version_with_the_same_weights_sends_nothing(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore
) -> None:
    publisher.publish(0)
    trainer.step()
    first = publisher.publish(1)
    keys = store.list("run/")
    again = publisher.publish(1)
    assert (again.kind, again.bytes_sent, again.state) == (first.kind, 0, first.state)
    assert store.list("run/") == keys


def test_the_same_version_with_other_weights_is_refused_and_the_next_is_right(
    publisher: WeightPublisher, trainer: ToyTrainer, reader: WeightSubscriber
) -> None:
    publisher.publish(0)
    trainer.step()
    publisher.publish(1)
    trainer.step()
    with pytest.raises(VersionRefused, match=r"1\.1 is published with other weights"):
        publisher.publish(1)
    assert publisher.publish(2).kind == "delta"
    assert holds(reader, trainer)


def test_going_back_is_refused(publisher: WeightPublisher) -> None:
    publisher.publish(5)
    with pytest.raises(VersionRefused, match=r"1\.4 goes back"):
        publisher.publish(4)


def test_another_model_is_refused(publisher: WeightPublisher, trainer: ToyTrainer) -> None:
    publisher.publish(0)
    trainer.masters["new"] = np.zeros(3, np.float32)
    with pytest.raises(VersionRefused, match=r"^model: .*it has besides new \("):
        publisher.publish(1)


def test_a_restarted_trainer_takes_the_next_attempt(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore, reader: WeightSubscriber
) -> None:
    for version in (0, 1, 2):
        publisher.publish(version)
        trainer.step()
    older = ToyTrainer(1)
    restarted = WeightPublisher(older.tensors, store, "run", 2, SMALL)
    older.step()
    report = restarted.publish(1)
    assert (report.kind, report.version) == ("anchor", V("2.1"))
    assert holds(reader, older)
    # The zombie of the first attempt learns it at its next publish.
    with pytest.raises(VersionRefused, match=r"head is at 2\.1"):
        publisher.publish(3)
    with pytest.raises(VersionRefused, match="attempt 2 has begun"):
        WeightPublisher(trainer.tensors, store, "run", 1, SMALL).publish(4)
    assert holds(reader, older)


def test_an_attempt_in_use_is_refused_with_the_fix(publisher: WeightPublisher, store: FlakyStore) -> None:
    publisher.publish(0)
    second = WeightPublisher(ToyTrainer(2).tensors, store, "run", 1, SMALL)
    for version in (0, 1):
        with pytest.raises(VersionRefused) as caught:
            second.publish(version)
    assert caught.value.fix == "a restarted trainer takes attempt 2"


def test_a_restarted_process_may_adopt_the_version_it_finds_published(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore, reader: WeightSubscriber
) -> None:
    publisher.publish(0)
    trainer.step()
    publisher.publish(1)
    second = WeightPublisher(trainer.tensors, store, "run", 1, SMALL)
    assert second.publish(1).bytes_sent == 0
    trainer.step()
    assert second.publish(2).kind == "delta"
    assert holds(reader, trainer)


def test_two_trainers_with_one_run_id_cannot_interleave(trainer: ToyTrainer, store: FlakyStore) -> None:
    one = WeightPublisher(trainer.tensors, store, "run", 1, SMALL)
    two = WeightPublisher(ToyTrainer(2).tensors, store, "run", 2, SMALL)
    one.publish(0)
    two.publish(0)
    for version in (1, 2):
        trainer.step()
        with pytest.raises(VersionRefused, match="another trainer"):
            one.publish(version)
    assert two.publish(1).version == V("2.1")


def test_a_copy_of_this_trainer_that_went_on_is_found_out(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore
) -> None:
    # The same attempt twice, for example a trainer that was thought dead: only one may write the next version.
    publisher.publish(0)
    twin = WeightPublisher(trainer.tensors, store, "run", 1, SMALL)
    twin.publish(0)
    trainer.step()
    twin.publish(1)
    keys = store.list("run/")
    with pytest.raises(VersionRefused, match=r"head is at 1\.1, this trainer published 1\.0"):
        publisher.publish(2)
    assert store.list("run/") == keys  # refused before anything was sent


def test_a_head_that_moves_during_the_publish_refuses_it(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore
) -> None:
    publisher.publish(0)
    twin = WeightPublisher(trainer.tensors, store, "run", 1, SMALL)
    twin.publish(0)

    def meddle(method: str, argument: Any) -> None:
        if method == "put_new" and argument.endswith("1.2/delta.json"):
            store.fail_at = lambda method, argument: None
            twin.publish(1)

    store.fail_at = meddle
    trainer.step()
    with pytest.raises(VersionRefused, match="another trainer"):
        publisher.publish(2)
    head = store.get_head("run")
    assert head is not None
    assert head.identity == V("1.1")


# --- failures ---------------------------------------------------------------------------------------------

POINTS = {
    "object": lambda method, argument: method == "put_new" and not argument.endswith(".json"),
    "manifest": lambda method, argument: method == "put_new" and argument.endswith(".json"),
    "head": lambda method, argument: method == "set_head",
}


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("retry", ["same-weights", "after-a-step"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("point", list(POINTS))
def test_after_any_failure_the_next_publish_is_right(
    publisher: WeightPublisher,
    trainer: ToyTrainer,
    store: FlakyStore,
    reader: WeightSubscriber,
    point: str,
    when: str,
    retry: str,
    dense: bool,
) -> None:
    for version in (0, 1):
        publisher.publish(version)
        trainer.step()
    assert reader.poll(0) == V("1.1")
    if dense:
        trainer.step(lr=1e-2)
    store.fail_at = lambda method, argument: when if POINTS[point](method, argument) else None
    with pytest.raises(CapacityError):
        publisher.publish(2)
    store.fail_at = lambda method, argument: None

    if retry == "after-a-step":
        trainer.step()
        publisher.publish(3)
    else:
        publisher.publish(2)
    assert holds(reader, trainer)
    # And the baseline is right for what follows: a normal small delta.
    trainer.step()
    report = publisher.publish(4)
    assert report.kind == "delta"
    assert report.bytes_sent < 0.04 * report.bytes_dense
    assert holds(reader, trainer)


def test_a_failed_publish_leaves_head_and_published_version_alone(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore
) -> None:
    publisher.publish(0)
    trainer.step()
    store.fail_at = lambda method, argument: "before" if POINTS["manifest"](method, argument) else None
    with pytest.raises(CapacityError):
        publisher.publish(1)
    head = store.get_head("run")
    assert head is not None
    assert head.identity == publisher.published == V("1.0")


def test_a_version_whose_manifest_landed_is_taken_even_if_its_head_did_not(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore, reader: WeightSubscriber
) -> None:
    publisher.publish(0)
    trainer.step()
    store.fail_at = lambda method, argument: "before" if method == "set_head" else None
    with pytest.raises(CapacityError):
        publisher.publish(1)
    store.fail_at = lambda method, argument: None
    trainer.step()
    with pytest.raises(VersionRefused, match=r"1\.1 was begun with other weights .*take the next version"):
        publisher.publish(1)
    publisher.publish(2)
    assert holds(reader, trainer)


def test_a_store_that_loses_an_object_is_found_out_before_the_head_moves(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore
) -> None:
    publisher.publish(0)
    trainer.step()

    def evict(method: str, argument: Any) -> str | None:
        if method == "put_new" and not argument.endswith(".json"):
            MemoryStore.put_new(store, argument, b"")  # the name is taken by other bytes
        return None

    store.fail_at = evict
    with pytest.raises(WeightsError, match="taken by other bytes"):
        publisher.publish(1)
    head = store.get_head("run")
    assert head is not None
    assert head.identity == V("1.0")


def test_an_object_of_an_earlier_try_that_was_damaged_since_is_replaced(
    publisher: WeightPublisher, trainer: ToyTrainer, store: FlakyStore, reader: WeightSubscriber
) -> None:
    publisher.publish(0)
    trainer.step()
    store.fail_at = lambda method, argument: "before" if POINTS["manifest"](method, argument) else None
    discard = Buckets.discard
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buckets, "discard", lambda self: None)  # it was killed before it could
        with pytest.raises(CapacityError):
            publisher.publish(1)
    assert Buckets.discard is discard
    store.fail_at = lambda method, argument: None
    (left,) = [key for key in store.list("run/1.1/") if not key.endswith(".json")]
    data = store.get(left)
    store.delete(left)
    store.put_new(left, bytes(len(data)))  # as long, and something else
    publisher.publish(1)
    assert store.get(left) == data
    assert holds(reader, trainer)


def test_a_store_that_was_wiped_gets_an_anchor(trainer: ToyTrainer, store: FlakyStore, tmp_path: Any) -> None:
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, SMALL)
    publisher.publish(0)
    trainer.step()
    fresh = MemoryStore()
    publisher._store = fresh
    assert publisher.publish(1).kind == "anchor"
    subscriber = WeightSubscriber(fresh, "run", tmp_path / "fresh")
    assert holds(subscriber, trainer)
    subscriber.close()


def test_a_baseline_damaged_in_memory_is_found_in_turn_and_the_version_is_whole(
    trainer: ToyTrainer, store: FlakyStore, reader: WeightSubscriber
) -> None:
    params = WeightsParams(
        anchor_every=4, collect=False
    )  # a quarter of the fragments is proved at every version
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, params)
    publisher.publish(0)
    trainer.step()
    publisher.publish(1)
    assert holds(reader, trainer)
    publisher._baseline.held[0].bits[7] ^= 0x40  # which has just been proved
    # Element 7 is sent as a step from what no reader holds: readers refuse it.
    assert publisher.publish(2).kind == "delta"
    with pytest.raises(WrongBase):
        reader.poll(0)
    kinds = [publisher.publish(version).kind for version in (3, 4)]
    assert kinds[-1] == "anchor"
    assert holds(reader, trainer)
    trainer.step()
    assert publisher.publish(5).kind == "delta"
    assert holds(reader, trainer)


def test_a_failing_clean_up_does_not_fail_the_publish(trainer: ToyTrainer) -> None:
    class NoListing(MemoryStore):
        def list(self, prefix: str) -> list[str]:
            raise CapacityError("away")

    publisher = WeightPublisher(trainer.tensors, NoListing(), "run", 1)
    assert publisher.publish(0).kind == "anchor"


# --- background -------------------------------------------------------------------------------------------


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


# --- retention --------------------------------------------------------------------------------------------


def test_old_versions_are_deleted_once_no_reader_can_need_them(
    trainer: ToyTrainer, store: FlakyStore
) -> None:
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, WeightsParams(anchor_every=3))
    store.lease("run", "slow-reader", V("1.2"), 60)

    def first_kept() -> str:
        return store.list("run/")[0].split("/")[1]

    def publish(versions: range) -> None:
        for version in versions:
            publisher.publish(version)
            assert publisher.settle(30)
            trainer.step()

    publish(range(7))
    assert first_kept() == "1.0"  # the reader of 1.2 starts from it
    store.lease("run", "slow-reader", None, 60)
    publish(range(7, 8))
    assert first_kept() == "1.6"  # where the chain of 1.7 starts


def test_a_leased_version_that_is_gone_holds_nothing(trainer: ToyTrainer, store: FlakyStore) -> None:
    store.lease("run", "ghost", V("0.1"), 60)
    publisher = WeightPublisher(trainer.tensors, store, "run", 1, WeightsParams(anchor_every=1))
    for version in range(4):
        publisher.publish(version)
        assert publisher.settle(30)
        trainer.step()
    assert "run/1.0/anchor.json" not in store.list("run/")


def test_nothing_is_deleted_while_the_heads_own_manifest_cannot_be_read(
    publisher: WeightPublisher, store: FlakyStore
) -> None:
    publisher.publish(0)
    publisher.publish(1)
    store.delete("run/1.1/delta.json")
    store.lease("run", "reader", V("1.0"), 60)
    assert retention.collect(store, "run") == []


# --- parameters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cast", "FP4"),
        ("anchor_every", 0),
        ("raw_density", 1.5),
        ("anchor_density", -0.1),
        ("chain_fraction", float("nan")),
        ("fragment_elements", 1000),
        ("fragment_elements", 1 << 30),
        ("bucket_bytes", 10),
        ("num_threads", 0),
    ],
)
def test_bad_parameters_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        WeightsParams(**{name: value})
    assert caught.value.field == f"weights.{name}"


@pytest.mark.parametrize("run_id", ["", "../x", "a/b"])
def test_bad_run_ids_are_refused(run_id: str) -> None:
    with pytest.raises(RoseError, match="run_id"):
        WeightPublisher(dict, MemoryStore(), run_id, 1)


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


def test_a_model_that_is_not_there_yet_is_no_version(store: FlakyStore) -> None:
    with pytest.raises(ConfigError, match="no rank gave any"):
        WeightPublisher(lambda: {}, store, "run", 1, SMALL).publish(0)
    assert store.get_head("run") is None


def test_patterns_are_a_tuple_and_one_that_fits_nothing_is_warned_of(
    trainer: ToyTrainer, store: FlakyStore, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"^weights\.keep: must be a tuple"):
        WeightsParams(keep="lm_head.*")  # type: ignore[arg-type]
    WeightPublisher(trainer.tensors, store, "run", 1, WeightsParams(keep=("*", "no-such-*"))).publish(0)
    assert [each.message for each in caplog.records if "keep" in each.message] == [
        "weights.keep: no tensor is called no-such-*"
    ]


def test_halves_that_become_the_other_kind_are_told_once(
    store: FlakyStore, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)).half()
    publisher = WeightPublisher(model, store, "run", 1)
    for version in range(2):
        publisher.publish(version)
    assert [each.message for each in caplog.records if "BF16" in each.message] == [
        "4 tensors are F16 and are published as BF16, 0.weight first: for engines of float16 say WeightsParams(cast='F16')"
    ]
    caplog.clear()
    WeightPublisher(model, store, "same", 1, WeightsParams(cast="F16")).publish(0)
    WeightPublisher(model.float(), store, "masters", 1).publish(0)
    assert not caplog.records


def test_a_store_that_is_to_take_less_than_two_copies_is_told(
    trainer: ToyTrainer, store: FlakyStore, caplog: pytest.LogCaptureFixture
) -> None:
    WeightPublisher(trainer.tensors, store, "run", 1, WeightsParams(max_store_bytes=1 << 10)).publish(0)
    assert [
        each.message for each in caplog.records if each.message.startswith("weights.max_store_bytes: 1.0 KiB")
    ]


def test_an_anchor_that_is_larger_than_the_store_is_said_once_and_in_the_error(
    trainer: ToyTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = FileStore(tmp_path, max_total_bytes=1000, durable=False)
    with pytest.raises(
        CapacityError, match=r"store is full.*nothing is left to delete; a full copy of this model takes"
    ):
        WeightPublisher(trainer.tensors, small, "run", 1).publish(0)
    assert not caplog.records


def test_parameters_are_of_their_own_type(trainer: ToyTrainer, store: FlakyStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^params: must be WeightsParams, got dict"):
        WeightSubscriber(store, "run", tmp_path, {"cast": "BF16"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^params: must be WeightsParams, got dict"):
        WeightPublisher(trainer.tensors, store, "run", 1, {"cast": "BF16"})  # type: ignore[arg-type]


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
