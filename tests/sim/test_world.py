"""A run: the same for the same seed, and no token, page or trajectory lost or counted twice."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rose.errors import ConfigError
from rose.policy.worker import Health
from rose.sim.arrivals import make_arrivals
from rose.sim.cells import measure
from rose.sim.events import EventDigest
from rose.sim.scenario import Scenario
from rose.sim.summary import SETTLE_S, compare_misses, summarize
from rose.sim.systems import SYSTEMS
from rose.sim.world import SimWorld, simulate

TINY: dict[str, Any] = {
    "name": "tiny",
    "duration_s": 300.0,
    "num_steps": 2,
    "fleet": {"dedicated": 1, "serving": 3, "trainers": 2, "spot": 2, "spot_up_s": 40.0, "spot_down_s": 20.0},
    "job": {"num_groups": 2, "group_size": 4, "turns_median": 4.0, "algorithm": "dapo"},
}


def tiny(**changes: object) -> Scenario:
    return Scenario.model_validate({**TINY, **changes})


def test_ten_runs_of_one_seed_write_the_same_journal(tmp_path: Path) -> None:
    journals = []
    for number in range(10):
        path = tmp_path / f"{number}.journal"
        simulate(tiny(), "rose", journal_path=path)
        journals.append(path.read_bytes())

    assert len(journals[0]) > 1000
    assert len(set(journals)) == 1


def test_the_hash_seed_of_the_interpreter_changes_nothing_and_the_scenario_s_does() -> None:
    script = (
        "import sys; from rose.sim.scenario import Scenario; from rose.sim.world import simulate;"
        "print(simulate(Scenario.model_validate_json(sys.argv[1]), 'paper', digest=True).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script, tiny().model_dump_json()],
            env={**os.environ, "PYTHONHASHSEED": value, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for value in ("1", "2")
    }

    assert len(digests) == 1
    assert simulate(tiny(seed=1), "paper", digest=True).digest + "\n" not in digests


@pytest.mark.parametrize("system", SYSTEMS)
def test_books_balance_at_the_end_whatever_happened(system: str) -> None:
    fleet = {**TINY["fleet"], "mean_hours_between_failures": 0.01, "restart_s": 5.0}
    serving = {"requests_per_s": 4.0, "burst_every_s": 20.0, "burst_factor": 8.0}

    run = simulate(tiny(fleet=fleet, serving=serving, duration_s=120.0), system, check=True)

    assert run.counters.turns > 0
    assert run.ttft_s


@pytest.mark.parametrize(("how", "left"), [("crashes", 4), ("is killed", 4), ("is taken away", 5)])
def test_an_engine_that_crashes_or_is_killed_costs_its_turns_a_failure(how: str, left: int) -> None:
    """As a live one does, for whose scheduler connections break; until it is back, that knows it for dead."""
    world = SimWorld(tiny(num_steps=1), SYSTEMS["fixed_sync"], EventDigest(None), None)
    cluster = world.cluster
    found: list[tuple[int, bool]] = []

    def at(now_s: float, _: object) -> None:
        running = [turn for turn in cluster.book.turns.values() if turn.worker is not None]
        assert running
        if how == "crashes":
            cluster.fail("d0")
        elif how == "is killed":
            cluster.kill(now_s, "d0")
        else:
            cluster.stop("d0", keep_tokens=True, reason="returned")
        worker = cluster.book.fleet.workers.get("d0")
        is_dead = worker is not None and worker.health is Health.DEAD
        found.extend((turn.infra_left, is_dead) for turn in running)

    world.queue.at(3.0, at)
    world.run(None)
    world.check()
    assert set(found) == {(left, how != "is taken away")}


@pytest.mark.parametrize("moment", [7.3, 41.9, 77.7])
def test_books_balance_in_the_middle_of_a_step(moment: float) -> None:
    simulate(tiny(duration_s=moment), "rose", check=True)


def test_all_systems_get_the_same_work() -> None:
    grpo = {**TINY["job"], "algorithm": "grpo"}
    runs = [simulate(tiny(job=grpo), name) for name in ("fixed_sync", "rose", "static")]

    assert len({tuple(step.tokens for step in run.steps) for run in runs}) == 1


def test_a_step_is_rollout_then_training_then_weights() -> None:
    run = simulate(tiny(), "fixed_sync")

    for step in run.steps:
        assert step.start_s < step.ready_s < step.trained_s < step.end_s
    assert run.steps[0].end_s == run.steps[1].start_s


def test_a_streamed_step_trains_the_same_while_it_samples() -> None:
    whole, streamed = (
        simulate(
            tiny(job={**TINY["job"], "algorithm": "grpo", "num_groups": 6, "streamed": on}, num_steps=1),
            "fixed_sync",
            check=True,
        ).steps[0]
        for on in (False, True)
    )

    assert (streamed.ready_s, streamed.tokens) == (whole.ready_s, whole.tokens)
    # At least the last group is left, and at most half of them: the others had ended long before.
    left = (streamed.trained_s - streamed.ready_s) / (whole.trained_s - whole.ready_s)
    assert 0.02 < left < 0.5


def test_gradients_of_a_step_wait_for_the_weights_of_the_one_before() -> None:
    """Asynchronous: groups of the next batch end while this one trains."""
    job = {**TINY["job"], "algorithm": "grpo", "streamed": True}
    fleet = {**TINY["fleet"], "trainers": 1}
    run = simulate(tiny(job=job, fleet=fleet, num_steps=4), "fixed_async", check=True)

    token_s = 8.0 * 8.19e9 / (989e12 * 0.35)  # of Qwen3-8B on one H100
    assert len(run.steps) == 4
    for before, step in itertools.pairwise(run.steps):
        assert step.trained_s >= before.trained_s + 0.99 * token_s * step.tokens


def test_a_bound_that_adapts_rises_for_a_trainer_that_waits_and_falls_for_mismatch() -> None:
    """Of the same job: few engines for many trainers, which wait, with and without a mismatch that forbids old samples."""
    job = {**TINY["job"], "algorithm": "grpo", "num_groups": 2, "adaptive_alpha": True}
    still, rising, falling = (
        [step.alpha for step in simulate(tiny(job=job | more, num_steps=20), "fixed_async", check=True).steps]
        for more in ({"adaptive_alpha": False}, {}, {"mismatch_kl": 1.0})
    )

    assert set(still) == {4}
    assert rising == sorted(rising)
    assert rising[-1] > 4
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] < 4


def test_gpus_that_are_lent_while_a_batch_is_sampled_cannot_train_on_its_groups() -> None:
    with pytest.raises(ConfigError, match=r"job\.streamed"):
        simulate(tiny(job={**TINY["job"], "streamed": True}), "trainers")


def test_a_trajectory_of_a_fixed_system_keeps_its_slot_so_its_prefix_stays() -> None:
    """24 trajectories for 4 slots: they follow each other, where turns would rotate and each find its prefix gone."""
    job = {"num_groups": 6, "group_size": 4, "turns_median": 6.0, "env_median_s": 0.01}
    fleet = {"dedicated": 2, "serving": 0, "trainers": 2, "memory_use": 0.5}
    found = {}
    for held_by in ("trajectory", "turn"):
        scenario = tiny(job={**job, "fixed_slots": held_by}, fleet=fleet, scheduler={"cap_dedicated": 2})
        run = simulate(
            scenario.model_copy(update={"num_steps": 1, "duration_s": 3600.0}), "fixed_sync", check=True
        )
        counters = run.counters
        found[held_by] = counters.cached / (counters.cached + counters.prefilled)
        assert run.steps[0].trajectories == 24

    assert found["trajectory"] > 0.7
    assert found["turn"] < found["trajectory"]


@pytest.mark.parametrize("alpha", [0, 2])
def test_asynchronous_training_never_takes_a_sample_older_than_alpha(alpha: int) -> None:
    run = simulate(tiny(num_steps=6, scheduler={"batches": {"alpha": alpha}}), "fixed_async", check=True)

    assert len(run.steps) == 6
    assert max(step.lag for step in run.steps) == alpha


def test_devices_are_given_to_the_job_and_taken_back_by_the_daemon_s_own_code(tmp_path: Path) -> None:
    """While the job trains, nothing that its devices lend gains it anything."""
    provisioning = {
        **{"switch_s": 1.0, "idle_s": 3.0, "min_active_s": 1.0, "rest_s": 0.5},
        "jobs": {"job": {"n_harvested": 2}},
    }
    path = tmp_path / "journal"

    run = simulate(
        tiny(scheduler={"provisioning": provisioning}, duration_s=3600.0),
        "rose",
        journal_path=path,
        check=True,
    )

    decided = [line.split()[2:] for line in path.read_text().splitlines() if line.split()[1] == "provision"]
    taken = {host for host, what in decided if what == "activate"}
    released = {host for host, what in decided if what == "release"}
    assert 0 < len({host for host in taken if host.startswith("s")}) <= 3
    assert released & taken
    assert run.counters.sampled["harvested"] > 0
    assert len(run.steps) == 2


def test_one_job_that_may_hold_all_is_simulated_as_without_provisioning() -> None:
    on, off = (
        simulate(tiny(scheduler={"provisioning": {"mode": mode}}), "rose", digest=True).digest
        for mode in ("on", "off")
    )
    assert on == off


def test_harvesting_moves_tokens_to_serving_engines_and_costs_no_gpu_hours() -> None:
    fixed, rose = (simulate(tiny(num_steps=1), name) for name in ("fixed_sync", "rose"))

    assert fixed.counters.sampled["harvested"] == 0
    assert rose.counters.sampled["harvested"] > 0
    assert rose.allocated_s == 0


def test_wide_engines_are_faster_belong_to_the_job_and_sample_the_longest_trajectories(
    tmp_path: Path,
) -> None:
    """Without harvested engines, so that the tail has no other place to be fast."""
    path = tmp_path / "journal"
    job = {**TINY["job"], "algorithm": "grpo", "num_groups": 24, "turns_log_std": 0.9}
    fleet = {"dedicated": 2, "serving": 0, "trainers": 2, "wide": 1, "wide_gpus": 2}
    scenario = tiny(job=job, fleet=fleet, num_steps=1, duration_s=3600.0, scheduler={"tail_fraction": 0.1})

    run = simulate(scenario, "fixed_ours", journal_path=path, check=True)

    sent: dict[str, list[str]] = {}
    for line in path.open():
        if line.split()[1] == "dispatch":
            _, _, turn, _, worker = line.split()
            sent.setdefault(worker, []).append(turn)
    assert set(sent) == {"d0", "d1", "w0"}
    late = {
        worker: sum(int(turn.split(".")[-1]) >= 8 for turn in turns) / len(turns)
        for worker, turns in sent.items()
    }
    assert late["w0"] > 1.3 * max(late["d0"], late["d1"])
    assert run.billed_gpu_s == pytest.approx((2 * 1 + 1 * 2 + 2) * run.duration_s)


def test_copies_of_running_turns_shorten_no_turn_and_what_is_sampled_twice_is_counted(tmp_path: Path) -> None:
    """Bursts of production hold some turns back on engines of which there are enough."""
    path = tmp_path / "journal"
    job = {**TINY["job"], "algorithm": "grpo", "num_groups": 8, "output_median": 300.0}
    fleet = {**TINY["fleet"], "serving": 6}
    scheduler = {"cap_dedicated": 4, "cap_harvested": 8}
    plain, copied = (
        simulate(
            tiny(job={**job, "copies": copies}, fleet=fleet, scheduler=scheduler, duration_s=3600.0),
            "rose",
            journal_path=path,
            check=True,
        )
        for copies in (0, 8)
    )

    assert [step.tokens for step in copied.steps] == [step.tokens for step in plain.steps]
    assert copied.counters.turns == plain.counters.turns
    counters = copied.counters
    assert 0 < counters.copies_won < counters.copies
    assert counters.copied > 0
    assert plain.counters.copied == plain.counters.copies == 0
    # At a turn's place only one is sampled to its end; the other is what was paid for it.
    began = sum(line.split()[1] == "copy" for line in path.open())
    assert began == counters.copies


def test_short_rounds_put_long_groups_by_for_a_long_round_and_train_on_all_of_them_once(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    job = {**TINY["job"], "algorithm": "grpo", "num_groups": 4}
    plain, batched = (
        simulate(
            tiny(job={**job, "tail_groups": extra}, num_steps=6, duration_s=7200.0),
            "rose",
            journal_path=path,
            check=True,
        )
        for extra in (0, 2)
    )

    assert [step.long for step in batched.steps] == [False, False, True] * 2
    assert {step.trajectories for step in batched.steps} == {16}
    # The same groups in another order, whole.
    assert sum(step.tokens for step in batched.steps) == sum(step.tokens for step in plain.steps)
    short, long = (
        [step.tokens for step in batched.steps if step.long is is_long] for is_long in (False, True)
    )
    assert sum(short) / len(short) < sum(long) / len(long)
    done = [line.split()[2] for line in path.open() if line.split()[1] == "group"]
    assert sorted(map(int, done)) == list(range(24))


def test_members_beyond_a_group_are_given_up_when_it_is_whole_and_the_shorter_ones_stay() -> None:
    job = {**TINY["job"], "algorithm": "grpo", "num_groups": 4, "tail_groups": 2}
    few, many = (
        simulate(tiny(job={**job, "tail_members": extra}, duration_s=3600.0), "rose", check=True)
        for extra in (0, 3)
    )

    assert {step.trajectories for step in many.steps} == {16}
    assert sum(step.tokens for step in many.steps) < sum(step.tokens for step in few.steps)


@pytest.mark.parametrize(
    ("system", "change"), [("fixed_async", {}), ("rose", {"algorithm": "dapo"})], ids=["asynchronous", "dapo"]
)
def test_short_and_long_rounds_are_of_synchronous_steps(system: str, change: dict[str, Any]) -> None:
    job = {**TINY["job"], "algorithm": "grpo", "tail_groups": 2, **change}
    with pytest.raises(ConfigError, match=r"job\.tail_groups"):
        simulate(tiny(job=job), system)


def test_misses_are_judged_request_by_request_over_the_window_of_both_runs() -> None:
    arrived_s = [0.0, 10.0, 20.0, 30.0, 100.0]
    late, alone = {0: 0.0, 1: 10.0, 4: 100.0}, {1: 10.0, 3: 30.0}

    misses = compare_misses(late, alone, arrived_s, end_s=SETTLE_S + 50.0)

    assert (misses.num, misses.added, misses.mended, misses.share) == (4, 1, 1, 0.0)
    assert compare_misses(late, alone, arrived_s, end_s=SETTLE_S).share is None


def test_requests_that_wait_for_too_long_at_the_end_are_misses() -> None:
    """Where they pile up the late ones are those without an answer."""
    crowded = tiny(
        serving={"requests_per_s": 60.0}, num_steps=None, duration_s=30.0, trajectories_in_flight=4
    )

    run = simulate(crowded, "fixed_sync")

    answered = {at_s for at_s, _ in run.ttft_s}
    waiting = [at_s for at_s in run.late.values() if at_s not in answered]
    assert len(waiting) > len(answered)
    told = len(answered) + len(waiting)
    assert summarize(run)["slo_missed"] == pytest.approx(len(run.late) / told, abs=1e-6)
    cell = measure(run, 60.0, 0.0)
    assert (cell.missed, cell.requests) == (len(run.late), told)


def test_a_request_whose_tokens_can_no_longer_come_in_time_is_late_before_its_answer() -> None:
    """Told at the end of a run, and never of one that a longer run finds in time."""
    serving = {"requests_per_s": 2.0, "slo_ttft_ms": 60_000.0, "slo_tpot_ms": 5.0}
    longer = tiny(serving=serving, num_steps=None, duration_s=60.0, trajectories_in_flight=4)
    arrivals = make_arrivals(longer.serving, longer.fleet.serving, 60.0, longer.seed)
    shorter = longer.model_copy(update={"duration_s": 30.0})

    short, long = (simulate(scenario, "fixed_sync", arrivals=arrivals) for scenario in (shorter, longer))

    answered = {at_s for at_s, _ in short.ttft_s}
    running = {number for number, at_s in enumerate(arrivals.at_s) if at_s < 30.0 and at_s not in answered}
    assert running & long.late.keys()
    assert short.late.keys() <= long.late.keys()
    assert running & short.late.keys()


def test_a_request_that_rollouts_delay_is_late_in_one_run_and_not_in_the_other() -> None:
    """Prompts that leave a few milliseconds of their limit: rollout steps in progress make some late, and at a layer none."""
    serving = {
        "prompt_median": 9000,
        "prompt_max": 9000,
        "prompt_log_std": 0.0,
        "requests_per_s": 0.3,
        "slo_ttft_ms": 365.0,
    }
    scenario = tiny(serving=serving, duration_s=130.0, num_steps=None, trajectories_in_flight=8)
    stay = scenario.scheduler.model_copy(update={"migrate_ratio": 0.0})  # rollout steps are what delays
    scenario = scenario.model_copy(update={"scheduler": stay})
    alone, beside = (simulate(scenario, name) for name in ("fixed_sync", "rose"))
    quick = scenario.model_copy(
        update={"fleet": scenario.fleet.model_copy(update={"preempt_s": 0.001, "idle_chunk_tokens": 512})}
    )
    stopped = simulate(quick, "rose")
    end_s = min(run.duration_s for run in (alone, beside, stopped))
    misses, fewer = (
        compare_misses(run.late, alone.late, alone.arrived_s, end_s) for run in (beside, stopped)
    )

    assert misses.num > 20
    assert misses.added > 3
    assert fewer.added < misses.added / 2


def test_turns_leave_borrowed_trainers_whose_owner_comes_and_goes_and_no_token_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lent for 6 s in every 8, and some turns take longer than was expected of them."""

    def now_and_then(world: SimWorld, now_s: float, word: tuple[str, int]) -> None:
        name, number = word
        step = world.job.steps[-1]
        if step.number == number and math.isnan(step.ready_s):
            if not world.cluster.nodes[name].registered:
                world.cluster.start(name, world.job.version)
            world.cluster.lend(name, 6.0)
            world.queue.at(now_s + 8.0, now_and_then_again(world), word)

    def now_and_then_again(world: SimWorld) -> Callable[[float, tuple[str, int]], None]:
        return lambda now_s, word: now_and_then(world, now_s, word)

    monkeypatch.setattr(SimWorld, "_borrow", now_and_then)
    fleet = {**TINY["fleet"], "serving": 0}
    job = {"num_groups": 4, "group_size": 4, "output_median": 300.0, "algorithm": "grpo"}
    path = tmp_path / "journal"

    run = simulate(tiny(fleet=fleet, job=job, duration_s=3600.0), "trainers", journal_path=path, check=True)

    did = [line.split()[1] for line in path.open()]
    assert (did.count("leave") > 0, len(run.steps)) == (True, 2)
    assert run.counters.sampled["borrowed"] > 0
    assert run.counters.lost == run.counters.dropped == run.counters.fenced == 0


