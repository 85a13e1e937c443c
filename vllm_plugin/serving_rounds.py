"""Production's background thread, once a round: read the shared files, tell the book, do what it says.

What is decided there is in :class:`~rose.policy.coserving.serving.ServingBook` and :class:`~rose.policy.coserving.loans.LoanBook`.

Order of lending: balloon -> unmark -> all ranks unmapped -> ``reserved_pages`` falls.
Order of taking back: ``reserved_pages`` rises -> wait for the peer's *number* -> mark -> all ranks mapped -> balloon
lets go.  Nothing here waits for the peer; if it never answers, serving stays as large as it is, and the node
agent kills the peer at the deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rose.coserve.node_dir import NodeDir
from rose.coserve.records import Mode, NodeState
from rose.errors import LedgerError
from rose.policy.coserving.events import (
    Mark,
    MarksWritten,
    PeerCounted,
    Reserve,
    ServingEvent,
    ServingLooked,
    Stranded,
    Use,
)
from rose.policy.coserving.loans import AgentSaid
from rose.policy.coserving.search import LoanSearch
from rose.policy.coserving.serving import NODE_DEAD_S, ServingBook
from rose.policy.coserving.steps import StepBook
from rose.policy.coserving.timing import age_s
from rose.units import NS_PER_S
from vllm_plugin import compat
from vllm_plugin.board import Board
from vllm_plugin.first_token_watch import FirstTokenWatch
from vllm_plugin.loan_log import LoanLog
from vllm_plugin.pager_channel import PagerChannel
from vllm_plugin.peers import Peers, Trouble, require_own
from vllm_plugin.prefix_watch import PrefixWatch
from vllm_plugin.protocol_log import ProtocolLog
from vllm_plugin.seam import Seam
from vllm_plugin.serving_lease import LentLease
from vllm_plugin.step_learning import StepLearner

logger = logging.getLogger("vllm.rose")


class ServingRounds:
    """See the module.  What it is made of is the side's (:class:`vllm_plugin.serving.ServingSide`).

    Args:
        elastic: Its KV memory can be given back; else nothing is ever lent.
        idle: Run on the engine thread where an idle engine has something to do.
    """

    def __init__(
        self,
        directory: NodeDir,
        *,
        elastic: bool,
        seam: Seam,
        book: ServingBook,
        steps: StepBook,
        search: LoanSearch,
        prefixes: PrefixWatch,
        learner: StepLearner,
        first_tokens: FirstTokenWatch,
        board: Board,
        lease: LentLease,
        pagers: PagerChannel,
        trouble: Trouble,
        loans: LoanLog,
        idle: Callable[[], None],
    ) -> None:
        self._path, self._elastic, self._idle = directory.path, elastic, idle
        self._seam, self._book, self._steps, self._search = seam, book, steps, search
        self._prefixes, self._learner, self._board = prefixes, learner, board
        self._first_tokens = first_tokens
        self._lease, self._pagers, self._trouble = lease, pagers, trouble
        self._node, self._peers = directory.node(), Peers(directory, trouble)
        self._door, self._loans = ProtocolLog("serving", book), loans
        self._max_loss = 0.0

    def round(self) -> None:
        """Look at everything once and act.  Order: see the module docstring.

        Once we have failed only what brings memory back is done: the part that failed may be one of the others, and fail again.
        """
        if not self._seam.failed:
            self._learn()
        book, seam, at_s = self._book, self._seam, time.monotonic()
        self.check_own_files()
        reports, retained = self._pagers.reports()
        node = self._read_node()
        self._turn_board_over(node)
        target = self._lendable(node)
        released = seam.take_released(book.chunks, self._pagers)
        self._tell(
            ServingLooked(
                at_s=at_s,
                released=released,
                reports=reports,
                target_chunks=target,
                claim_chunks=self._steps.claim_chunks,
                retained_pages=retained,
            )
        )
        if not seam.failed:
            self._prefixes.look(
                self._max_loss, released=[chunk for chunk, _ in released], short=target - book.num_lent
            )
        seam.target_chunks = book.may_lend(target)
        # Reserved first, the peer's number read second: of two that grow at once, one sees the other.
        peer_pages = self._peers.pages() if book.num_lent else 0
        self._tell(PeerCounted(at_s=time.monotonic(), pages=peer_pages))
        seam.stranded = book.stranded
        missing = book.missing_from(seam.target_chunks)
        if seam.mapped or (missing and self._is_worth_a_look()):
            seam.call_when_idle(self._idle)
        self._loans.round()

    def _learn(self) -> None:
        self._learner.learn(watched=self._board.watched)
        if self._first_tokens.look(self._board.slo_ttft_ns / NS_PER_S) and self._board.watched:
            self._seam.call_when_idle(self._idle)  # an engine that steps says it by itself

    def _is_worth_a_look(self) -> bool:
        return self._loans.may_find_more(time.monotonic(), self._prefixes.offered, self._search)

    def _tell(self, event: ServingEvent) -> None:
        """Tell the book, and do what it says."""
        for action in self._door.handle(event):
            match action:
                case Use():
                    self._seam.mapped.extend(action.chunks)
                case Reserve():
                    self._lease.say(action.pages)
                case Stranded():
                    self._say_stranded(action.pages)
                case Mark():
                    # A stranger's mark must not be written over unseen: a pager may have obeyed it.
                    self.check_own_files()
                    self._pagers.write(action)
                    self._door.handle(MarksWritten())

    def _say_stranded(self, pages: int) -> None:
        if pages and self._is_due():
            logger.error(
                "ROSE: %d pages of 2 MiB are not given back, by a process that neither obeys nor dies (frozen?); production "
                "goes on with what it has, nothing more is lent; kill or thaw the rollout engine of %s",
                pages,
                self._path,
            )
        elif pages:
            logger.warning(
                "ROSE: %d pages of 2 MiB that were lent less are not given back yet (has the rollout engine no core?); nothing waits for them, and "
                "nothing more is lent until they are",
                pages,
            )
        else:
            logger.warning("ROSE: what was not given back has come back")

    def _is_due(self) -> bool:
        """Does anybody want back what was lent: production itself, its agent's order or deadline, or an agent that says nothing?"""
        node, now_ns = self._read_node(), time.monotonic_ns()
        return (
            node is None
            or node.mode != Mode.ON
            or self._steps.claim_chunks > 0
            or age_s(node.heartbeat_ns / NS_PER_S, now_ns / NS_PER_S) > NODE_DEAD_S
            or 0 < node.deadline_ns <= now_ns
        )

    def check_own_files(self) -> None:
        """Notice a stranger's writes; once we are off, undo them, so that they keep no memory from production.  What was
        deleted is made anew: that steers nothing, and whoever comes later has to find it.

        Raises:
            LedgerError: Somebody else wrote into our files.
        """
        ours = (self._lease.file, self._pagers.marks)
        if not self._seam.failed:
            for writer in ours:
                require_own(writer)
        for writer in ours:
            self._trouble.mend(writer)
        self._board.find()

    def _read_node(self) -> NodeState | None:
        """What the agent says; None also where that cannot be read, for an agent of another version is no agent, and where it is dead: a
        file on a disk outlives the machine's clock, by which it may seem to have been written just now, or to come."""
        try:
            node = self._node.read() if self._node.alive() else None
        except LedgerError as error:
            self._trouble.say("node.state", error)
            return None
        self._trouble.over("node.state")
        return node

    def _turn_board_over(self, node: NodeState | None) -> None:
        """Is there anybody who steers by our steps?"""
        may_run = node is not None and node.mode == Mode.ON
        watched = self._book.is_watched(peer_lives=self._peers.any_alive(), may_run=may_run)
        healthy = not self._seam.failed
        compat.let_spin(not watched or not healthy)
        self._board.turn_over(watched, healthy=healthy)

    def _lendable(self, node: NodeState | None) -> int:
        """Chunks that may be lent now: what the agent asks for, nothing when it is silent or we failed."""
        if node is None or self._seam.failed:
            return 0
        self._board.slo_ttft_ns, self._board.slo_tpot_ns = node.slo_ttft_ns, node.slo_tpot_ns
        self._steps.fixed = bool(node.fixed)
        self._max_loss = max(0, node.max_loss_ppm) / 1e6
        if not self._elastic:
            return 0
        now_ns = time.monotonic_ns()
        return self._loans.lendable(
            AgentSaid(
                at_s=now_ns / NS_PER_S,
                mode=int(node.mode),
                lend_pages=self._asked_for(node),
                floor_pages=node.floor_pages,
                node_age_s=age_s(node.heartbeat_ns / NS_PER_S, now_ns / NS_PER_S),
            )
        )

    def _asked_for(self, node: NodeState) -> int:
        """Pages; of an agent that was not told of us none: its engine would hear no claim, and nobody would set it a deadline."""
        if node.has_serving or node.mode != Mode.ON:
            self._trouble.over("has_serving")
            return node.lend_pages
        says = "is of an agent whose node.toml has no [serving]: nothing is lent to it"
        self._trouble.say("has_serving", LedgerError(says, field=str(self._path / "node.state")))
        return 0

    def close(self) -> None:
        self._door.close()
        self._loans.close()
