"""One turn that has not ended, as the turn book sees it.

Holds the tokens, who made them (segments) and with which weights (spans).  Changed only by
``rose.policy.turns``; the invariants of its contents are in :meth:`Turn.check`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rose.lineage import Version
from rose.policy.turn_events import Segment, Span, TurnResult, TurnState, TurnSubmitted
from rose.policy.worker import Worker


@dataclass(kw_only=True, slots=True)
class Turn:
    """A turn that has not ended."""

    spec: TurnSubmitted
    order: tuple[int, float, int]
    queued_at_s: float
    is_tail: bool = False
    """Of a trajectory that is expected to be among the last: better off where nobody can cut it."""
    state: TurnState = TurnState.QUEUED
    hold: str = "capacity"
    attempt: int = 0
    worker: Worker | None = None
    dispatch_version: Version | None = None
    dispatch_run: str = ""
    reserved_tokens: int = 0
    attempt_start: int = 0
    attempt_at_s: float = 0.0
    attempt_load_s: float = 0.0
    """The worker's load integral at dispatch."""
    attempt_made: float = 0.0
    """Its worker's ``Pace.made`` at dispatch."""
    stopped_at_s: float | None = None
    """When the live attempt's engine was asked to end it with the tokens that it has."""
    stopped_for: str = ""
    """The worker with room for whose sake it was asked."""
    stopped_rest: tuple[float, float] = (0.0, 0.0)
    """What was left of it then: tokens, and the seconds they would have taken where it was."""
    attempt_mixed: bool | None = None
    """What the live attempt's engine said of its context (:class:`~rose.policy.turn_events.AttemptEnded`)."""
    kv_mixed: bool | None = False
    attempt_published: Version | None = None
    """The newest version that its job had published when the live attempt's first token arrived, by the word of its trainer or its worker."""
    attempt_resident: int = 0
    """Tokens believed to be in the worker's cache at dispatch."""
    asked_to_leave_s: float | None = None
    """When the live attempt was asked to end with what it has, because its device goes back."""
    progress_at_s: float = 0.0
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    """Packed, like the log-probs: a list would take eight times the memory."""
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    has_logprobs: bool = False
    """Some engine told one; else all are 0."""
    segments: list[Segment] = field(default_factory=lambda: list[Segment]())
    spans: list[Span] = field(default_factory=lambda: list[Span]())
    expected_tokens: int = 0
    """Output still expected, as of when it was queued; also what is reserved for it."""
    infra_left: int = 5
    data_left: int = 2
    num_reclaims: int = 0
    num_futile: int = 0
    backoff_until_s: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    detached_at_s: float | None = None
    answered_503: bool = False
    first_dispatch_at_s: float | None = None
    first_token_at_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far: what the next attempt starts with."""
        return self.spec.num_prompt_tokens + len(self.token_ids)

    @property
    def need_tokens(self) -> int:
        """KV room that a worker must have for it."""
        return self.num_tokens + self.expected_tokens

    @property
    def oldest_at_most(self) -> Version | None:
        """A version whose step its oldest token is not above, by all that was heard; None while nothing can be said.

        Of attempts at an engine that are over, the engine has told; of the live one, no token is newer than what had been published
        when it arrived, unless its worker had weights of an earlier start of the trainer, which may have got further.  What was published
        is what the trainer said or, where that is further, what the worker had by its last heartbeat: who changed its weights since then,
        before its trainer's call, is ahead of both for that moment.
        """
        over = self.attempt_start if self.worker is not None else len(self.token_ids)
        known = [span.version for span in self.spans if span.start < over]
        newest, sent = self.attempt_published, self.dispatch_version
        if len(self.token_ids) > over and newest is not None and (sent is None or sent[0] == newest[0]):
            known.append(newest)
        return min(known, key=_step, default=None)

    def append(self, worker: Worker, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Keep tokens of the live attempt.

        Their version is provisional: the one at dispatch, the oldest it can be; the engine's own
        spans replace it at the end of the attempt (:meth:`relabel`).
        """
        start, count = len(self.token_ids), len(token_ids)
        self.token_ids += array("I", token_ids)  # half the time of extend(token_ids)
        if logprobs:
            self.has_logprobs = True
            self.logprobs += array("d", logprobs)
        else:
            self.logprobs.frombytes(bytes(self.logprobs.itemsize * count))
        last = self.segments[-1] if self.segments else None
        same = last is not None and last.attempt == self.attempt
        if last is not None and same:
            start, count = last.start, last.num_tokens + count
            self.segments.pop()
        self.segments.append(
            Segment(
                worker_id=worker.worker_id,
                tier=worker.tier,
                attempt=self.attempt,
                start=start,
                num_tokens=count,
                run=self.dispatch_run,
            )
        )
        _append_span(self.spans, self.dispatch_version or (0, 0), len(token_ids))

    def relabel(self, versions: Sequence[Span]) -> None:
        """Replace the provisional version of this attempt's tokens by the engine's spans, if they fit."""
        num_new = len(self.token_ids) - self.attempt_start
        at = 0
        for span in versions:
            if span.start != at or span.num_tokens < 1:
                return
            at += span.num_tokens
        if at < num_new or not versions:
            return
        kept: list[Span] = []
        for span in self.spans:
            if span.start < self.attempt_start:
                _append_span(kept, span.version, min(span.num_tokens, self.attempt_start - span.start))
        for span in versions:
            _append_span(kept, span.version, max(0, min(span.num_tokens, num_new - span.start)))
        self.spans[:] = kept

    def relabel_run(self, run: str) -> None:
        """The live attempt's tokens were sampled by ``run``, whatever had been believed."""
        self.dispatch_run = run
        if self.segments and self.segments[-1].attempt == self.attempt:
            self.segments[-1] = replace(self.segments[-1], run=run)

    def close_attempt(self) -> None:
        """The live attempt is over; what its tokens saw counts for the turn."""
        if len(self.token_ids) > self.attempt_start:
            if self.attempt_mixed:
                self.kv_mixed = True
            elif self.attempt_mixed is None and not self.kv_mixed:
                self.kv_mixed = None
        self.attempt_mixed = None

    def restart(self) -> None:
        """Forget the output: this turn's sampling state cannot be carried to another engine."""
        self.kv_mixed = False
        del self.token_ids[:]
        del self.logprobs[:]
        self.segments.clear()
        self.spans.clear()

    def result(self, at_s: float) -> TurnResult:
        return TurnResult(
            turn_id=self.spec.turn_id,
            trajectory_id=self.spec.trajectory_id,
            token_ids=tuple(self.token_ids.tolist()),  # twice as fast as without the list
            logprobs=tuple(self.logprobs.tolist()) if self.has_logprobs else (0.0,) * len(self.logprobs),
            segments=tuple(self.segments),
            spans=tuple(self.spans),
            num_attempts=self.attempt,
            num_reclaims=self.num_reclaims,
            num_cached_tokens=self.num_cached_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens,
            submitted_at_s=self.spec.at_s,
            first_dispatch_at_s=self.first_dispatch_at_s,
            first_token_at_s=self.first_token_at_s,
            ended_at_s=at_s,
            kv_mixed=self.kv_mixed,
        )

    def check(self) -> None:
        """Each token has one segment, one span and one log-prob, contiguous from 0, within the limit."""
        at = 0
        for segment in self.segments:
            assert segment.start == at
            assert segment.num_tokens > 0
            at += segment.num_tokens
        assert at == len(self.token_ids) == len(self.logprobs) <= self.spec.max_tokens
        at = 0
        for span in self.spans:
            assert span.start == at
            assert span.num_tokens > 0
            at += span.num_tokens
        assert at == len(self.token_ids)


def _step(version: Version) -> int:
    """Steps are of one schedule, whichever start of the trainer took them (``rose.policy.staleness``)."""
    return version[1]


def _append_span(spans: list[Span], version: Version, count: int) -> None:
    """Grow the last span, or start one: spans stay run-length encoded."""
    if count <= 0:
        return
    if spans and spans[-1].version == version:
        last = spans[-1]
        spans[-1] = Span(version=version, start=last.start, num_tokens=last.num_tokens + count)
    else:
        start = spans[-1].start + spans[-1].num_tokens if spans else 0
        spans.append(Span(version=version, start=start, num_tokens=count))
