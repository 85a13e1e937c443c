"""One rank's weights: what is staged, committed, undone and refused, on a model small enough to read."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from rose.errors import ConfigError, RoseError, SectionCorrupt, VersionRefused, WeightsError, WrongBase
from rose.lineage import WeightVersion
from rose.weights.spec import TensorSpec
from rose.weights.update import UpdateFile
from tests.plugin.weights_kit import (
    Tensors,
    TinyLlama,
    change,
    make_update,
    memory_of,
    same_memory,
    specs_of,
    state_hash,
)
from vllm_plugin import rank_weights
from vllm_plugin.plan_recorder import record
from vllm_plugin.rank_weights import RankWeights
from vllm_plugin.weight_vote import judge
from vllm_plugin.weights import ENV_THREADS, staging_threads

V1, V2 = WeightVersion(1, 1), WeightVersion(1, 2)


class Bench:
    """A rank that holds ``old`` as version 0.0, and what it would hold after loading ``new`` afresh."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int = 0,
        world: int = 1,
        load: Any = None,
        streams: bool | None = None,
        threads: int = 1,
    ) -> None:
        self.folder = folder
        self.old = TinyLlama.weights()
        self.new = change(self.old, seed=1)
        self.model = TinyLlama(rank=rank, world=world)
        self.model.load_weights(self.old.items())
        loader = None if load is None else load(self.model)
        plan = record(self.model, specs_of(self.old), load=loader)
        self.rank = RankWeights(plan, WeightVersion(0, 0), streams=streams, num_threads=threads)
        self.before = memory_of(self.model)
        fresh = TinyLlama(rank=rank, world=world)
        fresh.load_weights(self.new.items())
        self.after = memory_of(fresh)

    def update(self, *, base: str | None = "0.0", target: str = "1.1", **kwargs: Any) -> str:
        path = self.folder / f"{target}.safetensors"
        return str(make_update(path, self.old, self.new, base=base, target=target, **kwargs))

    def stage(self, path: str, target: WeightVersion = V1) -> dict[str, Any]:
        self.rank.prefetch(path, target)
        self.rank.join()
        return self.rank.report()

    @property
    def unchanged(self) -> bool:
        return same_memory(self.before, memory_of(self.model))

    @property
    def changed(self) -> bool:
        return same_memory(self.after, memory_of(self.model))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("how", [{}, {"dense": True}, {"base": None}])
def test_threads_change_nothing(tmp_path: Path, how: dict[str, Any], streams: bool) -> None:
    alone, several = (Bench(tmp_path, streams=streams, threads=threads) for threads in (1, 3))
    path = alone.update(**how)
    for bench in (alone, several):
        assert bench.stage(path)["phase"] == "staged"
        bench.rank.commit(V1)
        while bench.rank.more:
            bench.rank.commit(V1)
        bench.rank.finish()
        assert bench.changed
    first, second = (bench.rank.report() for bench in (alone, several))
    assert first | {"stage_s": 0.0} == second | {"stage_s": 0.0}


def test_what_one_thread_refuses_is_refused_for_all(tmp_path: Path) -> None:
    bench = Bench(tmp_path, threads=3)
    path = bench.update()
    bench.rank.hashes[next(iter(bench.rank.hashes))] ^= 1
    report = bench.stage(path)
    assert report["phase"] == "failed"
    assert "the update is for" in report["error"]["message"]
    assert bench.unchanged


@pytest.mark.parametrize("wrong", ["swapped", "twice", "beyond", "below"])
@pytest.mark.parametrize("world", [1, 2])
def test_indices_that_are_no_increasing_ones_are_refused_before_anything_is_computed_with_them(
    tmp_path: Path, world: int, wrong: str
) -> None:
    benches = [Bench(tmp_path, rank=number, world=world) for number in range(world)]
    path = Path(benches[0].update())
    with UpdateFile(path) as file:
        metadata = {"rose": msgspec.json.encode(file.header).decode()}
    stored = load_file(path)
    for key, index in stored.items():
        if key.startswith("idx/") and index.size > 2:
            stored[key] = index = index.astype(np.int64)
            if wrong == "swapped":
                index[[0, -1]] = index[[-1, 0]]
            else:
                at, value = {"twice": (1, index[0]), "beyond": (-1, 1 << 40), "below": (0, -5)}[wrong]
                index[at] = value
    save_file(stored, path, metadata=metadata)
    reports = [bench.stage(str(path)) for bench in benches]
    with pytest.raises(RoseError):  # of what lies in no rank's part, the sum of all is wrong
        judge(reports, V1)
    assert all(bench.unchanged for bench in benches)


