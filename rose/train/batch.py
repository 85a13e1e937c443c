"""From recorded trajectories to tensors: which tokens are trained, and what is known of each.

:func:`samples_of` turns one trajectory, as the scheduler hands it out, into training sequences.  A turn
says which ids it was prompted with and which it sampled; a conversation that only grows is **one**
sequence, the last turn's prompt and sample, with a mask that is 1 exactly on sampled tokens.  Where the
agent rewrote its history the conversation forks: a new sequence begins, and each sampled token is trained
in one sequence only, the first that holds it.  Requests beside the task (``side``) are left out, and so are turns that
were drawn under something that the trainer does not reproduce (``rose.train.constrained``), unless the job has them trained.

Nothing here trusts the trace: ids, lengths, log-probs, temperatures and sampling settings are checked,
and what cannot be trained correctly is refused by name.

Shapes: ``B`` rows (one, of all sequences, where they are packed; else one a sequence), ``T`` positions (right-padded), ``N`` sampled tokens of the minibatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rose.errors import TrainError
from rose.train.collect import reward_of
from rose.train.constrained import Constrained, constraints_on
from rose.train.loss import distinct_restrictions

MIN_PART_SEQUENCES = 8
MAX_PART_TOKENS = 16_384
"""Bounds the activations of one forward pass, unless the trainer is told another bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSequence:
    """One training sequence.  Everything after ``token_ids`` is per *sampled* token, in order."""

    trajectory_id: str
    group_id: str
    reward: float
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    """Indices into ``token_ids`` of the sampled tokens; strictly increasing, never 0."""
    logprobs: tuple[float, ...]
    """Behaviour log-probs, as the engine processed them."""
    temperatures: tuple[float, ...]
    allowed: tuple[tuple[int, ...] | None, ...]
    branch: int = 0
    """Number of the sequence among those of its trajectory."""
    masked: bool = False
    """Not to be trained on (too stale); its reward still counts in its group."""
    truncated: bool = False
    """Cut at a limit: of its turns, of its context, or of the tokens of its last turn."""
    num_tokens: int = 0
    """Of an outline: tokens and log-probs are another rank's to know (:func:`share_of`)."""

    @property
    def length(self) -> int:
        """Tokens, prompts included."""
        return self.num_tokens or len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """Tensors of some samples.  ``rows_N, columns_N`` say where in ``[B, T]`` the logits of a token are."""

    input_ids_BT: Tensor
    position_ids_BT: Tensor | None
    """Of packed sequences: anew from 0 for each.  None = the columns."""
    rows_N: Tensor
    columns_N: Tensor
    sequence_N: Tensor
    """Number of the sequence that a token is of."""
    targets_N: Tensor
    behaviour_N: Tensor
    temperature_N: Tensor
    advantage_N: Tensor
    share_N: Tensor
    """What each token counts in the loss (``rose.train.loss.undivided_shares``)."""
    allowed_KV: Tensor | None
    allowed_index_N: Tensor

    def to(self, device: torch.device) -> Minibatch:
        """The same on ``device``."""
        moved = {
            one.name: value.to(device)
            for one in fields(self)
            if isinstance(value := getattr(self, one.name), Tensor)
        }
        return replace(self, **moved)

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of the minibatch."""
        return self.targets_N.numel()


def samples_of(
    trajectory: Mapping[str, Any],
    *,
    vocab_size: int,
    max_tokens: int,
    constrained: Constrained = "leave-out",
) -> list[TrainingSequence]:
    """Check a trajectory and return its training sequences; empty if nothing was sampled that is trained on.

    Raises:
        TrainError: The trace is malformed or cannot be trained correctly; ``field`` says where.
    """
    trajectory_id = _text(trajectory, "id")
    group_id = _text(trajectory, "group_id")
    reward = reward_of(trajectory)
    turns = trajectory.get("turns")
    if not isinstance(turns, list):
        raise TrainError(f"trajectory {trajectory_id} has no list of turns", field="turns")
    chains: list[_Chain] = []
    ends: dict[int, list[int]] = {}
    """By turn: its prompt, and what it sampled."""
    for index, turn in enumerate(turns):
        where = f"trajectories[{trajectory_id}].turns[{index}]"
        if not isinstance(turn, Mapping):
            raise TrainError("is not an object", field=where)
        sampled = _ids(turn, "token_ids", vocab_size, max_tokens, where)
        if "suffix_token_ids" in turn:
            prompt = _ids(turn, "suffix_token_ids", vocab_size, max_tokens, where)
            parent = turn.get("parent")
            if parent is not None:
                if not isinstance(parent, int) or parent not in ends:
                    raise TrainError(f"no turn {parent!r:.40} before it", field=f"{where}.parent")
                prompt = ends[parent] + prompt
        else:
            prompt = _ids(turn, "prompt_token_ids", vocab_size, max_tokens, where)
        if isinstance(number := turn.get("turn"), int):
            ends[number] = prompt + sampled
        if not sampled or turn.get("side") is True:
            continue
        if not prompt:
            raise TrainError("a sampled token needs a prompt before it", field=f"{where}.prompt_token_ids")
        if len(prompt) + len(sampled) > max_tokens:
            raise TrainError(f"is longer than {max_tokens} tokens", field=where)
        if constraints_on(trajectory, turn, where) and constrained == "leave-out":
            continue
        logprobs = _logprobs(turn, len(sampled), where)
        temperature, allowed = _sampling(turn, sampled, vocab_size, where)
        # The longest chain that this prompt continues; a branch point therefore starts a new chain, which
        # trains only what was sampled in it.
        parents = [chain for chain in chains if _is_prefix(chain.ids, prompt)]
        chain = max(parents, key=lambda chain: len(chain.ids), default=None)
        if chain is None:
            chain = _Chain()
            chains.append(chain)
        chain.extend(prompt, sampled, logprobs, temperature, allowed)
    return [
        TrainingSequence(
            trajectory_id=trajectory_id,
            group_id=group_id,
            reward=reward,
            token_ids=tuple(chain.ids),
            positions=tuple(chain.positions),
            logprobs=tuple(chain.logprobs),
            temperatures=tuple(chain.temperatures),
            allowed=tuple(chain.allowed),
            branch=branch,
            masked=trajectory.get("stale") is True,
            truncated=_is_truncated(trajectory),
        )
        for branch, chain in enumerate(chains)
    ]


def make_minibatch(
    samples: Sequence[TrainingSequence],
    *,
    vocab_size: int,
    advantages: Mapping[str, float] | None = None,
    shares: Sequence[float] | None = None,
    pad_id: int = 0,
    packed: bool = False,
) -> Minibatch:
    """Pad on the right: with causal attention no real token sees a pad, so no attention mask is needed.

    Args:
        packed: Put all behind one another into one row instead (:mod:`rose.train.packing`); nothing is padded.
        advantages: By trajectory id; None = 0, where only log-probs are wanted.
        shares: Of one token of each sample; None = 0.
    """
    # The last position predicts nothing that was sampled, and is left out.
    lengths = [max(1, len(sample.token_ids) - 1) for sample in samples]
    shape = (1, sum(lengths)) if packed else (len(samples), max(lengths))
    input_ids_BT = torch.full(shape, pad_id, dtype=torch.long)
    starts = [0, *accumulate(lengths[:-1])] if packed else [0] * len(samples)
    sequences: list[int] = []
    columns: list[int] = []
    targets: list[int] = []
    behaviour: list[float] = []
    temperatures: list[float] = []
    advantage: list[float] = []
    share: list[float] = []
    allowed: list[tuple[int, ...] | None] = []
    for row, (sample, start, length) in enumerate(zip(samples, starts, lengths, strict=True)):
        ids_T = torch.tensor(sample.token_ids[:length], dtype=torch.long)
        input_ids_BT[0 if packed else row, start : start + length] = ids_T
        for position in sample.positions:
            sequences.append(row)
            columns.append(start + position - 1)  # a token is predicted by the position before it
            targets.append(sample.token_ids[position])
        num_sampled = len(sample.positions)
        advantage.extend([0.0 if advantages is None else advantages[sample.trajectory_id]] * num_sampled)
        share.extend([0.0 if shares is None else shares[row]] * num_sampled)
        behaviour.extend(sample.logprobs)
        temperatures.extend(sample.temperatures)
        allowed.extend(sample.allowed)
    allowed_KV, allowed_index = distinct_restrictions(allowed, vocab_size)
    sequence_N = torch.tensor(sequences, dtype=torch.long)
    return Minibatch(
        input_ids_BT=input_ids_BT,
        position_ids_BT=torch.cat([torch.arange(one) for one in lengths]).unsqueeze(0) if packed else None,
        rows_N=torch.zeros_like(sequence_N) if packed else sequence_N,
        columns_N=torch.tensor(columns, dtype=torch.long),
        sequence_N=sequence_N,
        targets_N=torch.tensor(targets, dtype=torch.long),
        behaviour_N=torch.tensor(behaviour, dtype=torch.float32),
        temperature_N=torch.tensor(temperatures, dtype=torch.float32),
        advantage_N=torch.tensor(advantage, dtype=torch.float32),
        share_N=torch.tensor(share, dtype=torch.float32),
        allowed_KV=allowed_KV,
        allowed_index_N=torch.tensor(allowed_index, dtype=torch.long),
    )


def in_order(samples: Iterable[TrainingSequence]) -> list[TrainingSequence]:
    """The order of a step, whatever order they came in."""
    return sorted(samples, key=lambda sample: (sample.trajectory_id, sample.branch))


def episode_sizes(samples: Sequence[TrainingSequence]) -> list[int]:
    """Of each sequence: sampled tokens of the episode that it is of, all of its branches together."""
    found: Counter[str] = Counter()
    for sample in samples:
        found[sample.trajectory_id] += len(sample.positions)
    return [found[sample.trajectory_id] for sample in samples]


def owners_of(samples: Sequence[TrainingSequence], world_size: int) -> list[int]:
    """The rank that computes each sequence: dealt by length, back and forth, so that all have about as much to do."""
    owners = [0] * len(samples)
    by_length = sorted(range(len(samples)), key=lambda index: (samples[index].length, index))
    for place, index in enumerate(by_length):
        lap, seat = divmod(place, world_size)
        owners[index] = world_size - 1 - seat if lap % 2 else seat
    return owners


def share_of(samples: Sequence[TrainingSequence], rank: int, world_size: int) -> list[TrainingSequence]:
    """What ``rank`` is told of a batch: its own sequences, and of the others who they are, what they earned and how long they are.

    Args:
        samples: As :func:`in_order` gives them.
    """
    return [
        sample
        if owner == rank
        else replace(sample, token_ids=(), logprobs=(), temperatures=(), allowed=(), num_tokens=sample.length)
        for sample, owner in zip(samples, owners_of(samples, world_size), strict=True)
    ]


def split_by_length(
    indices: Iterable[int], lengths: Sequence[int], max_tokens: int = MAX_PART_TOKENS
) -> list[list[int]]:
    """Cut samples into parts of similar length, so that little is padded; every index comes once.

    Short and long trajectories mix in RL (half end early), and padding all to the longest more than doubles
    the work.  A part is closed when its longest member would be a quarter longer than its shortest, or
    when it would hold more than ``max_tokens``, pads included; parts under :data:`MIN_PART_SEQUENCES` go on growing, because a
    forward pass has a fixed cost too.
    """
    parts: list[list[int]] = []
    for index in sorted(indices, key=lambda index: (lengths[index], index)):
        part = parts[-1] if parts else []
        full = (len(part) + 1) * lengths[index] > max_tokens
        uneven = len(part) >= MIN_PART_SEQUENCES and lengths[index] > 1.25 * lengths[part[0]]
        if not part or full or uneven:
            parts.append([index])
        else:
            part.append(index)
    return parts


def _is_truncated(trajectory: Mapping[str, Any]) -> bool:
    info = trajectory.get("info")
    turns = [turn for turn in trajectory.get("turns") or () if turn.get("side") is not True]
    last = turns[-1] if turns else {}
    return (isinstance(info, Mapping) and bool(info.get("truncated"))) or last.get(
        "finish_reason"
    ) == "length"


class _Chain:
    """A growing conversation."""

    __slots__ = ("allowed", "ids", "logprobs", "positions", "temperatures")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.logprobs: list[float] = []
        self.temperatures: list[float] = []
        self.allowed: list[tuple[int, ...] | None] = []

    def extend(
        self,
        prompt: list[int],
        sampled: list[int],
        logprobs: list[float],
        temperature: float,
        allowed: tuple[int, ...] | None,
    ) -> None:
        self.ids = prompt + sampled
        self.positions.extend(range(len(prompt), len(prompt) + len(sampled)))
        self.logprobs.extend(logprobs)
        self.temperatures.extend([temperature] * len(sampled))
        self.allowed.extend([allowed] * len(sampled))


def _is_prefix(short: list[int], long: list[int]) -> bool:
    return len(short) <= len(long) and long[: len(short)] == short


def _text(table: Mapping[str, Any], name: str) -> str:
    value = table.get(name)
    if not isinstance(value, str) or not value:
        raise TrainError(f"needs a non-empty string, got {value!r:.40}", field=name)
    return value


def _ids(turn: Mapping[str, Any], name: str, vocab_size: int, max_tokens: int, where: str) -> list[int]:
    ids = turn.get(name)
    if not isinstance(ids, list):
        raise TrainError("needs a list of token ids", field=f"{where}.{name}")
    if len(ids) > max_tokens:
        raise TrainError(f"is longer than {max_tokens} tokens", field=f"{where}.{name}")
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise TrainError(
                f"token id {token_id!r:.40} is outside 0..{vocab_size - 1}", field=f"{where}.{name}"
            )
    return ids


def _logprobs(turn: Mapping[str, Any], num_sampled: int, where: str) -> list[float]:
    logprobs = turn.get("logprobs")
    if not isinstance(logprobs, list) or len(logprobs) != num_sampled:
        raise TrainError(f"needs {num_sampled} log-probs, one per sampled token", field=f"{where}.logprobs")
    for logprob in logprobs:
        # Rounding in the engine may leave a probability a hair above 1.
        if isinstance(logprob, bool) or not isinstance(logprob, int | float) or not -1e4 < logprob <= 1e-3:
            raise TrainError(f"{logprob!r:.40} is not a log-prob", field=f"{where}.logprobs")
    return logprobs


def _sampling(
    turn: Mapping[str, Any], sampled: list[int], vocab_size: int, where: str
) -> tuple[float, tuple[int, ...] | None]:
    sampling = turn.get("sampling") or {}
    temperature = sampling.get("temperature")
    temperature = 1.0 if temperature is None else temperature
    if (
        isinstance(temperature, bool)
        or not isinstance(temperature, int | float)
        or not 0.01 <= temperature <= 100.0
    ):
        raise TrainError(
            f"{temperature!r:.40} is not a sampling temperature",
            field=f"{where}.sampling.temperature",
            fix="use 0.01 to 100; greedy turns have no log-probs to train on",
        )
    allowed_ids = sampling.get("allowed_token_ids")
    if not allowed_ids:
        return float(temperature), None
    allowed = tuple(
        sorted(set(_ids(sampling, "allowed_token_ids", vocab_size, vocab_size, f"{where}.sampling")))
    )
    if not set(sampled) <= set(allowed):
        raise TrainError("a sampled token was not allowed", field=f"{where}.sampling.allowed_token_ids")
    return float(temperature), allowed
