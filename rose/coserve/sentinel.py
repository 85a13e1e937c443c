"""Ends a rollout engine that owes memory when the node agent, whose task it is, does not.

The agent kills an engine that does not obey.  An agent that is stopped (SIGSTOP, a debugger, a paused container) cannot, and
its engine may be stopped with it.  This small process notices: it reads the same shared files and needs nothing from the agent.  Where it can it lives in a cgroup of its own, which a pause of the agent's does not
reach (:mod:`rose.coserve.outside`).  It has no guard and outlives the agent, for as long as something of the engine is left.

    python -m rose.coserve.sentinel DIR GUARD_PID AGENT_PID DEADLINE_S GUARD_S RUNG [CGROUP]

- Owed: the rollout engine holds more than it is allowed (:func:`rose.policy.coserving.rollout.allowed_pages`, as it reckons itself);
  of one whose core is dead, all that its workers hold.
- Owed for ``DEADLINE_S + GRACE_S`` (0: by the engine's own steps, :mod:`rose.policy.deadlines`) without a break and unchanged, and past the
  deadline that the agent has set: SIGUSR2 to the engine's guard, which kills the whole tree; ``GUARD_S`` later SIGKILL for all
  of it from here, for the guard may be stopped, too.  The grace lets the agent go first, and its word counts because it knows
  more: it remembers longer steps than the engine tells, and a cut ahead of production's need has no deadline while that need
  does not come.  An agent that is silent gives no time to anybody.
- The agent is dead: what is left of its engine is killed.
- The agent is silent and something of the engine is dying: it gets a normal share of its cores (``RUNG``, ``CGROUP``:
  :mod:`rose.proc_share`), for in the idle class of a busy core the dying do not get to give their memory back.
- Never: memory that nobody asks for, and a dedicated device.

Decides by :func:`owed_pages`, which is pure.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol, cast

from rose.coserve import outside
from rose.coserve.device import DeviceView
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import NodeState, ServingBoard, ServingLease
from rose.errors import LedgerError
from rose.policy import deadlines
from rose.policy.compat import Support
from rose.policy.coserving.rollout import allowed_pages
from rose.policy.coserving.timing import age_s
from rose.policy.lending import DEAD_AFTER_S
from rose.policy.lending_events import Mode
from rose.proc_share import IdleShare, Rung
from rose.proc_tree import GuardedTree, ProcessHandle
from rose.units import NS_PER_S

PERIOD_S = 0.05
GRACE_S = 0.25
HELP_EVERY_S = 0.5
"""Who kills lifts what it kills; this is for what dies by itself, or by somebody else."""


class Tree(Protocol):
    """The engine's processes (:class:`rose.proc_tree.GuardedTree`)."""

    def kill(self) -> None: ...
    def dying(self) -> bool: ...
    def lift(self, on: bool) -> bool: ...


def owed_pages(
    node: NodeState | None,
    serving: ServingLease | None,
    serving_alive: bool,
    board: ServingBoard | None,
    held_pages: int,
    now_s: float,
) -> int:
    """Pages that the rollout engine holds and may not, by the files alone."""
    if node is None or not node.has_serving:
        return 0
    there = serving or ServingLease()
    allowed, _ = allowed_pages(
        mode=node.mode,
        lend_pages=node.lend_pages,
        has_serving=node.has_serving,
        serving_phase=there.phase,
        serving_alive=serving_alive and serving is not None,
        serving_total=there.total_pages,
        serving_reserved=there.reserved_pages,
        serving_needed=board.needed_pages if board is not None else 0,
        node_age_s=age_s(node.heartbeat_ns / NS_PER_S, now_s),
        serving_age_s=age_s(there.heartbeat_ns / NS_PER_S, now_s),
        compute_only=there.support == Support.COMPUTE_ONLY,
    )
    return max(0, held_pages - allowed)


