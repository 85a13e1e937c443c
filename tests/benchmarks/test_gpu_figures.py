"""From raw numbers to the figures of gpu_check's stages, the shapes of its models, and how one device is planned for two engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import common, figures, models
from rose.units import PAGE_BYTES

GIB = 1 << 30


def test_steps_are_told_against_the_first_arm_with_the_second_as_noise() -> None:
    arms = {
        "alone": [10.0] * 98 + [20.0] * 2,
        "again": [10.0] * 98 + [21.0] * 2,
        "loaded": [11.0] * 98 + [30.0] * 2,
    }
    found = figures.steps(arms)
    assert (found["alone_p50_ms"], found["alone_p99_ms"]) == (10.0, 20.0)
    assert found["aa_p99_ratio"] == pytest.approx(1.05)
    assert found["p99_ratio"] == pytest.approx(1.5)
    several = figures.steps({**arms, "more": [12.0] * 100})
    assert several["p99_ratio_loaded"] == pytest.approx(1.5)
    assert several["p99_ratio_more"] == pytest.approx(0.6)


def test_the_first_quarter_of_vmm_calls_only_fills_the_pool() -> None:
    mapped = [9000.0] * 4 + [320.0] * 12  # 16 pages a call
    found = figures.vmm({(2, "retained"): (mapped, [160.0] * 16, 16 * PAGE_BYTES)})
    assert found["map_us_per_page_2mib_retained_p99"] == 20.0
    assert found["unmap_us_per_page_2mib_retained_p50"] == 10.0


def test_a_handover_is_both_sides_per_gib() -> None:
    found = figures.handover([(20_000.0, 60_000.0), (24_000.0, 72_000.0), (20_000.0, 60_000.0)], 4 * GIB)
    assert found["usable_ms_per_gib_p50"] == 20.0
    assert found["usable_ms_per_gib_max"] == 24.0
    assert found["moonshot_20_ms_per_gib_met"]
    assert not figures.handover([(1.0, 90_000.0)], 4 * GIB)["moonshot_20_ms_per_gib_met"]


def test_the_slowest_kill_decides() -> None:
    assert figures.after_kill([0.2, 0.51]) == {"free_after_kill_s_max": 0.51, "limit_500_ms_met": False}


ANSWERS = [[5, 6], [7, 8]]


def lent(**answers: Any) -> dict[str, Any]:
    tokens = dict.fromkeys(("alone", "again", "lend", "take_back"), ANSWERS)
    return figures.lending(
        {"before": 10 * GIB, "lent": 14 * GIB, "after": 10 * GIB},
        4 * GIB // PAGE_BYTES,
        {"lend": 0.5, "take_back": 0.2},
        {**tokens, **answers},
    )


def test_lending_is_what_the_device_says_was_free() -> None:
    found = lent()
    assert (found["free_rose_share"], found["free_came_back_share"]) == (1.0, 1.0)
    assert found["take_back_ms_per_gib"] == pytest.approx(50.0)
    assert (found["control_same_tokens"], found["same_tokens"]) == (True, True)
    assert (found["requests"], found["distinct_answers"]) == (2, 2)


@pytest.mark.parametrize("which", ["lend", "take_back"])
def test_tokens_that_differ_while_memory_moved_are_told(which: str) -> None:
    assert lent(**{which: [[5, 6], [7, 9]]})["same_tokens"] is False


def test_an_engine_that_differs_from_itself_proves_nothing_about_lending() -> None:
    found = lent(again=[[5, 6], [7, 9]], lend=[[5, 6], [7, 9]])
    assert (found["control_same_tokens"], found["same_tokens"]) == (False, None)


def test_updates_are_told_by_kind_and_not_proved_by_one_that_was_not() -> None:
    def row(kind: str, seconds: float, proved: bool = True) -> dict[str, Any]:
        return {
            "kind": kind, "bytes_sent": 10, "bytes_dense": 2_000_000_000, "pause_s": seconds / 10, "acknowledged_s": seconds,
            "proved": proved,
        }  # fmt: skip

    found = figures.updates([row("anchor", 4.0), row("delta", 1.0), row("delta", 3.0), row("delta", 2.0)])
    assert (found["versions"], found["all_proved"]) == (4, True)
    assert (found["whole_acknowledged_s"], found["delta_acknowledged_s"], found["delta_pause_s"]) == (
        4.0,
        2.0,
        0.2,
    )
    assert found["whole_acknowledged_s_per_gb"] == 2.0
    assert not figures.updates([row("anchor", 1.0), row("delta", 1.0, proved=False)])["all_proved"]


def test_the_codecs_speed_is_of_new_weights_and_its_payload_is_counted_in_bits() -> None:
    found = figures.codec("dense", 500_000_000, 2**28 + 1, 7_000_000, 0.5, 0.25, 2.0)
    assert (found["dense_encode_gb_s"], found["dense_apply_gb_s"], found["dense_cpu_encode_gb_s"]) == (
        2.0,
        4.0,
        0.5,
    )
    assert found["dense_over_2_31_bits"]
    assert not figures.codec("x", 1, 2**28, 1, 1.0, 1.0, 1.0)["x_over_2_31_bits"]


def test_activation_counts_its_slowest_time() -> None:
    found = figures.activation(17 * GIB, [0.3, 0.4, 0.5, 1.2], 0)
    assert (found["inactive_gib"], found["again_s_p50"], found["again_s_max"]) == (17.0, 0.5, 1.2)
    assert not found["activation_1_s_met"]


def test_the_first_activation_stands_apart_from_those_behind_it() -> None:
    """It takes what kernels take to be made; once in an engine's life."""
    found = figures.activation(17 * GIB, [9.0, 0.4, 0.5], 0)
    assert (found["first_s"], found["again_s_max"]) == (9.0, 0.5)
    assert (found["activation_1_s_met_at_first"], found["activation_1_s_met"]) == (False, True)


