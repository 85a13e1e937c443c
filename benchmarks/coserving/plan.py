"""What the co-serving benchmark does and when: the arms, the blocks, and the requests of each block.  Pure.

A *segment* is a few seconds of production traffic.  Every arm serves every segment once, each time as a *block*: a lead
in which the arm settles, the traffic, and a tail in which its requests end.  The order of the arms rotates from
segment to segment, so that no arm always follows the same one.  Request ``i`` of a segment has the same
moment and lengths in every arm: that is the pair behind every ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rose.evaluation.arrivals import (
    Arrival,
    TraceRow,
    TrafficShape,
    fit_trace,
    generate_arrivals,
    thin_burst,
)

ALONE_1, ALONE_2, SOLO = "alone_1", "alone_2", "solo"
WORKLOADS = ("generated", "trace", "burst", "multiturn", "tight")
RETIMED = ("generated", "trace")
"""Of these a higher rate is the same requests closer together (:func:`retime`); the others are made for the rate."""
TIGHT_SHARE = 0.87
"""``tight``: of its limit, what a prompt takes alone."""
TIGHT_OUTPUT_TOKENS = 8
BURST_TRAFFIC_S = 20.0
"""Of a block of ``burst``: long enough for production to be no busier on average than in the other workloads."""
HALF, WHOLE = -1, -2
"""Loans that only the running engines can put into pages: half of them, and all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to share the device; ``settings`` go to the node agent (``POST /set``)."""

    name: str
    label: str
    settings: Mapping[str, Any]


def _on(
    policy: str,
    rule: str,
    sched: str,
    lend: int = WHOLE,
    serialise: bool = False,
    stop_at_layers: bool = False,
    first_token_reserve: float = 0.0,
) -> dict[str, Any]:
    return {
        "mode": "on",
        "policy": policy,
        "rule": rule,
        "sched": sched,
        "max_lend_pages": lend,
        "serialise": serialise,
        "stop_at_layers": stop_at_layers,
        "first_token_reserve": first_token_reserve,
        "rl_step": policy == "paper",
    }


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(name=ALONE_1, label="serving alone", settings={"mode": "off"}),
        Arm(name=ALONE_2, label="serving alone, again (A/A)", settings={"mode": "off"}),
        Arm(
            name="naive",
            label="naive: fixed half, no gate, equal priority",
            settings=_on("static", "free", "normal", HALF),
        ),
        Arm(
            name="idle",
            label="idle priority only: fixed half, no gate",
            settings=_on("static", "free", "idle", HALF),
        ),
        Arm(
            name="static",
            label="static split: fixed half, our gate, idle priority",
            settings=_on("static", "slack", "idle", HALF),
        ),
        Arm(
            name="paper",
            label="paper: its lending and its gate, idle priority",
            settings=_on("paper", "paper", "idle"),
        ),
        Arm(name="rose", label="ours: lending, gate, idle priority", settings=_on("rose", "slack", "idle")),
        Arm(
            name="paper_serial",
            label="paper, equal priority, steps serialised",
            settings=_on("paper", "paper", "normal", serialise=True),
        ),
        Arm(
            name="rose_serial",
            label="ours, equal priority, steps serialised",
            settings=_on("rose", "slack", "normal", serialise=True),
        ),
        Arm(
            name="rose_serial_layers",
            label="ours, serialised, steps stop at layers for a prompt",
            settings=_on("rose", "slack", "normal", serialise=True, stop_at_layers=True),
        ),
        Arm(
            name="rose_serial_reserve",
            label="ours, serialised, a fifth of the first-token limit left",
            settings=_on("rose", "slack", "normal", serialise=True, first_token_reserve=0.2),
        ),
    )
}
SOLO_ARM = Arm(name=SOLO, label="rollouts alone on the core", settings=_on("static", "free", "normal", WHOLE))
USUAL_ARMS = tuple(name for name in ARMS if name not in ("rose_serial_layers", "rose_serial_reserve"))
"""What is measured when nobody says; the others answer one question each."""
QUICK_ARMS = (ALONE_1, ALONE_2, "naive", "paper", "rose")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of a block."""

    lead_s: float = 1.5
    traffic_s: float = 9.0
    tail_s: float = 1.0

    @property
    def block_s(self) -> float:
        return self.lead_s + self.traffic_s + self.tail_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """``start_s`` from the first block; requests ``first .. first + count - 1`` of the schedule are its own."""

    arm: str
    segment: int
    start_s: float
    first: int
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """The head of a prompt: ``system_tokens`` of one stream, then ``history_tokens`` of another."""

    system: int = 0
    system_tokens: int = 0
    session: int = 0
    history_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """All blocks and all requests, in order.  ``keys[i]``: which pair request ``i`` belongs to."""

    timing: Timing
    blocks: tuple[Block, ...]
    arrivals: tuple[Arrival, ...]
    prefixes: tuple[Prefix, ...]
    keys: tuple[int, ...]

    @property
    def length_s(self) -> float:
        return len(self.blocks) * self.timing.block_s

    def num_requests(self, blocks: int) -> int:
        """Of the first so many blocks."""
        return sum(block.count for block in self.blocks[:blocks])


