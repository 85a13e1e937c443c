"""The rollout engine as the node agent holds it: one process tree, and the routes that it answers.

What it decides: how the engine is started, and when it has been started too often.  Not whether it should run,
nor what it may hold: that is the agent's and the policies'.

Every start is an *incarnation* with a token of its own, which guards the engine's routes; the token travels in
the environment and to rose-scheduler, never in argv or a log.  The process dies with this one (``rose.proc``).
All calls come from one event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil

from rose.auth import bearer
from rose.coserve import mps, outside
from rose.coserve.engine_args import derived_args
from rose.coserve.engine_log import EngineLog
from rose.coserve.node_config import EngineConfig, NodeConfig
from rose.coserve.step_profile import load_profile
from rose.errors import ConfigError, EngineError, RequestError, RoseError
from rose.lineage import Lineage, WeightVersion, check_run
from rose.policy import deadlines
from rose.policy.engine_start import EngineSize, Restarts
from rose.policy.ladder import DeviceFacts, choose
from rose.proc import Child, Listener, ProcSpec, open_log, require_free_port
from rose.proc_tree import GUARD_S
from rose.shared_memory import EngineSegments
from rose.wire.errors import read_refusal
from rose.wire.hosts import in_url, to_call
from rose.wire.http_client import ask, open_client

logger = logging.getLogger("rose.node")

MAX_ANSWER_BYTES = 4 << 20
SEGMENTS_FILE = "engine.segments"
"""In the node directory: the shared memory that an engine which is killed would leave."""
REQUEST_S = 10.0
_NOTE_STARTING_S, _NOTE_READY_S = 0.5, 5.0
"""How often the engine's shared memory is looked at: it makes nearly all of it before it is ready."""
SENTINEL_AGAIN_S = 30.0
"""A sentinel that ends by itself is not started more often: each start costs a second of a core."""