def test_a_trainer_lends_its_devices_while_rollouts_run(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    run = simulate(tiny(duration_s=3600.0), "trainers", journal_path=path, check=True)

    lines = [line.split() for line in path.open()]
    sent = [float(line[0]) for line in lines if line[1] == "dispatch" and line[-1].startswith("t")]
    assert sent
    for step in run.steps:
        assert not any(step.ready_s < at_s < step.end_s for at_s in sent)


SHARED = {
    "num_jobs": 2,
    "num_steps": 3,
    "duration_s": 7200.0,
    "fleet": {"dedicated": 1, "serving": 3, "trainers": 1},
    "job": {"num_groups": 8, "group_size": 8, "turns_median": 4.0, "algorithm": "grpo"},
}


@pytest.mark.parametrize("phases", [False, True])
def test_engines_go_from_job_to_job_and_no_turn_is_sampled_by_anothers_weights(
    tmp_path: Path, phases: bool
) -> None:
    provisioning = {"mode": "on", "switch_s": 1.0, "idle_s": 3.0, "min_active_s": 1.0, "rest_s": 0.5}
    scheduler = {"provisioning": {**provisioning, "phases": phases}}
    path = tmp_path / "journal"

    run = simulate(tiny(**SHARED, scheduler=scheduler), "rose", journal_path=path, check=True)

    assert {name: len(steps) for name, steps in run.job_steps.items()} == {"job0": 3, "job1": 3}
    assert run.num_switches > 0
    assert run.counters.sampled["harvested"] > 0
    has = {f"d{index}": f"job{index}" for index in range(2)} | {
        f"s{index}": f"job{index % 2}" for index in range(3)
    }
    for line in path.open():
        _, what, *words = line.split()
        if what == "switch":
            has[words[0]] = words[1]
        elif what == "dispatch":
            turn, _, worker = words
            assert turn.partition("/")[0] == has[worker]


def test_several_jobs_share_the_harvested_engines_for_good_where_nobody_provisions() -> None:
    nobody = {"provisioning": {"mode": "off"}}
    run = simulate(tiny(**SHARED, scheduler=nobody), "rose", check=True)

    assert {name: len(steps) for name, steps in run.job_steps.items()} == {"job0": 3, "job1": 3}
    assert run.num_switches == 0


def test_what_has_not_been_tried_with_several_jobs_is_refused() -> None:
    with pytest.raises(ConfigError, match="has not been tried with several jobs"):
        simulate(tiny(**SHARED), "spot")


def test_an_engine_is_not_killed_for_a_cut_that_waits_for_production_s_own_step() -> None:
    """A step of a 70B model on four A100 takes seconds where rollouts' take tens of milliseconds, and a cut waits for both here."""
    models = {
        "big": {"params_billion": 70.6, "layers": 80, "heads": 64, "kv_heads": 8},
        "policy": {"params_billion": 14.8, "layers": 48, "heads": 40, "kv_heads": 8},
    }
    fleet = {"device": "a100-80g", "dedicated": 0, "serving": 2, "rollout_gpus": 4, "serving_gpus": 4}
    scenario = Scenario.model_validate(
        {
            "name": "big",
            "duration_s": 300.0,
            "systems": ["rose"],
            "models": models,
            "fleet": fleet,
            "serving": {"model": "big", "requests_per_s": 0.5, "slo_ttft_ms": 2000.0},
            "job": {"model": "policy", "num_groups": 3, "group_size": 8},
        }
    )

    run = simulate(scenario, "rose")

    assert run.counters.cuts > 5
    assert run.counters.kills == 0
