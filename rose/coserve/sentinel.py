"""The last to look: ends a rollout engine that owes memory while its node agent does nothing about it.

The agent kills an engine that does not obey.  An agent that is stopped (SIGSTOP, a debugger, a paused container) cannot, and
its engine may be stopped with it; nobody else can see that.  This small process can: it reads the same shared files,
needs nothing from the agent, and is killed with it.

    python -m rose.coserve.sentinel DIR GUARD_PID DEADLINE_S

- Owed: the rollout engine reserves more than the loan in ``node.state`` and production's own numbers leave it; or production
  died, or is starting, and it reserves anything.
- Owed for ``DEADLINE_S + GRACE_S`` (0: by the engine's own steps, :mod:`rose.policy.deadlines`) without a break and unchanged: SIGUSR2 to the engine's guard, which kills the whole tree.
  The grace lets the agent, who knows more, go first.
- Never: memory that nobody asks for, and a dedicated device.

Decides by :func:`owed_pages`, which is pure.  Callers: the node agent starts one beside each engine.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from rose.coserve.ledger import NodeDir, NodeState, Phase, RolloutLease, ServingBoard, ServingLease
from rose.errors import LedgerError
from rose.policy import deadlines
from rose.policy.compat import Support
from rose.units import NS_PER_S

PERIOD_S = 0.05
GRACE_S = 0.25


def owed_pages(
    node: NodeState | None,
    serving: ServingLease | None,
    serving_alive: bool,
    board: ServingBoard | None,
    rollout: RolloutLease | None,
) -> int:
    """Pages that the rollout engine holds and may not, by the files alone."""
    if rollout is None or node is None or not node.has_serving:
        return 0
    if serving is None or not serving_alive or serving.phase == Phase.STARTING:
        allowed = 0
    elif serving.support == Support.COMPUTE_ONLY:
        allowed = node.lend_pages
    else:
        needed = max(serving.reserved_pages, board.needed_pages if board is not None else 0)
        allowed = min(node.lend_pages, serving.total_pages - needed)
    return max(0, rollout.reserved_pages - max(0, allowed))


class Sentinel:
    """Reads the files of one device.

    Args:
        kill: Ends the engine's tree.
        deadline_s: What the engine has to obey a cut; None: what its longest step says.
    """

    def __init__(self, node_dir: NodeDir, kill: Callable[[], None], deadline_s: float | None) -> None:
        self._node, self._serving = node_dir.node(), node_dir.serving_lease()
        self._board, self._rollout = node_dir.serving_board(), node_dir.rollout_lease()
        self._kill = kill
        self._deadline_s = deadline_s
        self._since_s: float | None = None
        self._held = 0

    def look(self, now_s: float) -> bool:
        """Look once; True when the engine was killed."""
        try:
            rollout = self._rollout.read() if self._rollout.alive() else None
            owed = owed_pages(
                self._node.read(), self._serving.read(), self._serving.alive(), self._board.read(), rollout
            )
        except LedgerError:
            return False  # a damaged file: the engine gives everything back by itself, and we have no proof
        held = rollout.reserved_pages if rollout is not None else 0
        step_s = rollout.step_ns / NS_PER_S if rollout is not None else 0.0
        patience_s = deadlines.reclaim_s(step_s, self._deadline_s) + GRACE_S
        if not owed:
            self._since_s = None
        elif self._since_s is None or held < self._held:
            self._since_s = now_s  # it is giving back: it gets its time again
        elif now_s - self._since_s > patience_s:
            self._kill()
            self._since_s = None
            return True
        self._held = held
        return False


def main() -> int:
    directory, guard_pid, deadline_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

    def kill() -> None:
        sys.stderr.write("rose sentinel: the rollout engine owes memory and nobody ended it: killing it\n")
        for number in (signal.SIGUSR2, signal.SIGCONT):
            os.kill(guard_pid, number)

    sentinel = Sentinel(NodeDir(directory), kill, deadline_s or None)
    while True:
        try:
            os.kill(guard_pid, 0)
            sentinel.look(time.monotonic())
        except ProcessLookupError:
            return 0
        time.sleep(PERIOD_S)


if __name__ == "__main__":
    sys.exit(main())
