"""Rewards of turns, branches and the whole: when they may come, what they are worth after a restart, and finding trajectories again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.scheduler.conftest import World, user


async def talked(world: World, num_turns: int = 2, **fields: Any) -> tuple[str, list[str]]:
    """A trajectory that has turns, and their ids."""
    session = await world.trajectory(**fields)
    messages: list[Any] = [user("go")]
    ids = []
    for _ in range(num_turns):
        answer = await world.chat(session, messages, max_tokens=4)
        ids += answer["rose"]["ids"]
        messages += [answer["choices"][0]["message"], user("on")]
    return session, ids


async def post(world: World, session: str, verb: str, body: Any) -> tuple[int, Any]:
    return await world.call("POST", f"/rose/v1/trajectories/{session}/{verb}", body)


async def scored(world: World, session: str, body: Any) -> str:
    status, answer = await post(world, session, "score", body)
    assert status == 200, answer
    return answer["state"]


async def batch(world: World, name: str = "b") -> Any:
    asked = {"job": "job", "num_groups": 1, "version": [0, 0]}
    return (await world.call("PUT", f"/rose/v1/batches/{name}", asked, role="trainer"))[1]


async def test_turns_and_branches_have_rewards_of_their_own(world: World) -> None:
    await world.start()
    await world.add("a")
    session, ids = await talked(world)
    body = {
        "turns": [{"turn": ids[0], "reward": 0.25}, {"turn": 1, "reward": -1}],
        "branches": [{"turn": ids[1], "reward": 2}],
    }
    assert await scored(world, session, body) == "running"
    # Said again, and otherwise: the last word counts while it runs.
    assert await scored(world, session, {"turns": [{"turn": 1, "reward": 0.5}]}) == "running"
    await world.ok("POST", f"/rose/v1/trajectories/{session}/finish", {"reward": 1})
    for trace in (
        await world.ok("GET", f"/rose/v1/trajectories/{session}"),
        (await batch(world))["trajectories"][0],
    ):
        assert trace["reward"] == 1
        assert [(turn["id"], turn["reward"], turn["branch_reward"]) for turn in trace["turns"]] == [
            (ids[0], 0.25, None),
            (ids[1], 0.5, 2),
        ]


@pytest.mark.parametrize("first", ["finish", "score"])
async def test_a_judge_that_takes_its_time_holds_the_group_up_and_no_turn_in(
    world: World, first: str
) -> None:
    await world.start()
    await world.add("a")
    session, _ = await talked(world)
    verdict = {"reward": 3, "success": True, "info": {"by": "judge"}}
    if first == "score":
        assert await scored(world, session, verdict) == "running"
        assert await batch(world) is None
        assert (await post(world, session, "finish", {}))[1]["state"] == "finished"
    else:
        for _ in range(2):
            assert (await post(world, session, "finish", {}))[1]["state"] == "unscored"
        asked = {"messages": [user("more")]}
        status, refused = await world.call("POST", f"/s/{session}/v1/chat/completions", asked)
        assert (status, "unscored" in refused["error"]["message"]) == (409, True)
        assert await batch(world) is None
        assert await scored(world, session, verdict) == "finished"
    trace = (await batch(world))["trajectories"][0]
    assert (trace["reward"], trace["success"], trace["info"]) == (3, True, {"by": "judge"})


async def test_what_is_finished_keeps_its_rewards(world: World) -> None:
    await world.start()
    await world.add("a")
    session, _ = await talked(world)
    verdict = {"reward": 3, "turns": [{"turn": 0, "reward": 1}]}
    await scored(world, session, verdict)
    assert (await post(world, session, "finish", {}))[1]["state"] == "finished"
    assert await scored(world, session, verdict) == "finished"
    assert (await post(world, session, "finish", {}))[1]["state"] == "finished"
    for other in (
        {"reward": 4},
        {"turns": [{"turn": 0, "reward": 2}]},
        {"branches": [{"turn": 1, "reward": 1}]},
    ):
        status, refused = await post(world, session, "score", other)
        assert (status, refused["error"]["code"]) == (409, "conflict"), other


async def test_scores_of_a_cancelled_trajectory_are_gone(world: World) -> None:
    await world.start()
    await world.add("a")
    for close in (False, True):
        session, _ = await talked(world)
        if close:
            await post(world, session, "finish", {})
        await world.ok("DELETE", f"/rose/v1/trajectories/{session}")
        assert (await post(world, session, "score", {"reward": 1}))[0] == 410


async def test_a_trajectory_without_a_verdict_does_not_wait_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.start()
    await world.add("a")
    session, _ = await talked(world, deadline_s=3600.0)
    assert (await post(world, session, "finish", {}))[1]["state"] == "unscored"
    later = SimpleNamespace(time=lambda: time.time() + 3601.0)
    monkeypatch.setattr("rose.scheduler.control_api.time", later)
    await world.until(lambda: world.scheduler.store.state(session)[0] == "cancelled")


@pytest.mark.parametrize("compacted", [False, True])
async def test_rewards_outlive_a_restart(world: World, compacted: bool) -> None:
    await world.start()
    await world.add("a")
    session, _ = await talked(world)
    other, _ = await talked(world)
    await scored(world, session, {"reward": 2, "info": "x" * 100, "turns": [{"turn": 0, "reward": 1}]})
    await scored(world, session, {"reward": 5, "branches": [{"turn": 1, "reward": 7}]})
    await post(world, other, "finish", {})
    held = world.scheduler.store.held_bytes("job")
    await world.scheduler.stop(drain_s=0)
    await world.start(**({"journal": {"compact_bytes": 1}} if compacted else {}))
    if compacted:
        await world.scheduler.stop(drain_s=0)
        await world.start()
    assert world.scheduler.store.held_bytes("job") == held
    assert world.scheduler.store.state(other)[0] == "unscored"
    assert await scored(world, other, {"reward": 1}) == "finished"
    assert (await post(world, session, "finish", {}))[1]["state"] == "finished"
    trace = await world.ok("GET", f"/rose/v1/trajectories/{session}")
    assert (trace["reward"], trace["info"]) == (5, None)
    assert [(turn["reward"], turn["branch_reward"]) for turn in trace["turns"]] == [(1, None), (None, 7)]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"turns": [{"turn": 2, "reward": 1}]}, "turns[0].turn"),
        ({"branches": [{"turn": "n-0000000000000000", "reward": 1}]}, "branches[0].turn"),
        ({"turns": [{"turn": 0}]}, "turns[0].reward"),
        ({"turns": [{"turn": 0, "reward": "x"}]}, "turns[0].reward"),
        ({"turns": [{"turn": -1, "reward": 1}]}, "turns[0].turn"),
        ({"turns": [{"turn": 0, "reward": 1}, {"turn": 0, "reward": 2}]}, "turns[1].turn"),
        ({"turns": [{"turn": 0, "reward": 1}] * 3}, "turns"),
        ({"branches": [{"turn": 0, "reward": 1}]}, "branches[0].turn"),
        ({"success": True}, "reward"),
        ({"reward": "high"}, "reward"),
    ],
)
async def test_a_score_that_cannot_be_is_refused_by_its_field(world: World, body: Any, field: str) -> None:
    await world.start()
    await world.add("a")
    session, _ = await talked(world)
    status, refused = await post(world, session, "score", body)
    assert (status, refused["error"]["param"]) == (400, field)


class Counted(list[Any]):
    """Counts how often it is gone through."""

    num_passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_passes += 1
        return super().__iter__()

    def __reversed__(self) -> Iterator[Any]:
        self.num_passes += 1
        return super().__reversed__()


async def test_turns_that_are_scored_by_id_are_looked_for_once(world: World) -> None:
    """Else a long list of a long trajectory's turns would hold up every other request."""
    await world.start()
    await world.add("a")
    session, ids = await talked(world, num_turns=5)
    trajectory = world.scheduler.store.trajectories[session]
    trajectory.turns = turns = Counted(trajectory.turns)
    await scored(world, session, {"turns": [{"turn": name, "reward": 1} for name in ids]})
    assert turns.num_passes == 1


