"""Routes that a node agent drives a rollout engine with; vLLM's endpoint plugin ``rose``.

``GET /rose/status``
    Version and staging state of every rank, what the scheduler says of itself, and whether vLLM is paused.
``POST /rose/weights/stage {"path", "attempt", "version", "run"?, "wait_s"?}``
    Stage an update file in the background of all ranks.  Answers ``{"state": "staged"}``, or 202 and
    ``"staging"`` when it takes longer than ``wait_s``; ask again then.  A refusal answers its status, and
    nothing has changed.
``POST /rose/weights/commit {"attempt", "version", "run"?, "kv"?}``
    Vote, pause at a step boundary with requests kept, change all ranks or none, resume.  ``run``: whose weights; left out, those
    of the run in place.  Where another run's come, every request that sampled under the old one, or asked for it, ends with its
    tokens (:mod:`vllm_plugin.runs`), and all cached keys and values go.  ``kv`` says what
    becomes of keys and values that the old weights computed (docs/weights.md):
    ``reset`` (default): all are dropped, and running requests recompute theirs; ``salt``: new requests find
    none of them, running ones go on with theirs; ``keep``: everybody goes on with them.
``POST /rose/weights/discard {}``
    Forget what is staged.
``GET /rose/weights/hash``
    State hash of every tensor per rank, from a full scan of memory between two steps: the proof of what runs.
``POST /rose/abort {"request_ids"}``
    End requests; ids as the client chose them, or as the answer named them.
``POST /rose/parse``, ``/rose/parse/whole``, ``/rose/parse/close``
    Text of a turn from its tokens; see :mod:`vllm_plugin.parses`.

Every route asks for the bearer token in ``ROSE_NODE_TOKEN``; with role ``rollout`` and no token the
server refuses to start, and with any other role there are no routes.  Errors have OpenAI's shape.

Invariants: at most one commit at a time; the engine is resumed on every way out, save when an undo could
not be proved: then it stays paused, because its tokens would be of no version, and only a restart helps.
An update file is read only from below ``ROSE_DIR`` or ``ROSE_WEIGHTS_DIR``.

It does not decide which version to run, and never fetches.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import os
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rose.errors import ConfigError, Conflict, NotFound, RequestError, RoseError, TooLarge, Unauthorized
from rose.wire.errors import error_body
from vllm_plugin import internals, selfcheck
from vllm_plugin.parses import CloseBody, FeedBody, Parses, VllmParse, WholeBody, parse_whole
from vllm_plugin.roles import ENV_DIR, role

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

    from rose.lineage import WeightVersion

logger = logging.getLogger("vllm.rose")

ENV_TOKEN = "ROSE_NODE_TOKEN"
ENV_WEIGHTS_DIR = "ROSE_WEIGHTS_DIR"
ENV_KV = "ROSE_WEIGHTS_KV"
KV_MODES = ("salt", "reset", "keep")
MIN_TOKEN_CHARS = 16
MAX_BODY_BYTES = 256 * 1024
MAX_PARSE_BYTES = 64 * 2**20
"""Of a body that brings a prompt: a million tokens, and the messages they were made of."""
MAX_ABORTS = 4096
MAX_WAIT_S = 300.0
PAUSE_TIMEOUT_S = 30.0
"""A pause ends at the next step boundary; a step that takes longer than this is not worth waiting for."""
ALIVE_EVERY_S = 0.5
"""How often a call looks whether the engine that should answer it is dead."""
POLL_FIRST_S, POLL_LAST_S = 0.005, 0.1
"""Asking how staging goes is a collective call, which waits for the step in progress: ask seldom."""
GENERATE_PREFIX = "generate-tokens-"
"""vLLM puts this before the ``request_id`` of a ``/inference/v1/generate`` body."""


class StageBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str
    attempt: int
    version: int
    run: str = ""
    wait_s: float = 30.0


class CommitBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    attempt: int
    version: int
    run: str = ""
    kv: str | None = None


class DiscardBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class AbortBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    request_ids: list[str]


B = TypeVar("B", bound=msgspec.Struct)


class RosePlugin:
    """vLLM's endpoint protocol; see the module."""

    name = "rose"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.control: EngineControl | None = None
        self.parses = Parses()
        self._token = b""

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; called before the engine is reachable.

        Raises:
            ConfigError: Role ``rollout`` without a node token, or with one that can be guessed.
        """
        if role() != "rollout":
            return
        token = os.environ.get(ENV_TOKEN, "")
        if len(token) < MIN_TOKEN_CHARS:
            raise ConfigError(
                f"needs {MIN_TOKEN_CHARS} characters or more with ROSE_ROLE=rollout", field=ENV_TOKEN
            )
        kv_mode(None)
        self._token = token.encode()
        for method, path, handler in (
            ("GET", "/rose/status", self._status),
            ("POST", "/rose/weights/stage", self._stage),
            ("POST", "/rose/weights/commit", self._commit),
            ("POST", "/rose/weights/discard", self._discard),
            ("GET", "/rose/weights/hash", self._hash),
            ("POST", "/rose/abort", self._abort),
            ("POST", "/rose/parse", self._parse),
            ("POST", "/rose/parse/whole", self._parse_whole),
            ("POST", "/rose/parse/close", self._parse_close),
        ):
            app.add_api_route(path, self._guarded(handler), methods=[method], response_model=None)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Engine reachable: put the version that the workers hold on every token from the first one."""
        if role() != "rollout" or engine_client is None:
            return
        selfcheck.require(selfcheck.API)
        control = EngineControl(engine_client)
        await control.announce_version()
        self.control = control

    # -- routes -----------------------------------------------------------------------------------

    async def _status(self, request: Request) -> tuple[int, dict[str, Any]]:
        status = await self._engine().status()
        return 200, {**status, "parses": {"open": len(self.parses), "bytes": self.parses.num_bytes}}

    async def _stage(self, request: Request) -> tuple[int, dict[str, Any]]:
        body = await _body(request, StageBody)
        if not 0 <= body.wait_s <= MAX_WAIT_S:
            raise RequestError(f"must be 0..{MAX_WAIT_S:.0f}, got {body.wait_s}", field="wait_s")
        state = await self._engine().stage(update_path(body.path), _version(body), _run(body), body.wait_s)
        return (200 if state["state"] == "staged" else 202), state

    async def _commit(self, request: Request) -> tuple[int, dict[str, Any]]:
        body = await _body(request, CommitBody)
        return 200, await self._engine().commit(_version(body), kv_mode(body.kv), _run(body))

    async def _discard(self, request: Request) -> tuple[int, dict[str, Any]]:
        await _body(request, DiscardBody)
        return 200, await self._engine().discard()

    async def _hash(self, request: Request) -> tuple[int, dict[str, Any]]:
        return 200, await self._engine().hashes()

    async def _abort(self, request: Request) -> tuple[int, dict[str, Any]]:
        body = await _body(request, AbortBody)
        if len(body.request_ids) > MAX_ABORTS:
            raise TooLarge(f"{len(body.request_ids)} ids, at most {MAX_ABORTS}", field="request_ids")
        await self._engine().abort(body.request_ids)
        return 200, {}

    async def _parse(self, request: Request) -> tuple[int, dict[str, Any]]:
        derenderer = _derenderer(request)
        body, size = await _sized_body(request, FeedBody, MAX_PARSE_BYTES)
        make = functools.partial(VllmParse, derenderer)
        return 200, await self.parses.feed(body, size, make, make_runner(derenderer))

    async def _parse_whole(self, request: Request) -> tuple[int, dict[str, Any]]:
        derenderer = _derenderer(request)
        body, _ = await _sized_body(request, WholeBody, MAX_PARSE_BYTES)
        counts = _counts_reasoning(request)
        work = functools.partial(parse_whole, derenderer, body, counts_reasoning=counts)
        return 200, await make_runner(derenderer)(work)

    async def _parse_close(self, request: Request) -> tuple[int, dict[str, Any]]:
        body = await _body(request, CloseBody)
        self.parses.close(body.parses)
        return 200, {}

    def _engine(self) -> EngineControl:
        if self.control is None:
            raise RequestError("the engine is not ready yet", status=503, code="not_ready")
        return self.control

    def _guarded(
        self, handler: Callable[[Any], Awaitable[tuple[int, dict[str, Any]]]]
    ) -> Callable[..., Awaitable[Response]]:
        """Token first, then the handler; the one place where an error becomes an answer."""
        from fastapi import Request
        from fastapi.responses import JSONResponse

        async def route(request: Request) -> Response:
            try:
                self._check_token(request.headers.get("authorization"))
                status, answer = await handler(request)
            except RoseError as error:
                return JSONResponse(error_body(error), status_code=error.status)
            except Exception as error:  # vLLM's own; its text may hold anything, so it is only logged
                logger.exception("ROSE: %s failed", request.url.path)
                failed = RoseError(f"the engine failed: {type(error).__name__}")
                return JSONResponse(error_body(failed), status_code=500)
            return JSONResponse(answer, status_code=status)

        # FastAPI reads the annotations, and `Request` is only known in here.
        route.__annotations__ = {"request": Request}
        return route

    def _check_token(self, authorization: str | None) -> None:
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token):
            raise Unauthorized("a bearer token of role node is needed", field="Authorization")


