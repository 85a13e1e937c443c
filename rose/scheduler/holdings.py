"""How many bytes the trajectories of each job hold in memory, and the bounds on them.

Counted are a trajectory's own bytes (task, ids, log-probs, info) and a constant for each trajectory and turn that stands
for the objects around them.  The same records give the same count, so a restart knows it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from rose.errors import CapacityError
from rose.scheduler.records import CreateRecord, FinishRecord, ScoreRecord, TurnRecord

_TRAJECTORY_BYTES = 3000
_TURN_BYTES = 3500
_FINISH_BYTES = 300
SCORE_BYTES = 200
"""Of one turn's or one branch's reward."""
_OBJECT_FACTOR = 12
"""Of sampling parameters and metadata, which are kept as objects: to their size as msgpack, at most about so."""

_encode = msgspec.msgpack.Encoder().encode


def created_bytes(record: CreateRecord) -> int:
    named = len(_encode(record.sampling)) + len(_encode(record.metadata))
    return _TRAJECTORY_BYTES + len(bytes(record.task)) + _OBJECT_FACTOR * named


def turn_bytes(record: TurnRecord) -> int:
    own = len(record.suffix_ids) if record.prompt_of is None else 0
    names = len(record.tip) + len(record.thoughts)
    return (
        _TURN_BYTES
        + own
        + len(record.token_ids)
        + len(record.logprobs)
        + names
        + len(record.messages)
        + sum(len(data) for _, data in record.routed_experts)
    )


def score_bytes(record: ScoreRecord | None) -> int:
    """Of what the whole is to be finished with."""
    return 0 if record is None else _FINISH_BYTES + len(bytes(record.info))


def finished_bytes(record: FinishRecord) -> int:
    return _FINISH_BYTES + len(bytes(record.info))


@dataclass(kw_only=True, slots=True)
class Holdings:
    """Args:
    max_job_bytes: Of one job's trajectories that are not final.
    max_bytes: Of all jobs'.
    """

    max_job_bytes: int
    max_bytes: int
    jobs: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0

    def add(self, job: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.jobs[job] += num_bytes
        if self.jobs[job] <= 0:
            del self.jobs[job]

    def check(self, job: str, num_bytes: int = 0) -> None:
        """Is there room for so much more?

        Raises:
            CapacityError: 429, the job or all jobs hold as much as they may.
        """
        for held, most, who, name in (
            (
                self.jobs[job],
                self.max_job_bytes,
                f"the trajectories of job '{job[:64]}' hold",
                "max_job_bytes",
            ),
            (self.num_bytes, self.max_bytes, "the trajectories of all jobs hold", "max_held_bytes"),
        ):
            if held + num_bytes >= most:
                raise CapacityError(
                    f"{who} {held} of {most} bytes",
                    status=429,
                    code="job_full",
                    field="job",
                    fix=f"finish and train on them, or cancel some; or raise limits.{name}",
                    retry_after_s=5.0,
                )
