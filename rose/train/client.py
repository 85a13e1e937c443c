"""The training side's way to rose-scheduler: trajectories (role environment), their turns (by each trajectory's own key),
batches and versions (role trainer), one method per route of ``docs/architecture.md``.

Answers are checked for shape here; what is inside a trajectory is checked by ``rose.train.batch``.

Retries: a scheduler that cannot be reached, be it for a proxy's 502 or 504, is asked again for ``retry_s``, because it
may be restarting and loses nothing when it does; one that says 429 or 503, for as long as the call may take.  A turn that has no
answer after ``turn_timeout_s`` has run out of time (504), whoever it waited for; where the scheduler had said why it waits, the error says
so too.  Each repeated call is safe: a turn carries its number and its
retry count, so the scheduler joins or replays it; finishing, leasing (a batch has a name), acknowledging, giving back,
publishing and resuming are idempotent; a trajectory created twice leaves one that nobody finishes, and the group drops it
when it is complete.

Tokens travel in a header and are in no message.  One client per event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlencode

import msgspec

from rose.auth import bearer
from rose.errors import CapacityError, Conflict, EngineError, Gone, NotFound, RoseError, TrainError
from rose.lineage import parse_version
from rose.train.envs.base import Message, Task
from rose.wire import samples
from rose.wire.addresses import Addresses
from rose.wire.errors import NOT_ACTIVE, error_of, read_refusal
from rose.wire.pool import AnswerTooLarge, HttpTarget, PeerLost, Pool, encode_headers
from rose.wire.samples import Ack, Finish, Lease, NewTrajectory, NewVersion, Resume, StaleRule

log = logging.getLogger("rose.train")

CONNECT_S = 10.0
MAX_ANSWER_BYTES = 2**28
MAX_BATCH_BYTES = 2**30
"""Of a leased batch: two thousand trajectories of 16,000 sampled tokens, of which each takes 27 bytes; anything larger is a mistake."""
CALL_TIMEOUT_S = 60.0
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 2.0
PATIENCE_S = 20.0
"""With one of several schedulers, beyond what a call is to wait there: one that hangs keeps its connections, and another may have taken over."""

_PROXY_STATUSES = (502, 503, 504)
_UNCHANGED = {
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}
"""For each that a request does not name, vLLM takes what the model's generation_config.json says: the trainer would compute another distribution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedTrajectory:
    """A trajectory that was begun.  ``key`` is all that its agent needs, and lets it chat and nothing else."""

    id: str
    key: str = field(repr=False)