def test_one_activation_says_nothing_of_those_behind_it() -> None:
    found = figures.activation(17 * GIB, [0.4], 0)
    assert found["first_s"] == 0.4
    assert not {"again_s_p50", "again_s_max", "activation_1_s_met"} & found.keys()


def test_a_terminated_client_and_its_neighbour() -> None:
    found = figures.mps({"alone": [1.0], "again": [1.0], "loaded": [2.0]}, True, 0.1)
    assert (found["p99_ratio"], found["other_client_survived"]) == (2.0, True)


def repeat(ttft: float, itl: float, **more: Any) -> dict[str, Any]:
    return {"p99_ttft_ratio": ttft, "p99_itl_ratio": itl, "aa_ratio": 1.0, "bar_met": True, **more}


def test_the_table_is_the_median_of_its_repeats_with_the_spread_of_its_ratios() -> None:
    found = figures.table_1([repeat(1.02, 1.0), repeat(1.10, 1.01), repeat(1.04, 1.02, harvested_share=None)])
    assert found["repeats"] == 3
    assert (found["p99_ttft_ratio"], found["p99_ttft_ratio_min"], found["p99_ttft_ratio_max"]) == (
        1.04,
        1.02,
        1.10,
    )
    assert found["p99_cost_under_5_percent"]
    assert found["better_than_the_papers_best"]
    assert "bar_met" not in found
    worse = figures.table_1([repeat(1.20, 1.0)])
    assert not worse["p99_cost_under_5_percent"]
    assert not worse["better_than_the_papers_best"]


def test_a_figure_that_one_repeat_lacks_is_left_out_and_no_repeat_is_no_table() -> None:
    assert "harvested_share" not in figures.table_1(
        [repeat(1.0, 1.0, harvested_share=0.9), repeat(1.0, 1.0, harvested_share=None)]
    )
    assert figures.table_1([]) == {}


# --- shapes and how a device is planned


def test_the_shapes_are_those_of_the_real_models() -> None:
    assert models.PRODUCTION.num_parameters == pytest.approx(7.6e9, rel=0.01)
    assert models.POLICY.num_parameters == pytest.approx(8.2e9, rel=0.01)
    assert models.POLICY.bytes_per_token * 16 == 36 * 64 * 1024  # 64 KiB per block of 16 and layer
    assert models.PRODUCTION.bytes_per_token * 16 == 28 * 32 * 1024