class RolloutEngine:
    """Starts, watches and ends the rollout engine.

    Attributes:
        state: ``down``, ``starting``, ``ready``, ``dying`` (until the last process of its tree is gone) or ``failed`` (restarted too
            often).
        exits_s: What the last trees took to be gone after they were killed.
        lineage: Weights that all ranks run; None = unknown.
        size: What it was last started with beside production; None: nothing, or the device is its own.
        weights_broken: A rank could not undo a failed commit.  The engine stays paused; only a restart helps.
    """

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.url = f"http://{in_url(to_call(config.engine.host))}:{config.engine.port}"
        self.state = "down"
        self.error = ""
        self.incarnation = ""
        self.lineage: Lineage | None = None
        self.vocab_size: int | None = None
        """Token ids that the model knows; None until the engine has said it."""
        self.max_num_seqs: int | None = None
        self.logprobs_mode: str | None = None
        self.weights_broken = False
        self.token = ""
        self.num_starts = 0
        self.num_kills = 0
        self.exits_s: deque[float] = deque(maxlen=deadlines.EXITS_REMEMBERED)
        self.segments = EngineSegments(config.dir / SEGMENTS_FILE)
        self.log = EngineLog(config)
        self._child: Child | None = None
        self._listener: Listener | None = None
        """Of the engine that was started last, once it has answered: before each call, for the token may go to nobody else."""
        self._sentinel: subprocess.Popen[bytes] | None = None
        self._sentinel_at_s = 0.0
        self._client: httpx.AsyncClient | None = None
        engine = config.engine
        self.restarts = Restarts(engine.max_restarts, engine.restart_window_s, engine.restart_pause_s)
        self.size: EngineSize | None = None
        self._own_ladder: dict[str, Any] | None = None
        self._mps_control: str | None = None
        self._stop_asked = False
        """Since the last start began."""
        self._ending, self._killing = asyncio.Lock(), asyncio.Lock()
        self._killed_s: float | None = None
        """When it was killed, until nothing of it is left."""
        self._hurried = False
        self._warned = False
        self._sched: Literal["normal", "batch", "idle"] = config.engine.sched or (
            "normal" if config.serving is None else "idle"
        )

    @property
    def exit_s(self) -> float:
        """The longest of them; 0 = none was killed."""
        return max(self.exits_s, default=0.0)

    @property
    def version(self) -> str | None:
        """Of :attr:`lineage`, as ``a.v``."""
        return None if self.lineage is None else str(self.lineage.version)

    @property
    def run(self) -> str | None:
        """Of :attr:`lineage`; None where nobody has said whose its weights are."""
        return None if self.lineage is None else self.lineage.run or None

    @property
    def running(self) -> bool:
        """Is the process there?"""
        return self._child is not None and self._child.returncode() is None

    def describe(self) -> dict[str, Any]:
        """For ``rose node status``."""
        child = self._child if self.running else None
        return {
            "state": self.state,
            "sched": self.sched,
            "idle_by": child.share.rung if child is not None and child.share is not None else None,
            "ladder": self._ladder(child) if child is not None else None,
            "url": self.url,
            "pid": child.pid if child is not None else None,
            "incarnation": self.incarnation,
            "version": self.version,
            "run": self.run,
            "starts": self.num_starts,
            "kills": self.num_kills,
            "sentinel": self._describe_sentinel(),
            "segments_removed": self.segments.num_removed,
            "log": str(self.log.path),
            "error": self.error,
        }

    def _describe_sentinel(self) -> dict[str, object] | None:
        if self._sentinel is None:
            return None
        if self._sentinel.poll() is not None:
            return {"outside": False, "frozen_dies": "", "why": "the sentinel has ended"}
        return outside.standing(self._sentinel.pid)

    def _ladder(self, child: Child) -> dict[str, Any]:
        """The rung in force: on a GPU the engine's own word, for it alone knows its device."""
        if self._own_ladder is not None:
            return self._own_ladder
        return asdict(choose(DeviceFacts(cuda=False, idle_share=child.share is not None)))

    async def start(self, size: EngineSize | None = None) -> None:
        """Start it and wait until it answers.

        Args:
            size: What it may take beside production; None: the device is its own.

        Raises:
            ConfigError: It cannot be started at all: no such program or model, port taken.
            EngineError: It died, was not ready in time, or was stopped meanwhile; nothing of it is left.
        """
        engine = self.config.engine
        self._stop_asked = False
        self.size = size
        self.restarts.started(time.monotonic())
        self._require()
        self.incarnation, self.token, self.lineage = secrets.token_hex(8), secrets.token_urlsafe(24), None
        self.num_starts += 1
        self.weights_broken = False
        async with self._ending:  # who ends the one before is done with what both have
            self.state, self.error = "starting", ""
            await asyncio.to_thread(self.segments.begin)
            self._own_ladder = None
            self._mps_control = await asyncio.to_thread(mps.find_control, self.config)
            if engine.allow_mps and self._mps_control is None:
                logger.warning("engine.allow_mps is set, but no MPS control daemon answers: going on without")
            log_path = await asyncio.to_thread(self.log.begin)
            if self._stop_asked:  # while there was no process that it could have ended
                raise EngineError("was stopped before it was started", field="rollout engine")
            self._child = child = Child.start(self._spec(log_path))
        self._hurried = False
        logger.info("rollout engine starting, incarnation %s", self.incarnation)
        try:
            if self.config.serving is not None:
                self._sentinel = self._start_sentinel(child)
            took_s = await child.wait_ready_async(f"{self.url}/health", engine.start_timeout_s)
            self._listener = await asyncio.to_thread(child.require_listener, engine.port)
            self._client = open_client(bearer(self.token))
            await self.refresh_status()
        except asyncio.CancelledError:
            raise
        except RoseError as error:
            self.error = error.message
            await self.stop(grace_s=0.0)
            raise
        self.state = "ready"
        self.restarts.came_up()
        logger.info("rollout engine ready after %.1f s, version %s", took_s, self.lineage)

    def look(self) -> str:
        """Say what would refuse a start now, in :attr:`error` too; "" where nothing would, or it runs.  What costs nothing to look at."""
        if self.state != "down" or self.running:
            return ""
        try:
            self._require()
            self.error = ""
        except ConfigError as error:
            self.error = str(error)
        return self.error

    def _require(self) -> None:
        engine = self.config.engine
        require_files(engine)
        require_free_port(engine.port, "engine.port", engine.host)

    @property
    def hurried(self) -> bool:
        """Has it a normal share of its cores just now?"""
        return self._hurried

    @property
    def sched(self) -> Literal["normal", "batch", "idle"]:
        """Scheduling class of the engine: beside production only what production leaves."""
        return self._sched

    @property
    def delay(self) -> float:
        """How much of its step production waits for, in this class and on this rung (``AdmissionParams.delay``)."""
        share = self._child.share if self._child is not None else None
        if share is None or self.sched != "idle" or self._hurried:
            return 1.0
        return share.delay

    def set_sched(self, sched: Literal["normal", "idle"]) -> None:
        """Change the class, of a running engine too (if it was started idle: only then the kernel lets us both ways).

        Raises:
            EngineError: The kernel does not let us; nothing is changed.
        """
        if (
            self._child is not None
            and self.running
            and sched != self.sched
            and not self._child.lift(sched == "normal")
        ):
            raise EngineError(
                f"its share cannot be made {sched}",
                field="sched",
                fix="start the engine with engine.sched = 'idle'",
            )
        self._sched, self._hurried = sched, False

    def hurry(self, on: bool) -> None:
        """Lift an idle-class engine to a normal share of its cores while production waits for it; drop it again after.

        It gets next to nothing of a core that production keeps busy, so the very burst that wants the
        memory back would keep the engine from letting go of it.  Like priority inheritance: what holds a
        resource that production waits for runs as production does, for the few milliseconds of a cut.
        """
        if (
            self._child is None
            or not self.running
            or self.sched != "idle"
            or on == self._hurried
            or self.state == "dying"
        ):
            return
        if self._child.lift(on):
            self._hurried = on
            logger.info("engine %s", "is waited for: normal share" if on else "is not waited for: idle share")
        elif not self._warned:  # tried again in the next round: the kernel may only have asked for patience
            self._warned = True
            logger.warning(
                "the engine's share of its cores cannot be changed (idle by: %s): a cut may take as long as "
                "production keeps its core busy, up to the reclaim deadline, and then costs the engine",
                self._child.share.rung if self._child.share is not None else "nothing",
            )

    def planned(self, size: EngineSize | None) -> ProcSpec:
        """What :meth:`start` would start, with no token yet."""
        self.size = size
        return self._spec()

    def _spec(self, log_path: Path | None = None) -> ProcSpec:
        config, engine = self.config, self.config.engine
        sched = self.sched
        decisions = config.decisions
        logs = decisions.directory is not None and decisions.max_bytes > 0
        return ProcSpec(
            name="rollout engine",
            argv=(
                *engine.command,
                engine.model,
                *("--host", engine.host, "--port", str(engine.port)),
                *("--served-model-name", engine.served_model_name or engine.model),
                *("--max-model-len", str(engine.max_model_len)),
                "--enable-scale-out",
                *("--weight-transfer-config", json.dumps({"backend": "rose"}, separators=(",", ":"))),
                *("--logprobs-mode", "processed_logprobs"),
                *derived_args(engine, self.size),
                *engine.args,
            ),
            env={
                **engine.env,
                "ROSE_ROLE": "rollout",
                "ROSE_DIR": str(config.dir),
                "ROSE_DECISIONS": str(decisions.directory) if logs else None,
                "ROSE_DECISIONS_NAME": config.node_id,
                "ROSE_DECISIONS_MAX_BYTES": str(decisions.max_bytes),
                "ROSE_DECISIONS_MAX_FILES": str(decisions.max_files),
                "ROSE_WEIGHTS_DIR": str(config.weights_dir) if config.weights is not None else None,
                "ROSE_WEIGHTS_THREADS": str(config.weights.threads) if config.weights is not None else None,
                "ROSE_RESERVE_BYTES": str(config.device.reserve) if config.device.kind == "host" else None,
                "ROSE_GPU_RESERVE_BYTES": str(config.device.reserve) if config.device.kind == "gpu" else None,
                "ROSE_NODE_TOKEN": self.token,
                "ROSE_ALLOW_UNMEASURED": "1" if engine.allow_unmeasured else None,
                "ROSE_SM_SHARE": str(engine.sm_share),
                "ROSE_COMPUTE_RUNG": engine.compute_rung,
                **mps.environment(config, self._mps_control),
                "ROSE_STEP_PROFILE": str(engine.profile.resolve()) if engine.profile is not None else None,
                "ROSE_TOKEN_FILE": None,  # the engine needs none of the fleet's secrets
                "VLLM_API_KEY": self.token,
                "VLLM_PLUGINS": "rose",
            },
            cores=engine.cores,
            sched=sched,
            nice=engine.nice,
            log_path=log_path,
            before_kill=mps.before_kill(self._mps_control),
        )

    def _start_sentinel(self, child: Child) -> subprocess.Popen[bytes]:
        """Without a guard: it has to outlive us for as long as something of the engine does, and ends by itself.

        Raises:
            EngineError: There is no process or memory left for it.
        """
        self._sentinel_at_s = time.monotonic()
        spec, share = child.spec, child.share
        rung, directory = (share.rung, share.directory) if share is not None else ("class", None)
        log = open_log(spec)
        try:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "rose.coserve.sentinel",
                    *(str(self.config.dir), str(child.guard_pid), str(os.getpid())),
                    str(self.config.lending.reclaim_deadline_s or 0),
                    str(spec.before_kill_s * bool(spec.before_kill) + GUARD_S),
                    *(rung, *((str(directory),) if directory is not None else ())),
                ],
                env={name: value for name, value in os.environ.items() if name != "ROSE_TOKEN_FILE"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(
                f"the sentinel could not be started: {error.strerror}", field="engine"
            ) from error
        finally:
            if log >= 0:
                os.close(log)

    def keep_sentinel(self) -> None:
        """Start it again where it has ended before the engine; not at once again, for it may not be able to run here at all."""
        child, sentinel = self._child, self._sentinel
        if child is None or sentinel is None or sentinel.poll() is None or not self.running:
            return
        if time.monotonic() - self._sentinel_at_s < SENTINEL_AGAIN_S:
            return
        logger.warning(
            "the sentinel of %s ended (status %s): starting another", self.config.dir, sentinel.returncode
        )
        try:
            self._sentinel = self._start_sentinel(child)
        except EngineError as error:
            self.error = str(error)

    def _end_sentinel(self) -> None:
        if self._sentinel is not None:
            places = outside.places(self._sentinel.pid)
            self._sentinel.kill()
            self._sentinel.wait()
            outside.remove(places)
            self._sentinel = None

    async def watch_segments(self) -> None:
        """Write down, until cancelled, which shared memory would stay if the engine were killed now; and keep its log short."""
        await asyncio.to_thread(self.segments.end)  # what an engine before us left, if its agent was killed
        last, last_s = ("", ""), 0.0
        while True:
            await asyncio.sleep(_NOTE_STARTING_S)
            if self.log.is_full():
                await asyncio.to_thread(self.log.roll)
            child, now = self._child, (self.incarnation, self.state)
            if child is None or not self.running:
                if self.segments.left:
                    await asyncio.to_thread(self.segments.note, ())
                continue
            if now == last and self.state == "ready" and time.monotonic() - last_s < _NOTE_READY_S:
                continue
            last, last_s = now, time.monotonic()
            try:
                await asyncio.to_thread(lambda c=child: self.segments.note([p.pid for p in c.processes()]))
            except (psutil.Error, OSError) as error:  # the next look will do
                logger.debug("shared memory of the engine: %s", error)

    async def wait_exit(self) -> None:
        """Return when the process has ended by itself or was killed."""
        while self.running:  # noqa: ASYNC110 - a process has no event to wait for here
            await asyncio.sleep(0.05)
        self.lineage = None
        if self.state in ("ready", "starting", "dying"):
            self.state = "down"
            code = self._child.returncode() if self._child is not None else None
            self.error = self.error or f"ended with {code} (its output: {self.log.path})"
            logger.warning("rollout engine %s", self.error)

    async def kill(self, reason: str) -> None:
        """SIGKILL for the whole tree; returns when nothing is left.  A second call waits for the first."""
        async with self._killing:
            if self.running and self._child is not None:
                if self._killed_s is None:  # else it is slow to die, and this is the same kill
                    self._killed_s = time.monotonic()
                    self.num_kills += 1
                self.error = f"killed: {reason}"
                logger.error("killing the rollout engine: %s", reason)
                self._begin_dying()
                await asyncio.to_thread(self._child.kill)
                self._note_exit()

    def _note_exit(self) -> None:
        """Nothing of it is left: what that took from the first kill on, by whom ever it was ended at last."""
        if self._killed_s is not None:
            self.exits_s.append(time.monotonic() - self._killed_s)
            self._killed_s = None

    def _begin_dying(self) -> None:
        """From here until nothing of it is left it has a normal share: the dying need their core to give memory back."""
        self.hurry(True)
        if self.state != "failed":
            self.state = "dying"

    async def kill_broken(self) -> None:
        """End an engine whose weights are of no version: it stays paused for ever, and its start loads good ones."""
        self.weights_broken = True
        await self.kill("a failed weight update could not be undone, its weights are of no version")

    @property
    def stop_asked(self) -> bool:
        """:meth:`stop` was called since the last start, whether or not it has ended all."""
        return self._stop_asked

    async def stop(self, grace_s: float | None = None) -> None:
        """End it and everything below it; one that is about to be started is not.  A second call waits for the first, and ends nothing that was
        started after it was made.

        Raises:
            EngineError: Something of it still lives.
        """
        self._stop_asked, incarnation = True, self.incarnation
        client, self._client = self._client, None  # first: who asks meanwhile is told that it does not run
        if client is not None:
            await client.aclose()
        self.lineage = None
        async with self._ending:
            if self.incarnation != incarnation:
                return
            if self._child is not None:
                if self.running:
                    self._begin_dying()
                patience_s = self.config.engine.stop_grace_s if grace_s is None else grace_s
                await self._child.terminate_async(patience_s)
                self._note_exit()
            self._end_sentinel()
            await asyncio.to_thread(self.segments.end)
            if self.state != "failed":
                self.state = "down"

    def give_up(self) -> None:
        """Started too often, or refused: stay down until the window is over or an operator says otherwise."""
        if self.state != "failed":
            self.state = "failed"
            logger.error("rollout engine stays down after %d starts: %s", self.num_starts, self.error)

    def forgive(self) -> None:
        """Forget the restarts so far."""
        self.restarts.forgive()

    def rss_bytes(self) -> int:
        """Resident memory of the whole tree."""
        return self._child.rss_bytes() if self.running and self._child is not None else 0

    # -- its routes -----------------------------------------------------------------------------------

    async def refresh_status(self, timeout_s: float = REQUEST_S) -> dict[str, Any]:
        """``GET /rose/status``; also learns version, vocabulary and whether the weights are broken."""
        self.keep_sentinel()
        before = self.lineage
        status = await self.call("GET", "/rose/status", timeout_s=timeout_s)
        ranks = status.get("ranks")
        self.weights_broken = isinstance(ranks, list) and any(
            isinstance(rank, dict) and rank.get("phase") == "broken" for rank in ranks
        )
        if self.lineage is before:  # else a commit was answered meanwhile, and this may be of before it
            self.lineage = _lineage_of(status)
        vocab_size = status.get("vocab_size")
        self.vocab_size = vocab_size if type(vocab_size) is int and 0 < vocab_size < 2**32 else None
        scheduler = status.get("scheduler")
        ladder = scheduler.get("ladder") if isinstance(scheduler, dict) else None
        self._own_ladder = ladder if isinstance(ladder, dict) else None
        max_num_seqs = status.get("max_num_seqs")
        self.max_num_seqs = max_num_seqs if type(max_num_seqs) is int and 0 < max_num_seqs <= 65_536 else None
        mode = status.get("logprobs_mode")
        self.logprobs_mode = mode if isinstance(mode, str) and 0 < len(mode) <= 64 else None
        return status

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = REQUEST_S
    ) -> dict[str, Any]:
        """One request to the engine.

        Raises:
            RequestError: It refuses, with its status, field and code.
            EngineError: It does not answer, or not with a JSON object.
        """
        if self._client is None:
            raise EngineError("is not running", field="rollout engine")
        if self._listener is not None and not self._listener.is_open() and self._child is not None:
            self._listener = await asyncio.to_thread(self._child.require_listener, self.config.engine.port)
        found = await ask(
            self._client,
            method,
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            timeout_s=timeout_s,
            max_bytes=MAX_ANSWER_BYTES,
            field="rollout engine",
            what=f"{path}: ",
        )
        try:
            answer = json.loads(found.body)
        except (ValueError, RecursionError):
            answer = None
        if found.status >= 400:
            raise _refusal(path, found.status, answer)
        if not isinstance(answer, dict):
            raise EngineError(
                f"{path}: answered {found.status} without a JSON object", field="rollout engine"
            )
        return answer


