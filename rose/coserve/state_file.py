"""``node.state``: the agent's settings in force as the engines read them, and as the agent after a killed one takes them over."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from rose.coserve.device import age_s
from rose.coserve.node import Node
from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode, NodeState
from rose.errors import LedgerError
from rose.policy.admission import MOST_RESERVE, Rule
from rose.policy.baselines import POLICIES, make_lending
from rose.policy.lending_policy import LendingPolicy
from rose.units import NS_PER_S

logger = logging.getLogger("rose.node")

TAKE_OVER_S = 600.0
"""How long the settings of an agent that was killed, or ended by an error, outlive it."""


def take_over(node: Node) -> bool:
    """Go on as the operator told an agent that was killed, or ended by an error, a moment ago: one who switched off must not find it on.

    An agent that was asked to end leaves no file, and then the configuration counts.  So does a lower mode in a configuration that was changed
    since that agent lived: it is the later order.

    Returns:
        Whether there was one.  Something of its engine may still be there.
    """
    reader = node.dir.node()
    try:
        last = reader.read()
        if last is None or reader.alive() or age_s(last.heartbeat_ns) > TAKE_OVER_S:
            return False
        died_at_s = time.time() - age_s(last.heartbeat_ns)
        mode, rule, policy = Mode(last.mode), Rule(last.rule), POLICIES[max(0, last.policy)]
    except (LedgerError, ValueError, IndexError):
        return False
    finally:
        reader.close()
    if node.changed_at_s > died_at_s and node.mode < mode:
        logger.warning(
            "mode %s, as the configuration says: it was changed after the agent died that had mode %s",
            node.config.mode,
            mode.name.lower(),
        )
        mode = node.mode
    elif mode != node.mode:
        logger.warning(
            "mode %s, as the agent that died here had it (configured: %s)",
            mode.name.lower(),
            node.config.mode,
        )
    node.mode, node.rule, node.serialise = mode, rule, bool(last.serialise)
    node.stop_at_layers = bool(last.stop_at_layers)
    node.first_token_reserve = min(MOST_RESERVE, max(0, last.reserve_pct) / 100)
    node.max_lend_pages = max(0, last.max_lend_pages)
    if policy != node.policy_name:
        node.policy_name, node.policy = policy, make_lending(policy, node.config.lending.params())
    if node.config.serving is not None and last.slo_ttft_ns > 0 and last.slo_tpot_ns > 0:
        node.floor_pages = last.floor_pages
        node.slo_ttft_ms, node.slo_tpot_ms = last.slo_ttft_ns / 1e6, last.slo_tpot_ns / 1e6
    return True


def keep_off(directory: NodeDir) -> str:
    """Order what no agent is there to carry out: the one that is started next begins in mode off, as if the last one had been told.

    Returns:
        What becomes of the order, for the operator.
    """
    reader = directory.node()
    try:
        last = reader.read()
        if last is None:
            return 'No agent has left anything here: the next one begins as its file says, so set mode = "off" there.'
        order = replace(
            last,
            epoch=last.epoch + 1,
            mode=int(Mode.OFF),
            lend_pages=0,
            deadline_ns=0,
            heartbeat_ns=time.monotonic_ns(),
        )
        directory.node_writer(order).close()
    except LedgerError as error:
        return f"The order could not be kept ({error}): say `rose node off` again once an agent answers."
    finally:
        reader.close()
    return (
        f"No agent is there; the order is kept for the next one: started within {TAKE_OVER_S / 60:.0f} minutes, it begins in mode off, whatever its "
        'file says. After that its file counts: set mode = "off" there, too.'
    )


class StateFile:
    """The one writer of a node's ``node.state``.

    Raises:
        LedgerError: Another agent owns the directory.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        # Not for a moment without settings: whoever comes after us, killed here, takes over what we took over.
        first = replace(self._in_force(), epoch=node.epoch, heartbeat_ns=time.monotonic_ns())
        self._writer = node.dir.node_writer(first)
        self._published: NodeState | None = None

    def publish(self, deadline_s: float | None) -> None:
        """Write what is in force; wake the readers when something besides the heartbeat and the deadline changed.

        Args:
            deadline_s: By when the engine must have given back what it holds above the loan; by the monotonic clock.

        Raises:
            LedgerError: Another agent has taken our place.
        """
        now, before = self._in_force(), self._published
        self._mend()
        if before is None or (now.mode, now.lend_pages) != (before.mode, before.lend_pages):
            self._node.epoch += 1
        self._published = now
        self._writer.write(
            replace(
                now,
                epoch=self._node.epoch,
                deadline_ns=int(deadline_s * NS_PER_S) if deadline_s else 0,
                heartbeat_ns=time.monotonic_ns(),
            )
        )
        if now != before:
            self._writer.wake()

    def close(self) -> None:
        self._writer.close()

    def _in_force(self) -> NodeState:
        node, policy = self._node, self._node.policy
        return NodeState(
            mode=int(node.mode),
            lend_pages=policy.lend_pages,
            floor_pages=node.floor_pages,
            slo_ttft_ns=int(node.slo_ttft_ms * 1e6),
            slo_tpot_ns=int(node.slo_tpot_ms * 1e6),
            has_serving=node.config.serving is not None,
            rule=int(node.rule),
            serialise=int(node.serialise),
            fixed=int(node.policy_name == "static"),
            policy=POLICIES.index(node.policy_name),
            max_lend_pages=node.max_lend_pages,
            delay_pct=round(100 * node.engine.delay),
            stop_at_layers=int(node.stop_at_layers),
            reserve_pct=round(100 * node.first_token_reserve),
            max_loss_ppm=max(1, round(1e6 * policy.params.max_hit_rate_loss))
            if isinstance(policy, LendingPolicy)
            else 0,
        )

    def _mend(self) -> None:
        """Put the file back as we left it.  Where there is no room for its name, those who have met us read on."""
        errors = self._node.errors
        try:
            if self._writer.mend():
                logger.warning(
                    "%s was deleted, cut off or written by another process; mended", self._writer.path
                )
            errors.pop("node.state", None)
        except LedgerError as error:
            if self._writer.replaced():
                raise
            if errors.get("node.state") != str(error):
                logger.error("%s", error)
            errors["node.state"] = str(error)
