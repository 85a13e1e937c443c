"""Recorded trajectories to tensors: the mask is 1 on sampled tokens and nowhere else."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rose.errors import TrainError
from rose.train.batch import (
    MIN_PART_SEQUENCES,
    in_order,
    make_minibatch,
    owners_of,
    samples_of,
    share_of,
    split_by_length,
)
from rose.train.metrics import trajectory_metrics
from tests.train.traces import random_batch, trajectory, turn

LIMITS: dict[str, Any] = {"vocab_size": 320, "max_tokens": 64}


def test_a_growing_conversation_is_one_sequence_with_its_sampled_tokens_marked() -> None:
    turns = [
        turn([10, 11], [1]),
        turn([10, 11, 1, 12, 13], [2, 3]),
        turn([10, 11, 1, 12, 13, 2, 3, 14], [4]),
    ]

    (sample,) = samples_of(trajectory(turns), **LIMITS)

    assert sample.token_ids == (10, 11, 1, 12, 13, 2, 3, 14, 4)
    assert sample.positions == (2, 5, 6, 8)
    assert sample.logprobs == (-1.0, -1.0, -1.1, -1.0)


def test_a_fork_trains_each_sampled_token_once() -> None:
    """The agent dropped its first exchange: what was sampled before stays with the first branch."""
    turns = [turn([10], [1]), turn([10, 1, 11], [2]), turn([20, 21], [3]), turn([10, 1, 11, 2, 12], [4])]

    first, second = samples_of(trajectory(turns), **LIMITS)

    assert (first.token_ids, first.positions) == ((10, 1, 11, 2, 12, 4), (1, 3, 5))
    assert (second.token_ids, second.positions) == ((20, 21, 3), (2,))


def test_a_request_beside_the_task_is_not_trained_on() -> None:
    """Neither a title in front nor a probe at the end, which its one token would make a cut trajectory."""
    beside = {"side": True, "finish_reason": "length"}
    turns = [turn([30], [4]) | beside, turn([10], [1]), turn([10, 1, 11], [2]), turn([20], [3]) | beside]

    whole = trajectory(turns)
    (sample,) = samples_of(whole, **LIMITS)

    assert [sample.token_ids[position] for position in sample.positions] == [1, 2]
    assert not sample.truncated
    assert trajectory_metrics([whole], version=(0, 0))["num_side_turns"] == 2


def test_a_branch_from_the_middle_does_not_train_the_shared_part_again() -> None:
    turns = [turn([10], [1]), turn([10, 1, 11], [2]), turn([10, 1, 99], [3])]

    samples = samples_of(trajectory(turns), **LIMITS)

    trained = [[sample.token_ids[position] for position in sample.positions] for sample in samples]
    assert trained == [[1, 2], [3]]


def without_what_parents_hold(whole: dict[str, Any], parents: list[int | None]) -> dict[str, Any]:
    """As a batch is leased."""
    turns: list[dict[str, Any]] = []
    for number, (one, parent) in enumerate(zip(whole["turns"], parents, strict=True)):
        prompt = one["prompt_token_ids"]
        held = 0
        if parent is not None:
            before = whole["turns"][parent]
            held = len(before["prompt_token_ids"]) + len(before["token_ids"])
        rest = {name: value for name, value in one.items() if name != "prompt_token_ids"}
        suffix = {"suffix_token_ids": prompt[held:], "num_prompt_tokens": len(prompt)}
        turns.append({**rest, **suffix, "turn": number, "parent": parent})
    return whole | {"turns": turns}


@pytest.mark.parametrize("seed", range(20))
def test_prompts_without_what_their_parents_hold_make_the_same_sequences(seed: int) -> None:
    rng = random.Random(seed)
    turns: list[dict[str, Any]] = []
    parents: list[int | None] = []
    for number in range(rng.randint(1, 6)):
        parent = rng.choice([None, *range(number)])
        before = [] if parent is None else turns[parent]["prompt_token_ids"] + turns[parent]["token_ids"]
        suffix = [rng.randrange(300) for _ in range(rng.randint(0 if before else 1, 3))]
        sampled = [rng.randrange(300) for _ in range(rng.randint(0, 2))]
        turns.append(turn(before + suffix, sampled, turn=number, parent=parent))
        parents.append(parent)
    whole = trajectory(turns)
    leased = without_what_parents_hold(whole, parents)
    assert samples_of(leased, **LIMITS) == samples_of(whole, **LIMITS)
    assert trajectory_metrics([leased], version=(1, 0)) == trajectory_metrics([whole], version=(1, 0))


@pytest.mark.parametrize("parent", [1, 7, -1, "0", [0]])
def test_a_turn_whose_parent_is_none_before_it_is_refused(parent: Any) -> None:
    leased = without_what_parents_hold(trajectory([turn([10], [1]), turn([10, 1, 11], [2])]), [None, 0])
    leased["turns"][1]["parent"] = parent
    with pytest.raises(TrainError, match=r"turns\[1\]\.parent: no turn .* before it"):
        samples_of(leased, **LIMITS)


def test_minibatch_points_every_target_at_the_position_before_it() -> None:
    a = samples_of(trajectory([turn([10, 11], [1]), turn([10, 11, 1, 12], [2])], id="a"), **LIMITS)
    b = samples_of(trajectory([turn([20], [3, 4])], id="b"), **LIMITS)

    batch = make_minibatch([*a, *b], vocab_size=320, advantages={"a": 0.5, "b": -0.5}, shares=[0.3, 0.2])

    assert batch.input_ids_BT.tolist() == [[10, 11, 1, 12], [20, 3, 0, 0]]
    assert batch.targets_N.tolist() == [1, 2, 3, 4]
    assert list(zip(batch.rows_N.tolist(), batch.columns_N.tolist(), strict=True)) == [
        (0, 1),
        (0, 3),
        (1, 0),
        (1, 1),
    ]
    assert batch.advantage_N.tolist() == [0.5, 0.5, -0.5, -0.5]
    assert batch.share_N.tolist() == pytest.approx([0.3, 0.3, 0.2, 0.2])


def test_packed_sequences_lie_behind_one_another_and_begin_anew() -> None:
    a = samples_of(trajectory([turn([10, 11], [1]), turn([10, 11, 1, 12], [2])], id="a"), **LIMITS)
    b = samples_of(trajectory([turn([20], [3, 4])], id="b"), **LIMITS)

    padded, packed = (make_minibatch([*a, *b], vocab_size=320, packed=packed) for packed in (False, True))

    assert packed.input_ids_BT.tolist() == [[10, 11, 1, 12, 20, 3]]
    assert packed.position_ids_BT is not None
    assert packed.position_ids_BT.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert packed.rows_N.tolist() == [0, 0, 0, 0]
    assert packed.columns_N.tolist() == [1, 3, 4, 5]
    for batch in (padded, packed):
        assert batch.sequence_N.tolist() == [0, 0, 1, 1]
        assert batch.targets_N.tolist() == [1, 2, 3, 4]


def test_restriction_and_temperature_are_those_of_each_turn() -> None:
    free = turn([10], [7])
    bound = turn([10, 7, 11], [5], sampling={"temperature": 0.5, "allowed_token_ids": [6, 5]})

    batch = make_minibatch(samples_of(trajectory([free, bound]), **LIMITS), vocab_size=320)

    assert batch.temperature_N.tolist() == [1.0, 0.5]
    assert batch.allowed_index_N.tolist() == [-1, 0]
    assert batch.allowed_KV is not None
    assert batch.allowed_KV[0].nonzero().flatten().tolist() == [5, 6]


def test_a_stale_trajectory_is_marked_and_keeps_its_reward() -> None:
    (sample,) = samples_of(trajectory([turn([10], [1])], stale=True, reward=0.25), **LIMITS)
    assert sample.masked
    assert sample.reward == 0.25


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token_ids": [320]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"token_ids": "1"}, "token_ids"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": list(range(64))}, "turns[0]"),
        ({"logprobs": []}, "logprobs"),
        ({"logprobs": [0.5]}, "logprobs"),
        ({"logprobs": [float("nan")]}, "logprobs"),
        ({"sampling": [0.9]}, "sampling"),
        ({"constraints": [1]}, "constraints"),
        ({"segments": [1]}, "segments"),
        ({"sampling": {"temperature": 0.0}}, "temperature"),
        ({"sampling": {"allowed_token_ids": [2]}}, "allowed_token_ids"),
    ],
)
def test_what_cannot_be_trained_correctly_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(TrainError) as caught:
        samples_of(trajectory([turn([10], [1]) | changes]), **LIMITS)
    assert caught.value.field is not None
    assert field in caught.value.field


UNREPRODUCED: list[dict[str, Any]] = [
    {"constraints": ["structured_outputs"]},
    {"constraints": ["allowed_token_ids", "bad_words"]},
    {"sampling": {"top_p": 0.9}},  # of a journal that does not name them
    {"sampling": {"temperature": 0.5}, "segments": [{"logprobs_mode": "raw_logprobs"}]},
    {"sampling": {"allowed_token_ids": [2, 3]}, "segments": [{}, {"logprobs_mode": "raw_logprobs"}]},
    {"segments": [{"logprobs_mode": "raw_logits"}]},
]


@pytest.mark.parametrize("changes", UNREPRODUCED, ids=str)
def test_a_turn_under_a_constraint_is_context_unless_the_job_has_it_trained(changes: dict[str, Any]) -> None:
    turns = [
        turn([10], [1]),
        turn([10, 1, 11], [2, 3]) | changes,
        turn([10, 1, 11, 2, 3, 12], [4]),
        turn([50], [5]) | changes | {"side": True},
    ]
    whole = trajectory(turns)

    (sample,) = samples_of(whole, **LIMITS)
    assert (sample.token_ids, sample.positions) == ((10, 1, 11, 2, 3, 12, 4), (1, 6))
    assert len(sample.logprobs) == len(sample.temperatures) == len(sample.allowed) == 2
    assert trajectory_metrics([whole], version=(0, 0))["num_constrained_turns"] == 1

    (sample,) = samples_of(whole, **LIMITS, constrained="train")
    assert sample.positions == (1, 3, 4, 6)
    assert samples_of(trajectory([turn([10], [2, 3]) | changes]), **LIMITS) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"constraints": ["allowed_token_ids"], "segments": [{"logprobs_mode": "processed_logprobs"}]},
        {"constraints": [], "segments": [{"logprobs_mode": "raw_logprobs"}]},
        {"constraints": ["top_p"], "sampling": {"top_p": 0.95}},
    ],
    ids=str,
)
def test_what_the_trainer_reproduces_and_what_the_job_chose_is_trained(changes: dict[str, Any]) -> None:
    whole = trajectory([turn([10], [1]) | changes], sampling={"top_p": 0.95})
    (sample,) = samples_of(whole, **LIMITS)
    assert sample.positions == (1,)
    assert trajectory_metrics([whole], version=(0, 0))["num_constrained_turns"] == 0


@pytest.mark.parametrize("reward", [None, "1", True, float("nan"), float("inf")])
def test_a_missing_reward_is_an_error_and_never_zero(reward: object) -> None:
    with pytest.raises(TrainError) as caught:
        samples_of(trajectory([turn([10], [1])], reward=reward), **LIMITS)
    assert caught.value.field == "reward"


def test_neutral_sampling_settings_pass() -> None:
    sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0}
    (sample,) = samples_of(trajectory([turn([10], [1], sampling=sampling)]), **LIMITS)
    assert sample.temperatures == (0.7,)


def test_parts_hold_every_index_once_and_pad_little() -> None:
    lengths = [20, 200, 22, 180, 21, 40, *([24] * 30), *([190] * 10)]

    parts = split_by_length(range(len(lengths)), lengths)

    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    for part in parts[:-1]:
        longest, shortest = max(lengths[i] for i in part), min(lengths[i] for i in part)
        assert longest <= 1.25 * shortest or len(part) <= MIN_PART_SEQUENCES


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_are_told_the_tokens_of_their_own_sequences_and_the_length_of_all(world_size: int) -> None:
    whole = in_order(
        one
        for trace in random_batch(1, num_groups=6)
        for one in samples_of(trace, vocab_size=320, max_tokens=1024)
    )
    shares = [share_of(whole, rank, world_size) for rank in range(world_size)]

    for index, sample in enumerate(whole):
        told = [share[index] for share in shares]
        assert [one.token_ids for one in told].count(sample.token_ids) == 1  # one rank's, and no other's
        assert all(one.token_ids in (sample.token_ids, ()) for one in told)
        for name in ("trajectory_id", "group_id", "reward", "positions", "length"):
            assert {getattr(one, name) for one in told} == {getattr(sample, name)}
    work = [sum(len(one.token_ids) for one in share) for share in shares]
    assert sum(work) == sum(sample.length for sample in whole)
    assert max(work) <= 1.1 * sum(work) / world_size
    # Whoever knows less deals the same way.
    assert all(owners_of(share, world_size) == owners_of(whole, world_size) for share in shares)
    assert all(in_order(share) == share for share in shares)
