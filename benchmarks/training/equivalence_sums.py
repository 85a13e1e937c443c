"""What the equivalence gate makes of leased groups: figures with 95 % intervals, and a verdict.  Pure; the bar is :data:`BAR`.

Intervals are percentiles of a bootstrap over groups, drawn anew within each board: which boards a fleet was leased is what it did, not
chance.  ``actions`` is never below 0 and rises with noise, in a draw twice as much as in the data: its upper end errs on the side of a
difference.  In the two of the gradient noise is taken out: a product of two means counts no group with itself.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Verdict = Literal["within", "outside", "undecided"]
LevelVerdict = Literal["equivalent", "different", "undecided", "not judged"]

FLEETS = ("dedicated", "harvested", "uncut")
JUDGED = (("harvested", "dedicated"), ("harvested", "uncut"))
CONTROL = ("uncut", "dedicated")
"""Shown beside: what a second engine does that nobody cuts."""
NUM_ACTIONS = 4
NUM_DRAWS = 2000
SEED = 20_261_127


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Margins and least counts; see ``benchmarks/training/equivalence.py``."""

    episodes: int = 5000
    """Of each fleet at each level."""
    cut_turns: int = 500
    """Of the harvested fleet at each level: their memory was taken back in the middle, and they went on with their tokens."""
    margins: Mapping[str, tuple[float, float]] = field(
        default_factory=lambda: {
            "success": (-0.03, 0.03),
            "length": (0.9, 1.1),
            "lag": (-0.25, 0.25),
            "actions": (0.0, 0.04),
            "gradient_cosine": (0.9, float("inf")),
            "gradient_norm": (0.8, 1.25),
            "cut_success": (-0.1, 0.1),
        }
    )


