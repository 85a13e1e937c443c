"""Dual-SLO admission: how many tokens fit production's slack, and how the step model learns."""

from __future__ import annotations

import math
import random

import pytest

from rose.errors import ConfigError
from rose.policy.admission import (
    UNLIMITED_TOKENS,
    AdmissionParams,
    BoardView,
    Demand,
    Rule,
    StepModel,
    admit,
    slack,
    tokens_that_fit,
)

MODEL = StepModel(base_s=0.010, prefill_token_s=0.0001, decode_s=0.001)
"""10 ms, 0.1 ms per prompt token, 1 ms per decode."""
PARAMS = AdmissionParams(guard_s=0.005, max_prefill_tokens=512)
DEMAND = Demand(num_decodes=10, prefill_tokens=1000)


def board(**change: object) -> BoardView:
    return BoardView(**{"running": 1, **change})  # type: ignore[arg-type]


def budget(view: BoardView, demand: Demand = DEMAND, params: AdmissionParams = PARAMS) -> int:
    return admit(100.0, board=view, model=MODEL, params=params, demand=demand).token_budget


def test_idle_or_absent_serving_leaves_rollouts_unlimited() -> None:
    idle = admit(100.0, board=BoardView(), model=MODEL, params=PARAMS, demand=DEMAND)
    assert (idle.token_budget, idle.wake_at_s, idle.reason) == (UNLIMITED_TOKENS, None, "serving is idle")
    absent = BoardView(present=False, busy=True, running=9, tpot_deadline_s=0.0)
    assert budget(absent) == UNLIMITED_TOKENS


@pytest.mark.parametrize("view", [board(busy=True, running=0), board(running=1), board(running=0, waiting=1)])
def test_serving_with_any_work_is_not_idle(view: BoardView) -> None:
    assert 0 < budget(view) < UNLIMITED_TOKENS


def test_the_budget_is_the_most_that_fits_the_decode_slack() -> None:
    # 50 ms to the latest start, 5 guard: 45 = 10 base + 10 decodes of 1 + 250 prompt tokens of 0.1.
    # (Half a token more, so that rounding does not matter.)
    assert budget(board(tpot_deadline_s=100.05005)) == 10 + 250


def test_the_earlier_of_the_two_deadlines_counts() -> None:
    late, soon = 100.200, 100.03005
    one = admit(
        100.0,
        board=board(tpot_deadline_s=late, ttft_deadline_s=soon),
        model=MODEL,
        params=PARAMS,
        demand=DEMAND,
    )
    two = admit(
        100.0,
        board=board(tpot_deadline_s=soon, ttft_deadline_s=late),
        model=MODEL,
        params=PARAMS,
        demand=DEMAND,
    )
    assert one.token_budget == two.token_budget == 10 + 50
    assert (one.reason, two.reason) == ("TTFT slack", "TPOT slack")


def test_decodes_come_first_and_as_many_as_fit() -> None:
    assert budget(board(tpot_deadline_s=100.0191)) == 4


def test_nothing_fits_closes_the_gate_until_the_board_changes_or_a_recheck() -> None:
    closed = admit(100.0, board=board(tpot_deadline_s=100.014), model=MODEL, params=PARAMS, demand=DEMAND)
    assert not closed.open
    assert closed.wake_at_s == pytest.approx(100.1)
    assert closed.slack_s == pytest.approx(0.009)
    assert budget(board(tpot_deadline_s=90.0)) == 0


def test_a_step_starts_only_if_its_predicted_length_fits() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        model = StepModel(
            base_s=rng.uniform(0, 0.02),
            prefill_token_s=rng.choice([0.0, rng.uniform(0, 0.001)]),
            decode_s=rng.choice([0.0, rng.uniform(0.0001, 0.002)]),
            context_token_s=rng.choice([0.0, 1e-6]),
        )
        demand = Demand(
            num_decodes=rng.randint(0, 40),
            prefill_tokens=rng.randint(0, 2000),
            context_tokens=rng.randint(0, 40000),
        )
        params = AdmissionParams(interference=rng.choice([1.0, 1.5]), guard_s=0.0)
        limit_s = rng.uniform(0, 0.1)
        tokens = tokens_that_fit(limit_s, model, demand, params)
        assert 0 <= tokens <= demand.num_decodes + min(demand.prefill_tokens, 512)
        if tokens == 0:
            continue

        def length(count: int) -> float:
            decodes = min(count, demand.num_decodes)  # noqa: B023
            context = demand.context_tokens * decodes // max(1, demand.num_decodes)  # noqa: B023
            return params.interference * model.predict(count - decodes, decodes, context)  # noqa: B023

        assert length(tokens) <= limit_s + 1e-6
        if tokens < demand.num_decodes + min(demand.prefill_tokens, 512):
            assert length(tokens + 1) > limit_s - 1e-5  # and it is the most


def test_prefill_goes_in_chunks_beside_serving_work() -> None:
    assert budget(board(tpot_deadline_s=200.0)) == 10 + 512
    assert budget(board()) == 10 + 512  # no deadline at all


