"""Turns as OpenTelemetry spans, where ``tracing.otlp_endpoint`` is set.

A turn is a span, a child of its client's where the request carries a ``traceparent``; the engine gets the turn's.  Inside it are
``queue`` (until its first engine), ``engine`` (one for each that it met; what ended it is an attribute) and ``move`` (from the loss of one engine to
the next).  Attributes are names, counts and reasons: no text, no token.

Spans are handed to the SDK's batch processor, which sends them from a thread of its own and drops what it has no room for: a collector
that is slow or away costs no turn anything.  The usual variables (``OTEL_TRACES_SAMPLER``, ``OTEL_EXPORTER_OTLP_HEADERS``, ...) apply.  The packages are optional
(``pip install '.[tracing]'``, from a checkout); without the setting they are not imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rose.errors import ConfigError
from rose.policy import turn_events as te

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

SERVICE = "rose-scheduler"


@dataclass(kw_only=True, slots=True)
class _Turn:
    span: Span
    inner: Span
    """``queue``, ``engine`` or ``move``: there is always one."""


class Tracing:
    """Args:
    processor: Takes the spans.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Whoever made it ends it: at the interpreter's end nothing would bound its wait for the collector.
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": SERVICE}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SERVICE)
        self._context_of = set_span_in_context
        self._headers = TraceContextTextMapPropagator()
        self._turns: dict[str, _Turn] = {}

    @classmethod
    def make(cls, otlp_endpoint: str | None) -> Tracing | None:
        """None where no endpoint is set.

        Raises:
            ConfigError: The packages are not installed.
        """
        if otlp_endpoint is None:
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"needs a package that is not installed: {error.name}",
                field="tracing.otlp_endpoint",
                fix="pip install '.[tracing]' from a checkout of ROSE",
            ) from error
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=otlp_endpoint)))

    def begin(self, spec: te.TurnSubmitted, headers: Mapping[str, str]) -> dict[str, str]:
        """A turn is submitted.

        Args:
            headers: Its client's trace context; may be empty.

        Returns:
            The trace context for its engines.
        """
        span = self._tracer.start_span(
            "turn",
            context=self._headers.extract(dict(headers)),
            attributes={
                "rose.turn": spec.turn_id,
                "rose.trajectory": spec.trajectory_id,
                "rose.job": spec.job,
                "rose.model": spec.model,
                "rose.prompt_tokens": spec.num_prompt_tokens,
            },
        )
        self._turns[spec.turn_id] = _Turn(span=span, inner=self._inside(span, "queue"))
        passed: dict[str, str] = {}
        self._headers.inject(passed, context=self._context_of(span))
        return passed

    def refused(self, turn_id: str, reason: str) -> None:
        """A turn that was begun is not taken."""
        turn = self._turns.pop(turn_id, None)
        if turn is None:
            return
        turn.inner.end()
        turn.span.set_attributes({"rose.outcome": "refused", "rose.reason": reason})
        turn.span.end()

    def on_action(self, action: te.Action) -> None:
        match action:
            case te.Dispatch():
                turn = self._turns.get(action.turn_id)
                if turn is not None:
                    turn.inner.end()
                    turn.inner = self._inside(
                        turn.span,
                        "engine",
                        worker=action.worker_id,
                        attempt=action.attempt,
                        kept_tokens=action.num_kept_tokens,
                    )
            case te.Requeued():
                turn = self._turns.get(action.turn_id)
                if turn is not None:
                    turn.inner.set_attribute("rose.reason", action.reason)
                    turn.inner.end()
                    turn.inner = self._inside(turn.span, "move", reason=action.reason)
            case te.TurnEnded():
                self._ended(action)
            case _:
                pass

    @property
    def num_open(self) -> int:
        """Turns whose span has not ended."""
        return len(self._turns)

    async def stop(self, timeout_s: float) -> None:
        """Send what is left.  Neither this nor the end of the process waits longer for a collector that is away."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def close() -> None:
            try:
                self.close()
            finally:
                with contextlib.suppress(RuntimeError):  # the loop did not wait for us, and is closed
                    loop.call_soon_threadsafe(done.set)

        # Not an executor's thread: those are joined before the process ends.
        threading.Thread(target=close, name="rose-traces", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), timeout_s)

    def close(self) -> None:
        """Send what is left, for as long as the exporter tries."""
        for turn in self._turns.values():
            turn.inner.end()
            turn.span.end()
        self._turns.clear()
        self._provider.shutdown()

    def _ended(self, action: te.TurnEnded) -> None:
        turn = self._turns.pop(action.turn_id, None)
        if turn is None:
            return
        now_ns = time.time_ns()
        turn.inner.set_attribute("rose.reason", action.reason)
        turn.inner.end(now_ns)
        result = action.result
        turn.span.set_attributes(
            {
                "rose.outcome": action.outcome.value,
                "rose.reason": action.reason,
                "rose.tokens": len(result.token_ids),
                "rose.cached_tokens": result.num_cached_tokens,
                "rose.attempts": result.num_attempts,
            }
        )
        turn.span.end(now_ns)

    def _inside(self, span: Span, name: str, **attributes: Any) -> Span:
        return self._tracer.start_span(
            name,
            context=self._context_of(span),
            attributes={f"rose.{field}": value for field, value in attributes.items()},
        )