def test_a_seeded_checkpoint_is_the_same_again_and_of_a_trained_scale(tmp_path: Path) -> None:
    first = models.write_checkpoint(models.TINY, tmp_path / "a", seed=1)
    models.write_checkpoint(models.TINY, tmp_path / "b", seed=1)
    models.write_checkpoint(models.TINY, tmp_path / "c", seed=2)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]
    matrices = [tensor for tensor in first.values() if tensor.ndim == 2]
    assert sum(tensor.numel() for tensor in matrices) == models.TINY.num_parameters
    for tensor in matrices:
        assert float(tensor.float().std()) == pytest.approx(tensor.shape[1] ** -0.5, rel=0.05)
    assert float(first["model.norm.weight"].float().mean()) == pytest.approx(1.0, abs=0.05)


def test_every_token_id_of_a_shape_has_a_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    models.write_folder(models.POLICY, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == models.POLICY.vocab_size
    last = models.POLICY.vocab_size - 1
    assert tokenizer.decode([7, last]) == f"t7 t{last}"
    assert tokenizer.encode("t7 t9").ids == [7, 9]


@pytest.mark.parametrize("total_gib", [79, 139])
def test_both_engines_fit_beside_each_other_with_a_reserve(total_gib: int) -> None:
    from benchmarks.gpu.coserve import RESERVE_BYTES, ROLLOUT_EXTRA_BYTES, Split

    split = Split.of(total_gib * GIB)
    assert (split.production + split.rollout) * total_gib <= total_gib - RESERVE_BYTES / GIB + 0.2
    assert split.rollout * total_gib * GIB >= models.POLICY.weight_bytes + ROLLOUT_EXTRA_BYTES - 0.1 * GIB
    assert split.rollout_kv_bytes > 20 * GIB


def test_a_device_too_small_for_both_is_refused() -> None:
    from benchmarks.gpu.coserve import Split
    from rose.errors import EngineError

    with pytest.raises(EngineError, match="too few for both"):
        Split.of(40 * GIB)


def test_each_engines_host_side_has_cores_of_its_own() -> None:
    from benchmarks.gpu.coserve import core_lists
    from rose.errors import EngineError

    assert [len(part) for part in core_lists(list(range(16)))] == [6, 6, 4]
    assert [len(part) for part in core_lists([3, 5, 7])] == [1, 1, 1]
    with pytest.raises(EngineError, match="3 are needed"):
        core_lists([0, 1])


def test_the_parts_are_started_as_a_gpu_needs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import coserve
    from rose.config import load_config
    from rose.coserve.node_config import NodeConfig
    from rose.demo.demo_config import DemoConfig

    monkeypatch.setattr(coserve.os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    monkeypatch.setattr(coserve.importlib.util, "find_spec", lambda name: object())
    plan = coserve.GpuPlan(config=DemoConfig(), cores=(12, 15), root=tmp_path, logs=tmp_path / "logs")
    plan.split, plan.rung = coserve.Split.of(139 * GIB), "green-context"
    plan.prepare([])
    plan.make_models()
    production = plan.production().spec
    assert production.argv[1:4] == ("-m", "vllm.entrypoints.cli.main", "serve")
    assert "--enforce-eager" in production.argv
    monkeypatch.setenv(common.GRAPHS, "1")  # this device has been seen to run them
    assert "--enforce-eager" not in plan.production().spec.argv
    assert production.cores == tuple(range(6))
    assert {
        production.env[name] for name in ("ROSE_ROLE", "ROSE_ALLOW_UNMEASURED", "CUDA_VISIBLE_DEVICES")
    } == {
        "serving",
        "1",
        "3",
    }
    assert "OMP_NUM_THREADS" not in production.env
    plan.node()
    node = load_config(NodeConfig, tmp_path / "harvested.toml")
    assert node.engine.allow_unmeasured
    assert node.engine.compute_rung == "green-context"
    assert (node.device.kind, node.device.gpu) == ("gpu", 3)
    assert node.engine.command[:3] == ("taskset", "--cpu-list", "6,7,8,9,10,11")
    assert f"--kv-cache-memory-bytes={plan.split.rollout_kv_bytes}" in node.engine.args
    assert "--enforce-eager" in node.engine.args
    assert node.weights is None
