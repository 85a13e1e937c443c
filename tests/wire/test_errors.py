"""What a refusal says ends with the fix, in whichever form it leaves a process."""

from __future__ import annotations

from rose.errors import WrongBase
from rose.wire.errors import error_body, error_data
from vllm_plugin.engine_control import RankError

REFUSED = WrongBase(
    "the file is of run a, not of b", field="run", fix="name the run whose weights are wanted"
)


def test_an_answer_of_an_engine_s_rank_has_the_fix() -> None:
    assert error_data(REFUSED)["message"].endswith("(name the run whose weights are wanted)")


def test_what_a_rank_said_reaches_the_caller_of_the_route_whole() -> None:
    body = error_body(RankError(1, error_data(REFUSED)))["error"]

    assert body["message"].startswith("rank 1: the file is of run a")
    assert body["message"].endswith("(name the run whose weights are wanted)")
    assert (body["param"], body["code"]) == ("run", error_body(REFUSED)["error"]["code"])
