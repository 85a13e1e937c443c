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

What they do to the engine is in :mod:`vllm_plugin.engine_control`.  An update file is read only from below ``ROSE_DIR`` or ``ROSE_WEIGHTS_DIR``.

It does not decide which version to run, and never fetches.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import os
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rose.errors import ConfigError, NotFound, RequestError, RoseError, TooLarge, Unauthorized
from rose.wire.errors import error_body
from vllm_plugin import internals, selfcheck
from vllm_plugin.engine_control import EngineControl
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
