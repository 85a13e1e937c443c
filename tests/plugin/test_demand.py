"""What the rollout engine says it would run next: admission gives it no more tokens than that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rose.policy.admission import AdmissionParams, BoardView, StepModel, admit
from vllm_plugin.gate import demand_of


def request(num_tokens: int, computed: int) -> Any:
    return SimpleNamespace(num_tokens=num_tokens, num_computed_tokens=computed)


def test_a_running_prompt_that_is_not_computed_yet_is_prefill_and_no_decode() -> None:
    demand = demand_of([request(100, 99), request(4000, 512)], [request(30, 0)])
    assert (demand.num_decodes, demand.prefill_tokens, demand.context_tokens) == (1, 3488 + 30, 99 + 512)


def test_a_long_prompt_beside_serving_gets_whole_chunks_not_a_token_a_step() -> None:
    admission = admit(
        10.0,
        board=BoardView(running=1, tpot_deadline_s=11.0),
        model=StepModel(),
        params=AdmissionParams(),
        demand=demand_of([request(4000, 512)], []),
    )
    assert admission.token_budget == 512


def test_a_request_whose_last_token_is_in_flight_is_one_decode() -> None:
    """With asynchronous scheduling everything known of it is computed already."""
    assert demand_of([request(100, 100)], []).num_decodes == 1
