"""Scenarios, traces and arrivals: what is wrong is named with its file and line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rose.coserve.step_profile import Profile
from rose.errors import ConfigError
from rose.sim.arrivals import make_arrivals
from rose.sim.hardware import Hardware
from rose.sim.links import transfer
from rose.sim.scenario import LinksSection, Scenario, ServingSection
from rose.sim.scenario_file import load_scenario
from rose.sim.systems import SYSTEMS
from rose.sim.tables import find_model
from rose.sim.workload import make_script
from rose.sim.world import simulate

SCENARIOS = Path(__file__).parents[2] / "examples" / "scenarios"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize("path", sorted(SCENARIOS.rglob("*.toml")), ids=lambda path: path.stem)
def test_every_scenario_we_ship_loads(path: Path) -> None:
    assert load_scenario(path).name


@pytest.mark.parametrize(
    ("text", "line", "match"),
    [
        ("[fleet]\ndevice = 'h900'", 3, "not a known device"),
        ("[job]\nmodel = 'gpt-9'", 3, "not a known model"),
        ("[job]\nnum_groups = 0", 3, "greater than or equal to 1"),
        ("[fleet]\ndedicatd = 3", 3, "did you mean 'dedicated'"),
        ("duration_s = -5.0", 2, "greater than 0"),
        ("[serving]\nslo_ttft_ms = -1", 3, "greater than 0"),
        ("[links]\nrelay_gbps = 0", 3, "greater than 0"),
        ("[fleet]\ndedicated = -1", 3, "greater than or equal to 0"),
        ("[fleet]\nserving = 99999", 3, "less than or equal to 16384"),
        ("[fleet]\ndedicated = 0", 3, "fixed_sync has no engine"),
        ("[fleet]\nrollout_gpus = 3", 3, "cannot share the 32 attention heads"),
        ("[fleet]\ndevice = 'l40s'\nrollout_gpus = 1\n[job]\nmodel = 'qwen3-32b'", 4, "do not fit"),
        (
            "[fleet]\ndevice = 'l40s'\nrollout_gpus = 4\nwide = 1\nwide_gpus = 1\n[job]\nmodel = 'qwen3-32b'",
            6,
            "do not fit",
        ),
        ("[fleet]\ndevice = 'l40s'\n[job]\nmodel = 'qwen3-8b'\nmax_model_len = 999999", 6, "KV memory"),
        ("[devices.mine]\nmemory_gb = 0\nbandwidth_tb_s = 1\ntflops = 1", 3, "greater than 0"),
        ("[serving]\ntrace_start_s = -1.0", 3, "greater than or equal to 0"),
    ],
)
def test_a_wrong_setting_is_named_with_its_line(tmp_path: Path, text: str, line: int, match: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(f'name = "s"\n{text}\n')

    with pytest.raises(ConfigError, match=match) as caught:
        load_scenario(path)
    assert f"{path}:{line}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("systems = ['rosy']", "unknown system 'rosy'"),
        ("baseline = 'rose'\nsystems = ['paper']", "not among the systems"),
        ("[fleet]\ndedicated = 0\nserving = 0", "no engine"),
        ("mode = 'fleet'\n[fleet]\nwide = 1", "engines of one width"),
        ("[lending]\nheadroom = 0.2", "lending.headroom.*unknown key"),
        ("[lending]\nmin_headroom_fraction = 7.0", "less than or equal to 1"),
        ("[scheduler]\noldest_first = 1.0", "did you mean 'oldest_first_s'"),
        ("[job]\ntail_members = 4", "which tail_groups makes"),
        ("[job]\nprompt_tokens = 40000", "no room"),
        ("[serving]\nprompt_median = 99999", "prompt_median is above"),
        ("duration_s = nan", "greater than 0|finite"),
        ("duration_s = [", "not TOML"),
        ("[devices.'a b']\nmemory_gb = 1\nbandwidth_tb_s = 1\ntflops = 1", "pattern"),
        ("[job]\nprofile = 'none.json'", "none.json.*cannot be read"),
    ],
)
def test_impossible_scenarios_are_refused(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(f'name = "s"\n{text}\n')

    with pytest.raises(ConfigError, match=match) as caught:
        load_scenario(path)
    assert str(path) in str(caught.value)


def test_a_wrong_override_is_named_as_one(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('name = "s"\n[fleet]\ndevice = "h100"\n')

    with pytest.raises(ConfigError, match=r"--set: fleet.device.*not a known device"):
        load_scenario(path, ["fleet.device=h900"])


def test_a_profile_that_cannot_be_read_is_named_with_its_setting(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('name = "s"\n[job]\nprofile = "mine.json"\n')

    with pytest.raises(ConfigError, match=rf"s.toml:3: job.profile.*{tmp_path}/mine.json cannot be read"):
        load_scenario(path)


def test_a_scenario_describes_its_own_device_and_model_and_takes_measured_step_times(tmp_path: Path) -> None:
    profile = Profile(
        model="p",
        base_s=0.009,
        prefill_token_s=1e-5,
        decode_s=2e-5,
        context_token_s=0.0,
        mae_fraction=0.1,
        median_error_fraction=0.1,
        num_steps=100,
        num_held_out=33,
    )
    (tmp_path / "p.json").write_text(profile.to_json())
    path = tmp_path / "s.toml"
    path.write_text(
        """