def make_plugin() -> RosePlugin:
    """Entry point of ``vllm.endpoint_plugins``."""
    return RosePlugin()


# -- input -------------------------------------------------------------------------------------------


async def _body(request: Request, kind: type[B]) -> B:
    return (await _sized_body(request, kind, MAX_BODY_BYTES))[0]


async def _sized_body(request: Request, kind: type[B], max_bytes: int) -> tuple[B, int]:
    """The body, and how many bytes it had."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > max_bytes:
            raise TooLarge(f"more than {max_bytes} bytes", field="body")
    try:
        return msgspec.json.decode(bytes(raw) or b"{}", type=kind), len(raw)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise RequestError(message, field=path.strip("`.") or "body") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"is not JSON: {error}", field="body") from None


def _derenderer(request: Request) -> Any:
    """vLLM's own, with its parsers, tokenizer and threads.

    Raises:
        NotFound: Started without ``--enable-scale-out``.
    """
    serving = getattr(request.app.state, "serving_derender", None)
    if serving is None:
        raise NotFound("needs --enable-scale-out", field="path")
    return serving.online_derenderer


def _counts_reasoning(request: Request) -> bool:
    return internals.counts_reasoning(getattr(request.app.state, "openai_serving_chat", None))


def make_runner(derenderer: Any) -> Callable[[Callable[[], Any]], Awaitable[Any]]:
    """Runs parsing where vLLM runs its own."""
    loop = asyncio.get_running_loop()
    return functools.partial(loop.run_in_executor, internals.render_threads(derenderer))


def _version(body: StageBody | CommitBody) -> WeightVersion:
    from rose.lineage import WeightVersion

    return WeightVersion(body.attempt, body.version)


def _run(body: StageBody | CommitBody) -> str:
    from rose.lineage import check_run

    return check_run(body.run) if body.run else ""


def kv_mode(given: str | None) -> str:
    """What a commit does with the KV cache: from the request, from the environment, or ``reset``.

    Raises:
        RequestError: None of ``salt``, ``reset`` and ``keep`` in the request.
        ConfigError: The same in the environment.
    """
    mode = given if given is not None else os.environ.get(ENV_KV, "reset")
    if mode in KV_MODES:
        return mode
    if given is not None:
        raise RequestError(f"must be one of {', '.join(KV_MODES)}, got '{given[:40]}'", field="kv")
    raise ConfigError(f"must be one of {', '.join(KV_MODES)}, got '{mode[:40]}'", field=ENV_KV)


def update_path(text: str) -> str:
    """The real path of an update file, if it lies where update files may lie.

    Raises:
        RequestError: It is not below ``ROSE_DIR`` or ``ROSE_WEIGHTS_DIR``, links followed.
        NotFound: No such file.
    """
    if not text or "\0" in text or len(text) > 4096:
        raise RequestError("must be a path of 1..4096 characters", field="path")
    try:
        path = Path(text).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):  # ValueError: text that no file system can encode
        raise NotFound("no such file", field="path") from None
    roots = [os.environ[name] for name in (ENV_WEIGHTS_DIR, ENV_DIR) if os.environ.get(name)]
    if not any(path.is_relative_to(Path(root).resolve()) for root in roots):
        raise RequestError(f"must lie below {ENV_WEIGHTS_DIR} or {ENV_DIR}", field="path", status=403)
    if not path.is_file():
        raise RequestError("is not a regular file", field="path")
    return str(path)


def _label(run: str, version: str) -> str:
    """What every token is stamped with."""
    return f"{run}@{version}" if run else version


class RankError(RoseError):
    """What a worker rank answered instead of doing it; carries the rank's own status and code."""

    def __init__(self, rank: int, error: dict[str, Any]) -> None:
        super().__init__(f"rank {rank}: {error['message']}", field=error["field"])
        self.status = error["status"]
        self.code = error["code"]


