"""The node agent: the one process that starts, feeds, limits and kills the rollout engine of a device.

What it does, all on one event loop:

- owns ``node.state``: mode, loan, deadlines; written every period, so that its heartbeat is its liveness;
- runs the lending policy (``rose.policy.lending``) every period on what the shared files say, and carries out
  its actions: a new loan is published and woken, a kill is a SIGKILL for the engine's whole tree;
- keeps the rollout engine running: not before serving is ready, with bounded restarts;
- links it to rose-scheduler and to the relay (``rose.coserve.links``);
- answers ``rose node on|off|set|status`` (``rose.coserve.control``).

What it decides itself: nothing about sizes.  And production depends on nothing here: when this process dies the
engine dies with it (``rose.proc``), ``node.state`` has no writer any more, and serving takes all memory back.

Invariants: one agent per directory (the lock of ``node.state``); ``epoch`` rises with every change of mode or loan;
the loan in the file is the policy's; after ``run`` returns nothing of the engine lives, and our files are gone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import signal
import time
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any, TypeVar

from rose.auth import Tokens
from rose.coserve.config import NodeConfig
from rose.coserve.control import ControlServer
from rose.coserve.engine import RolloutEngine
from rose.coserve.latency import ServingLatency
from rose.coserve.ledger import (
    Mode,
    NodeDir,
    NodeState,
    Phase,
    RecordReader,
    RolloutLease,
    ServingBoard,
    ServingLease,
)
from rose.coserve.links import SchedulerUplink, WeightLoop, WeightSource, open_weight_source
from rose.decisions.log import DecisionLog
from rose.decisions.words import LENDING
from rose.errors import ConfigError, LedgerError, RequestError, RoseError
from rose.policy.admission import BoardView, Rule, slack
from rose.policy.baselines import POLICIES, make_lending
from rose.policy.compat import Support, row_of_number
from rose.policy.lending import (
    ALL_PAGES,
    Action,
    Event,
    KillRollout,
    Lending,
    LendingPolicy,
    ModeSet,
    RlStepStarted,
    RolloutReported,
    ServingReported,
    SetLend,
    Tick,
)
from rose.policy.watch import Harvestable, SloGuard, StepFloor
from rose.units import NS_PER_S, PAGE_BYTES

logger = logging.getLogger("rose.node")

R = TypeVar("R")
DECISIONS_EVERY_S = 1.0
"""A killed agent loses at most this much of its decision log."""
STATUS_EVERY_S = 2.0
"""The engine's own status costs it a call to its workers."""
HURRIED_PERIOD_S = 0.005
TAKE_OVER_S = 600.0
"""How long the settings of an agent that was killed outlive it."""
_RESTART_PAUSE_S = 1.0


