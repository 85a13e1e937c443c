"""FSDP2 trainers of real processes: what engines get is what ``full_tensor`` says, though nothing is gathered."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rose.lineage import WeightVersion
from rose.weights import stored_manifests
from rose.weights.file_store import FileStore
from rose.weights.subscriber import WeightSubscriber

pytest.importorskip("torch")
from safetensors.numpy import load_file

from tests.engine_launcher import run_module
from tests.weights.fsdp_ranks import CASES, VERSIONS

pytestmark = pytest.mark.timeout(300)  # the start of what is forked from is in it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the trainers wrote."""
    folder = tmp_path_factory.mktemp("fsdp")
    done = run_module("tests.weights.fsdp_ranks", str(folder), timeout=150)
    assert done.returncode == 0, done.stdout[-4000:]
    return folder


@pytest.mark.parametrize("case", list(CASES))
def test_engines_get_what_the_ranks_hold_together(case: str, folder: Path, tmp_path: Path) -> None:
    store = FileStore(folder / "store", durable=False)
    for version in range(VERSIONS):
        identity = WeightVersion(1, version)
        record = stored_manifests.read(store, case, identity, "delta" if version else "anchor")
        expected = load_file(folder / f"{case}-{version}.safetensors")
        assert record.state().keys() == expected.keys()
        for name, tensor in expected.items():
            assert int(record.state()[name], 16) == _hash(tensor), (name, version)
    reader = WeightSubscriber(store, case, tmp_path / "reader")
    reader.poll(0)
    expected = load_file(folder / f"{case}-{VERSIONS - 1}.safetensors")
    found = {name: np.array(reader._host.bits(name)) for name in reader._host.specs}
    reader.close()
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name].view(np.uint16).reshape(-1)) for name in expected)


@pytest.mark.parametrize("case", list(CASES))
def test_no_rank_publishes_more_than_its_shard(case: str, folder: Path) -> None:
    members, _ = CASES[case]
    loads = []
    for rank in members:
        mine, total, _kind = (folder / f"{case}-1-rank{rank}.txt").read_text().split()
        loads.append(int(mine))
    assert sum(loads) == int(total)
    assert max(loads) <= 1.35 * int(total) / len(members)  # 30 rows over 4 ranks are 8, 8, 8, 6


def test_a_matrix_cut_both_ways_is_listed_in_boxes(folder: Path) -> None:
    store = FileStore(folder / "store", durable=False)
    record = stored_manifests.read(store, "fsdp-2-tp-2", WeightVersion(1, 0), "anchor")
    sections = record.sections_by_tensor()["down.weight"]  # [16, 24] by columns, then by rows
    assert [(s.start, s.num_elements, s.run, s.stride) for s in sections] == [
        (0, 96, 12, 24),
        (12, 96, 12, 24),
        (192, 96, 12, 24),
        (204, 96, 12, 24),
    ]


def _hash(tensor: np.ndarray) -> int:
    from rose.weights import statehash

    return statehash.hash_bits(tensor.view(np.uint16).reshape(-1))
