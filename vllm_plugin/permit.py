"""What the shared files allow a rollout engine now: how many pages it may hold, and by which rules it may step."""

from __future__ import annotations

import time
from dataclasses import replace

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import NodeState, Phase
from rose.errors import LedgerError
from rose.policy.admission import AdmissionParams, Rule
from rose.policy.compat import Support
from rose.policy.coserving.rollout import allowed_pages
from rose.policy.coserving.timing import age_s
from rose.units import NS_PER_S


class Permit:
    """See the module.

    Attributes:
        epoch: Of the last ``node.state`` that was read.
        has_serving: Is there production on this device, by the agent's word?
        params: How the gate decides.
        may_stop: Steps may stop between two layers.
        must_serialise: The workers' rung of the compute ladder takes turns, whatever the agent says.
    """

    def __init__(self, directory: NodeDir) -> None:
        self._node = directory.node()
        self._lease = directory.serving_lease()
        self._board = directory.serving_board()
        self.epoch = 0
        self.has_serving = True
        self.must_serialise = False
        self.may_stop = False
        self.params = AdmissionParams()

    def pages(self) -> tuple[int, str]:
        """Pages, and why so many; none where another's file cannot be read: the round goes on, for what is held must go back."""
        try:
            return self._pages()
        except LedgerError as error:
            return 0, f"shared files: {error}"

    def _pages(self) -> tuple[int, str]:
        now_s = time.monotonic_ns() / NS_PER_S
        node = self._node.read()
        if node is None or not self._node.alive():
            return 0, "node agent is not there"
        self.epoch, self.has_serving = node.epoch, bool(node.has_serving)
        self._take_rules(node)
        lease = self._lease.read() if node.has_serving else None
        board = self._board.read() if node.has_serving else None
        # Who was not told of production knows nothing of its lease but that somebody writes it.
        lives = self._lease.alive() if lease is not None else not node.has_serving and self._lease.may_live()
        return allowed_pages(
            mode=node.mode,
            lend_pages=node.lend_pages,
            has_serving=self.has_serving,
            serving_phase=lease.phase if lease is not None else Phase.ABSENT,
            serving_alive=lives,
            serving_total=lease.total_pages if lease is not None else 0,
            serving_reserved=lease.reserved_pages if lease is not None else 0,
            serving_needed=board.needed_pages if board is not None else 0,
            node_age_s=age_s(node.heartbeat_ns / NS_PER_S, now_s),
            serving_age_s=age_s(lease.heartbeat_ns / NS_PER_S, now_s) if lease is not None else 0.0,
            compute_only=lease is not None and lease.support == Support.COMPUTE_ONLY,
        )

    def _take_rules(self, node: NodeState) -> None:
        rule = Rule(node.rule) if node.rule in list(Rule) else Rule.SLACK
        # An agent of before has no such number, and a damaged one is no reason to hurry.
        delay = node.delay_pct / 100 if 0 < node.delay_pct <= 100 else 1.0
        serialise = bool(node.serialise) or self.must_serialise
        self.may_stop = bool(node.stop_at_layers and node.has_serving and serialise)
        reserve_s = min(max(0, node.reserve_pct), 100) * max(0, node.slo_ttft_ns) / 100 / NS_PER_S
        params = self.params
        if (rule, serialise, delay, reserve_s) != (
            params.rule,
            params.serialise,
            params.delay,
            params.first_token_reserve_s,
        ):
            self.params = replace(
                params, rule=rule, serialise=serialise, delay=delay, first_token_reserve_s=reserve_s
            )
