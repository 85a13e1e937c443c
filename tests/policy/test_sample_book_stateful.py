"""SampleBook under any sequence of events: each trajectory is consumed at most once, and the books balance."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rose.errors import RequestError
from rose.policy import samples as sp


class AnySequence(RuleBasedStateMachine):
    """Each trajectory is consumed at most once, and the books balance, after anything."""

    def __init__(self) -> None:
        super().__init__()

    @initialize(
        on_stale=st.sampled_from(["cancel", "mask", "wait"]), order=st.sampled_from(["ready", "submitted"])
    )
    def begin(self, on_stale: str, order: str) -> None:
        self.book = sp.SampleBook(params=sp.SampleParams(alpha=1, on_stale=on_stale, order=order))
        self.num_created = self.num_batches = 0
        self.now_s = 0.0
        self.consumed: list[str] = []
        self.version = 0

    def feed(self, event: sp.Event) -> None:
        try:
            actions = self.book.handle(event)
        except RequestError:
            return
        for action in actions:
            if isinstance(action, sp.Consumed):
                self.consumed.extend(action.trajectory_ids)
            if isinstance(action, sp.Leased) and "j" in self.book.runs:
                assert all("theirs" not in self.book.samples[name].runs for name in action.trajectory_ids)

    @rule(group=st.integers(0, 5), size=st.integers(1, 3))
    def create(self, group: int, size: int) -> None:
        self.num_created += 1
        self.feed(
            sp.TrajectoryCreated(
                trajectory_id=f"t{self.num_created}", job="j", group_id=f"g{group}", group_size=size
            )
        )

    @rule(back=st.integers(0, 5), cancel=st.booleans())
    def finish(self, back: int, cancel: bool) -> None:
        name = f"t{max(1, self.num_created - back)}"
        if cancel:
            self.feed(sp.TrajectoryCancelled(trajectory_id=name, reason="x"))
        else:
            self.feed(sp.TrajectoryFinished(trajectory_id=name, versions=((1, self.version),)))

    @rule()
    def name_run(self) -> None:
        self.book.runs["j"] = "mine"

    @rule(back=st.integers(0, 5), reward=st.integers(0, 1), run=st.sampled_from(["mine", "theirs"]))
    def turn_and_reward(self, back: int, reward: int, run: str) -> None:
        name = f"t{max(1, self.num_created - back)}"
        self.feed(sp.TurnAdded(trajectory_id=name, versions=((1, self.version),), num_tokens=7, runs=(run,)))
        self.feed(
            sp.TrajectoryFinished(
                trajectory_id=name, versions=((1, self.version),), reward=reward, filter_equal=True
            )
        )

    @rule(num_groups=st.integers(1, 2), newer=st.booleans())
    def lease(self, num_groups: int, newer: bool) -> None:
        self.num_batches += 1
        self.version += newer
        self.feed(
            sp.BatchAsked(
                at_s=self.now_s,
                batch_id=f"b{self.num_batches}",
                job="j",
                num_groups=num_groups,
                version=(1, self.version),
                ttl_s=3.0,
            )
        )

    @rule(newer=st.booleans(), back=st.integers(0, 5), lag=st.integers(0, 2))
    def publish(self, newer: bool, back: int, lag: int) -> None:
        self.version += newer
        name = f"t{max(1, self.num_created - back)}"
        live = {name: (1, max(0, self.version - lag))}
        self.feed(sp.VersionPublished(job="j", version=(1, self.version), live=live))

    @rule(back=st.integers(0, 3), attempt=st.integers(1, 2))
    def ack(self, back: int, attempt: int) -> None:
        self.feed(sp.BatchAcked(batch_id=f"b{max(1, self.num_batches - back)}", step=1, attempt=attempt))

    @rule(group=st.integers(0, 5))
    def forsake(self, group: int) -> None:
        self.feed(sp.GroupForsaken(job="j", group_id=f"g{group}"))

    @rule(step=st.floats(0, 4))
    def time(self, step: float) -> None:
        self.now_s += step
        for batch_id in self.book.due(self.now_s):
            self.feed(sp.BatchExpired(batch_id=batch_id))

    @rule(attempt=st.integers(1, 2), back=st.integers(0, 5))
    def resume(self, attempt: int, back: int) -> None:
        name = f"t{max(1, self.num_created - back)}"
        self.feed(sp.JobResumed(job="j", attempt=attempt, consumed=(name,)))

    @invariant()
    def books_hold(self) -> None:
        if not hasattr(self, "book"):
            return
        self.book.check()
        for sample in self.book.samples.values():
            if sample.state is sp.SampleState.RUNNING and "j" in self.book.bounds:
                assert all(self.book.bounds["j"][0][1] - step <= 1 for _, step in sample.versions)
        assert len(set(self.consumed)) == len(self.consumed)
        assert self.book.counts()["consumed"] == len(self.consumed)


TestAnySequence = AnySequence.TestCase


TestAnySequence.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
