"""WeightPublisher: what becomes a delta or an anchor, and what its objects are."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from rose.testing.memory_store import MemoryStore
from rose.weights import statehash, stored_manifests
from rose.weights.file_store import FileStore
from rose.weights.params import WeightsParams
from rose.weights.publisher import PublishReport, WeightPublisher
from rose.weights.source import RawBits
from rose.weights.subscriber import WeightSubscriber
from rose.weights.warmup import warm_up
from tests.weights.publisher.kit import SMALL, FlakyStore, V, holds
from tests.weights.toy import ToyTrainer


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
