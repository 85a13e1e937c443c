"""A whole version that streams into a rank, as it does into a model on a device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rose.errors import WeightsError
from rose.weights.spec import TensorSpec
from tests.plugin.rank_kit import V1, V2, Bench, commit_all, refused, spoil
from tests.plugin.weights_kit import (
    change,
    make_update,
    state_hash,
)
from vllm_plugin import rank_weights
from vllm_plugin.weight_vote import judge


@pytest.fixture
def streaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """One tensor in each slice."""
    monkeypatch.setattr(rank_weights, "STREAM_SLICE_S", 0.0)
    return Bench(tmp_path, streams=True)


def test_a_whole_version_streams_in_tensor_by_tensor(streaming: Bench) -> None:
    report = streaming.stage(streaming.update(base=None))
    assert (report["phase"], report["num_changed"] > 0) == ("staged", True)
    assert streaming.unchanged
    assert commit_all(streaming.rank) == len(streaming.new)
    assert streaming.changed
    streaming.rank.commit(V1)  # another rank has more to write
    assert streaming.rank.finish() == V1
    assert (
        streaming.rank.hashes == streaming.rank.scan() == {n: state_hash(t) for n, t in streaming.new.items()}
    )


def test_a_rank_that_holds_none_of_a_version_that_streams_comes_to_it_too(streaming: Bench) -> None:
    streaming.stage(streaming.update(base=None))
    staged = streaming.rank._slot.staged
    assert staged is not None
    assert staged.left
    staged.left.clear()  # as where its file has only other ranks' tensors
    streaming.rank.commit(V1)
    assert not streaming.rank.more
    assert streaming.rank.finish() == V1


def test_nothing_of_a_version_that_streams_is_kept_beside_the_model(streaming: Bench) -> None:
    streaming.stage(streaming.update(base=None))
    staged = streaming.rank._slot.staged
    assert staged is not None
    assert staged.pieces == []


def test_a_delta_does_not_stream(streaming: Bench) -> None:
    streaming.stage(streaming.update())
    streaming.rank.commit(V1)
    assert streaming.changed
    streaming.rank.undo()
    assert streaming.unchanged


def test_a_flipped_bit_in_a_file_that_would_stream_is_seen_before_anything_is_written(
    streaming: Bench,
) -> None:
    path = Path(streaming.update(base=None))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    refused(streaming, str(path))


@pytest.mark.parametrize("calls_before", [0, 1, 4])
@pytest.mark.parametrize("how", ["gone", "another"])
def test_a_version_streams_from_the_file_that_was_staged_whatever_has_its_name(
    streaming: Bench, calls_before: int, how: str
) -> None:
    path = Path(streaming.update(base=None))
    streaming.stage(str(path))
    for _ in range(calls_before):
        streaming.rank.commit(V1)
    if how == "gone":
        path.unlink()
    else:
        make_update(path, streaming.old, change(streaming.old, seed=5), base=None, target="1.1")
    commit_all(streaming.rank)
    assert streaming.changed
    assert streaming.rank.finish() == V1


def test_a_file_that_lost_its_name_is_asked_for_again_for_free(streaming: Bench) -> None:
    path = streaming.update(base=None)
    streaming.stage(path)
    Path(path).unlink()
    assert streaming.stage(path)["phase"] == "staged"
    commit_all(streaming.rank)
    assert streaming.changed


def test_the_header_of_a_version_that_streams_is_read_once(
    streaming: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each slice reading it anew made a version of n tensors cost n headers of n tensors."""
    decoded: list[str] = []
    real = TensorSpec.__post_init__
    monkeypatch.setattr(TensorSpec, "__post_init__", lambda spec: (decoded.append(spec.name), real(spec))[1])
    path = streaming.update(base=None)
    decoded.clear()
    streaming.stage(path)
    assert commit_all(streaming.rank) == len(streaming.new)
    assert sorted(decoded) == sorted(streaming.new)


@pytest.mark.parametrize(
    "end", ["committed", "discarded", "replaced", "written to", "broken", "refused", "delta"]
)
def test_no_update_file_stays_open_behind_its_use(streaming: Bench, end: str) -> None:
    """An open file keeps its bytes on the disk, or in memory, though nobody can see it."""
    before = len(os.listdir("/proc/self/fd"))
    path = Path(streaming.update(base="0.0" if end == "delta" else None))
    if end == "refused":
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    streaming.stage(str(path))
    if end == "committed":
        commit_all(streaming.rank)
    elif end == "discarded":
        streaming.rank.discard()
    elif end == "replaced":
        streaming.stage(streaming.update(base="0.0", target="1.2"), V2)
    elif end in ("written to", "broken"):
        if end == "broken":
            streaming.rank.commit(V1)
        os.truncate(path, 100)
        with pytest.raises(WeightsError, match="was written to since it was staged"):
            streaming.rank.commit(V1)
    assert len(os.listdir("/proc/self/fd")) == before
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_a_file_that_was_written_to_since_it_was_staged_is_refused_and_nothing_written(
    streaming: Bench,
) -> None:
    path = streaming.update(base=None)
    streaming.stage(path)
    os.truncate(path, 100)
    with pytest.raises(WeightsError, match=r"1\.1\.safetensors: was written to since it was staged"):
        streaming.rank.commit(V1)
    assert streaming.unchanged
    assert streaming.rank.report()["phase"] == "failed"


@pytest.mark.parametrize("how", ["memory", "file"])
def test_what_goes_wrong_while_a_version_streams_breaks_the_rank(
    streaming: Bench, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = Path(streaming.update(base=None))
    streaming.stage(str(path))
    streaming.rank.commit(V1)
    if how == "memory":
        spoil(monkeypatch, on_call=1)
    else:
        os.truncate(path, 100)
    with pytest.raises(WeightsError):
        commit_all(streaming.rank)
    report = streaming.rank.report()
    assert (report["phase"], report["version"]) == ("broken", "0.0")


def test_half_a_version_that_streamed_has_no_way_back(streaming: Bench) -> None:
    streaming.stage(streaming.update(base=None))
    streaming.rank.commit(V1)
    assert streaming.rank.more
    with pytest.raises(WeightsError, match="is streaming"):
        streaming.rank.prefetch(streaming.update(base=None), V2)
    with pytest.raises(WeightsError, match="in part"):
        streaming.rank.undo()
    assert streaming.rank.report()["phase"] == "broken"


def test_a_whole_one_that_streamed_has_none_either(streaming: Bench) -> None:
    streaming.stage(streaming.update(base=None))
    commit_all(streaming.rank)
    with pytest.raises(WeightsError, match="nothing leads back"):
        streaming.rank.undo()
    assert streaming.rank.report()["phase"] == "broken"


@pytest.mark.parametrize("world", [2, 4])
def test_all_ranks_stream_the_same_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    monkeypatch.setattr(rank_weights, "STREAM_SLICE_S", 0.0)
    benches = [Bench(tmp_path, rank=rank, world=world, streams=True) for rank in range(world)]
    path = benches[0].update(base=None)
    judge([bench.stage(path) for bench in benches], V1)
    for bench in benches:
        commit_all(bench.rank)
        assert bench.changed
        assert bench.rank.finish() == V1
