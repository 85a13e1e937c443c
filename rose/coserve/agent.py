"""The node agent: the one process that starts, feeds, limits and kills the rollout engine of a device.

What it does, all on one event loop:

- owns ``node.state``: mode, loan, deadlines; written every period, so that its heartbeat is its liveness;
- runs the lending policy (``rose.policy.lending``) every period on what the shared files say, and carries out
  its actions: a new loan is published and woken, a kill is a SIGKILL for the engine's whole tree;
- keeps the rollout engine running while the mode is on: not before serving is ready, with bounded restarts; mode observe
  leaves nothing of it, mode off what is there (``rose.coserve.engine_keeper``);
- links it to rose-scheduler and to the relay (``rose.coserve.links``);
- answers ``rose node on|off|set|status`` (``rose.coserve.control``, ``rose.coserve.report``).

What the engines say in their files is read by ``rose.coserve.device``.

It decides no sizes itself; the policies do.  Production does not depend on it: when this process dies, the engine dies with it
(``rose.proc``), ``node.state`` has no writer any more, and serving takes all memory back.

Invariants: one agent per directory (the lock of ``node.state``); ``epoch`` rises with every change of mode or loan;
the loan in the file is the policy's; after ``run`` returns nothing of the engine lives, and our files are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

from rose.auth import Tokens
from rose.coserve import report
from rose.coserve.audit import AUDIT_EVERY_S
from rose.coserve.control import ControlServer
from rose.coserve.engine import REQUEST_S
from rose.coserve.engine_keeper import EngineKeeper
from rose.coserve.free_memory import GpuMemory
from rose.coserve.links import SchedulerUplink, WeightLoop, WeightSource, open_copies
from rose.coserve.node import Node
from rose.coserve.node_config import NodeConfig
from rose.coserve.policies import PolicyCopies
from rose.coserve.records import Mode
from rose.coserve.state_file import StateFile, take_over
from rose.decisions.event_format import LENDING
from rose.decisions.log import DecisionLog
from rose.errors import LedgerError, RequestError, RoseError
from rose.lineage import WeightVersion
from rose.policy.admission import Rule
from rose.policy.baselines import make_lending
from rose.policy.lending_events import ALL_PAGES, Action, Event, KillRollout, ModeSet, RlStepStarted, SetLend
from rose.policy.lending_policy import LendingPolicy
from rose.policy.watch import StepFloor
from rose.proc_share import lift_what_is_left
from rose.units import NS_PER_S
from rose.wire.workers import Heartbeat, HeartbeatAnswer

logger = logging.getLogger("rose.node")
DECISIONS_EVERY_S = 1.0
"""A killed agent loses at most this much of its decision log."""
STATUS_EVERY_S = 2.0
"""The engine's own status costs it a call to its workers."""
HURRIED_PERIOD_S = 0.005
AGAIN_S = 1.0
"""A job of the agent that broke begins anew after so long."""
RELEASE_AFTER_S = 5.0
"""How long nobody wants the device before its engine gives its memory back: a scheduler that was restarted has no job for a moment."""


