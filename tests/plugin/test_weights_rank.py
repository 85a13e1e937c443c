"""One rank's weights: what is staged, committed, undone and refused, on a model small enough to read."""

from __future__ import annotations

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
from rose.weights.update import UpdateFile
from tests.plugin.rank_kit import V1, V2, Bench, ranks, refused, spoil
from tests.plugin.weights_kit import (
    Tensors,
    TinyLlama,
    change,
    make_update,
    memory_of,
    specs_of,
    state_hash,
)
from vllm_plugin.plan_recorder import record
from vllm_plugin.rank_weights import RankWeights
from vllm_plugin.weight_vote import judge
from vllm_plugin.weights import ENV_THREADS, staging_threads


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