class SchedulerClient:
    """Args:
    url: Base URL of the scheduler; or several with commas between them, its stand-by's too: one that does not answer, or is not
        the active one, is left for the next.
    environment_token: For trajectories; None where only batches are trained on.
    trainer_token: For batches and versions; None where only episodes are run.
    turn_timeout_s: Longest wait for one turn, in line or at an engine.
    retry_s: How long an unreachable scheduler is tried again.

    Attributes:
        no_engine: Why no engine takes its turns, by the scheduler's word; empty when one has been answered since.
    """

    def __init__(
        self,
        url: str,
        *,
        environment_token: str | None = None,
        trainer_token: str | None = None,
        turn_timeout_s: float = 600.0,
        retry_s: float = 60.0,
    ) -> None:
        self._addresses = Addresses(url)
        self._tokens = {"environment": environment_token, "trainer": trainer_token}
        self._turn_timeout_s = turn_timeout_s
        self._retry_s = retry_s
        self._pool: Pool | None = None
        self._is_closed = False
        self.no_engine = ""

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """For good: calls under way end, and later ones are refused, for they would open connections that nobody closes."""
        self._is_closed = True
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    # --- episodes (role environment; their turns with their own keys) -----------------------------------

    async def create_trajectory(
        self,
        *,
        job: str,
        group_id: str,
        group_size: int,
        task: Task,
        task_kind: str = "",
        prefill_per_decode: float | None = None,
    ) -> StartedTrajectory:
        """A new member of a group.  The last two tell the scheduler how long its turns will be: see ``rose.train.mix``."""
        body = NewTrajectory(
            job=job,
            group_id=group_id,
            group_size=group_size,
            task=dict(task),
            task_kind=task_kind or None,
            prefill_per_decode=prefill_per_decode,
        )
        answer = await self._call("POST", "/rose/v1/trajectories", self._by("environment"), body)
        return StartedTrajectory(id=_field(answer, "id", str), key=_field(answer, "key", str))

    async def chat(
        self,
        key: str,
        turn: int,
        *,
        model: str,
        messages: Sequence[Message],
        temperature: float,
        max_tokens: int,
        allowed_token_ids: Sequence[int] | None = None,
    ) -> str:
        """Sample the answer of turn ``turn`` of the trajectory whose ``key`` it is, and return its text.

        Raises:
            CapacityError: With status 504: no answer within ``turn_timeout_s``.  Else: the scheduler is away.
        """
        body: dict[str, Any] = {
            "model": model,
            "messages": list(messages),
            "temperature": temperature,
            "max_tokens": max_tokens,
            **_UNCHANGED,
        }
        if allowed_token_ids is not None:
            body["allowed_token_ids"] = list(allowed_token_ids)
        answer = await self._call(
            "POST",
            "/v1/chat/completions",
            bearer(key),
            body,
            headers={"X-ROSE-Turn": str(turn)},
            timeout_s=self._turn_timeout_s,
            has_deadline=True,
        )
        choices = _field(answer, "choices", list)
        if not choices or not isinstance(choices[0], dict):
            raise EngineError("the answer has no choice", field="choices")
        content = _field(choices[0], "message", dict).get("content")
        if content is not None and not isinstance(content, str):
            raise EngineError("is not text", field="choices[0].message.content")
        return content or ""

    async def generate(
        self, key: str, turn: int, *, token_ids: Sequence[int], sampling_params: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Sample turn ``turn`` of the trajectory whose ``key`` it is, from tokens: for trainers that render prompts themselves.

        Args:
            sampling_params: vLLM's, by its names; those that would change the model's distribution and are not named do not.

        Returns:
            At least ``token_ids``, a ``logprobs`` for each, ``finish_reason`` and ``versions`` (``[["a.v", start, n], ...]``).

        Raises:
            CapacityError: With status 504: no answer within ``turn_timeout_s``.  Else: the scheduler is away.
        """
        answer = await self._call(
            "POST",
            "/rose/v1/generate",
            bearer(key),
            {"token_ids": list(token_ids), "sampling_params": _UNCHANGED | dict(sampling_params)},
            headers={"X-ROSE-Turn": str(turn)},
            timeout_s=self._turn_timeout_s,
            has_deadline=True,
        )
        num_sampled = len(_field(answer, "token_ids", list))
        if len(_field(answer, "logprobs", list)) != num_sampled:
            raise EngineError("are not as many as tokens", field="logprobs")
        _field(answer, "finish_reason", str)
        _field(answer, "versions", list)
        return answer

    async def finish(
        self, trajectory_id: str, *, reward: float, success: bool, info: Mapping[str, Any]
    ) -> None:
        """End a trajectory with its reward.

        Raises:
            Gone: It was cancelled.
            Conflict: It has another reward already.
        """
        body = Finish(reward=reward, success=success, info=dict(info))
        await self._call(
            "POST", f"/rose/v1/trajectories/{trajectory_id}/finish", self._by("environment"), body
        )

    async def cancel(self, trajectory_id: str) -> None:
        """Give a trajectory up.  One that is gone already is what we wanted."""
        try:
            await self._call("DELETE", f"/rose/v1/trajectories/{trajectory_id}", self._by("environment"))
        except (NotFound, Gone, Conflict):
            pass

    async def list_trajectories(self, *, job: str, state: str) -> list[dict[str, Any]]:
        """Trajectories of a job in one state: at least ``id`` and ``group_id``."""
        found = await self._listed({"job": job, "state": state})
        if len(found) >= samples.USUAL_FOUND:
            # Only now: a scheduler of before refuses it.
            found = await self._listed({"job": job, "state": state, "limit": str(samples.MOST_FOUND)})
        return found

    async def _listed(self, params: Mapping[str, str]) -> list[dict[str, Any]]:
        answer = await self._call("GET", "/rose/v1/trajectories", self._by("environment"), params=params)
        found = _field(answer, "trajectories", list)
        if not all(isinstance(one, dict) and isinstance(one.get("id"), str) for one in found):
            raise EngineError("holds something that is no trajectory", field="trajectories")
        return found

    async def get_trajectory(self, trajectory_id: str) -> dict[str, Any]:
        """The full trace; also ``group_size`` and ``task``, which the list leaves out."""
        answer = await self._call("GET", f"/rose/v1/trajectories/{trajectory_id}", self._by("environment"))
        _field(answer, "id", str)
        return answer

    # --- batches and versions (role trainer) -----------------------------------------------------------

    async def lease(
        self,
        *,
        job: str,
        num_groups: int,
        attempt: int,
        version: int,
        ttl_s: float,
        wait_s: float,
        alpha: int | None = None,
        on_stale: StaleRule | None = None,
        name: str | None = None,
        consumer: str | None = None,
        run: str | None = None,
    ) -> tuple[str, list[dict[str, Any]]] | None:
        """``(batch_id, trajectories)``, or None when too few groups are ready after ``wait_s``.

        ``alpha`` and ``on_stale``: instead of what the scheduler is configured with for this job.

        ``name`` is the batch's id, to be used once: asking again for it, whatever happened in between, gives the same batch.  None: one of
        its own.  ``consumer``: which of several trainers of the job this is.
        ``run``: under which name it publishes.

        Raises:
            Gone: What was leased under this name has been given back, or has run out and was leased to others.
        """
        name = name or secrets.token_hex(12)
        body = Lease(
            job=job,
            num_groups=num_groups,
            version=[attempt, version],
            ttl_s=ttl_s,
            wait_s=wait_s,
            alpha=alpha,
            on_stale=on_stale,
            consumer=consumer,
            run=run,
        )
        answer = await self._call(
            "PUT",
            _batch(name),
            self._by("trainer"),
            body,
            timeout_s=CALL_TIMEOUT_S + wait_s,
            patience_s=PATIENCE_S + wait_s,
            max_bytes=MAX_BATCH_BYTES,
        )
        if answer is None:
            return None
        trajectories = _field(answer, "trajectories", list)
        if not all(isinstance(trajectory, dict) for trajectory in trajectories):
            raise EngineError("holds something that is no trajectory", field="trajectories")
        return _field(answer, "batch_id", str), trajectories

    async def ack(self, batch_id: str, *, step: int, attempt: int, run: str | None = None) -> None:
        """The batch has been trained on, in this step of this attempt, and a checkpoint says so.  Safe to repeat."""
        body = Ack(step=step, attempt=attempt, run=run)
        await self._call("POST", f"{_batch(batch_id)}/ack", self._by("trainer"), body)

    async def give_back(self, batch_id: str) -> None:
        """Let others have a batch.  Nothing is leased under its name again."""
        await self._call("DELETE", _batch(batch_id), self._by("trainer"))

    async def set_version(
        self,
        *,
        job: str,
        attempt: int,
        version: int,
        run: str | None = None,
        alpha: int | None = None,
        on_stale: StaleRule | None = None,
    ) -> None:
        """Workers below this version take no new turn of the job, and what is too old for it is given up.

        ``run``: under which name the weights are published; workers that follow another take no turn of the job at all.

        ``alpha`` and ``on_stale`` as with :meth:`lease`.
        """
        body = NewVersion(job=job, attempt=attempt, version=version, run=run, alpha=alpha, on_stale=on_stale)
        answer = await self._call("POST", "/rose/v1/versions", self._by("trainer"), body)
        if answer.get("warning"):
            log.error("%s", answer["warning"])

    async def latest_attempt(self, job: str) -> int:
        """The highest attempt of the job that the scheduler knows; 0 for none.  Of one that died before its first version it has heard as well."""
        answer = await self._call("GET", "/status", self._by("trainer"))
        version = _field(answer, "versions", dict).get(job)
        # A scheduler of before says of versions alone.
        resumed = _field(answer, "attempts", dict).get(job, 0) if "attempts" in answer else 0
        if not isinstance(resumed, int):
            raise EngineError("holds something that is no attempt", field="attempts")
        if version is None:
            return resumed
        try:
            return max(resumed, parse_version(version)[0])
        except RoseError as error:
            raise EngineError("holds something that is no version", field="versions") from error

    async def runs_of_engines(self) -> list[str]:
        """The run that each engine the scheduler knows has its weights of; empty for one that has named none yet."""
        answer = await self._call("GET", "/workers", self._by("trainer"))
        found = _field(answer, "workers", list)
        return [_field(one, "run", str) for one in found]

    async def discards(self, job: str) -> dict[str, list[int]]:
        """What the scheduler has thrown away of the job: ``{cause: [shortest quarter of lengths, ..., longest]}``."""
        answer = await self._call("GET", "/status", self._by("trainer"))
        found = _field(answer, "discards", dict).get(job, {})
        if not isinstance(found, dict) or not all(isinstance(row, list) for row in found.values()):
            raise EngineError("holds something that is no count", field="discards")
        return found

    async def resume(
        self,
        *,
        job: str,
        attempt: int,
        consumed: Sequence[str],
        run: str | None = None,
        consumer: str | None = None,
        afresh: bool = False,
    ) -> tuple[int, int]:
        """A trainer starts: its open leases return, except what ``consumed`` names.  Those of other consumers stay.

        Args:
            afresh: It goes on from nothing: what was sampled for the job before is given up.

        Returns:
            Groups that were given up, and trajectories of them that still ran.
        """
        body = Resume(
            attempt=attempt,
            consumed=list(consumed),
            run=run,
            consumer=consumer,
            afresh=True if afresh else None,  # not said: a scheduler of before knows no such field
        )
        answer = await self._call("POST", f"/rose/v1/jobs/{job}/resume", self._by("trainer"), body)
        return (_field(answer, "dropped_groups", int), _field(answer, "cancelled", int)) if afresh else (0, 0)

    def _by(self, role: str) -> dict[str, str]:
        token = self._tokens[role]
        if token is None:
            raise TrainError(f"this client has no {role} token", field=f"{role}_token")
        return bearer(token)

    # --- transport -------------------------------------------------------------------------------------

    def _open(self) -> Pool:
        if self._is_closed:
            raise TrainError("this client is closed", field="scheduler.url")
        if self._pool is None:
            self._pool = Pool(connect_s=CONNECT_S)  # every episode holds one connection while it waits
        return self._pool

    async def _call(
        self,
        method: str,
        path: str,
        token: Mapping[str, str],
        body: Mapping[str, Any] | msgspec.Struct | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        patience_s: float | None = None,
        has_deadline: bool = False,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> Any:
        """One request with retries; the parsed answer, None for 204.

        ``has_deadline``: ``timeout_s`` is all the time that the answer is good for, and its end no sign that the scheduler is away.
        ``patience_s``: before the next of several addresses is asked, where that may be the one that answers by now; None: the usual.

        Raises:
            TrainError: ``body`` is not JSON: foreign code's task, or a mistake of ours.
        """
        longest_s = timeout_s
        if len(self._addresses.all) > 1:
            longest_s = min(timeout_s, PATIENCE_S if patience_s is None else patience_s)
        self._open()
        # By the standard encoder: what a tool answered may be no Unicode (the scheduler refuses it by name), a reward numpy's.
        try:
            data = None if body is None else json.dumps(body, default=_table).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise TrainError(f"cannot be sent as JSON: {error}", field=path) from error
        kind = {} if data is None else {"Content-Type": "application/json"}
        if params:
            path = f"{path}?{urlencode(params)}"
        started_s = time.monotonic()
        unreachable_since_s: float | None = None
        delay_s, num_retries = FIRST_DELAY_S, 0
        waits_because = ""
        while True:
            sent = {**token, **kind, **(headers or {}), "x-stainless-retry-count": str(num_retries)}
            url = self._addresses.current
            try:
                exchange = self._open().request(
                    HttpTarget.of(url, {}),
                    method,
                    path,
                    data or b"",
                    timeout_s=longest_s,
                    max_bytes=max_bytes,
                    headers=encode_headers(sent),
                )
            except ValueError as error:
                raise TrainError(str(error), field="scheduler.url") from error
            is_reached = False
            try:
                async with exchange as connection:
                    is_reached = True
                    status, raw = await connection.begun(), await connection.whole()
                    retry_after = connection.retry_after
                if status in _PROXY_STATUSES and read_refusal(raw).code is None:
                    # Something between us and the scheduler, which may be restarting behind it.
                    raise PeerLost(f"HTTP {status}")
                unreachable_since_s = None  # a whole answer: headers alone arrive from a broken path too
                if status < 300:
                    if has_deadline:
                        self.no_engine = ""
                    return None if status == 204 else _parse(raw, path)
                raise error_of(status, raw, retry_after)
            except AnswerTooLarge as error:
                raise EngineError(f"the answer exceeds {max_bytes} bytes", field=path) from error
            except CapacityError as error:
                # The call's own time counts here: a turn that waits for a worker may wait as long as any turn.
                waited_s = time.monotonic() - started_s
                if error.retry_after_s is None:
                    raise
                if has_deadline and error.status == 503 and error.code != NOT_ACTIVE:
                    self.no_engine = waits_because = error.message
                is_elsewhere = error.code == NOT_ACTIVE and self._addresses.leave(url)
                if waited_s >= max(self._retry_s, timeout_s):
                    if has_deadline:
                        raise _late(timeout_s, waits_because) from error
                    raise
                if not is_elsewhere:
                    delay_s = max(delay_s, min(error.retry_after_s, MAX_DELAY_S))
            except (PeerLost, TimeoutError, OSError) as error:
                self._open()  # it was we who hung up
                if (
                    is_reached
                    and isinstance(error, TimeoutError)
                    and time.monotonic() - started_s < timeout_s
                    and longest_s < timeout_s
                ):
                    self._addresses.leave(url)  # a stand-by says so at once, and we are back
                    num_retries += 1
                    continue
                if has_deadline and is_reached and isinstance(error, TimeoutError):
                    raise _late(timeout_s, waits_because) from error
                now_s = time.monotonic()
                # Counted from the first failure: a connection may break after minutes of waiting.
                unreachable_since_s = now_s if unreachable_since_s is None else unreachable_since_s
                if now_s - unreachable_since_s >= self._retry_s:
                    raise CapacityError(
                        f"the scheduler at {url} did not answer: {type(error).__name__}",
                        field="scheduler.url",
                    ) from error
                self._addresses.leave(url)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)
            num_retries += 1


def _late(timeout_s: float, because: str) -> CapacityError:
    said = f"no answer within {timeout_s:g} s{because and f': {because}'}"
    return CapacityError(said, status=504, retry_after_s=None, field="scheduler.turn_timeout_s")


def _table(body: Any) -> dict[str, Any]:
    """A body as ``json`` takes it; what is None is not said."""
    if not isinstance(body, msgspec.Struct):
        raise TypeError(f"{type(body).__name__} is not JSON")
    return {name: value for name, value in msgspec.structs.asdict(body).items() if value is not None}


def _batch(name: str) -> str:
    return f"/rose/v1/batches/{quote(name, safe='')}"


def _parse(raw: bytes | bytearray, path: str) -> Any:
    if not raw:
        return {}
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise EngineError("the answer is not JSON", field=path) from error


def _field(answer: Any, name: str, kind: type[Any]) -> Any:
    value = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(value, kind):
        raise EngineError(f"the answer has no {kind.__name__} here", field=name)
    return value