class NodeAgent(Node):
    """See the module.  ``await run()`` once.

    Args:
        source: Where weight updates come from; None = the relay of the configuration.

    Raises:
        ConfigError: From ``run``, before anything was started.
        LedgerError: From ``run``: another agent owns the directory.
    """

    def __init__(
        self,
        config: NodeConfig,
        tokens: Tokens,
        source: WeightSource | PolicyCopies | None = None,
        changed_at_s: float = 0.0,
    ) -> None:
        super().__init__(config, changed_at_s)
        self._decisions = DecisionLog(
            config.decisions.directory or config.dir,
            f"lending-{config.node_id}",
            LENDING,
            self.policy,
            max_bytes=config.decisions.max_bytes if config.decisions.directory is not None else 0,
            max_files=config.decisions.max_files,
        )
        self._recorded_s = -math.inf
        self._tokens = tokens
        self._source = source
        self._step_floor = StepFloor()
        self._num_commits = 0
        self._unwanted_s: float | None = None
        self._order: Mode | None = None
        """What was ordered here last, to us or to a killed agent before us; None: the configuration counts."""
        self._core_seen_s = 0.0
        self._deadline_s: float | None = None
        self._stop = asyncio.Event()
        self._killing: asyncio.Task[None] | None = None
        self._engine_status: dict[str, Any] = {}
        self._keeper = EngineKeeper(
            self.engine,
            self,
            is_ordered=lambda: self._order is not None,
            give_back=lambda: self.wait_given_back(self.policy.reclaim_deadline_s),
            errors=self.errors,
        )

    # -- life -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until SIGTERM, SIGINT or :meth:`stop`."""
        self._order = self.mode if take_over(self) else None
        self._state = StateFile(self)  # first: it proves that we are the only one
        lift_what_is_left()
        left = False
        try:
            await self._run()
        except RoseError:
            left = self._leave_order()
            raise
        finally:
            with contextlib.suppress(OSError):
                self.config.socket_path.unlink()
            self._decisions.close()
            self._state.close()
            try:
                if not left:
                    self.dir.remove()
            except LedgerError as error:  # not our directory any more
                logger.warning("%s", error)

    def _leave_order(self) -> bool:
        """What was ordered outlives an agent that an error has ended, as it does a killed one: whoever starts it again has not read its file anew."""
        if self._order is None:
            return False
        self.mode = self._order
        try:
            self._publish()
        except LedgerError:  # another agent has our place
            return False
        return True

    async def _run(self) -> None:
        config = self.config
        if config.device.kind == "gpu":
            self.free.memory = GpuMemory(
                config.device.gpu
            )  # an agent that cannot see the device must not lend it
        if config.weights is not None:
            source = self._source or open_copies(config, config.weights, self._tokens)
            self.weights = WeightLoop(config.weights, config.weights_dir, self.engine, source)
        if config.scheduler is not None:
            self.uplink = SchedulerUplink(
                config,
                config.scheduler,
                self._tokens,
                self.engine,
                self.heartbeat,
                self.assign,
                self.refused,
            )
        control = ControlServer(self, config.socket_path, self._tokens)
        await control.start()
        self.released_because = self._released_because()
        self._log_anew()
        self._set_mode()
        if problem := self.unnamed_production:
            logger.error("nothing is lent: %s", problem)
        if not self.wants_engine and (problem := self.engine.look()):
            logger.warning("the rollout engine could not be started now: %s", problem)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        jobs = [self._govern, self._keeper.keep, self._watch_status, self.engine.watch_segments]
        jobs += [self._watch_books, self._keeper.end_unwanted, control.keep]
        jobs += [link.run for link in (self.uplink, self.weights, self.latency) if link is not None]
        tasks = [asyncio.create_task(self._outlast(job)) for job in jobs]
        stopped = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                task.result()  # none of them ends by itself: its error ends us
        finally:
            stopped.cancel()
            await self._leave(tasks, control)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def _outlast(self, job: Callable[[], Awaitable[None]]) -> None:
        """Run a job until it is cancelled.  What nobody has foreseen is logged, and the job begins anew: the engine is not ended for it.

        Raises:
            RoseError: The job's: the settings cannot be carried out, or another agent has our place.
        """
        said = ""
        while True:
            try:
                return await job()
            except RoseError:
                raise
            except Exception as error:
                if said != repr(error):  # one traceback, not one a second
                    said = repr(error)
                    logger.exception("%s broke, and begins anew", getattr(job, "__qualname__", job))
            await asyncio.sleep(AGAIN_S)

    async def _leave(self, tasks: list[asyncio.Task[None]], control: ControlServer) -> None:
        """Take the loan back, then end the engine; in that order, so that requests end with their tokens.

        The mode stays: killed before our file is gone, we leave the next agent what was ordered.
        """
        logger.info("stopping")
        self.want_engine = False
        self._stop.set()
        try:
            self._heed_assignment()
            if self.engine.running:
                await self.wait_given_back(self.policy.reclaim_deadline_s)
        except RoseError as error:
            logger.warning("while stopping: %s", error)
        except Exception:
            logger.exception("while stopping")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await control.stop()
        finally:
            await self.engine.stop()

    def stop(self) -> None:
        """Ask :meth:`run` to end."""
        self._stop.set()

    # -- lending --------------------------------------------------------------------------------------

    async def _govern(self) -> None:
        period_s = self.config.lending.period_s
        while True:
            self._round()
            # A lifted engine competes with production: look often, so that this ends with the cut.
            await asyncio.sleep(min(period_s, HURRIED_PERIOD_S) if self.engine.hurried else period_s)

    def _round(self) -> None:
        """Look at the files, ask the policy, obey it, show that we live."""
        device = self.device
        device.look()
        serving = device.serving_event(self.config.lending.dead_after_s)
        if serving is not None:
            self._handle(serving)
        self._handle(device.rollout_event(self.engine.exit_s))
        self._end_headless_engine()
        self._heed_assignment()
        if self.weights is not None and self.weights.num_commits != self._num_commits:
            self._num_commits = self.weights.num_commits
            self._handle(RlStepStarted(at_s=time.monotonic()))  # new weights: that is how a node knows
        # After the files: what the engine gave back before we read them is free by now.
        self._handle(self.free.tick(time.monotonic()))
        self._watch_production()
        self._publish()
        self.engine.hurry(self.policy.is_urgent)
        if time.monotonic() - self._recorded_s >= DECISIONS_EVERY_S:
            self._recorded_s = time.monotonic()
            self._decisions.flush()

    def _end_headless_engine(self) -> None:
        """Without its core an engine serves nobody, and what is left of it has memory: it is not waited for."""
        if self.device.rollout_seen or self.engine.state != "ready":
            self._core_seen_s = time.monotonic()
        elif time.monotonic() - self._core_seen_s > self.config.lending.dead_after_s:
            self._obey(KillRollout(reason="its engine core is gone"))

    def _watch_production(self) -> None:
        """Keep the books of mode observe; end harvesting when production broke its promises too often."""
        board, policy, now_s = self.device.board, self.policy, time.monotonic()
        if not self.device.serving_seen or board is None:
            return
        if isinstance(policy, LendingPolicy):
            self.observed.see(now_s, policy.target_pages, board.busy_ns / NS_PER_S)
        self._step_floor.see(board.step, board.step_ns / NS_PER_S, board.running)
        floor_s = self._step_floor.floor_s
        if self.mode == Mode.ON and floor_s is not None and self.slo_tpot_ms < floor_s * 1e3:
            self._switch_off(
                f"slo_tpot_ms of {self.slo_tpot_ms:g} is below production's own step of {floor_s * 1e3:.1f} ms"
            )
        lent = policy.held_pages > 0  # not by the engine's file alone, which outlives it
        if self.slo_guard.see(now_s, board.breaches, lent) and self.mode == Mode.ON:
            lending = self.config.lending
            self._switch_off(
                f"{lending.max_slo_breaches} broken promises of production within {lending.slo_window_s:g} s"
            )

    async def _watch_books(self) -> None:
        while True:
            await asyncio.sleep(AUDIT_EVERY_S)
            self.compare_books()

    def compare_books(self) -> None:
        """Stop lending where a rank's books do not agree with the kernel."""
        wrong = self.audit.look()
        if wrong and self.mode == Mode.ON:
            self._switch_off("; ".join(wrong), "audit")
        elif wrong:
            self.errors["audit"] = "; ".join(wrong)

    def _switch_off(self, reason: str, kind: str = "slo") -> None:
        """End harvesting by our own decision; an operator switches it on again."""
        logger.error("harvesting is off: %s; `rose node on` switches it on again", reason)
        self.errors[kind] = f"off: {reason}"
        self.mode = self._order = Mode.OFF
        self._set_mode()

    def _handle(self, event: Event) -> None:
        actions = self.policy.handle(event)
        self._decisions.record(event, actions)
        for action in actions:
            self._obey(action)

    def _obey(self, action: Action) -> None:
        match action:
            case SetLend():
                if action.deadline_s is not None or action.pages == 0:
                    logger.info("loan is %d pages: %s", action.pages, action.reason)
                self._deadline_s = action.deadline_s
            case KillRollout():
                if self._killing is None or self._killing.done():
                    self._killing = asyncio.create_task(self._kill(action.reason))

    async def _kill(self, reason: str) -> None:
        try:
            await self.engine.kill(reason)
        except RoseError as error:
            self.errors["kill"] = str(error)
            logger.critical("%s", error)

    def _set_mode(self) -> None:
        self._handle(
            ModeSet(
                at_s=time.monotonic(),
                mode=Mode.OFF if self.released else self.mode,
                floor_pages=self.floor_pages,
                max_lend_pages=self.max_lend_pages,
                has_serving=self.config.serving is not None,
            )
        )
        self._publish()

    def _publish(self) -> None:
        self._state.publish(self._deadline_s)

    # -- whom it serves -------------------------------------------------------------------------------

    def assign(self, answer: HeartbeatAnswer) -> None:
        """What rose-scheduler said last.  While it is away, that stays so."""
        self.assignment = answer
        self.told = self.told or answer.known
        if answer.active:
            self._unwanted_s = None
        elif self._unwanted_s is None:
            self._unwanted_s = time.monotonic()
        for kind in ("assignment", "node_id"):
            self.errors.pop(kind, None)
        self._heed_assignment()  # now: who reads that it has answered reads what follows from it
        if self.weights is not None and answer.floor_run is not None and answer.floor is not None:
            self.weights.require(answer.floor_run, WeightVersion.parse(answer.floor))
        if answer.run is None:
            if answer.own_run and self.weights is not None:
                self.weights.follow_own()
            return
        if self.weights is not None:
            self.weights.follow(answer.run)
        elif answer.run != self.engine.run:
            self.errors["assignment"] = (
                f"run {answer.run} is wanted, and no [weights] say where it is published"
            )

    def refused(self, why: str) -> None:
        """rose-scheduler does not know this node, for another one has its name: no order of the fleet's could reach it, so it lends
        nothing."""
        self.errors["node_id"] = why
        self.told = False

    def lend(self, seconds: float) -> None:
        """Its owner leaves a borrowed device to the engine for so long from now; 0: it wants it back.

        Raises:
            RequestError: The device has no owner that could.
        """
        if not self.config.borrowed:
            raise RequestError(
                "this device is not borrowed", field="seconds", fix="borrowed = true in node.toml"
            )
        self.lent_until_s = time.monotonic() + seconds
        self._heed_assignment()

    def _heed_assignment(self) -> None:
        because = self._released_because()
        if because != self.released_because:
            was, self.released_because = self.released_because, because
            if was and because:
                logger.info("%s", because)
            elif because:
                logger.info("%s: its engine gives back what it holds", because)
            else:
                logger.info("this device is the engine's, for job %s", self.assignment.job or "any")
            self._set_mode()

    def _released_because(self) -> str:
        if self._stop.is_set():
            return "the agent is stopping"
        if reason := self.unnamed_production:
            return reason
        if self.lent_s == 0.0:
            return "its owner has this device"
        if self.assignment.held:
            return "the fleet is switched off here (rose fleet on)"
        if not self.told:
            if "node_id" in self.errors:
                return f"another node has the node_id {self.config.node_id}"
            if self.engine.state != "ready":
                return "the rollout engine is not ready yet; once it is, rose-scheduler is asked whether the fleet is on"
            return "rose-scheduler has not answered yet whether the fleet is on"
        if self._unwanted_s is not None and time.monotonic() - self._unwanted_s >= RELEASE_AFTER_S:
            return "no job wants this device"
        return ""

    # -- commands (rose.coserve.control) --------------------------------------------------------------

    def change(
        self,
        *,
        mode: Mode | None = None,
        floor_pages: int | None = None,
        max_lend_pages: int | None = None,
        slo_ttft_ms: float | None = None,
        slo_tpot_ms: float | None = None,
        policy: str | None = None,
        rule: Rule | None = None,
        serialise: bool | None = None,
        stop_at_layers: bool | None = None,
        first_token_reserve: float | None = None,
        rl_step: bool = False,
    ) -> None:
        """Apply an operator's wish at once.

        Raises:
            RequestError: A value out of range; nothing was changed.
        """
        if self.config.serving is None and any(
            v is not None for v in (floor_pages, slo_ttft_ms, slo_tpot_ms)
        ):
            raise RequestError("this device has no serving engine", field="serving")
        for name, value in (("floor_pages", floor_pages), ("max_lend_pages", max_lend_pages)):
            if value is not None and not 0 <= value <= ALL_PAGES:
                raise RequestError(f"must be 0..{ALL_PAGES}, got {value}", field=name)
        for name, value in (("slo_ttft_ms", slo_ttft_ms), ("slo_tpot_ms", slo_tpot_ms)):
            if value is not None and not 0.0 < value < 1e9:
                raise RequestError(f"must be a positive number, got {value}", field=name)
        floor_s = self._step_floor.floor_s
        if slo_tpot_ms is not None and floor_s is not None and slo_tpot_ms < floor_s * 1e3:
            raise RequestError(
                f"{slo_tpot_ms:g} is below production's own step of {floor_s * 1e3:.1f} ms",
                field="slo_tpot_ms",
            )
        total = self.policy.total_pages
        if floor_pages is not None and 0 < total < floor_pages:
            raise RequestError(
                f"{floor_pages} is more than the {total} pages of the device", field="floor_pages"
            )
        turns = self.serialise if serialise is None else serialise
        stops = self.stop_at_layers if stop_at_layers is None else stop_at_layers
        if problem := self.no_stops(turns, stops):
            raise RequestError(problem, field="stop_at_layers", fix="serialise as well")
        if mode is not None:
            for kind in ("slo", "audit"):
                self.errors.pop(kind, None)
            self.slo_guard.forgive()
            if mode != self.mode:
                self.observed.clear()
                self.engine.forgive()
            self.mode = self._order = mode
            if self.wants_engine:
                self.engine.look()
        self.floor_pages = self.floor_pages if floor_pages is None else floor_pages
        self.max_lend_pages = self.max_lend_pages if max_lend_pages is None else max_lend_pages
        self.slo_ttft_ms = self.slo_ttft_ms if slo_ttft_ms is None else slo_ttft_ms
        self.slo_tpot_ms = self.slo_tpot_ms if slo_tpot_ms is None else slo_tpot_ms
        self.rule = self.rule if rule is None else rule
        self.serialise, self.stop_at_layers = turns, stops
        if first_token_reserve is not None:
            self.first_token_reserve = first_token_reserve
        if policy is not None and policy != self.policy_name:
            before, self.policy_name = self.policy, policy
            self.policy = make_lending(policy, self.config.lending.params())
            self.policy.take_over(before)
            self._log_anew()
        if rl_step:
            self._handle(RlStepStarted(at_s=time.monotonic()))
        asked = {
            "floor_pages": floor_pages,
            "max_lend_pages": max_lend_pages,
            "slo_ttft_ms": slo_ttft_ms,
            "slo_tpot_ms": slo_tpot_ms,
            "policy": policy,
            "rule": None if rule is None else rule.name.lower(),
            "serialise": serialise,
            "stop_at_layers": stop_at_layers,
            "first_token_reserve": first_token_reserve,
        }
        said = "".join(f", {name} {value}" for name, value in asked.items() if value is not None)
        logger.info(
            "mode %s, floor %d pages%s", self.mode.name.lower(), self.floor_pages, said and "; set" + said[1:]
        )
        self._set_mode()

    async def set_engine(self, wanted: bool) -> None:
        """Start or stop the engine process itself, apart from what it may hold."""
        self.want_engine = wanted
        if wanted:
            self.engine.forgive()
        else:
            await self.engine.stop()

    def _log_anew(self) -> None:
        """No event says which policy rules: a decision log begins with the books of the one that does."""
        self._decisions.book = self.policy
        self._decisions.roll()

    async def wait_given_back(self, timeout_s: float) -> bool:
        """Wait until the rollout engine holds no page, by its own word and by its workers'; False: it still does."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            self._round()
            if self.device.held_pages() == 0:
                return True
            await asyncio.sleep(0.02)
        return False

    async def proof(self, timeout_s: float = REQUEST_S) -> dict[str, Any]:
        """What the rollout engine holds, from three sources that do not know each other."""
        return await report.proof(self, timeout_s)

    # -- what others see ------------------------------------------------------------------------------

    async def _watch_status(self) -> None:
        while True:
            if self.engine.state == "ready":
                try:
                    status = await self.engine.refresh_status()
                    scheduler = status.get("scheduler")
                    self._engine_status = scheduler if isinstance(scheduler, dict) else {}
                    if self.engine.weights_broken:  # the answer to the commit was lost, or another one's
                        await self.engine.kill_broken()
                except RoseError as error:
                    logger.debug("engine status: %s", error)
            await asyncio.sleep(STATUS_EVERY_S)

    def heartbeat(self, incarnation: str, seq: int) -> Heartbeat:
        """The engine's next heartbeat to rose-scheduler."""
        return report.heartbeat(self, self._engine_status, self._stop.is_set(), incarnation, seq)

    def status(self) -> dict[str, Any]:
        """Everything in force on this device, for ``rose node status``."""
        return report.status(self)
