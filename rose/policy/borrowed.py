"""When turns leave a borrowed device, so that its owner has it back in time and no token is lost.

A training GPU that is idle during rollouts is *borrowed* until a time that its node renews with each heartbeat, as seconds from
now: no clock of two machines is compared, and what a node said last runs out by itself when nothing more is heard of it.  No
turn is placed whose expected end lies past the time to leave (``rose.policy.packed.WorkerTable.ends_in_time``).  A turn that
runs longer than expected is asked to end with what it has ``drain_s`` before the device goes back, and goes on elsewhere; one
whose engine does not answer within ``drain_s`` is moved with the tokens that have arrived.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from rose.policy.turn import Turn
from rose.policy.worker import Tier, Worker

SAME_END_S = 0.25
"""An end that is told this much later than the last time is the same end: the message took longer."""


def until_s(worker: Worker, at_s: float, lent_s: float | None) -> float:
    """Until when a worker is ours, where its node says that this is ``lent_s`` seconds from now; None: it does not say."""
    if worker.tier is not Tier.BORROWED:
        return math.inf
    if lent_s is None:
        return -math.inf
    told_s = at_s + lent_s
    return worker.until_s if worker.until_s <= told_s <= worker.until_s + SAME_END_S else told_s


def goes_back(worker: Worker, at_s: float, drain_s: float) -> bool:
    """Is it time for its turns to leave?"""
    return at_s >= worker.until_s - drain_s


def must_leave(turns: Iterable[Turn], at_s: float, drain_s: float) -> tuple[list[Turn], list[Turn]]:
    """Of the turns that run on a device that goes back: whom to ask to leave, and whose engine has had its time to answer."""
    ask, move = list[Turn](), list[Turn]()
    for turn in turns:
        if turn.asked_to_leave_s is None:
            ask.append(turn)
        elif at_s >= turn.asked_to_leave_s + drain_s:
            move.append(turn)
    return ask, move
