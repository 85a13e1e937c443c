"""An engine whose parameter has more than 2**32 elements: what is recorded, staged and committed past that index.

The parameter is address space that nobody touched, so the test costs no memory but what the update writes.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rose.errors import WeightsError
from rose.lineage import WeightVersion
from rose.weights import statehash
from rose.weights.spec import TensorSpec, model_digest
from rose.weights.update import TensorUpdate, Update, write_update
from vllm_plugin.plan_recorder import record
from vllm_plugin.rank_weights import RankWeights
from vllm_plugin.weight_vote import judge

ROWS, COLUMNS = (1 << 16) + 1, 1 << 16
"""2**32 + 2**16 elements of one byte."""
SPEC = TensorSpec("experts", "U8", (ROWS, COLUMNS))
_MAP_NORESERVE = 0x4000


class Giant(torch.nn.Module):
    """One parameter of fused experts, all zero, loaded by rows."""

    def __init__(self) -> None:
        super().__init__()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        memory = mmap.mmap(-1, ROWS * COLUMNS, flags=flags)
        memory.madvise(mmap.MADV_HUGEPAGE)  # what is only read is then one huge page of zeros, mapped quickly
        untouched = torch.frombuffer(memory, dtype=torch.uint8)
        self.experts = torch.nn.Parameter(untouched.view(ROWS, COLUMNS), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            self.experts.data.copy_(tensor)


@pytest.fixture(scope="module")
def rank() -> RankWeights:
    plan = record(Giant(), [SPEC])
    assert not plan.fallback
    assert not plan.holes
    assert plan.is_whole(SPEC.name)
    return RankWeights(plan, WeightVersion(0, 0))


def test_changes_past_32_bits_are_written_where_they_belong(rank: RankWeights, tmp_path: Path) -> None:
    index = np.array([5, (1 << 32) - 1, 1 << 32, SPEC.num_elements - 1], np.int64)
    values = np.array([1, 2, 3, 4], np.uint8)
    before = rank.hashes[SPEC.name]
    after = statehash.add(before, statehash.delta_hash(index, np.zeros(4, np.uint8), values))
    target = WeightVersion(1, 1)
    update = Update(
        run_id="test",
        target=target,
        base=WeightVersion(0, 0),
        model=model_digest([SPEC]),
        tensors={SPEC.name: TensorUpdate(spec=SPEC, h_before=before, h_after=after, idx=index, val=values)},
    )
    write_update(tmp_path / "update", update)
    rank.prefetch(str(tmp_path / "update"), target)
    rank.join()
    judge([rank.report()], target)
    rank.commit(target)
    rank.finish()

    memory = rank.plan.targets[0].bits()
    assert memory[torch.from_numpy(index)].tolist() == values.tolist()
    assert int(memory[(1 << 32) + 1 :][: COLUMNS - 2].count_nonzero()) == 0  # and nothing beside
    assert rank.hashes[SPEC.name] == after


def test_an_index_past_the_end_of_a_giant_tensor_is_refused(rank: RankWeights, tmp_path: Path) -> None:
    index = np.array([SPEC.num_elements], np.int64)
    update = Update(
        run_id="test",
        target=WeightVersion(1, 2),
        base=WeightVersion(1, 1),
        model=model_digest([SPEC]),
        tensors={
            SPEC.name: TensorUpdate(spec=SPEC, h_before=1, h_after=2, idx=index, val=np.zeros(1, np.uint8))
        },
    )
    with pytest.raises(WeightsError, match=f"within 0..{SPEC.num_elements - 1}"):
        write_update(tmp_path / "update", update)