# -- the engine --------------------------------------------------------------------------------------


class EngineControl:
    """What the routes do, on vLLM's ``EngineClient``.  One event loop; one stage or commit at a time."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._busy = asyncio.Lock()

    async def announce_version(self) -> None:
        """Label generated tokens with what the ranks hold, and tell the core whose it is."""
        reports = await self._ranks("rose_weights_staged")
        held = {(report["run"], report["version"]) for report in reports}
        if len(held) != 1:
            raise ConfigError(f"ranks hold different versions: {sorted(held)}", field="version")
        run, version = held.pop()
        await self._answer(self._client.update_weight_version(_label(run, version)))
        await self._switch(run)
        await self._prefixes({"version": version, "kv": "reset"})

    async def _prefixes(self, argument: dict[str, str] | None) -> Any:
        """Key prefixes by version, in the scheduler; None when this engine's scheduler cannot."""
        try:
            return await self._answer(
                self._client.engine_core.call_utility_async("rose_call", "prefixes", argument)
            )
        except Exception:  # vLLM's own scheduler, or one that is gone: the caller clears the cache instead
            logger.debug("ROSE: prefixes cannot be keyed", exc_info=True)
            return None

    async def _switch(self, run: str | None) -> str:
        """Tell the core whose weights are, or are about to be, in place; None asks it."""
        call = self._client.engine_core.call_utility_async("rose_call", "run", run)
        return (await self._answer(call))["run"]

    async def status(self) -> dict[str, Any]:
        reports = await self._ranks("rose_weights_staged")
        for report in reports:
            report.pop("partial")
        held = sorted({(report["run"], report["version"]) for report in reports})
        run, version = held[0] if len(held) == 1 else (None, None)
        return {
            "role": "rollout",
            "run": run,
            "version": version,
            "paused": await self._answer(self._client.is_paused()),
            "vocab_size": self._client.model_config.get_vocab_size(),
            "max_num_seqs": self._client.vllm_config.scheduler_config.max_num_seqs,
            "logprobs_mode": self._client.model_config.logprobs_mode,
            "ranks": reports,
            "scheduler": await self._scheduler(),
        }

    async def _scheduler(self) -> Any:
        """The scheduler's own status; None when this engine's scheduler has none."""
        try:
            return await self._answer(self._client.engine_core.call_utility_async("rose_call", "status", {}))
        except Exception:  # a status route answers with what it has
            logger.debug("ROSE: the scheduler gives no status", exc_info=True)
            return None

    async def stage(self, path: str, target: WeightVersion, run: str, wait_s: float) -> dict[str, Any]:
        """Start staging on all ranks and wait for the slowest, at most ``wait_s``."""
        async with self._exclusive():
            until_s = time.monotonic() + wait_s
            await self._ranks("rose_weights_prefetch", path, target.attempt, target.version, run)
            pause_s = POLL_FIRST_S
            while True:
                reports = await self._ranks("rose_weights_staged")
                for rank, report in enumerate(reports):
                    if report["phase"] == "failed":
                        raise RankError(rank, report["error"])
                if all(report["phase"] == "staged" for report in reports):
                    return {
                        "state": "staged",
                        "version": str(target),
                        "num_changed": sum(report["num_changed"] for report in reports),
                        "stage_s": max(report["stage_s"] for report in reports),
                    }
                if time.monotonic() + pause_s > until_s:
                    return {"state": "staging", "version": str(target)}
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 1.5, POLL_LAST_S)

    async def discard(self) -> dict[str, Any]:
        async with self._exclusive():
            await self._ranks("rose_weights_discard")
            return {}

    async def hashes(self) -> dict[str, Any]:
        async with self._exclusive():
            answers = await self._ranks("rose_weights_hash")
            names = ("run", "version", "hashes")
            return {"ranks": [{name: each[name] for name in names} for each in answers]}

    async def abort(self, request_ids: list[str]) -> None:
        """End requests; an id that nobody has is no error."""
        names = set(request_ids) | {
            GENERATE_PREFIX + name for name in request_ids if not name.startswith(GENERATE_PREFIX)
        }
        await self._client.abort(sorted(names))

    async def commit(self, target: WeightVersion, kv: str, run: str = "") -> dict[str, Any]:
        """Change every rank to ``target`` of ``run`` (empty: of the one in place), or none; see the module.

        Runs to its end even when the caller hangs up: a cancelled commit would leave the engine paused.
        """
        return await asyncio.shield(asyncio.ensure_future(self._commit(target, kv, run)))

    async def _commit(self, target: WeightVersion, kv: str, run: str) -> dict[str, Any]:
        from vllm_plugin.weight_vote import judge

        async with self._exclusive():
            reports = await self._ranks("rose_weights_staged")
            before = reports[0]["run"]
            if all(report["version"] == str(target) and run in ("", report["run"]) for report in reports):
                return {
                    "version": str(target), "run": before, "pause_s": 0.0, "commit_s": 0.0, "kv": kv, "repeated": True,
                }  # fmt: skip
            judge(reports, target)
            staged = reports[0]["target_run"]
            if staged != (run or before or staged):
                raise Conflict(f"what is staged is of run {staged}", field="run")
            run = staged
            if any(report["session"] for report in reports):
                raise Conflict("another weight update is in progress", field="version")
            was_paused = await self._answer(self._client.is_paused())
            began_s = time.monotonic()
            resume = not was_paused
            if run != before or (kv == "salt" and await self._prefixes(None) is None):
                kv = "reset"
            try:
                await self._pause(clear_cache=kv == "reset")
                if run != before:
                    await self._switch(run)
                commit_s = await self._swap(target, run)
                keyed = await self._prefixes({"version": str(target), "kv": kv})
                if kv == "salt" and keyed is None:
                    kv = "reset"
                    await self._pause(clear_cache=True)
            except _Broken as broken:
                resume = False
                raise broken.error from broken
            finally:
                if resume:
                    if run != before:
                        await self._name_run()
                    await self._answer(self._client.resume_generation())
            return {
                "version": str(target),
                "run": run,
                "pause_s": time.monotonic() - began_s,
                "commit_s": commit_s,
                "kv": kv,
                "repeated": False,
            }

    async def _name_run(self) -> None:
        """Before the engine samples again: its core admits for the run that the ranks hold, however the change went."""
        (run,) = {report["run"] for report in await self._ranks("rose_weights_staged")}
        await self._switch(run)

    async def _pause(self, *, clear_cache: bool) -> None:
        try:
            await asyncio.wait_for(
                self._answer(self._client.pause_generation(mode="keep", clear_cache=clear_cache)),
                PAUSE_TIMEOUT_S,
            )
        except TimeoutError:
            raise RequestError(
                f"no step boundary within {PAUSE_TIMEOUT_S:.0f} s; nothing was changed",
                status=504,
                code="pause_timeout",
            ) from None

    async def _swap(self, target: WeightVersion, run: str) -> float:
        """While paused: write on all ranks, read all outcomes, then keep or undo on all; returns seconds."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(
            update_info={"attempt": target.attempt, "version": target.version}
        )
        try:
            await self._answer(self._client.start_weight_update())
            more = True
            while more:  # a version that streams comes in slices
                await self._answer(self._client.update_weights(request))
                outcomes = await self._ranks("rose_weights_outcome")
                more = any(each["more"] for each in outcomes) and not any(each["failed"] for each in outcomes)
        except Exception as error:
            # Not a refusal (those come as outcomes): the executor itself failed.  Leave nothing half done.
            if not await self._undone():
                broken = f"the executor failed ({type(error).__name__}), and so did the undo"
                raise _Broken(RequestError(broken, status=500, code="weights_broken")) from error
            raise
        failed = [
            (rank, each["failed"] or {"message": "did not commit", "field": None, "status": 500, "code":
            "weights"}) for rank, each in enumerate(outcomes) if not each["committed"]
        ]  # fmt: skip
        if not failed:
            await self._answer(self._client.finish_weight_update(_label(run, str(target))))
            return max(each["commit_s"] for each in outcomes)
        error = RankError(*failed[0])
        if not await self._undone():
            error.status, error.code = 500, "weights_broken"
            raise _Broken(error)
        raise error

    async def _undone(self) -> bool:
        """Take the change back on all ranks and close vLLM's session; False when the old weights are not proved."""
        try:
            await self._ranks("rose_weights_undo", check=False)
            await self._answer(self._client.finish_weight_update())
            reports = await self._ranks("rose_weights_staged")
        except Exception:
            logger.exception("ROSE: an update could not be taken back")
            return False
        return not any(report["phase"] == "broken" for report in reports)

    async def _ranks(self, method: str, *args: Any, check: bool = True) -> list[dict[str, Any]]:
        """One collective call; raises the first rank's error after all ranks have answered."""
        answers = await self._answer(self._client.collective_rpc(method, args=args))
        for rank, answer in enumerate(answers):
            if check and not answer["ok"]:
                raise RankError(rank, answer["error"])
        return answers

    async def _answer(self, call: Awaitable[Any]) -> Any:
        """What vLLM answers; its own error once the engine is dead.

        A utility call that was under way when the engine died may never be answered: the caller would wait, and with it the
        server, which ends only when its connections are closed.
        """
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=ALIVE_EVERY_S)
                if not task.done() and self._client.errored:
                    raise self._client.dead_error
            return task.result()
        finally:
            task.cancel()

    def _exclusive(self) -> _Exclusive:
        return _Exclusive(self._busy)


class _Broken(Exception):
    """Carries the error of a rank whose undo could not be proved past the resume."""

    def __init__(self, error: RoseError) -> None:
        super().__init__(str(error))
        self.error = error


class _Exclusive:
    """The lock, without a queue: whoever finds it taken is told so."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock

    async def __aenter__(self) -> None:
        if self._lock.locked():
            raise Conflict("another weight call is in progress", code="busy")
        await self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()