def _lineage_of(status: dict[str, Any]) -> Lineage | None:
    """What an engine says that it runs; None unless it is something that can be."""
    run = status.get("run")
    try:
        return Lineage(check_run(run) if run else "", WeightVersion.parse(status.get("version")))
    except RequestError:
        return None


def _refusal(path: str, status: int, answer: Any) -> RoseError:
    said = read_refusal(answer)
    if not said.message:
        return EngineError(f"{path}: answered {status}", field="rollout engine")
    return RequestError(said.message, field=said.field, status=status, code=said.code)


def check_update_path(path: Path, directory: Path) -> Path:
    """An update file must lie in the directory that the engine reads from.

    Raises:
        ConfigError: It does not.
    """
    if not path.resolve().is_relative_to(directory.resolve()):
        raise ConfigError(f"{path} is not below {directory}", field="weights.directory")
    return path


def require_files(engine: EngineConfig) -> None:
    """What the engine reads is there.  Wrong here is a clear error; in the engine it would be a line in a log.

    Raises:
        ConfigError: A profile that is none; a model that is a path and no model folder (anything else is a name that vLLM resolves).
    """
    if engine.profile is not None:
        load_profile(engine.profile)
    model = engine.model
    path = Path(model).expanduser()
    looks_like_path = model.startswith(("/", "./", "../", "~")) or path.exists()
    if looks_like_path and not (path / "config.json").is_file():
        raise ConfigError(f"{model} is not a model folder (no config.json in it)", field="engine.model")
