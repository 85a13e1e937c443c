"""Decide how many tokens the next rollout step may have, so that serving keeps both of its deadlines.

Serving has two promises: the first token by ``arrival + B_ttft`` and each next one by ``last + B_tpot``.
Take serving's own predicted work off them and they say when that work must *start* at the latest::

    TTFT start = earliest arrival + B_ttft - T(waiting prompt tokens)
    TPOT start = earliest last token + B_tpot - T(decode batch)

What lies between now (or the end of serving's running step) and the earlier of the two is *slack*.  A rollout
step may start only if the time that it would keep serving waiting fits the slack: its *predicted* length, or the share of it
that counts where the device preempts it (``AdmissionParams.delay``).  Its token budget is the largest that does.
Nothing fits: the gate is closed until serving writes its board again.

:func:`admit` decides; :class:`StepModel` predicts step lengths and learns from measured ones.  Neither
counts steps in flight (the engine runs one at a time) nor looks at memory (``rose.policy.lending``).

Pure: no I/O, no clock, no randomness, no logging.  Times are seconds on one monotonic clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum

from rose.errors import ConfigError

UNLIMITED_TOKENS = 1 << 30
"""The budget when serving has nothing to do."""

MOST_RESERVE = 0.95
"""Of a first token's limit, the most that can be kept from rollouts."""

_FORGET = 0.998
"""Weight of the past at each observation: about the last 500 steps count."""
_MAX_VARIANCE = 1e6
"""Directions that traffic does not exercise would otherwise blow up as the past is forgotten."""

_SCALES = (1e-2, 1e-4, 1e-3, 1e-6, 1e-4)
"""Typical seconds per step, prefill token, decode, context token and encoder token: makes the unknowns of order one."""
_FIRST_VARIANCE = 10.0
SHORTEST_S = 1e-5
"""No engine makes a step in less; a measurement that says so is wrong, and by its relative error it would outweigh all others."""


class StepModel:
    """Length of one engine step: ``base + prefill tokens + decoding requests + context tokens + encoder tokens``, linear.

    Args:
        base_s: A step with nothing in it.
        prefill_token_s: Each prompt token, and each draft that is verified.
        decode_s: Each request that gets one token.
        context_token_s: Each token that attention reads, summed over the batch.
        encoder_token_s: Each token that an image is made into, in the step that runs its encoder.

    Raises:
        ConfigError: A coefficient is negative or no number, or all are zero.

    Holds no reference to a clock or an engine; one owner.
    """

    __slots__ = ("_coefficients", "_num_unknown", "_spread", "num_observed", "relative_error")

    def __init__(
        self,
        *,
        base_s: float = 0.010,
        prefill_token_s: float = 0.0002,
        decode_s: float = 0.0005,
        context_token_s: float = 0.0,
        encoder_token_s: float = 0.0002,
    ) -> None:
        given = {
            "base_s": base_s,
            "prefill_token_s": prefill_token_s,
            "decode_s": decode_s,
            "context_token_s": context_token_s,
            "encoder_token_s": encoder_token_s,
        }
        for name, value in given.items():
            if not 0.0 <= value < math.inf:
                raise ConfigError(f"{value} is not a number of seconds", field=name)
        if not any((base_s, prefill_token_s, decode_s, context_token_s)):
            raise ConfigError("a step cannot take no time", field="base_s")
        self._coefficients = list(given.values())
        self._num_unknown = 4
        """Five from the first encoder on: an engine without one does not pay for what it would cost."""
        self._spread = _diagonal(_FIRST_VARIANCE)
        self.num_observed = 0
        self.relative_error = 0.0
        """Running mean of ``|predicted - measured| / measured``, before each correction."""

    @property
    def base_s(self) -> float:
        return self._coefficients[0]

    @property
    def prefill_token_s(self) -> float:
        return self._coefficients[1]

    @property
    def decode_s(self) -> float:
        return self._coefficients[2]

    @property
    def context_token_s(self) -> float:
        return self._coefficients[3]

    @property
    def encoder_token_s(self) -> float:
        return self._coefficients[4]

    def predict(
        self,
        prefill_tokens: float = 0,
        num_decodes: int = 0,
        context_tokens: int = 0,
        encoder_tokens: int = 0,
    ) -> float:
        """Seconds."""
        base_s, prefill_s, decode_s, context_s, encoder_s = self._coefficients
        seconds = base_s + prefill_tokens * prefill_s + num_decodes * decode_s + context_tokens * context_s
        return seconds + encoder_tokens * encoder_s

    def observe(
        self,
        *,
        prefill_tokens: int,
        num_decodes: int,
        seconds: float,
        context_tokens: int = 0,
        encoder_tokens: int = 0,
    ) -> None:
        """Correct the model by one measured step (recursive least squares on the *relative* error).

        A measurement below :data:`SHORTEST_S`, or that is no number, is ignored.  About 20 us.
        """
        if not SHORTEST_S <= seconds < math.inf:
            return
        # Divided by the measurement: a long step must not outweigh a hundred short ones.
        counts = (
            1.0,
            float(prefill_tokens),
            float(num_decodes),
            float(context_tokens),
            float(encoder_tokens),
        )
        if encoder_tokens:
            self._num_unknown = 5
        n = self._num_unknown
        x = [count * scale / seconds for count, scale in zip(counts, _SCALES, strict=True)]
        w = [value / scale for value, scale in zip(self._coefficients, _SCALES, strict=True)]
        p = self._spread
        px = [sum(p[i][j] * x[j] for j in range(n)) for i in range(n)]
        denominator = _FORGET + sum(x[i] * px[i] for i in range(n))
        gain = [value / denominator for value in px]
        residual = 1.0 - self.predict(prefill_tokens, num_decodes, context_tokens, encoder_tokens) / seconds
        learned = [max(0.0, w[i] + gain[i] * residual) for i in range(n)]
        if any(learned):
            w[:n] = learned
            self._coefficients = [value * scale for value, scale in zip(w, _SCALES, strict=True)]
        for i in range(n):
            p[i][:n] = [(p[i][j] - gain[i] * px[j]) / _FORGET for j in range(n)]
        if sum(p[i][i] for i in range(n)) >= _MAX_VARIANCE:
            self._spread = _diagonal(_FIRST_VARIANCE)
        self.num_observed += 1
        weight = max(1.0 / self.num_observed, 0.01)
        self.relative_error += weight * (abs(residual) - self.relative_error)