class Sentinel:
    """Reads the files of one device.

    Args:
        deadline_s: What the engine has to obey a cut; None: what its longest step says.
    """

    def __init__(self, node_dir: NodeDir, tree: Tree, deadline_s: float | None) -> None:
        self._node, self._serving = node_dir.node(), node_dir.serving_lease()
        self._board, self._rollout = node_dir.serving_board(), node_dir.rollout_lease()
        self._device = DeviceView(node_dir, {})
        self._tree = tree
        self._deadline_s = deadline_s
        self._longest_s = max(deadlines.MAX_RECLAIM_S, deadline_s or 0.0) + GRACE_S
        self._since_s: float | None = None
        self._held = 0
        self._lifted = False
        self._next_help_s = 0.0

    def look(self, now_s: float) -> bool:
        """Look once; True when the engine was killed."""
        try:
            node = self._node.read()
        except LedgerError:
            self._help_the_dying(now_s, alone=True)
            return False  # a damaged file: the engine gives everything back by itself, and we have no proof
        self._help_the_dying(
            now_s, alone=node is None or age_s(node.heartbeat_ns / NS_PER_S, now_s) > GRACE_S
        )
        try:
            rollout = self._rollout.read() if self._rollout.alive() else None
            # Its workers may outlive a core, and hold memory by themselves.
            held = (
                rollout.reserved_pages if rollout is not None else sum(self._device.resident_pages().values())
            )
        except LedgerError:
            return False
        serving, serving_alive, board = self._production()
        owed = owed_pages(node, serving, serving_alive, board, held, now_s)
        if rollout is None:
            owed = held
        step_s = rollout.step_ns / NS_PER_S if rollout is not None else 0.0
        patience_s = deadlines.reclaim_s(step_s, self._deadline_s) + GRACE_S
        set_s = 0.0
        if node is not None:
            set_s = node.deadline_ns / NS_PER_S + GRACE_S
            heard = age_s(node.heartbeat_ns / NS_PER_S, now_s) <= DEAD_AFTER_S
            if heard and not node.deadline_ns and node.mode == Mode.ON and rollout is not None:
                self._since_s, self._held = None, held
                return False
        if not owed:
            self._since_s = None
        elif self._since_s is None or held < self._held:
            self._since_s = now_s  # it is giving back: it gets its time again
        # However far away the agent has set it: nobody gets longer than the longest deadline that there is.
        elif now_s > min(set_s, self._since_s + self._longest_s) and now_s - self._since_s > patience_s:
            self._tree.kill()
            self._since_s = None
            return True
        self._held = held
        return False

    def _production(self) -> tuple[ServingLease | None, bool, ServingBoard | None]:
        """What production says.  Of damaged files nothing: then it may not share, as the rollout engine itself takes it."""
        serving = board = None
        alive = False
        with suppress(LedgerError):
            serving, alive = self._serving.read(), self._serving.alive()
        with suppress(LedgerError):
            board = self._board.read()
        return serving, alive, board

    def _help_the_dying(self, now_s: float, *, alone: bool) -> None:
        """An agent that is there lifts the tree itself; but what we have lifted is not dropped while it dies, whoever comes back.

        What the kernel refuses (it may only ask for patience) is tried again at the next look at the tree, which goes through all
        processes of the machine: an agent may be silent for hours, on production's cores.
        """
        if not alone and not self._lifted:
            self._next_help_s = 0.0
            return
        if now_s < self._next_help_s:
            return
        self._next_help_s = now_s + HELP_EVERY_S
        lift = (alone or self._lifted) and self._tree.dying()
        if lift != self._lifted and self._tree.lift(lift):
            self._lifted = lift


def main() -> int:
    directory, guard_pid, agent_pid, deadline_s, guard_s, rung, *cgroup = sys.argv[1:]
    share = IdleShare(rung=cast(Rung, rung), directory=Path(cgroup[0]) if cgroup else None)
    try:
        engine = EngineTree(int(guard_pid), share, float(guard_s))
    except ProcessLookupError:
        return 0
    outside.leave(guard_pid)
    agent = None
    with suppress(ProcessLookupError):
        agent = ProcessHandle(int(agent_pid))
    orphan = os.getppid() != int(agent_pid)  # else the number was its own when we took its handle
    sentinel = Sentinel(NodeDir(directory), engine, float(deadline_s) or None)
    while not engine.ended():
        if orphan or agent is None or not agent.alive():
            engine.kill()
        else:
            sentinel.look(time.monotonic())
        time.sleep(PERIOD_S)
    return 0


class EngineTree(GuardedTree):
    """Says once what it does."""

    _said = False

    def kill(self) -> None:
        if not self._said:
            self._said = True
            sys.stderr.write(
                "rose sentinel: the rollout engine is nobody's, or owes memory and nobody ended it: killing it\n"
            )
        super().kill()


if __name__ == "__main__":
    sys.exit(main())