def test_interference_stretches_the_step() -> None:
    stretched = AdmissionParams(guard_s=0.005, interference=2.0)
    # 90 ms of slack hold a step of 45 ms.
    assert budget(board(tpot_deadline_s=100.0951), params=stretched) == 10 + 250


def test_a_step_that_the_device_preempts_counts_for_what_it_delays() -> None:
    # 9 ms of slack hold no step that runs to its end, and one of 90 ms of which a tenth counts.
    view = board(tpot_deadline_s=100.0141)
    assert budget(view) == 0
    assert budget(view, params=AdmissionParams(guard_s=0.005, delay=0.1)) == budget(
        board(tpot_deadline_s=100.0951)
    )
    # No slack is no slack.
    assert budget(board(tpot_deadline_s=100.004), params=AdmissionParams(guard_s=0.005, delay=0.1)) == 0


def test_a_waiting_prompt_waits_for_the_end_of_the_running_step() -> None:
    view = board(busy=True, step_started_s=99.99, step_s=0.030, ttft_deadline_s=100.060)
    assert slack(100.0, view, 0.005)[0] == pytest.approx(0.060 - 0.020 - 0.005)
    overdue = board(busy=True, step_started_s=99.0, step_s=0.030, ttft_deadline_s=100.060)
    assert slack(100.0, overdue, 0.005)[0] == pytest.approx(0.060 - 0.005)


def test_rollouts_leave_a_reserve_of_a_first_token_s_slack_and_none_of_a_next_one_s() -> None:
    keeps = AdmissionParams(guard_s=0.005, first_token_reserve_s=0.1)
    # 120 ms to the latest start, 5 guard, 100 kept: 15 = 10 base + 5 decodes (half a millisecond more, for rounding).
    assert budget(board(ttft_deadline_s=100.1205), params=keeps) == 5
    assert budget(board(ttft_deadline_s=100.110), params=keeps) == 0
    assert budget(board(tpot_deadline_s=100.1205), params=keeps) > 10
    by_the_paper = AdmissionParams(guard_s=0.005, first_token_reserve_s=0.1, rule=Rule.PAPER)
    assert budget(board(ttft_deadline_s=100.050), params=by_the_paper) > 0


def test_a_running_decode_step_counts_from_its_start_and_costs_slack_once_overdue() -> None:
    view = board(busy=True, step_started_s=99.99, step_s=0.030, tpot_deadline_s=100.040)
    assert slack(100.0, view, 0.0)[0] == pytest.approx(0.050)
    assert slack(100.015, view, 0.0)[0] == pytest.approx(0.050)
    assert slack(100.025, view, 0.0)[0] == pytest.approx(0.045)


def test_servings_own_work_is_taken_off_when_its_model_is_given() -> None:
    serving = StepModel(base_s=0.020, prefill_token_s=0.0002, decode_s=0.002)
    view = board(running=5, waiting=1, waiting_tokens=100, ttft_deadline_s=100.1, tpot_deadline_s=100.2)
    assert slack(100.0, view, 0.0, serving) == (pytest.approx(0.1 - 0.040), "TTFT")
    view = board(running=5, tpot_deadline_s=100.1)
    assert slack(100.0, view, 0.0, serving) == (pytest.approx(0.1 - 0.030), "TPOT")


def test_a_tiny_step_waits_for_more_slack_unless_it_is_all_there_is() -> None:
    params = AdmissionParams(guard_s=0.0, min_tokens=8)
    view = board(tpot_deadline_s=100.0141)
    assert budget(view, params=params) == 0
    assert budget(view, Demand(num_decodes=4), params) == 4


def test_steps_may_be_bounded_while_serving_is_idle_but_never_to_nothing() -> None:
    params = AdmissionParams(idle_step_s=0.0701)
    assert budget(BoardView(), params=params) == 10 + 500
    assert budget(BoardView(), params=AdmissionParams(idle_step_s=0.001)) == 1


# --- the step model ---

TRUTH = (0.012, 0.00015, 0.0008, 3e-7)


def measured(rng: random.Random, noise: float) -> tuple[int, int, int, float]:
    prefill, decodes = rng.choice([0, rng.randint(1, 1024)]), rng.randint(0, 64)
    context = decodes * rng.randint(100, 4000)
    exact = TRUTH[0] + TRUTH[1] * prefill + TRUTH[2] * decodes + TRUTH[3] * context
    return prefill, decodes, context, exact * rng.lognormvariate(0.0, noise)


@pytest.mark.parametrize("seed", range(5))
def test_the_model_learns_to_within_ten_percent_of_held_out_steps(seed: int) -> None:
    rng, model = random.Random(seed), StepModel()
    for _ in range(400):
        prefill, decodes, context, seconds = measured(rng, 0.05)
        model.observe(prefill_tokens=prefill, num_decodes=decodes, context_tokens=context, seconds=seconds)
    errors: list[float] = []
    for _ in range(200):
        prefill, decodes, context, seconds = measured(rng, 0.05)
        errors.append(abs(model.predict(prefill, decodes, context) - seconds) / seconds)
    assert sum(errors) / len(errors) < 0.06
    assert model.relative_error < 0.1
    assert model.num_observed == 400