# --- search ----------------------------------------------------------------------------------------------


async def test_trajectories_are_found_by_what_they_were_given(world: World) -> None:
    await world.start()
    await world.add("a")
    made = {}
    for split in ("train", "test"):
        for number in range(2):
            made[split, number] = await world.trajectory(
                group_id=f"g-{split}", group_size=2, metadata={"split": split, "seed": str(number)}
            )
    await world.ok("POST", f"/rose/v1/trajectories/{made['test', 0]}/finish", {"reward": 0.5})

    async def found(query: str) -> set[str]:
        return {
            each["id"] for each in (await world.ok("GET", f"/rose/v1/trajectories?{query}"))["trajectories"]
        }

    assert await found("meta.split=train") == {made["train", 0], made["train", 1]}
    assert await found("meta.split=train&meta.seed=1") == {made["train", 1]}
    assert await found("group_id=g-test&state=finished") == {made["test", 0]}
    assert await found("meta.split=none") == set()
    assert len(await found("limit=3")) == 3
    (group,) = (await world.ok("GET", "/rose/v1/groups?meta.split=test"))["groups"]
    assert group == {
        "job": "job",
        "group_id": "g-test",
        "group_size": 2,
        "states": {"running": 1, "finished": 1},
        "rewards": [0.5],
        "metadata": {"split": "test"},
    }
    trace = await world.ok("GET", f"/rose/v1/trajectories/{made['train', 1]}")
    assert trace["metadata"] == {"split": "train", "seed": "1"}


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=99999999999", "state=odd"])
async def test_a_search_that_cannot_be_is_refused_by_its_field(world: World, query: str) -> None:
    await world.start()
    for path in ("trajectories", "groups"):
        status, refused = await world.call("GET", f"/rose/v1/{path}?{query}")
        assert (status, refused["error"]["param"]) == (400, query.split("=")[0])


@pytest.mark.parametrize(
    "metadata", [{"a" * 65: "x"}, {"a": "x" * 513}, {"": "x"}, {str(at): "x" for at in range(17)}, {"a": 1}]
)
async def test_metadata_is_small_text(world: World, metadata: dict[str, Any]) -> None:
    await world.start()
    status, refused = await world.call("POST", "/rose/v1/trajectories", {"job": "job", "metadata": metadata})
    assert (status, refused["error"]["param"]) == (400, "metadata")


async def test_what_is_kept_no_longer_than_it_lasts_is_answered_for(world: World) -> None:
    """Nothing final is retained: an ended trajectory is forgotten before its end is answered."""
    await world.start(limits={"retained_finals": 0}, batches={"filter_equal": True})
    await world.add("a")
    session, _ = await talked(world)
    answer = await world.ok("DELETE", f"/rose/v1/trajectories/{session}")
    assert answer == {"id": session, "state": "cancelled", "reason": "cancelled"}
    members = [(await talked(world, group_id="g", group_size=2))[0] for _ in range(2)]
    answers = [await post(world, member, "finish", {"reward": 1.0}) for member in members]
    assert [status for status, _ in answers] == [200, 200]
    assert [(await world.call("GET", f"/rose/v1/trajectories/{name}"))[0] for name in members] == [404, 404]