PAIRS_PER_SEGMENT = 10_000
Segment = Sequence[tuple[Arrival, Prefix]]


def make_segments(
    workload: str,
    shape: TrafficShape,
    timing: Timing,
    num_segments: int,
    seed: int,
    rows: list[TraceRow] | None,
    stretch: int = 0,
) -> list[Segment]:
    """Traffic of each segment, times from the start of its traffic.

    Args:
        stretch: Of the trace, for ``trace``: another number, other requests (:func:`rose.evaluation.arrivals.fit_trace`).  A seed does not
            change a trace.

    ``generated`` and ``trace`` are stretches of one long excerpt, so bursts fall where they fall; ``burst`` has the trace's busiest
    second in every segment, each time with other requests of it; ``multiturn`` is made for the segment, because its sessions must end in it.
    ``tight`` is prompts of the longest length, about evenly spaced and with short answers: each uses nearly all of its limit alone.
    """
    if workload == "tight":
        return [_tight(shape, timing, seed, number) for number in range(num_segments)]
    if workload == "multiturn":
        return [_sessions(shape, timing, seed, number) for number in range(num_segments)]
    if workload == "burst":
        assert rows is not None
        window = replace(shape, period_s=timing.traffic_s)
        return [
            [(one, Prefix()) for one in thin_burst(rows, window, seed + number)]
            for number in range(num_segments)
        ]
    # A little longer than what is replayed: the generator keeps its last seconds quiet.
    whole = replace(shape, period_s=num_segments * timing.traffic_s + 4.0)
    arrivals = fit_trace(rows, whole, stretch) if rows is not None else generate_arrivals(whole, seed)
    segments: list[list[tuple[Arrival, Prefix]]] = [[] for _ in range(num_segments)]
    for one in arrivals:
        number = int(one.at_s // timing.traffic_s)
        if number < num_segments:
            at_s = one.at_s - number * timing.traffic_s
            moved = Arrival(at_s=at_s, prompt_tokens=one.prompt_tokens, output_tokens=one.output_tokens)
            segments[number].append((moved, Prefix()))
    return list(segments)


def retime(segments: Sequence[Segment], timing: Timing, factor: float) -> list[Segment]:
    """The same requests, ``factor`` times as close together, cut into segments anew.

    Which stretch of a trace is the ``k``-th busiest depends on how long it is in the trace's time, so on the rate: a rate that is looked for on one
    stretch must not move to another.
    """
    found: list[list[tuple[Arrival, Prefix]]] = []
    for number, segment in enumerate(segments):
        for one, prefix in segment:
            at_s = (number * timing.traffic_s + one.at_s) / factor
            place = int(at_s // timing.traffic_s)
            found += [[] for _ in range(len(found), place + 1)]
            found[place].append((replace(one, at_s=at_s - place * timing.traffic_s), prefix))
    return list(found)


def _tight(shape: TrafficShape, timing: Timing, seed: int, number: int) -> Segment:
    """So far apart that none waits for another: what makes one late is what runs beside production."""
    rng = np.random.default_rng([seed, number, 0x71647])
    count = max(2, round(shape.mean_rate_hz * timing.traffic_s))
    every_s = timing.traffic_s / count
    return [
        (
            Arrival(
                at_s=(index + float(rng.uniform(0.0, 0.4))) * every_s,
                prompt_tokens=shape.prompt_max_tokens,
                output_tokens=min(TIGHT_OUTPUT_TOKENS, shape.output_max_tokens),
            ),
            Prefix(),
        )
        for index in range(count)
    ]


SYSTEM_TOKENS = 256
TURN_TOKENS = 64
MAX_TURNS = 4


def _sessions(shape: TrafficShape, timing: Timing, seed: int, number: int) -> Segment:
    """Sessions of 2 to ``MAX_TURNS`` turns; each prompt is the system prompt, the history and a new turn."""
    rng = np.random.default_rng([seed, number, 0x5E55])
    found: list[tuple[Arrival, Prefix]] = []
    num_requests = max(4, round(shape.mean_rate_hz * timing.traffic_s))
    session = 0
    while len(found) < num_requests:
        session += 1
        turns = int(rng.integers(2, MAX_TURNS + 1))
        at_s = float(rng.uniform(0, timing.traffic_s * 0.5))
        for turn in range(turns):
            if at_s >= timing.traffic_s:
                break
            output = int(
                np.clip(round(shape.output_median_tokens * rng.lognormal(0, 0.5)), 1, shape.output_max_tokens)
            )
            history = turn * TURN_TOKENS
            arrival = Arrival(
                at_s=at_s, prompt_tokens=SYSTEM_TOKENS + history + TURN_TOKENS, output_tokens=output
            )
            prefix = Prefix(
                system_tokens=SYSTEM_TOKENS,
                session=number * 1000 + session,
                history_tokens=history + TURN_TOKENS,
            )
            found.append((arrival, prefix))
            at_s += float(rng.uniform(0.8, 1.8))
    return sorted(found, key=lambda pair: pair[0].at_s)


SOLO_EVERY = 3
"""Segments between two blocks of rollouts alone.  What the core gives them drifts by a third within half an hour on a shared
machine, so it is measured as often as what is divided by it."""


def make_schedule(
    segments: Sequence[Segment], arms: Sequence[str], timing: Timing, run: int = 0, *, solo: bool = True
) -> Schedule:
    """Blocks of every segment in every arm, and now and then one of rollouts alone (``solo``).

    ``run`` keeps the pairs of several pooled runs apart.  Each arm has streams of its own for the prefixes: an arm must not profit from what another left in the cache.
    """
    blocks: list[Block] = []
    arrivals: list[Arrival] = []
    prefixes: list[Prefix] = []
    keys: list[int] = []
    for number, segment in enumerate(segments):
        shift = number % len(arms)
        for arm in (*arms[shift:], *arms[:shift]):
            start_s = len(blocks) * timing.block_s
            blocks.append(
                Block(arm=arm, segment=number, start_s=start_s, first=len(arrivals), count=len(segment))
            )
            stream = 1 + arms.index(arm)
            for index, (one, prefix) in enumerate(segment):
                arrivals.append(
                    Arrival(
                        at_s=start_s + timing.lead_s + one.at_s,
                        prompt_tokens=one.prompt_tokens,
                        output_tokens=one.output_tokens,
                    )
                )
                prefixes.append(
                    Prefix(
                        system=stream,
                        system_tokens=prefix.system_tokens,
                        session=stream * 1_000_000 + prefix.session,
                        history_tokens=prefix.history_tokens,
                    )
                )
                keys.append((run * 1000 + number) * PAIRS_PER_SEGMENT + index)
        if solo and number % SOLO_EVERY == 0:
            start_s = len(blocks) * timing.block_s
            blocks.append(Block(arm=SOLO, segment=number, start_s=start_s, first=len(arrivals), count=0))
    return Schedule(
        timing=timing,
        blocks=tuple(blocks),
        arrivals=tuple(arrivals),
        prefixes=tuple(prefixes),
        keys=tuple(keys),
    )