def test_the_model_learns_what_an_encoder_costs_apart_from_the_prompt() -> None:
    rng, model = random.Random(0), StepModel()
    for _ in range(500):
        prefill, decodes, context, seconds = measured(rng, 0.02)
        encoder = rng.choice([0, 0, 256, 1024])
        model.observe(
            prefill_tokens=prefill,
            num_decodes=decodes,
            context_tokens=context,
            encoder_tokens=encoder,
            seconds=seconds + encoder * 0.001,
        )
    assert model.encoder_token_s == pytest.approx(0.001, rel=0.1)
    prefill, decodes, context, seconds = measured(rng, 0.0)
    assert model.predict(prefill, decodes, context) == pytest.approx(seconds, rel=0.1)
    assert model.predict(prefill, decodes, context, 512) == pytest.approx(seconds + 0.512, rel=0.1)


def test_the_model_follows_a_machine_that_became_slower() -> None:
    rng, model = random.Random(0), StepModel()
    for slower in (1.0, 2.0):
        for _ in range(2000):
            prefill, decodes, context, seconds = measured(rng, 0.02)
            model.observe(
                prefill_tokens=prefill, num_decodes=decodes, context_tokens=context, seconds=slower * seconds
            )
    prefill, decodes, context, seconds = measured(rng, 0.0)
    assert model.predict(prefill, decodes, context) == pytest.approx(2.0 * seconds, rel=0.15)


@pytest.mark.parametrize("seed", range(10))
def test_predictions_stay_positive_and_finite_under_any_measurement(seed: int) -> None:
    rng, model = random.Random(seed), StepModel()
    for _ in range(3000):
        model.observe(
            prefill_tokens=rng.choice([0, 0, 1, 10**6]),
            num_decodes=rng.choice([0, 1, 1000]),
            context_tokens=rng.choice([0, 10**8]),
            seconds=rng.choice([1e-9, 1e-3, 1.0, 1e6]),
        )
        for prediction in (model.predict(), model.predict(100, 10, 1000)):
            assert 0.0 <= prediction < math.inf


def test_what_traffic_does_not_exercise_stays_uncertain_but_bounded() -> None:
    model = StepModel()
    for _ in range(8000):
        model.observe(prefill_tokens=0, num_decodes=4, seconds=0.015)
    spread = model._spread  # pyright: ignore[reportPrivateUsage]
    assert sum(spread[i][i] for i in range(4)) < 1e6
    assert model.predict(0, 4) == pytest.approx(0.015, rel=0.01)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-9, math.nan, math.inf])
def test_a_measurement_that_is_no_duration_is_ignored(seconds: float) -> None:
    model = StepModel()
    model.observe(prefill_tokens=10, num_decodes=0, seconds=seconds)
    assert model.num_observed == 0
    assert model.predict(10) == StepModel().predict(10)


def test_impossible_settings_name_their_field() -> None:
    with pytest.raises(ConfigError, match="decode_s"):
        StepModel(decode_s=-1.0)
    with pytest.raises(ConfigError, match="base_s"):
        StepModel(base_s=0.0, prefill_token_s=0.0, decode_s=0.0)
    for name, value in (
        ("guard_s", -1.0),
        ("delay", 0.0),
        ("interference", 0.5),
        ("recheck_s", 0.0),
        ("idle_step_s", 0.0),
    ):
        with pytest.raises(ConfigError, match=name):
            AdmissionParams(**{name: value})  # type: ignore[arg-type]
    for name in ("max_prefill_tokens", "min_tokens"):
        with pytest.raises(ConfigError, match=name):
            AdmissionParams(**{name: 0})  # type: ignore[arg-type]


def test_serialised_rollouts_start_no_step_beside_a_serving_step() -> None:
    params = AdmissionParams(serialise=True)
    assert (
        budget(board(busy=True, step_started_s=100.0, step_s=0.01, tpot_deadline_s=110.0), params=params) == 0
    )
    assert budget(board(busy=False, tpot_deadline_s=110.0), params=params) > 0


def test_the_published_rule_takes_a_whole_chunk_however_little_slack_is_left() -> None:
    params = AdmissionParams(rule=Rule.PAPER, guard_s=0.005)
    assert budget(board(tpot_deadline_s=100.0051), params=params) == 10 + 512
    assert budget(board(tpot_deadline_s=100.0049), params=params) == 0


def test_without_a_rule_nothing_is_held_back() -> None:
    params = AdmissionParams(rule=Rule.FREE, serialise=True)
    assert budget(board(busy=True, waiting=9, tpot_deadline_s=1.0), params=params) == UNLIMITED_TOKENS
