"""Harvesting of a whole fleet on and off, by group of nodes: who is held, and a release in stages that takes itself back.

A *held* node lends nothing and its rollout engine holds nothing, whatever its own mode says; a released one does as its own operator
has set it.  So the fleet's switch never starts harvesting on a node whose operator has it off.

A release goes in *stages*: the canary groups first, then the rest.  Each stage is watched for ``watch_s``.  A node that has kept
production's promises and then breaks one for ``late_s`` on end takes its stage back: the stage is held again and the release ends.
So does one that was judged and then is not heard for as long: what became of production there nobody can tell.
A node that was late when it was released is not judged until it has been in time; one that was silent already is *skipped*, and not
judged until it is heard again, when it does as was ordered.  No stage follows one of which no node was
heard and measured at its end.

Pure: no I/O, no clock.  Times are seconds on one clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

MAX_GROUPS = 256
DEFAULT_GROUP = "default"
"""Of a node that names none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSaid:
    """What one node says of itself.

    Attributes:
        late: Which promise of production's is broken now, in words; empty: none.
        measured: Production's latency is known at all.
    """

    node: str
    group: str
    late: str
    measured: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Released:
    groups: tuple[str, ...]
    """Empty: all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenBack:
    groups: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """Every stage was watched to its end."""


Action = Released | TakenBack | Done


@dataclass(kw_only=True, slots=True)
class StagedRelease:
    """One in progress.  ``stages``: groups of each; an empty one, always the last, is all the rest."""

    stages: list[tuple[str, ...]]
    watch_s: float
    index: int = 0
    began_s: float = 0.0


@dataclass(kw_only=True, slots=True)
class _Node:
    group: str
    heard_s: float
    measured: bool = False
    late_since_s: float | None = None
    judged: bool = False
    """Was in time since its stage was released."""
    says: str = ""
    skipped: bool = False
    """Was silent when its stage began, and has not been heard since."""


@dataclass(kw_only=True, slots=True)
class FleetSwitch:
    """See the module.

    Attributes:
        all_held: Groups that are not named in ``held``.
        held: By group, where it differs.
        release: In progress.
        taken_back: Why the last release ended early; empty: it did not.
    """

    late_s: float = 10.0
    silent_s: float = 5.0
    clock_gap_s: float = math.inf
    """Longer than this between two ticks is our own stop, as for :class:`~rose.policy.fleet.Fleet`: nobody was heard, and nothing was watched."""
    all_held: bool = False
    held: dict[str, bool] = field(default_factory=dict[str, bool])
    release: StagedRelease | None = None
    taken_back: str = ""
    _nodes: dict[str, _Node] = field(default_factory=dict[str, _Node])
    _ticked_at_s: float | None = None

    def is_held(self, group: str) -> bool:
        return self.held.get(group, self.all_held)

    # --- orders

    def off(self, groups: tuple[str, ...] = ()) -> list[Action]:
        """Hold these groups, or all; a release in progress ends."""
        self.release, self.taken_back = None, ""
        self._forget_skipped()
        self._hold(groups)
        return []

    def on(
        self, at_s: float, groups: tuple[str, ...] = (), canary: tuple[str, ...] = (), watch_s: float = 60.0
    ) -> list[Action]:
        """Release these groups, or all, the canary groups first."""
        rest = tuple(group for group in groups if group not in canary)
        stages = [canary] if canary else []
        if rest or not groups:
            stages.append(rest)
        self.taken_back = ""
        self._forget_skipped()
        self.release = StagedRelease(stages=stages, watch_s=watch_s)
        return self._begin(at_s)

    def skipped(self) -> tuple[str, ...]:
        """Nodes that the last release did not wait for, by name: silent when their stage began, and ever since."""
        return tuple(name for name, node in sorted(self._nodes.items()) if node.skipped)

    # --- what nodes say

    def said(self, at_s: float, said: NodeSaid) -> None:
        node = self._nodes.setdefault(said.node, _Node(group=said.group, heard_s=at_s))
        node.group, node.heard_s, node.measured, node.says = said.group, at_s, said.measured, said.late
        node.skipped = False
        if not said.late:
            node.late_since_s = None
            node.judged = node.judged or said.measured
        elif node.late_since_s is None:
            node.late_since_s = at_s

    def gone(self, node: str) -> None:
        self._nodes.pop(node, None)

    # --- time

    def tick(self, at_s: float) -> list[Action]:
        self._forgive_own_stop(at_s)
        release = self.release
        if release is None:
            return []
        groups = release.stages[release.index]
        for name, node in sorted(self._nodes.items()):
            if not node.judged or not self._is_of(node, groups):
                continue
            since_s = node.late_since_s
            if since_s is not None and at_s - since_s >= self.late_s:
                return self._take_back(groups, f"{name} in group {node.group}: {node.says}")
            silent_s = at_s - max(node.heard_s, release.began_s)
            if silent_s >= max(self.late_s, self.silent_s):
                return self._take_back(groups, f"{name} in group {node.group}: silent for {silent_s:.0f} s")
        if at_s - release.began_s < release.watch_s:
            return []
        last = release.index + 1 == len(release.stages)
        if last:
            self.release = None
            return [Done()]
        if not any(
            node.measured and self._is_of(node, groups) and at_s - node.heard_s <= self.silent_s
            for node in self._nodes.values()
        ):
            return []  # nothing was learnt
        release.index += 1
        return self._begin(at_s)

    # --- what outlives the process

    def state(self) -> dict[str, Any]:
        """As JSON has it; a stage in progress is watched anew after :meth:`restore`."""
        release = self.release
        return {
            "all_held": self.all_held,
            "held": dict(self.held),
            "taken_back": self.taken_back,
            "release": None
            if release is None
            else {
                "stages": [list(s) for s in release.stages],
                "watch_s": release.watch_s,
                "index": release.index,
            },
        }

    def restore(self, at_s: float, state: dict[str, Any]) -> None:
        """Raises:
        KeyError, TypeError, ValueError: It is not what :meth:`state` makes; nothing is changed.
        """
        all_held, taken_back, told = state["all_held"], state["taken_back"], state["release"]
        held = {str(group): bool(value) for group, value in dict(state["held"]).items()}
        release = None
        if told is not None:
            stages = [tuple(map(str, stage)) for stage in told["stages"]]
            release = StagedRelease(
                stages=stages, watch_s=float(told["watch_s"]), index=int(told["index"]), began_s=at_s
            )
            if not 0 <= release.index < len(stages):
                raise ValueError("no such stage")
        if type(all_held) is not bool or len(held) > MAX_GROUPS:
            raise ValueError("not a fleet's state")
        self.all_held, self.held, self.release, self.taken_back = all_held, held, release, str(taken_back)
        self._forget_skipped()

    # --- inside

    def _forgive_own_stop(self, at_s: float) -> None:
        gap_s = 0.0 if self._ticked_at_s is None else at_s - self._ticked_at_s
        self._ticked_at_s = at_s
        if gap_s <= self.clock_gap_s:
            return
        for node in self._nodes.values():
            node.heard_s = min(at_s, node.heard_s + gap_s)
            if node.late_since_s is not None:
                node.late_since_s = min(at_s, node.late_since_s + gap_s)
        if self.release is not None:
            self.release.began_s = min(at_s, self.release.began_s + gap_s)

    def _is_of(self, node: _Node, groups: tuple[str, ...]) -> bool:
        if groups:
            return node.group in groups
        before = self.release.stages[:-1] if self.release is not None else []
        return not any(node.group in stage for stage in before)

    def _begin(self, at_s: float) -> list[Action]:
        release = self.release
        assert release is not None
        groups = release.stages[release.index]
        release.began_s = at_s
        if groups:
            self.held.update(dict.fromkeys(groups, False))
        else:
            self.all_held = False
            self.held.clear()
        for node in self._nodes.values():
            if self._is_of(node, groups):
                node.skipped = at_s - node.heard_s > self.silent_s
                node.judged = node.measured and not node.says and not node.skipped
        return [Released(groups=groups)]

    def _forget_skipped(self) -> None:
        for node in self._nodes.values():
            node.skipped = False

    def _take_back(self, groups: tuple[str, ...], reason: str) -> list[Action]:
        release = self.release
        assert release is not None
        passed = [group for stage in release.stages[: release.index] for group in stage]
        self.release, self.taken_back = None, reason
        self._hold(groups)
        if not groups:  # those before it were watched to their end
            self.held.update(dict.fromkeys(passed, False))
        return [TakenBack(groups=groups, reason=reason)]

    def _hold(self, groups: tuple[str, ...]) -> None:
        if groups:
            self.held.update(dict.fromkeys(groups, True))
        else:
            self.all_held = True
            self.held.clear()