name = "s"
[devices.mine]
memory_gb = 10
bandwidth_tb_s = 0.1
tflops = 5
[models.own]
params_billion = 0.5
layers = 10
heads = 4
kv_heads = 2
head_dim = 64
[fleet]
device = "mine"
[serving]
model = "own"
[job]
model = "own"
profile = "p.json"
"""
    )
    hardware = Hardware(load_scenario(path))

    assert hardware.rollout_steps(1).predict(100, 3) == pytest.approx(0.009 + 100e-5 + 3 * 2e-5)
    assert hardware.serving_steps().base_s == pytest.approx(0.002 + 1e9 / (0.7 * 0.1e12))
    assert hardware.policy_model.kv_bytes_per_token == 2 * 10 * 2 * 64 * 2
    # 90 % of 10 GB less 4 GB reserved and the weights of one or of both models.
    assert hardware.serving_pages(shared=False) == int((9e9 - 4e9 - 1e9) // 2**21)
    assert hardware.serving_pages(shared=True) == int((9e9 - 4e9 - 2e9) // 2**21)


def test_models_that_do_not_fit_their_device_are_an_impossible_fleet() -> None:
    scenario = Scenario.model_validate(
        {"name": "s", "fleet": {"device": "l40s"}, "job": {"model": "qwen3-32b"}, "duration_s": 10.0}
    )
    with pytest.raises(ConfigError, match=r"do not fit.*more GPUs per engine"):
        simulate(scenario, "rose")


@pytest.mark.parametrize(
    ("rows", "line", "match"),
    [
        ("2023-11-16 18:00:01,5,5\n2023-11-16 18:00:00,5,5\n", 3, "time goes back"),
        ("2023-11-16 18:00:01,five,5\n", 2, "not a whole number"),
        ("2023-11-16 18:00:01,-5,5\n", 2, "outside 0"),
        ("yesterday,5,5\n", 2, "not a time"),
        ("2023-11-16 18:00:01,5,5\n9999-11-16 18:00:01,5,5\n", 3, "days after the first row"),
        ("-1,5,5\n", 2, "not a time"),
        ("2023-11-16 18:00:01,5\n", 2, "2 columns"),
    ],
)
def test_a_wrong_trace_is_named_with_its_line(tmp_path: Path, rows: str, line: int, match: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + rows)

    with pytest.raises(ConfigError, match=match) as caught:
        make_arrivals(ServingSection(trace=path), 4, 60.0, 0)
    assert f"{path}:{line}" in str(caught.value)


def test_a_trace_of_few_rows_far_apart_is_refused_before_it_is_multiplied(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "2023-01-01 00:00:00,5,5\n2023-01-01 00:00:01,5,5\n2023-12-31 00:00:00,5,5\n")

    with pytest.raises(ConfigError, match=r"its 3 rows in .* would become more than") as caught:
        make_arrivals(ServingSection(trace=path, requests_per_s=2.0), 64, 60.0, 0)
    assert str(path) in str(caught.value)


def test_a_trace_keeps_its_bursts_and_gets_the_wanted_rate(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:00:{second:02d}.{part},100,10" for second in (5, 30) for part in range(10)]
    rows.append("2023-11-16 18:00:59.0,100,10")
    path.write_text(HEADER + "\n".join(rows) + "\n")

    arrivals = make_arrivals(ServingSection(trace=path, requests_per_s=2.0), 10, 600.0, 3)

    assert len(arrivals.at_s) == pytest.approx(2.0 * 10 * 600, rel=0.1)
    counts = np.bincount(arrivals.at_s.astype(int), minlength=600)
    assert counts.max() > 8 * counts.mean()


def test_a_trace_may_begin_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:{second // 60:02d}:{second % 60:02d},100,10" for second in range(0, 600, 20)]
    rows[20:20] = ["2023-11-16 18:06:25,100,10"] * 40
    path.write_text(HEADER + "\n".join(rows) + "\n")

    first, burst = (
        len(make_arrivals(ServingSection(trace=path, trace_start_s=start_s), 8, 60.0, 1).at_s)
        for start_s in (0.0, 360.0)
    )
    assert burst > 3 * first > 0


@pytest.mark.parametrize("seed", range(5))
def test_generated_requests_are_sorted_in_range_and_bursty(seed: int) -> None:
    config = ServingSection(requests_per_s=1.0)
    arrivals = make_arrivals(config, 20, 1200.0, seed)

    assert np.all(np.diff(arrivals.at_s) >= 0)
    assert 0 <= arrivals.at_s[0] <= arrivals.at_s[-1] < 1200.0
    assert set(arrivals.engine) == set(range(20))
    assert arrivals.prompt.min() >= 1
    assert arrivals.prompt.max() <= config.prompt_max
    counts = np.bincount(arrivals.at_s.astype(int))
    assert counts.max() > 2.5 * counts.mean()


def test_too_many_requests_are_refused_before_they_are_made() -> None:
    with pytest.raises(ConfigError, match="mode = 'fleet'"):
        make_arrivals(ServingSection(requests_per_s=100.0), 4096, 86400.0, 0)


def test_a_script_depends_on_its_arguments_alone() -> None:
    job = Scenario(name="s").job

    assert make_script(job, 0, 3, 1) == make_script(job, 0, 3, 1)
    assert make_script(job, 0, 3, 1) != make_script(job, 0, 3, 2)
    assert make_script(job, 0, 3, 1).total_tokens <= job.max_model_len


def test_a_large_model_s_update_is_bound_by_the_host_and_a_delta_moves_fewer_bytes() -> None:
    model, links = find_model("qwen3-32b", ""), LinksSection()
    full = transfer(SYSTEMS["static"], model, links, 1, 0.03, num_ranks=1, full=False)
    delta = transfer(SYSTEMS["rose"], model, links, 1, 0.03, num_ranks=1, full=False)
    coo = transfer(SYSTEMS["paper"], model, links, 1, 0.03, num_ranks=1, full=False)

    # 65.6 GB at 3.1 GB/s of host path; at 25 Gbps into the host the full copy takes as long.
    assert full.extra_s == pytest.approx(65.6 / 3.1, rel=0.01)
    assert full.relay_bytes / coo.relay_bytes == pytest.approx(2 / (0.03 * 6), rel=0.01)
    assert coo.relay_bytes / delta.relay_bytes == pytest.approx(6 / 1.25)


def test_ranks_in_tensor_parallel_apply_an_update_side_by_side() -> None:
    model, links = find_model("qwen3-32b", ""), LinksSection(host_gbps=400.0)
    one, four = (
        transfer(SYSTEMS["rose"], model, links, 1, 0.03, num_ranks=ranks, full=False) for ranks in (1, 4)
    )

    assert one.extra_s == pytest.approx(21.2, abs=0.1)
    assert four.extra_s == pytest.approx(21.2 / 4, abs=0.1)
    assert four.relay_bytes == one.relay_bytes


def test_four_ranks_divide_a_step_and_pay_for_adding_it_up() -> None:
    """By hand, H100 and Qwen3-32B: 128 all-reduces of 10 us, and of each token's 5,120 bf16 values 1.5 times the bytes at 315 GB/s."""
    scenario = Scenario.model_validate(
        {"name": "s", "fleet": {"rollout_gpus": 4, "serving_gpus": 4}, "job": {"model": "qwen3-32b"}}
    )
    steps = Hardware(scenario).rollout_steps(4)

    assert steps.base_s == pytest.approx(0.002 + 65.6e9 / (4 * 0.7 * 3.35e12) + 128 * 1e-5)
    all_reduce_s = 128 * 1.5 * 5120 * 2 / 315e9
    assert steps.prefill_token_s == pytest.approx(2 * 32.8e9 / (4 * 0.5 * 989e12) + all_reduce_s)
    assert steps.context_token_s == pytest.approx(2 * 64 * 8 * 128 * 2 / (4 * 0.7 * 3.35e12))