@pytest.mark.parametrize("how", [{}, {"dense": True}, {"base": None}])
def test_commit_gives_the_bits_of_a_fresh_load(bench: Bench, how: dict[str, Any]) -> None:
    report = bench.stage(bench.update(**how))
    assert (report["phase"], report["target"], report["version"]) == ("staged", "1.1", "0.0")
    assert bench.unchanged

    bench.rank.commit(V1)
    assert bench.changed
    assert bench.rank.version == WeightVersion(0, 0)

    assert bench.rank.finish() == V1
    assert bench.rank.report()["phase"] == "idle"
    assert bench.rank.hashes == bench.rank.scan() == {n: state_hash(t) for n, t in bench.new.items()}


def test_a_chain_of_updates_ends_in_the_last_state(bench: Bench) -> None:
    weights, at = bench.old, "0.0"
    for number in range(1, 6):
        target = f"1.{number}"
        following = change(weights, seed=number, fraction=0.1)
        path = make_update(bench.folder / target, weights, following, base=at, target=target)
        version = WeightVersion.parse(target)
        assert bench.stage(str(path), version)["phase"] == "staged"
        bench.rank.commit(version)
        bench.rank.finish()
        weights, at = following, target
    assert bench.rank.scan() == {name: state_hash(tensor) for name, tensor in weights.items()}


def test_undo_after_a_commit_is_bit_exact(bench: Bench) -> None:
    bench.stage(bench.update())
    bench.rank.commit(V1)
    bench.rank.undo()
    assert bench.unchanged
    assert bench.rank.finish() == WeightVersion(0, 0)
    assert bench.rank.report()["phase"] == "failed"
    assert bench.stage(bench.update())["phase"] == "staged"  # and the way is free for another try


def spoil(monkeypatch: pytest.MonkeyPatch, on_call: int) -> None:
    """Memory that takes one element wrong at the n-th write."""
    real, calls = rank_weights.put, iter(range(1_000))

    def put(bits: torch.Tensor, piece: Any, values: torch.Tensor) -> torch.Tensor | bool:
        if next(calls) != on_call:
            return real(bits, piece, values)
        values = values.clone()
        values.view(-1)[-1] ^= 1
        real(bits, piece, values)
        return True  # what reading back would say

    monkeypatch.setattr(rank_weights, "put", put)


def test_a_commit_that_memory_does_not_take_is_undone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.stage(bench.update())
    spoil(monkeypatch, on_call=3)
    with pytest.raises(WeightsError, match="does not hold what was written"):
        bench.rank.commit(V1)
    assert bench.unchanged
    assert bench.rank.finish() == WeightVersion(0, 0)
    assert bench.rank.report()["phase"] == "failed"


