"""All client requests in progress, and what happens when a client asks again.

One that comes back joins its request (:class:`~rose.scheduler.inflight_request.Inflight`); one that comes back after
the end gets its answer: from the trajectory's turns, or, under an ``Idempotency-Key``, from the last few answers.

Whether a request repeats another is decided by the name that its client gave it: ``Idempotency-Key``, else ``X-ROSE-Turn``.
A request without a name is a new turn even if its body equals an earlier one's, and what its headers demand (tier, oldest version,
side), since an agent may sample one prompt several times on purpose.  There are two exceptions: no client waits for the earlier request any more, or the request says that it is a retry
(``rose.scheduler.deliveries``).  Each retry takes one answer, and no other retry gets the same one.  It takes the first of these:

1. a request that no client waits for any more, or an answer that was not sent to its end;
2. a new turn, once for each equal request that was refused with "try again";
3. a request whose client has retried less often: its connection may be broken without our knowing;
4. an answer that was sent to its end to such a client and may have been lost on the way, closed connections first.

Invariant: a turn of a trajectory is in the journal before its answer leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rose.errors import CapacityError, RequestError, RoseError
from rose.policy import samples as sp
from rose.policy import turn_events as te
from rose.scheduler import side
from rose.scheduler.deliveries import Connections
from rose.scheduler.dispatch import Dispatcher, TurnHandle, turn_error
from rose.scheduler.inflight_request import Finished, Inflight, Replay, TurnRequest
from rose.scheduler.kept import Kept
from rose.scheduler.messages import thought, tips
from rose.scheduler.prompts import Prompt
from rose.scheduler.recording import is_resumable, record_of, summary_of
from rose.scheduler.store import TrajectoryStore
from rose.scheduler.tracing import Tracing
from rose.scheduler.trajectory import Trajectory

log = logging.getLogger("rose.scheduler")

_MAX_ANSWERS = 4096
_MAX_ANSWER_BYTES = 64 * 2**20


@dataclass(kw_only=True, slots=True)
class InflightRequests:
    """All requests in progress in this process.

    Args:
        store, dispatcher: Shared.
        turn_s: Deadline of a turn that names none.
        max_turns: Per trajectory.
        max_running: Requests at once, those that still wait for a renderer included.
    """

    store: TrajectoryStore
    dispatcher: Dispatcher
    turn_s: float
    max_turns: int
    max_running: int
    tracing: Tracing | None = None
    on_duplicate: Callable[[], None] = lambda: None
    on_fork: Callable[[str], None] = lambda reason: None
    on_finished: Callable[[Finished, TurnRequest], None] = lambda finished, asked: None
    _named: dict[str, Inflight] = field(default_factory=dict)
    """Those that have names."""
    _alike: dict[str, list[Inflight]] = field(default_factory=dict)
    """The others, by what they ask, oldest first."""
    _refused: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """What was asked -> how often it was refused with "try again"."""
    _answers: OrderedDict[str, tuple[str, bytes]] = field(default_factory=OrderedDict)
    """Idempotency key of an ended request without a trajectory -> (digest of the request, answer)."""
    _answer_bytes: int = 0
    _running: set[asyncio.Task[bytes]] = field(default_factory=set)
    _connections: Connections = field(default_factory=Connections)

    def start(self, asked: TurnRequest, work: Callable[[Inflight], Awaitable[bytes]]) -> Inflight | Replay:
        """Join the request that this one repeats, find its answer, or start anew.

        What comes is to be given to :meth:`delivering`.

        Raises:
            RequestError: 422, the same name with another body, or other demands.
            CapacityError: 429, too many requests.
        """
        key = _key(asked)
        again = self._named_before(asked, key) if asked.name else self._asked_before(asked, key)
        if again is not None:
            self.on_duplicate()
            return again
        if len(self._running) >= self.max_running:
            self._refuse(asked, key)
            raise CapacityError("too many requests are running", status=429, code="queue_full")
        if asked.trajectory is not None:
            try:
                self.store.holdings.check(asked.trajectory.created.job)
            except CapacityError:
                self._refuse(asked, key)
                raise
        inflight = Inflight(self.dispatcher, asked, key)

        async def run() -> bytes:
            try:
                return await work(inflight)
            finally:
                inflight.started.set()
                for handle in inflight.handles:
                    handle.notify()

        inflight.task = asyncio.create_task(run())
        self._running.add(inflight.task)
        inflight.task.add_done_callback(functools.partial(self._reap, inflight))
        if asked.name:
            self._named[key] = inflight
        else:
            self._alike.setdefault(key, []).append(inflight)
        return inflight

    def _named_before(self, asked: TurnRequest, key: str) -> Inflight | Replay | None:
        field = "Idempotency-Key" if asked.idempotency_key else "X-ROSE-Turn"
        inflight = self._named.get(key)
        if inflight is not None and inflight.is_joinable:
            _check_same(inflight.asked.digest, asked, field)
            return inflight
        if asked.trajectory is None:
            ended = self._answers.get(key)
            if ended is None:
                return None
            _check_same(ended[0], asked, field)
            return Replay(answer=ended[1])
        turn = asked.trajectory.named.get(asked.name)
        if turn is None:
            return None
        _check_same(asked.trajectory.turns[turn].digest, asked, field)
        return Replay(trajectory=asked.trajectory, turn=turn)

    def _asked_before(self, asked: TurnRequest, key: str) -> Inflight | Replay | None:
        alike = self._alike.get(key, ())
        for inflight in alike:
            if inflight.num_attached == 0 and inflight.is_joinable:
                return inflight
        trajectory, retry = asked.trajectory, asked.retry
        if trajectory is None or not retry:
            return None
        deliveries = trajectory.deliveries
        for turn in trajectory.answers_to(asked.digest):
            if deliveries.is_free(turn):
                return Replay(trajectory=trajectory, turn=turn)
        if key in self._refused:
            self._refused[key] -= 1
            if not self._refused[key]:
                del self._refused[key]
            return None
        for inflight in alike:
            if inflight.retry < retry and inflight.is_joinable:
                return inflight
        lost = [
            turn
            for turn in trajectory.answers_to(asked.digest)
            if not deliveries.is_open(turn) and deliveries.retry(turn) < retry
        ]
        if not lost:
            return None
        likeliest = max(lost, key=lambda turn: (self._connections.is_closed(trajectory.id, turn), turn))
        return Replay(trajectory=trajectory, turn=likeliest)

    def _refuse(self, asked: TurnRequest, key: str) -> None:
        """Its client will ask again, and not for an answer that others got."""
        if asked.trajectory is not None and not asked.name:
            self._refused[key] = self._refused.get(key, 0) + 1
            self._refused.move_to_end(key)
            if len(self._refused) > _MAX_ANSWERS:
                self._refused.popitem(last=False)

    @contextlib.contextmanager
    def delivering(
        self, asked: TurnRequest, found: Inflight | Replay
    ) -> Iterator[Callable[[asyncio.BaseTransport | None], None]]:
        """Around the sending of an answer; to be told when it left whole, and over which connection."""
        retry, delivered = asked.retry, False

        def sent(transport: asyncio.BaseTransport | None) -> None:
            nonlocal delivered
            delivered = True
            answer = self._answer_of(found)
            if answer is not None:
                trajectory, turn = answer
                self._connections.add(trajectory.id, turn, transport)
                # The answer has left, so no error may follow it: a restart that is not told says it again at worst.
                with contextlib.suppress(CapacityError):
                    self.store.delivered(trajectory, turn, retry)

        if isinstance(found, Inflight):
            found.attach()
            found.retry = max(found.retry, retry)
        elif found.trajectory is not None:
            found.trajectory.deliveries.begin(found.turn, retry)
        try:
            yield sent
        except CapacityError as error:
            if (
                error.retry_after_s is not None
                and isinstance(found, Inflight)
                and found.task is not None
                and found.task.done()
            ):
                self._refuse(asked, found.key)
            raise
        finally:
            if isinstance(found, Inflight):
                found.detach()
            answer = self._answer_of(found)
            if (
                answer is not None
                and not delivered
                and not (isinstance(found, Inflight) and found.num_attached)
            ):
                trajectory, turn = answer
                trajectory.deliveries.fail(turn)

    def _answer_of(self, found: Inflight | Replay) -> tuple[Trajectory, int] | None:
        """What it is named by, once it is recorded."""
        if isinstance(found, Replay):
            return None if found.trajectory is None else (found.trajectory, found.turn)
        turns = [item.turn for item in found.finished if item.turn is not None]
        if found.asked.trajectory is None or not found.is_recorded:
            return None
        return found.asked.trajectory, min(turns)

    def _reap(self, inflight: Inflight, task: asyncio.Task[bytes]) -> None:
        self._running.discard(task)
        if inflight.asked.name:
            if self._named.get(inflight.key) is inflight:
                del self._named[inflight.key]
        else:
            alike = self._alike[inflight.key]
            alike.remove(inflight)
            if not alike:
                del self._alike[inflight.key]
        inflight.let_go()
        inflight.drop_ended()
        if task.cancelled():
            return
        if task.exception() is not None:
            log.debug("a request ended with %s", type(task.exception()).__name__)
        elif inflight.asked.idempotency_key and inflight.asked.trajectory is None:
            self._keep(inflight.key, inflight.asked.digest, task.result())

    def _keep(self, key: str, digest: str, answer: bytes) -> None:
        self._answers[key] = (digest, answer)
        self._answer_bytes += len(answer)
        while len(self._answers) > _MAX_ANSWERS or self._answer_bytes > _MAX_ANSWER_BYTES:
            _, (_, old) = self._answers.popitem(last=False)
            self._answer_bytes -= len(old)

    # --- turns -----------------------------------------------------------------------------------------

    def submit(
        self,
        inflight: Inflight,
        prompt: Prompt,
        params: dict[str, Any],
        *,
        model: str,
        streamed: bool,
        entries: bool,
    ) -> TurnHandle:
        """Start one turn of a request."""
        asked, trajectory = inflight.asked, inflight.asked.trajectory
        if trajectory is not None and len(trajectory.turns) >= self.max_turns:
            raise RequestError(
                f"a trajectory has at most {self.max_turns} turns",
                field="X-Session-ID",
                code="too_many_turns",
            )
        now_s = self.dispatcher.now_s()
        floors = [v for v in (asked.min_version, trajectory.newest if trajectory else None) if v is not None]
        spec = te.TurnSubmitted(
            at_s=now_s,
            turn_id=f"n-{secrets.token_hex(8)}",
            trajectory_id=trajectory.id if trajectory is not None else f"anonymous-{secrets.token_hex(8)}",
            job=trajectory.created.job if trajectory is not None else "",
            task_kind=trajectory.created.task_kind if trajectory is not None else "",
            prefill_per_decode=trajectory.created.prefill_per_decode if trajectory is not None else None,
            group_id=trajectory.created.group_id if trajectory is not None else None,
            model=model,
            num_prompt_tokens=len(prompt.token_ids),
            max_tokens=params["max_tokens"],
            resumable=is_resumable(params, streamed=streamed),
            streamed=streamed,
            streamed_here=self.dispatcher.stream_upstream,
            min_version=max(floors, default=None),
            dedicated_only=asked.dedicated_only,
            deadline_at_s=now_s + min(self.turn_s, asked.deadline_s or self.turn_s),
            run=trajectory.run if trajectory is not None else "",
        )
        headers = asked.trace_headers
        if self.tracing is not None:
            headers = self.tracing.begin(spec, headers)
        try:
            handle = self.dispatcher.submit(
                spec,
                prompt.token_ids,
                params,
                keep_entries=entries,
                trace_headers=headers,
                routed_from=None if trajectory is None else trajectory.routed_from(prompt.parent),
            )
        except RoseError as error:
            if self.tracing is not None:
                self.tracing.refused(spec.turn_id, error.code or "refused")
            raise
        inflight.add(handle)
        return handle

    async def finish(self, inflight: Inflight, handle: TurnHandle, prompt: Prompt) -> Finished:
        """Wait for a turn and sum it up.

        Raises:
            RoseError: The turn was cancelled or failed.
        """
        ended = await handle.done
        if ended.outcome is not te.TurnState.DONE:
            raise turn_error(ended)
        done = Finished(
            ended=ended,
            handle=handle,
            prompt=prompt,
            turn=None,
            fork=prompt.fork,
            created=int(time.time()),
            summary=summary_of(ended.result, handle, prompt),
        )
        inflight.finished.append(done)
        return done

    def next_turns(self, inflight: Inflight, done: list[Finished]) -> None:
        """Number turns that are about to be recorded, and see which of them branch; both hold until the next await.

        Raises:
            Gone, Conflict: The trajectory ended while they ran.
            CapacityError: Its job has become another run's than theirs.
        """
        trajectory = inflight.asked.trajectory
        if trajectory is not None:
            self.store.open(trajectory.id)
            for item in done:
                self.store.check_sampled(trajectory.created.job, item.summary["segments"])
            continued: set[int] = set()
            first = len(trajectory.turns)
            is_side = inflight.asks == side.SIDE or (inflight.asks == side.SMALL and trajectory.has_tools)
            # What came before it was beside the task, so nothing was left for it.
            beside = (side.SIDE, side.SMALL) if inflight.asks == side.TOOLS else (side.SIDE,)
            begins = all(each.asks in beside for each in trajectory.turns)
            for turn, item in enumerate(done, first):
                item.turn, parent = turn, item.prompt.parent
                if parent is None and turn > 0 and (is_side or (begins and turn == first)):
                    item.fork = "side" if is_side else None
                    continue
                again = parent in trajectory.parents or parent in continued
                if item.fork is None and (again if parent is not None else turn > 0):
                    item.fork = "branch"
                if parent is not None:
                    continued.add(parent)

    def record(
        self,
        inflight: Inflight,
        choices: Sequence[Finished],
        *,
        kind: str,
        messages: Sequence[Mapping[str, Any]] = (),
        kept: Kept | None = None,
    ) -> None:
        """Journal the finished turns of a request, one for each choice.

        Args:
            messages: What each says, of a chat.
            kept: Its new messages, where a later request may refer to them.
        """
        first_with: dict[int, int | None] = {}
        for index, done in enumerate(choices):
            tip = mark = b""
            if messages and done.prompt.tip_base:
                tip, mark = tips(done.prompt.tip_base, messages[index]), thought(messages[index])
            self._record(
                inflight,
                done,
                kind=kind,
                prompt_of=first_with.get(id(done.prompt)),
                choice=index,
                num_choices=len(choices),
                tip=tip,
                thoughts=mark,
                messages=b""
                if kept is None
                else kept.with_answer(messages[index], done.ended.result.turn_id),
                messages_of=None if kept is None else kept.after,
                asks=inflight.asks,
            )
            first_with.setdefault(id(done.prompt), done.turn)
        if inflight.asked.trajectory is not None:
            inflight.is_recorded = True
            if inflight.num_attached:
                inflight.asked.trajectory.deliveries.begin(
                    min(done.turn or 0 for done in choices), inflight.retry
                )

    def _record(
        self, inflight: Inflight, done: Finished, *, kind: str, prompt_of: int | None, **fields: Any
    ) -> None:
        trajectory = inflight.asked.trajectory
        if trajectory is not None and done.turn is not None:
            if done.fork is not None:
                self.on_fork(done.fork)
            actions = self.store.add_turn(
                record_of(trajectory, inflight, done, done.turn, kind=kind, prompt_of=prompt_of, **fields)
            )
            for action in actions:
                if isinstance(action, sp.Discard):
                    for name in action.trajectory_ids:
                        self.dispatcher.cancel_trajectory(name, action.reason)
        self.on_finished(done, inflight.asked)

    def delivers(self, inflight: Inflight, handle: TurnHandle, answer: Mapping[str, Any]) -> None:
        """A stream is about to end: ``answer`` is the message that its client put together."""
        trajectory = inflight.asked.trajectory
        done = next(item for item in inflight.finished if item.handle is handle)
        if trajectory is not None and done.turn is not None and done.prompt.tip_base:
            self.store.add_form(trajectory, done.turn, tips(done.prompt.tip_base, answer), thought(answer))

    def delivers_again(self, found: Replay, tip_base: bytes, answer: Mapping[str, Any]) -> None:
        """A recorded answer is about to leave in a form that may never have left before.

        Args:
            tip_base: Names the messages that it answers.
        """
        if found.trajectory is not None:
            self.store.add_form(found.trajectory, found.turn, tips(tip_base, answer), thought(answer))

    async def drain(self, timeout_s: float) -> int:
        """Let running requests end; returns how many did not."""
        if not self._running:
            return 0
        _, pending = await asyncio.wait(set(self._running), timeout=timeout_s)
        return len(pending)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


def _check_same(digest: str, asked: TurnRequest, field: str) -> None:
    if digest != asked.digest:
        raise RequestError(
            "the same turn was asked with another body, or with other X-ROSE headers",
            field=field,
            status=422,
            code="turn_conflict",
        )


def _key(asked: TurnRequest) -> str:
    scope = "" if asked.trajectory is None else asked.trajectory.id
    name = asked.name
    return f"{name[:2]}{scope}:{name[2:]}" if name else f"d:{scope}:{asked.digest}"