class NodeAgent:
    """See the module.  ``await run()`` once.

    Args:
        source: Where weight updates come from; None = the relay of the configuration.

    Raises:
        ConfigError: From ``run``, before anything was started.
        LedgerError: From ``run``: another agent owns the directory.
    """

    def __init__(self, config: NodeConfig, tokens: Tokens, source: WeightSource | None = None) -> None:
        self.config = config
        self.dir = NodeDir(config.dir)
        self.engine = RolloutEngine(config)
        self.policy: Lending = make_lending(config.lending.policy, config.lending.params())
        self.policy_name: str = config.lending.policy
        self._decisions = DecisionLog(
            config.decisions.directory or config.dir,
            f"lending-{config.node_id}",
            LENDING,
            self.policy,
            max_bytes=config.decisions.max_bytes if config.decisions.directory is not None else 0,
            max_files=config.decisions.max_files,
        )
        self._recorded_s = -math.inf
        self.rule = Rule[config.gate.rule.upper()]
        self.serialise = config.gate.serialise
        serving = config.serving
        self.mode = Mode[config.mode.upper()]
        self.floor_pages = serving.floor_pages if serving else 0
        self.max_lend_pages = config.lending.max_lend_pages
        self.slo_ttft_ms = serving.slo_ttft_ms if serving else 0.0
        self.slo_tpot_ms = serving.slo_tpot_ms if serving else 0.0
        self.want_engine = True
        self.errors: dict[str, str] = {}
        self.lease: ServingLease | None = None
        self.board: ServingBoard | None = None
        self.rollout: RolloutLease | None = None
        self._tokens = tokens
        self._source = source
        self._uplink: SchedulerUplink | None = None
        self._weights: WeightLoop | None = None
        metrics_url = None if serving is None else serving.metrics_url
        self.latency = None if metrics_url is None else ServingLatency(metrics_url)
        self.observed = Harvestable()
        self._step_floor = StepFloor()
        self._slo_guard = SloGuard(config.lending.max_slo_breaches, config.lending.slo_window_s)
        self._num_commits = 0
        self._lease_file = self.dir.serving_lease()
        self._board_file = self.dir.serving_board()
        self._rollout_file = self.dir.rollout_lease()
        self._deadline_s: float | None = None
        self._epoch = 0
        self._published: tuple[int, ...] = ()
        self._stop = asyncio.Event()
        self._killing: asyncio.Task[None] | None = None
        self._engine_status: dict[str, Any] = {}

    # -- life -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until SIGTERM, SIGINT or :meth:`stop`."""
        config = self.config
        self._take_over()
        self._state = self.dir.node_writer()  # first: it proves that we are the only one
        made_weights = not config.weights_dir.exists() and config.weights_dir.is_relative_to(config.dir)
        try:
            await self._run()
        finally:
            config.socket_path.unlink(missing_ok=True)
            self._decisions.close()
            if made_weights:
                shutil.rmtree(config.weights_dir, ignore_errors=True)
            self._state.close()
            self.dir.remove()

    def _take_over(self) -> None:
        """Go on as the operator told an agent that was killed a moment ago: one who switched off must not find it on.

        An agent that ended by itself leaves no file, and then the configuration counts.
        """
        reader = self.dir.node()
        try:
            last = reader.read()
            if last is None or reader.alive() or _age_s(last.heartbeat_ns) > TAKE_OVER_S:
                return
            mode, rule, policy = Mode(last.mode), Rule(last.rule), POLICIES[max(0, last.policy)]
        except (LedgerError, ValueError, IndexError):
            return
        finally:
            reader.close()
        if mode != self.mode:
            logger.warning(
                "mode %s, as the agent that died here had it (configured: %s)",
                mode.name.lower(),
                self.config.mode,
            )
        self.mode, self.rule, self.serialise = mode, rule, bool(last.serialise)
        self.max_lend_pages = max(0, last.max_lend_pages)
        if policy != self.policy_name:
            self.policy_name, self.policy = policy, make_lending(policy, self.config.lending.params())
        if self.config.serving is not None and last.slo_ttft_ns > 0 and last.slo_tpot_ns > 0:
            self.floor_pages = last.floor_pages
            self.slo_ttft_ms, self.slo_tpot_ms = last.slo_ttft_ns / 1e6, last.slo_tpot_ns / 1e6

    async def _run(self) -> None:
        config = self.config
        if config.weights is not None:
            source = self._source or open_weight_source(config, config.weights, self._tokens)
            self._weights = WeightLoop(config.weights, config.weights_dir, self.engine, source)
        if config.scheduler is not None:
            self._uplink = SchedulerUplink(
                config, config.scheduler, self._tokens, self.engine, self.heartbeat
            )
        control = ControlServer(self, config.socket_path, self._tokens)
        await control.start()
        self._decisions.roll()
        self._set_mode()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        jobs: list[Coroutine[Any, Any, None]] = [self._govern(), self._keep_engine(), self._watch_status()]
        jobs += [link.run() for link in (self._uplink, self._weights, self.latency) if link is not None]
        tasks = [asyncio.create_task(job) for job in jobs]
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

    async def _leave(self, tasks: list[asyncio.Task[None]], control: ControlServer) -> None:
        """Take the loan back, then end the engine; in that order, so that requests end with their tokens."""
        logger.info("stopping")
        self.want_engine = False
        self.mode = Mode.OFF
        try:
            self._set_mode()
            if self.engine.running:
                await self.wait_given_back(self.config.lending.reclaim_deadline_s)
        except RoseError as error:
            logger.warning("while stopping: %s", error)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await control.stop()
        await self.engine.stop()

    def stop(self) -> None:
        """Ask :meth:`run` to end."""
        self._stop.set()

    async def _keep_engine(self) -> None:
        """Start the engine when serving is ready, and again when it ended."""
        while True:
            if not self.want_engine or self.waits_for() is not None:
                await asyncio.sleep(0.1)
                continue
            if not self.engine.may_start:
                self.engine.give_up()
                await asyncio.sleep(0.1)
                continue
            first = self.engine.num_starts == 0
            try:
                await self.engine.start()
                await self.engine.wait_exit()
            except ConfigError as error:
                if first:
                    raise  # wrong from the beginning: say so and end
                self.engine.error = str(error)  # it ran before: what is wrong now may pass
                logger.error("rollout engine: %s", error)
            except RoseError as error:
                logger.error("rollout engine: %s", error)
            await self.engine.stop(grace_s=0.0)
            await asyncio.sleep(_RESTART_PAUSE_S)

    def waits_for(self) -> str | None:
        """Why the engine may not be started now: serving sizes its memory first."""
        if self.config.serving is None:
            return None
        if self.lease is None or not self._alive(self._lease_file):
            return "serving is not there"
        if self.lease.phase == Phase.OFF:
            because = row_of_number(self.lease.row)
            return f"serving does not share: {because.feature}: {because.reason}"
        return None if self.lease.phase == Phase.READY else "serving is not ready"

    async def set_engine(self, wanted: bool) -> None:
        """Start or stop the engine process itself, apart from what it may hold."""
        self.want_engine = wanted
        if wanted:
            self.engine.forgive()
        else:
            await self.engine.stop()

    # -- lending --------------------------------------------------------------------------------------

    async def _govern(self) -> None:
        period_s = self.config.lending.period_s
        while True:
            self._round()
            # A lifted engine competes with production: look often, so that this ends with the cut.
            await asyncio.sleep(min(period_s, HURRIED_PERIOD_S) if self.engine.hurried else period_s)

    def _round(self) -> None:
        """Look at the files, ask the policy, obey it, show that we live."""
        self.lease, lease_alive = self._look(self._lease_file, self.lease)
        self.board, board_alive = self._look(self._board_file, self.board)
        self.rollout, rollout_alive = self._look(self._rollout_file, self.rollout)
        if self.lease is not None:
            self._handle(self._serving_event(self.lease, lease_alive and board_alive))
        self._handle(self._rollout_event(rollout_alive))
        if self._weights is not None and self._weights.num_commits != self._num_commits:
            self._num_commits = self._weights.num_commits
            self._handle(RlStepStarted(at_s=time.monotonic()))  # new weights: that is how a node knows
        self._handle(Tick(at_s=time.monotonic()))
        self._watch_production(lease_alive and board_alive)
        self._publish()
        self.engine.hurry(rollout_alive and self.policy.is_urgent)
        if time.monotonic() - self._recorded_s >= DECISIONS_EVERY_S:
            self._recorded_s = time.monotonic()
            self._decisions.flush()

    def _watch_production(self, alive: bool) -> None:
        """Keep the books of mode observe; end harvesting when production broke its promises too often."""
        board, policy, now_s = self.board, self.policy, time.monotonic()
        if not alive or board is None:
            return
        if isinstance(policy, LendingPolicy):
            self.observed.see(now_s, policy.target_pages, board.busy_ns / NS_PER_S)
        self._step_floor.see(board.step, board.step_ns / NS_PER_S, board.running)
        floor_s = self._step_floor.floor_s
        if self.mode == Mode.ON and floor_s is not None and self.slo_tpot_ms < floor_s * 1e3:
            self._switch_off(
                f"slo_tpot_ms of {self.slo_tpot_ms:g} is below production's own step of {floor_s * 1e3:.1f} ms"
            )
        lent = self.rollout is not None and self.rollout.reserved_pages > 0
        if self._slo_guard.see(now_s, board.breaches, lent) and self.mode == Mode.ON:
            lending = self.config.lending
            self._switch_off(
                f"{lending.max_slo_breaches} broken promises of production within {lending.slo_window_s:g} s"
            )

    def _switch_off(self, reason: str) -> None:
        """End harvesting by our own decision; an operator switches it on again."""
        logger.error("harvesting is off: %s; `rose node on` switches it on again", reason)
        self.errors["slo"] = f"off: {reason}"
        self.mode = Mode.OFF
        self._set_mode()

    def _look(self, file: RecordReader[R], last: R | None) -> tuple[R | None, bool]:
        """The record and whether its writer lives; a damaged file is a dead writer, recorded once."""
        name = file.path.name
        try:
            record = file.read()
            alive = record is not None and file.alive()
        except LedgerError as error:
            if self.errors.get(name) != str(error):
                logger.error("%s", error)
            self.errors[name] = str(error)
            return last, False
        self.errors.pop(name, None)
        return record, alive

    def _alive(self, file: RecordReader[Any]) -> bool:
        try:
            return file.alive()
        except LedgerError:
            return False

    def _serving_event(self, lease: ServingLease, alive: bool) -> ServingReported:
        board = self.board or ServingBoard()
        fresh = _age_s(lease.heartbeat_ns) <= self.config.lending.dead_after_s
        return ServingReported(
            at_s=time.monotonic(),
            alive=alive and fresh,
            phase=lease.phase,
            total_pages=max(0, lease.total_pages),
            reserved_pages=max(0, lease.reserved_pages),
            used_pages=max(0, board.used_pages),
            needed_pages=max(0, board.needed_pages),
            pressure_seq=board.pressure_seq,
            compute_only=lease.support == Support.COMPUTE_ONLY,
        )

    def _rollout_event(self, alive: bool) -> RolloutReported:
        """What the engine holds.  A process that is gone holds nothing, whatever it wrote last."""
        lease = self.rollout if alive and self.rollout is not None else RolloutLease()
        return RolloutReported(
            at_s=time.monotonic(),
            alive=alive,
            phase=lease.phase,
            reserved_pages=max(0, lease.reserved_pages),
            wanted_pages=max(0, lease.wanted_pages),
            reclaim_seq=lease.reclaim_seq,
        )

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
                mode=self.mode,
                floor_pages=self.floor_pages,
                max_lend_pages=self.max_lend_pages,
                has_serving=self.config.serving is not None,
            )
        )
        self._publish()

    def _publish(self) -> None:
        """Write ``node.state``; wake its readers when something besides the heartbeat changed."""
        now = (
            int(self.mode),
            self.policy.lend_pages,
            self.floor_pages,
            int(self.slo_ttft_ms * 1e6),
            int(self.slo_tpot_ms * 1e6),
            int(self.rule),
            int(self.serialise),
            int(self.policy_name == "static"),
            POLICIES.index(self.policy_name),
            self.max_lend_pages,
            round(100 * self.engine.delay),
        )
        if self._state.mend():
            logger.warning("%s was written by another process, or cut off; mended", self._state.path)
        changed = now != self._published
        if changed and now[:2] != self._published[:2]:
            self._epoch += 1
        self._published = now
        self._state.write(
            NodeState(
                mode=now[0],
                epoch=self._epoch,
                lend_pages=now[1],
                floor_pages=now[2],
                deadline_ns=int(self._deadline_s * NS_PER_S) if self._deadline_s else 0,
                slo_ttft_ns=now[3],
                slo_tpot_ns=now[4],
                has_serving=self.config.serving is not None,
                rule=now[5],
                serialise=now[6],
                fixed=now[7],
                policy=now[8],
                max_lend_pages=now[9],
                delay_pct=now[10],
                heartbeat_ns=time.monotonic_ns(),
            )
        )
        if changed:
            self._state.wake()

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
        if mode is not None:
            self.errors.pop("slo", None)
            self._slo_guard.forgive()
            if mode != self.mode:
                self.observed.clear()
        self.mode = self.mode if mode is None else mode
        self.floor_pages = self.floor_pages if floor_pages is None else floor_pages
        self.max_lend_pages = self.max_lend_pages if max_lend_pages is None else max_lend_pages
        self.slo_ttft_ms = self.slo_ttft_ms if slo_ttft_ms is None else slo_ttft_ms
        self.slo_tpot_ms = self.slo_tpot_ms if slo_tpot_ms is None else slo_tpot_ms
        self.rule = self.rule if rule is None else rule
        self.serialise = self.serialise if serialise is None else serialise
        if policy is not None and policy != self.policy_name:
            before, self.policy_name = self.policy, policy
            self.policy = make_lending(policy, self.config.lending.params())
            self.policy.take_over(before)
            self._decisions.book = self.policy  # no event says so: the log goes on from the books as they are
            self._decisions.roll()
        if rl_step:
            self._handle(RlStepStarted(at_s=time.monotonic()))
        logger.info("mode %s, floor %d pages", self.mode.name.lower(), self.floor_pages)
        self._set_mode()

    async def wait_given_back(self, timeout_s: float) -> bool:
        """Wait until the rollout engine holds no page, by its own word and by its workers'; False: it still does."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            self._round()
            if self.held_pages() == 0:
                return True
            await asyncio.sleep(0.02)
        return False

    def held_pages(self) -> int:
        """Pages of the rollout engine: reserved, or still resident in one of its workers."""
        alive = self._alive(self._rollout_file)
        reserved = self.rollout.reserved_pages if self.rollout is not None and alive else 0
        # Asked also where the engine core is dead or its file damaged: workers hold memory by themselves.
        return max(reserved, sum(self.resident_pages().values()))

    def resident_pages(self) -> dict[int, int]:
        """What each live worker of the rollout engine holds, by the kernel's word in its file."""
        found: dict[int, int] = {}
        for rank in self.dir.ranks("rollout"):
            reader = self.dir.rank("rollout", rank)
            try:
                record = reader.read() if reader.alive() else None
            except LedgerError:
                record = None
            finally:
                reader.close()
            if record is not None:
                found[rank] = record.resident_pages
        return found

    async def proof(self) -> dict[str, Any]:
        """What the rollout engine holds, from three sources that do not know each other."""
        try:
            status = await self.engine.refresh_status() if self.engine.state == "ready" else {}
        except RoseError:
            status = {}  # dead or too busy to answer: the files and the kernel still speak
        scheduler = status.get("scheduler")
        resident = scheduler.get("resident_bytes") if isinstance(scheduler, dict) else None
        return {
            "reserved_pages": self.rollout.reserved_pages if self.rollout and self.engine.running else 0,
            "resident_pages": sum(self.resident_pages().values()),
            "engine_kv_resident_bytes": resident if isinstance(resident, int) else None,
            "engine_rss_bytes": await asyncio.to_thread(self.engine.rss_bytes),
            "gate_open": bool(self.rollout.gate_open) if self.rollout and self.engine.running else False,
            "steps": self.rollout.steps if self.rollout else 0,
        }

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

    def heartbeat(self) -> dict[str, Any]:
        """The agent's part of a heartbeat to rose-scheduler."""
        ready = self.engine.state == "ready" and self.mode == Mode.ON
        state = "ready" if ready else "stopping" if self._stop.is_set() else "starting"
        rollout = self.rollout if self.engine.running else None
        budget, used = self._tokens_of(rollout)
        slack_s = self._slack_s()
        return {
            "version": self.engine.version,
            "state": state,
            "kv_budget_tokens": budget,
            "kv_used_tokens": used,
            "running": _count(self._engine_status.get("running")) or 0,
            "waiting": _count(self._engine_status.get("waiting")) or 0,
            "num_preemptions": _count(self._engine_status.get("num_preemptions")) or 0,
            "gated": rollout is not None and not rollout.gate_open,
            "reclaim_seq": rollout.reclaim_seq if rollout is not None else 0,
            "slack_s": slack_s,
            "serving_use": self._serving_use(),
            "slo_breaches": self.board.breaches if self.board is not None else 0,
            **self._promises(),
        }

    def _promises(self) -> dict[str, float]:
        """Production's P99 beside what it promises, in seconds."""
        p99_s = {} if self.latency is None else self.latency.p99_s
        promised = {"ttft": self.slo_ttft_ms / 1e3, "tpot": self.slo_tpot_ms / 1e3}
        return {f"serving_{kind}_p99_s": value for kind, value in p99_s.items()} | {
            f"slo_{kind}_s": promised[kind] for kind in p99_s
        }

    def _serving_use(self) -> float:
        """Share of the device's KV memory that production uses."""
        if self.board is None or self.lease is None or not self.lease.total_pages:
            return 0.0
        return min(1.0, self.board.used_pages / self.lease.total_pages)

    def _tokens_of(self, rollout: RolloutLease | None) -> tuple[int | None, int | None]:
        """KV budget and use in tokens; the budget follows the lease, which is newer than the engine's status."""
        status = self._engine_status
        budget, used = _count(status.get("budget_tokens")), _count(status.get("used_tokens"))
        pages = _count(status.get("usable_pages"))
        if rollout is None or budget is None or not pages:
            return budget, used
        return budget * rollout.reserved_pages // pages, used

    def _slack_s(self) -> float | None:
        board = self.board
        if self.config.serving is None or board is None or not self._alive(self._board_file):
            return None
        view = BoardView(
            busy=bool(board.busy),
            running=board.running,
            waiting=board.waiting,
            ttft_deadline_s=board.ttft_deadline_ns / NS_PER_S if board.ttft_deadline_ns else None,
            tpot_deadline_s=board.tpot_deadline_ns / NS_PER_S if board.tpot_deadline_ns else None,
            step_started_s=board.step_started_ns / NS_PER_S,
            step_s=board.step_ns / NS_PER_S,
        )
        if view.idle:
            return None
        value, _ = slack(time.monotonic(), view, 0.0)
        return value if math.isfinite(value) else None

    def status(self) -> dict[str, Any]:
        """Everything in force on this device, for ``rose node status``."""
        policy = self.policy
        lending: dict[str, Any] = {
            "policy": self.policy_name,
            "rule": self.rule.name.lower() + (", serialised" if self.serialise else ""),
            "lend_pages": policy.lend_pages,
            "reason": policy.blocked or policy.reason,
            "cap_pages": policy.cap_pages,
            "headroom_pages": policy.headroom_pages,
            "reclaim_p99_s": policy.reclaim_p99_s,
            "cuts": policy.num_cuts,
        }
        if isinstance(policy, LendingPolicy):
            lending["need_pages"] = policy.need_pages
            lending["watermark_pages"] = policy.watermark_pages
            lending["harvestable_pages"] = policy.target_pages
        lease, board, rollout = self.lease, self.board, self.rollout
        observed = self.observed.report()
        return {
            "node_id": self.config.node_id,
            "pid": os.getpid(),
            "tier": self.config.tier,
            "mode": self.mode.name.lower(),
            "epoch": self._epoch,
            "page_bytes": PAGE_BYTES,
            "slo_ttft_ms": self.slo_ttft_ms,
            "slo_tpot_ms": self.slo_tpot_ms,
            "floor_pages": self.floor_pages,
            "lending": lending,
            "observed": None if observed is None else asdict(observed),
            "serving": {
                "alive": self._alive(self._lease_file),
                "phase": _phase(lease),
                "support": _support(lease),
                "because": row_of_number(lease.row).feature if lease else "",
                "total_pages": lease.total_pages if lease else 0,
                "reserved_pages": lease.reserved_pages if lease else 0,
                "used_pages": board.used_pages if board else 0,
                "claim_pages": board.claim_pages(lease.reserved_pages) if board and lease else 0,
                "pressure_seq": board.pressure_seq if board else 0,
                "errors": lease.errors if lease else 0,
                "slo_breaches": board.breaches if board else 0,
                "slo_breaches_while_lending": self._slo_guard.total,
                "p99_s": None if self.latency is None else dict(self.latency.p99_s),
                "metrics_error": None if self.latency is None else self.latency.error,
            },
            "rollout": {
                "alive": self._alive(self._rollout_file),
                "phase": _phase(rollout),
                "reserved_pages": rollout.reserved_pages if rollout else 0,
                "resident_pages": sum(self.resident_pages().values()),
                "gate_open": bool(rollout.gate_open) if rollout else False,
                "steps": rollout.steps if rollout else 0,
                "tokens": rollout.tokens if rollout else 0,
                "reclaim_seq": rollout.reclaim_seq if rollout else 0,
                "cut_requests": rollout.cut_requests if rollout else 0,
            },
            "engine": {**self.engine.describe(), "waits_for": self.waits_for()},
            "scheduler": None
            if self._uplink is None
            else {"connected": self._uplink.connected, "error": self._uplink.error},
            "weights": None
            if self._weights is None
            else {
                "newest": str(self._weights.newest) if self._weights.newest is not None else None,
                "commits": self._weights.num_commits,
                "error": self._weights.error,
                "last": self._weights.last,
            },
            "errors": dict(self.errors),
        }


def _age_s(at_ns: int) -> float:
    """Seconds since a CLOCK_MONOTONIC stamp; a stamp from the future is as wrong as one from long ago."""
    age_s = (time.monotonic_ns() - at_ns) / NS_PER_S
    return age_s if age_s > -1.0 else math.inf


def _count(value: Any) -> int | None:
    """A count out of an engine's answer; None unless it is one."""
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def _support(lease: ServingLease | None) -> str:
    """``elastic``, ``compute-only``, ``refused``; ``unknown`` while production is not there."""
    return Support(lease.support).label if lease is not None and lease.support in list(Support) else "unknown"


def _phase(lease: ServingLease | RolloutLease | None) -> str:
    try:
        return Phase(lease.phase).name.lower() if lease is not None else "absent"
    except ValueError:
        return "unknown"