def _diagonal(value: float) -> list[list[float]]:
    size = range(len(_SCALES))
    return [[value if i == j else 0.0 for j in size] for i in size]


@dataclass(frozen=True, kw_only=True, slots=True)
class BoardView:
    """What ``serving.board`` says, in seconds.

    The two deadlines are latest *starts* of serving's work when serving took its own prediction off them
    (it knows its own speed best); else pass ``serving_model`` to :func:`admit`.
    """

    present: bool = True
    """There is a serving engine that lives."""
    busy: bool = False
    """A step is running."""
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    """Prompt tokens to compute before the request with the earliest TTFT deadline has its first token."""
    ttft_deadline_s: float | None = None
    tpot_deadline_s: float | None = None
    step_started_s: float = 0.0
    step_s: float = 0.0
    """Predicted length of the running step."""

    @property
    def idle(self) -> bool:
        return not (self.present and (self.busy or self.running or self.waiting))


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What the rollout engine would run in its next step."""

    num_decodes: int = 0
    """Requests that want one token each."""
    prefill_tokens: int = 0
    context_tokens: int = 0
    """Tokens that attention reads for those decodes."""

    @property
    def tokens(self) -> int:
        return self.num_decodes + self.prefill_tokens


class Rule(IntEnum):
    """When a rollout step may start beside serving."""

    SLACK = 0
    """When its predicted length fits serving's slack.  Ours, and the default."""
    PAPER = 1
    """The published rule: while both slacks are positive, the decodes and one chunk of prefill, however long."""
    FREE = 2
    """Always.  For comparison: it protects nobody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionParams:
    """Raises:
    ConfigError: A value out of range.
    """

    rule: Rule = Rule.SLACK
    serialise: bool = False
    """Start no step while serving runs one: for a device that cannot preempt a kernel."""
    guard_s: float = 0.003
    """For requests that are still in serving's front end, and for the time to notice anything."""
    first_token_reserve_s: float = 0.0
    """Of a first token's slack, what rollouts leave with the rule ``SLACK``: requests that arrive behind this one, in a burst, wait for
    all that was spent before they came, and each of them has less of its own."""
    delay: float = 1.0
    """How long serving waits for each second of a rollout step that is under way when it wants the device: 1 where
    nothing preempts the step, less where the device's own scheduler does."""
    interference: float = 1.0
    """How much longer a rollout step takes beside a serving step than alone; 1 = no longer."""
    max_prefill_tokens: int = 512
    """Chunk of rollout prefill in a step that shares the device."""
    min_tokens: int = 1
    """A step smaller than this is not worth its base cost; wait for more slack instead."""
    idle_step_s: float | None = None
    """Longest rollout step while serving is idle; None = any.  Bounds how long a new request waits for it."""
    recheck_s: float = 0.1
    """A closed gate looks again after this long, should serving have died without a last word."""

    @property
    def reserve_s(self) -> float:
        """``first_token_reserve_s``, where the rule has one."""
        return self.first_token_reserve_s if self.rule is Rule.SLACK else 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.guard_s < math.inf:
            raise ConfigError(f"{self.guard_s} is not a number of seconds", field="guard_s")
        if not 0.0 <= self.first_token_reserve_s < math.inf:
            raise ConfigError(
                f"{self.first_token_reserve_s} is not a number of seconds", field="first_token_reserve_s"
            )
        if not 0.0 < self.delay <= 1.0:
            raise ConfigError(f"{self.delay} is not above 0 and at most 1", field="delay")
        if not 1.0 <= self.interference < math.inf:
            raise ConfigError(f"{self.interference} is below 1", field="interference")
        if self.max_prefill_tokens < 1 or self.min_tokens < 1:
            raise ConfigError("is below 1", field="max_prefill_tokens or min_tokens")
        if self.idle_step_s is not None and not 0.0 < self.idle_step_s < math.inf:
            raise ConfigError(f"{self.idle_step_s} is not a positive number", field="idle_step_s")
        if not 0.0 < self.recheck_s < math.inf:
            raise ConfigError(f"{self.recheck_s} is not a positive number", field="recheck_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """The answer: 0 tokens = gate closed, until the board changes or ``wake_at_s``."""

    token_budget: int
    wake_at_s: float | None
    reason: str
    slack_s: float | None = None
    """None: nothing to protect."""

    @property
    def open(self) -> bool:
        return self.token_budget > 0


def slack(
    now_s: float,
    board: BoardView,
    guard_s: float,
    serving_model: StepModel | None = None,
    first_token_reserve_s: float = 0.0,
) -> tuple[float, str]:
    """Seconds that serving can spare, and which deadline says so; ``inf`` where there is none."""
    best, which = math.inf, "no deadline"
    if board.ttft_deadline_s is not None:
        work_s = serving_model.predict(board.waiting_tokens) if serving_model else 0.0
        # The running step cannot take the waiting prompt in any more.
        free_s = max(now_s, board.step_started_s + board.step_s) if board.busy else now_s
        best, which = board.ttft_deadline_s - work_s - free_s - guard_s - first_token_reserve_s, "TTFT"
    if board.tpot_deadline_s is not None:
        work_s = serving_model.predict(num_decodes=board.running) if serving_model else 0.0
        # The running step brings the next tokens: what counts is when it started, or, once it takes
        # longer than predicted, when a step of the predicted length would have to have started.
        start_s = max(board.step_started_s, now_s - board.step_s) if board.busy else now_s
        left_s = board.tpot_deadline_s - work_s - start_s - guard_s
        if left_s < best:
            best, which = left_s, "TPOT"
    return best, which


def tokens_that_fit(limit_s: float, model: StepModel, demand: Demand, params: AdmissionParams) -> int:
    """The most tokens of ``demand`` that one step of ``limit_s`` seconds holds; decodes come first."""
    left_s = limit_s / (params.interference * params.delay) - model.base_s
    if left_s < 0.0:
        return 0
    num_decodes, fit = demand.num_decodes, 0
    if num_decodes > 0:
        each_s = model.decode_s + model.context_token_s * demand.context_tokens / num_decodes
        fit = num_decodes if each_s * num_decodes <= left_s else int(left_s / each_s)
        if fit < num_decodes:
            return fit
        left_s -= each_s * num_decodes
    prefill = min(demand.prefill_tokens, params.max_prefill_tokens)
    if prefill * model.prefill_token_s > left_s:
        prefill = int(left_s / model.prefill_token_s)
    return fit + prefill


def admit(
    now_s: float,
    *,
    board: BoardView,
    model: StepModel,
    params: AdmissionParams,
    demand: Demand,
    serving_model: StepModel | None = None,
) -> Admission:
    """Token budget of the rollout step that would start at ``now_s``.

    Args:
        model: Step lengths of the rollout engine.
        serving_model: Step lengths of serving; None when the board's deadlines already account for them.
    """
    if params.rule is Rule.FREE:
        return Admission(token_budget=UNLIMITED_TOKENS, wake_at_s=None, reason="no rule")
    if board.idle:
        why = "serving is idle" if board.present else "no serving on this device"
        if params.idle_step_s is None or not board.present:
            return Admission(token_budget=UNLIMITED_TOKENS, wake_at_s=None, reason=why)
        whole = replace(params, max_prefill_tokens=UNLIMITED_TOKENS, interference=1.0, delay=1.0)
        fit = tokens_that_fit(params.idle_step_s, model, demand, whole)
        # One token always: an idle device must not stand still because a limit was set too low.
        return Admission(token_budget=max(1, fit), wake_at_s=None, reason=why)
    if params.serialise and board.busy:
        wake_at_s = now_s + params.recheck_s
        return Admission(token_budget=0, wake_at_s=wake_at_s, reason="a serving step runs")
    slack_s, which = slack(now_s, board, params.guard_s, serving_model, params.reserve_s)
    chunk = demand.num_decodes + params.max_prefill_tokens
    if slack_s == math.inf:
        # Requests without a deadline: protected by the chunk alone.
        return Admission(token_budget=chunk, wake_at_s=None, reason="serving has no deadline")
    if params.rule is Rule.PAPER and slack_s > 0.0:
        return Admission(token_budget=chunk, wake_at_s=None, reason=f"{which} slack", slack_s=slack_s)
    fit = tokens_that_fit(slack_s, model, demand, params)
    if fit < min(params.min_tokens, max(1, demand.tokens)):
        return Admission(
            token_budget=0, wake_at_s=now_s + params.recheck_s, reason=f"{which} slack", slack_s=slack_s
        )
    return Admission(token_budget=fit, wake_at_s=None, reason=f"{which} slack", slack_s=slack_s)