def test_an_undo_that_cannot_be_proved_breaks_the_rank_for_good(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bench.update()
    bench.stage(path)
    bench.rank.commit(V1)
    spoil(monkeypatch, on_call=0)
    with pytest.raises(WeightsError, match="does not hold its old values"):
        bench.rank.undo()
    assert bench.rank.report()["phase"] == "broken"
    with pytest.raises(WeightsError, match="broken"):
        bench.rank.prefetch(path, V1)


def refused(bench: Bench, path: str, target: WeightVersion = V1) -> dict[str, Any]:
    report = bench.stage(path, target)
    assert report["phase"] == "failed"
    assert bench.unchanged
    with pytest.raises(WeightsError, match="not staged"):
        bench.rank.commit(target)
    assert bench.unchanged
    return report["error"]


def test_a_delta_for_another_base_is_refused(bench: Bench) -> None:
    later = change(bench.new, seed=9)
    path = make_update(bench.folder / "u", bench.new, later, base="1.1", target="1.2")
    error = refused(bench, str(path), V2)
    assert error["code"] == "wrong_base"


def test_the_base_is_proved_by_content_and_not_by_label(bench: Bench) -> None:
    assert bench.stage(bench.update(base="7.7", target="8.0"), WeightVersion(8, 0))["phase"] == "staged"


def test_memory_that_is_not_what_the_hash_says_is_noticed_while_staging(bench: Bench) -> None:
    path = bench.update()
    index = int((bench.old["norm"] != bench.new["norm"]).nonzero()[0])
    bench.model.norm.data.view(torch.int16)[index] ^= 1
    bench.before = memory_of(bench.model)
    assert refused(bench, path)["code"] == "section_corrupt"


def test_a_flipped_bit_in_the_file_is_refused(bench: Bench) -> None:
    path = Path(bench.update())
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 0x10
    path.write_bytes(raw)
    assert refused(bench, str(path))["code"] == "section_corrupt"


def test_a_truncated_file_is_refused(bench: Bench) -> None:
    path = Path(bench.update())
    path.write_bytes(path.read_bytes()[:-100])
    assert refused(bench, str(path))["code"] == "section_corrupt"


def test_a_file_that_holds_another_version_is_refused(bench: Bench) -> None:
    assert refused(bench, bench.update(target="1.2"), V1)["field"] == "version"


def test_an_update_of_another_model_is_refused(bench: Bench) -> None:
    bench.old.pop("norm")
    bench.new.pop("norm")
    error = refused(bench, bench.update())
    assert (error["code"], error["field"]) == ("wrong_base", "model")


def test_a_version_that_is_not_newer_is_refused_at_once(bench: Bench) -> None:
    bench.stage(bench.update())
    bench.rank.commit(V1)
    bench.rank.finish()
    for version in (V1, WeightVersion(0, 99)):
        with pytest.raises(VersionRefused, match=r"not newer than 1\.1"):
            bench.rank.prefetch(bench.update(), version)


def test_a_second_update_waits_until_the_first_is_through(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bench.update()
    go, real = threading.Event(), bench.rank._stage

    def slow(*args: Any) -> Any:
        assert go.wait(10)
        return real(*args)

    monkeypatch.setattr(bench.rank, "_stage", slow)
    bench.rank.prefetch(path, V1)
    bench.rank.prefetch(path, V1)  # the same again is free
    with pytest.raises(WeightsError, match=r"staging with 1\.1"):
        bench.rank.prefetch(path, V2)
    go.set()
    bench.rank.join()
    assert bench.rank.report()["phase"] == "staged"


def test_a_corrected_file_of_the_same_version_is_staged_anew(bench: Bench) -> None:
    first = bench.stage(bench.update())
    bench.new = change(bench.old, seed=2)
    again = bench.stage(bench.update())
    assert again["phase"] == "staged"
    assert again["header"] != first["header"]
    bench.rank.commit(V1)
    bench.rank.finish()
    assert bench.rank.hashes == {name: state_hash(tensor) for name, tensor in bench.new.items()}


def test_a_discarded_update_cannot_be_committed(bench: Bench) -> None:
    bench.stage(bench.update())
    bench.rank.discard()
    with pytest.raises(WeightsError, match="not staged"):
        bench.rank.commit(V1)
    assert bench.unchanged


def test_a_change_of_a_tensor_without_a_plan_is_refused_with_the_reason(tmp_path: Path) -> None:
    def casting(model: TinyLlama) -> Any:
        def load(weights: Any) -> None:
            for name, tensor in weights:
                if name == "norm":
                    model.norm.data.copy_(tensor.float())
                else:
                    model.load_one(name, tensor)

        return load

    bench = Bench(tmp_path, load=casting)
    error = refused(bench, bench.update())
    assert error["field"] == "norm"
    assert "cannot be patched" in error["message"]


# -- ranks that hold parts ---------------------------------------------------------------------------


def ranks(folder: Path, world: int) -> list[Bench]:
    return [Bench(folder, rank=rank, world=world) for rank in range(world)]


@pytest.mark.parametrize("world", [2, 4])  # 4 ranks share 2 key/value heads: replicas
@pytest.mark.parametrize("dense", [False, True])
def test_all_ranks_together_reach_the_new_state(tmp_path: Path, world: int, dense: bool) -> None:
    benches = ranks(tmp_path, world)
    path = benches[0].update(dense=dense)
    reports = [bench.stage(path) for bench in benches]

    judge(reports, V1)
    for bench in benches:
        bench.rank.commit(V1)
        assert bench.changed


def test_the_vote_adds_up_the_ranks_and_sees_a_wrong_base_that_no_rank_sees_alone(tmp_path: Path) -> None:
    benches = ranks(tmp_path, 2)
    benches[1].model.out.data.view(torch.int16)[0, 0] ^= 1
    benches[1].rank = RankWeights(benches[1].rank.plan, WeightVersion(0, 0))
    path = benches[0].update()
    reports = [bench.stage(path) for bench in benches]
    assert {report["phase"] for report in reports} == {"staged"}
    with pytest.raises(WrongBase, match="before") as caught:
        judge(reports, V1)
    assert caught.value.field == "out"


def test_the_vote_sees_a_wrong_result(tmp_path: Path) -> None:
    benches = ranks(tmp_path, 2)
    reports = [bench.stage(benches[0].update()) for bench in benches]
    reports[0]["partial"]["q"]["parts"]["after"] = "0" * 16
    with pytest.raises(SectionCorrupt, match="after"):
        judge(reports, V1)


def test_one_rank_that_has_not_staged_stops_the_vote(tmp_path: Path) -> None:
    benches = ranks(tmp_path, 2)
    reports = [benches[0].stage(benches[0].update()), benches[1].rank.report()]
    with pytest.raises(WeightsError, match="not staged on rank 1, which is idle"):
        judge(reports, V1)


def test_ranks_that_staged_different_files_stop_the_vote(tmp_path: Path) -> None:
    benches = ranks(tmp_path, 2)
    reports = [benches[0].stage(benches[0].update())]
    benches[1].new = change(benches[1].old, seed=2)
    reports.append(benches[1].stage(benches[1].update()))
    with pytest.raises(WeightsError, match="different files"):
        judge(reports, V1)


def test_a_part_that_no_rank_holds_stops_the_vote(tmp_path: Path) -> None:
    benches = ranks(tmp_path, 2)
    reports = [bench.stage(benches[0].update()) for bench in benches]
    with pytest.raises(RoseError, match=r"the ranks hold \d+ of \d+ elements"):
        judge(reports[:1], V1)


def test_reports_are_plain_data(tmp_path: Path) -> None:
    import msgspec

    for bench in ranks(tmp_path, 2):
        report = bench.stage(bench.update())
        assert msgspec.json.decode(msgspec.json.encode(report)) == report


def test_float32_weights_are_updated_too(tmp_path: Path) -> None:
    model = torch.nn.Linear(6, 5, bias=False)
    old: Tensors = {"w": model.weight.detach().clone()}
    new = change(old, seed=3, fraction=0.5)
    plan = record(
        model, specs_of(old), load=lambda items: [model.weight.data.copy_(tensor) for _, tensor in items]
    )
    rank = RankWeights(plan, WeightVersion(0, 0))
    rank.prefetch(str(make_update(tmp_path / "u", old, new, base="0.0", target="1.1")), V1)
    rank.join()
    rank.commit(V1)
    assert torch.equal(model.weight.data.view(torch.int32), new["w"].view(torch.int32))


# --- a whole version that streams, as it does into a model on a device


@pytest.fixture
def streaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """One tensor in each slice."""
    monkeypatch.setattr(rank_weights, "STREAM_SLICE_S", 0.0)
    return Bench(tmp_path, streams=True)


def commit_all(rank: RankWeights, target: WeightVersion = V1) -> int:
    """Calls until nothing is left."""
    for calls in range(1, 1000):
        rank.commit(target)
        if not rank.more:
            return calls
    raise AssertionError("it does not end")


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


@pytest.mark.parametrize(
    ("text", "ranks", "expected"), [("", 1, 1), ("1", 8, 1), ("4", 2, 2), ("32", 8, 4), ("5", 2, 2)]
)
def test_an_engines_threads_are_shared_by_its_ranks(
    monkeypatch: pytest.MonkeyPatch, text: str, ranks: int, expected: int
) -> None:
    monkeypatch.setenv(ENV_THREADS, text)
    assert staging_threads(ranks) == expected


@pytest.mark.parametrize("text", ["0", "-1", "257", "two", "1.5", "9" * 5000])
def test_a_wrong_number_of_threads_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(ENV_THREADS, text)
    with pytest.raises(ConfigError, match=r"ROSE_WEIGHTS_THREADS.*1\.\.256"):
        staging_threads(1)
