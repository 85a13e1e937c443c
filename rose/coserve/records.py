"""The words of the shared files of one device: what each writer says, in integers.

Every record is a frozen dataclass of ints (64-bit signed in the file).  Times are CLOCK_MONOTONIC
nanoseconds, 0 = none; memory is in pages of 2 MiB.  A record's schema is its name and its field names in
order: changing either makes old and new programs refuse each other instead of misreading each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.policy.lending_events import ALL_PAGES, Mode, Phase

__all__ = [
    "ChunkState",
    "LayerState",
    "Mode",
    "NodeState",
    "Phase",
    "RankState",
    "RolloutLease",
    "ServingBoard",
    "ServingLease",
    "phase_name",
]


def phase_name(phase: int) -> str:
    """The word for a lease's ``phase``; ``unknown``: of a version that has others."""
    return Phase(phase).name.lower() if phase in list(Phase) else "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeState:
    """``node.state``: what the node agent wants.  ``epoch`` rises with each change of mode or lend_pages."""

    mode: int = 0
    epoch: int = 0
    lend_pages: int = 0
    floor_pages: int = 0
    deadline_ns: int = 0
    slo_ttft_ns: int = 0
    slo_tpot_ns: int = 0
    has_serving: int = 0
    rule: int = 0
    """``rose.policy.admission.Rule``: when a rollout step may start."""
    serialise: int = 0
    fixed: int = 0
    """1: the loan is a fixed split; serving claims nothing back."""
    policy: int = 0
    """Of ``rose.policy.baselines.POLICIES``; with ``max_lend_pages`` for the agent that comes after one that was killed."""
    max_lend_pages: int = ALL_PAGES
    heartbeat_ns: int = 0
    delay_pct: int = 100
    """``AdmissionParams.delay`` in hundredths: how much of a rollout step production has to wait for."""
    stop_at_layers: int = 0
    """1: a rollout step under way waits between two layers while production owes a first token (:mod:`rose.policy.coserving.stops`)."""
    max_loss_ppm: int = 0
    """``LendingParams.max_hit_rate_loss`` in millionths: what a loan may cost production's prefix cache; 0 or all: whatever it costs."""
    reserve_pct: int = 0
    """Of ``slo_ttft_ns``, in hundredths, what rollout steps leave unspent (``AdmissionParams.first_token_reserve_s``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingLease:
    """``serving.lease``: memory of the serving engine; ``lent_pages`` is total - reserved as it sees it.

    ``support`` is a ``rose.policy.compat.Support``, ``row`` the number of the table's row that decided it.
    ``queried_tokens``, ``lost_tokens``, ``cold_pages``: what loans cost its prefix cache
    (``rose.policy.lending_events.ServingReported``); running totals since it started.
    ``kept_pages``: asked for, and not lent for what lies in them.
    ``stranded_pages``: wanted back, and for seconds no fewer of them: their holder neither obeys nor dies.
    """

    phase: int = 0
    support: int = 0
    row: int = 0
    total_pages: int = 0
    reserved_pages: int = 0
    lent_pages: int = 0
    stranded_pages: int = 0
    queried_tokens: int = 0
    lost_tokens: int = 0
    cold_pages: int = 0
    kept_pages: int = 0
    heartbeat_ns: int = 0
    errors: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingBoard:
    """``serving.board``: written by the engine thread at the start and the end of every step while a rollout engine may run;
    while none may, by the background thread, at most a quarter of a second late.

    ``Board.write`` writes the fields by position: a new one goes there too.
    ``owes_first`` is 1 while a request waits for its first token: in the queue, read in part, or in the step under way.
    ``needed_pages`` is what serving must come to hold while it claims memory, else 0; ``pressure_seq`` counts how
    often it claimed.  An absolute number: a claim *beyond* what serving holds would be asked for again and again by
    readers who see each returned page in the lease before serving, in a long step, sees it too.
    ``busy_ns`` is the sum of all step lengths so far, ``breaches`` how often a promise was broken: each request whose first
    token is later than the TTFT objective, each step with decodes that is longer than the TPOT objective.
    """

    step: int = 0
    busy: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    ttft_deadline_ns: int = 0
    tpot_deadline_ns: int = 0
    step_started_ns: int = 0
    step_ns: int = 0
    busy_ns: int = 0
    breaches: int = 0
    used_pages: int = 0
    needed_pages: int = 0
    pressure_seq: int = 0
    written_ns: int = 0
    owes_first: int = 0

    def claim_pages(self, reserved_pages: int) -> int:
        """What serving, which holds ``reserved_pages`` now, still wants back."""
        return max(0, self.needed_pages - reserved_pages)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutLease:
    """``rollout.lease``: memory and progress of the rollout engine."""

    phase: int = 0
    acked_epoch: int = 0
    reserved_pages: int = 0
    wanted_pages: int = 0
    gate_open: int = 0
    steps: int = 0
    schedules: int = 0
    tokens: int = 0
    """Computed, prefill included."""
    decoded: int = 0
    """Of these, one per request and step."""
    reclaim_seq: int = 0
    cut_requests: int = 0
    cut_ns: int = 0
    step_ns: int = 0
    """The longest of its last steps."""
    heartbeat_ns: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkState:
    """``<role>.chunks``: the engine's wish; one byte per chunk follows, 1 = wanted mapped.

    ``generation`` rises with each change of the marks, which are written before it: they are at least as new.
    ``after_step``: a chunk that is not wanted any more may be touched by steps up to this one; it is published before the marks.
    ``engine`` says whose wish it is (``RankState.engine``): workers obey no other engine core's.
    """

    engine: int = 0
    generation: int = 0
    wanted_pages: int = 0
    after_step: int = 0
    heartbeat_ns: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """``<role>.rank<k>``: what one worker holds; one byte per chunk follows: 1 = mapped, 2 = on its way (not to be used, and
    perhaps there).

    ``generation``: of the marks that it acts by.  A chunk that they do not want and that is not mapped will not be mapped, one that they
    want and that is mapped will stay, until newer marks say otherwise; the states are written before it.
    ``engine``: of the engine that the worker belongs to, a number that its core made before it started the worker.
    ``resident_pages`` is what it mapped and did not unmap; ``retained_pages`` of these are behind no address, kept for the
    next growth.  The kernel's word on that is in the other numbers, of one instant
    ``audited_ns`` (0: not looked yet): of ``booked_bytes`` that were mapped then ``missing_bytes`` were not in memory, and
    of all that was not mapped ``touched_bytes`` were used.
    """

    engine: int = 0
    generation: int = 0
    resident_pages: int = 0
    retained_pages: int = 0
    heartbeat_ns: int = 0
    booked_bytes: int = 0
    missing_bytes: int = 0
    touched_bytes: int = 0
    audited_ns: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerState:
    """``rollout.layers``: where rank 0 of a rollout engine stands in its step, written while steps may stop between layers.

    ``point`` is the last that it has passed in ``step``: no rank passes one that rank 0 has not.  The rest are running totals:
    ``stops``, of these ``quick_stops`` within 2 ms of the word of production that they stopped for, how late they were together
    (``late_ns``), how long they lasted (``waited_ns``), and how many went on before production was done (``given_up``).
    """

    step: int = 0
    point: int = 0
    waiting: int = 0
    stops: int = 0
    quick_stops: int = 0
    late_ns: int = 0
    waited_ns: int = 0
    given_up: int = 0