BAR = Bar()


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """One leased group, in sums over its episodes."""

    board: int
    episodes: int
    wins: int
    moves: int
    """Walked, to the goal, a hole or the end of the plan."""
    tokens: int
    """Sampled."""
    lag: int
    """Versions behind the step that leased it, over tokens."""
    actions: tuple[int, ...]
    """Moves by ``(cell, move)``."""
    cut: int
    """Turns whose memory was taken back on a harvested engine in the middle, and that went on with their tokens."""
    cut_wins: int
    gradient: Floats
    """Of the group's loss a token, projected: ``[D]``."""

    def to_json(self) -> dict[str, Any]:
        packed = base64.b64encode(self.gradient.astype("<f4").tobytes()).decode()
        return asdict(self) | {"actions": list(self.actions), "gradient": packed}

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Group:
        """Raises:
        KeyError: A field is missing; others are left out.
        """
        gradient = np.frombuffer(base64.b64decode(row["gradient"]), dtype="<f4").astype(np.float64)
        names = set(Group.__dataclass_fields__) - {"actions", "gradient"}
        return Group(**{name: row[name] for name in names}, actions=tuple(row["actions"]), gradient=gradient)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A difference of two fleets, its 95 % interval, and the margin that this has to lie in."""

    value: float
    low: float
    high: float
    margin: tuple[float, float]

    @property
    def verdict(self) -> Verdict:
        if self.margin[0] <= self.low and self.high <= self.margin[1]:
            return "within"
        return "outside" if self.high < self.margin[0] or self.low > self.margin[1] else "undecided"


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """What is said of one policy."""

    verdict: LevelVerdict
    reason: str
    """Why it was not judged, or which figures are not within; empty for an equivalent one."""
    pairs: Mapping[tuple[str, str], Mapping[str, Figure]]


class Fleet:
    """Groups of one fleet, and their sums in each draw of the bootstrap; draw 0 is the data.

    Args:
        rng: Draws.
    """

    def __init__(self, groups: Sequence[Group], rng: np.random.Generator, num_draws: int = NUM_DRAWS) -> None:
        self._groups = groups
        self.boards = np.array([one.board for one in groups])
        self.weights = np.ones((num_draws + 1, len(groups)))
        for board in np.unique(self.boards):
            places = np.flatnonzero(self.boards == board)
            count = len(places)
            self.weights[1:, places] = rng.multinomial(count, np.full(count, 1.0 / count), size=num_draws)

    def column(self, name: str) -> Floats:
        return np.array([getattr(one, name) for one in self._groups], dtype=np.float64)

    def sum(self, name: str) -> Floats:
        """``[draws]``, of a column; ``[draws, n]`` of one of vectors."""
        return self.weights @ self.column(name)

    def total(self, name: str) -> int:
        return int(self.column(name).sum())

    def wins_by_board(self) -> dict[int, Floats]:
        """Success ``[draws]`` of each board."""
        wins, episodes = self.column("wins"), self.column("episodes")
        found: dict[int, Floats] = {}
        for board in np.unique(self.boards):
            here = self.boards == board
            found[int(board)] = (self.weights[:, here] @ wins[here]) / (
                self.weights[:, here] @ episodes[here]
            )
        return found

    def squared_mean_gradient(self) -> Floats:
        """``[draws]``: the square of its length, without what noise adds.  May be below 0."""
        vectors = self.column("gradient")
        sums = self.weights @ vectors
        own = (self.weights**2) @ (vectors**2).sum(axis=1)
        pairs = self.weights.sum(axis=1) ** 2 - (self.weights**2).sum(axis=1)
        return ((sums**2).sum(axis=1) - own) / pairs


def figures_of(ours: Fleet, other: Fleet, bar: Bar = BAR) -> dict[str, Figure]:
    """Every difference that has a margin, of ``ours`` less or over ``other``; ``cut_success`` only where ``ours`` was cut."""
    draws: dict[str, Floats] = {
        "success": ours.sum("wins") / ours.sum("episodes") - other.sum("wins") / other.sum("episodes"),
        "length": (ours.sum("moves") / ours.sum("episodes")) / (other.sum("moves") / other.sum("episodes")),
        "lag": ours.sum("lag") / ours.sum("tokens") - other.sum("lag") / other.sum("tokens"),
        "actions": total_variation(ours.sum("actions"), other.sum("actions")),
    }
    squares = ours.squared_mean_gradient(), other.squared_mean_gradient()
    means = [one.sum("gradient") / one.weights.sum(axis=1, keepdims=True) for one in (ours, other)]
    with np.errstate(invalid="ignore", divide="ignore"):
        lengths = [np.sqrt(one) for one in squares]
        draws["gradient_cosine"] = (means[0] * means[1]).sum(axis=1) / (lengths[0] * lengths[1])
        draws["gradient_norm"] = lengths[0] / lengths[1]
    if ours.total("cut"):
        draws["cut_success"] = cut_success(ours, other)
    return {name: figure(values, bar.margins[name]) for name, values in draws.items()}


def total_variation(ours: Floats, other: Floats) -> Floats:
    """``[draws]`` from counts ``[draws, cells * actions]``: mean over cells of the distance between the distributions of moves."""
    shares = [one.reshape(len(one), -1, NUM_ACTIONS) for one in (ours, other)]
    shares = [one / np.maximum(1.0, one.sum(axis=2, keepdims=True)) for one in shares]
    return 0.5 * np.abs(shares[0] - shares[1]).sum(axis=2).mean(axis=1)


def cut_success(ours: Fleet, other: Fleet) -> Floats:
    """``[draws]``: success of the cut turns, less that of ``other`` on the same boards."""
    cut, cut_wins, by_board = ours.column("cut"), ours.column("cut_wins"), other.wins_by_board()
    expected = np.zeros(len(ours.weights))
    num_cut = np.zeros(len(ours.weights))
    wins = np.zeros(len(ours.weights))
    for board, rate in by_board.items():
        here = ours.boards == board
        on_board = ours.weights[:, here] @ cut[here]
        expected += on_board * rate
        num_cut += on_board
        wins += ours.weights[:, here] @ cut_wins[here]
    with np.errstate(invalid="ignore", divide="ignore"):
        return (wins - expected) / num_cut


def figure(values: Floats, margin: tuple[float, float]) -> Figure:
    """Value and interval from draws, the first of which is the data.  Draws without a value leave the question open."""
    drawn = values[1:]
    if not np.isfinite(drawn).all():
        # A mean gradient that may be nil has no direction: no interval.
        return Figure(value=float(values[0]), low=-np.inf, high=np.inf, margin=margin)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Figure(value=float(values[0]), low=float(low), high=float(high), margin=margin)


def judge(
    groups: Mapping[str, Sequence[Group]], bar: Bar = BAR, *, seed: int = SEED, num_draws: int = NUM_DRAWS
) -> Level:
    """What the groups that three fleets were leased say of one policy.

    Fleets without groups are left out of the pairs; then nothing is judged.
    """
    rngs = np.random.default_rng(seed).spawn(len(FLEETS))
    fleets = {
        name: Fleet(groups[name], rng, num_draws)
        for name, rng in zip(FLEETS, rngs, strict=True)
        if groups.get(name)
    }
    pairs = {
        (ours, other): figures_of(fleets[ours], fleets[other], bar)
        for ours, other in (*JUDGED, CONTROL)
        if ours in fleets and other in fleets
    }
    lacking = _lacking(fleets, bar)
    if lacking:
        return Level(verdict="not judged", reason=lacking, pairs=pairs)
    judged = {
        f"{name} of {ours} and {other}": one.verdict
        for (ours, other) in JUDGED
        for name, one in pairs[ours, other].items()
    }
    bad = {name: one for name, one in judged.items() if one != "within"}
    verdict: LevelVerdict = "different" if "outside" in bad.values() else "undecided" if bad else "equivalent"
    return Level(
        verdict=verdict, reason="; ".join(f"{name}: {one}" for name, one in bad.items()), pairs=pairs
    )


def _lacking(fleets: Mapping[str, Fleet], bar: Bar) -> str:
    for name in FLEETS:
        count = fleets[name].total("episodes") if name in fleets else 0
        if count < bar.episodes:
            return f"{name} has {count} of {bar.episodes} episodes"
    count = fleets["harvested"].total("cut")
    return f"{count} of {bar.cut_turns} turns were cut" if count < bar.cut_turns else ""
