"""What the jobs learn, for people: rewards and successes of finished trajectories, a day of them in half minutes.

Bounded, nothing on disk: a restart begins anew.  Decides nothing.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from rose.wire.status import LearningRow

BUCKET_S = 30.0
MAX_BUCKETS = 24 * 120
MAX_JOBS = 64


@dataclass(kw_only=True, slots=True)
class _Bucket:
    start_s: float
    count: int = 0
    reward: float = 0.0
    """Sum."""
    num_judged: int = 0
    """Of which it was said whether they succeeded."""
    num_successes: int = 0


class Learning:
    """Finished trajectories by job and half minute; jobs that were not heard of for longest are forgotten first."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, deque[_Bucket]] = OrderedDict()

    def finished(self, job: str, at_s: float, reward: float, success: bool | None) -> None:
        """A trajectory has its reward.

        Args:
            at_s: Of the scheduler's clock; never less than before.
        """
        buckets = self._jobs.setdefault(job, deque(maxlen=MAX_BUCKETS))
        self._jobs.move_to_end(job)
        if len(self._jobs) > MAX_JOBS:
            self._jobs.popitem(last=False)
        start_s = at_s // BUCKET_S * BUCKET_S
        if not buckets or buckets[-1].start_s < start_s:
            buckets.append(_Bucket(start_s=start_s))
        bucket = buckets[-1]
        bucket.count += 1
        bucket.reward += reward
        if success is not None:
            bucket.num_judged += 1
            bucket.num_successes += success

    def curves(self) -> dict[str, Iterator[LearningRow]]:
        """The half minutes of each job in which a trajectory of it finished.

        What is finished while they are read adds no row.
        """
        return {job: map(_row, list(buckets)) for job, buckets in self._jobs.items()}


def _row(bucket: _Bucket) -> LearningRow:
    judged = bucket.num_judged
    success = bucket.num_successes / judged if judged else None
    return bucket.start_s, bucket.count, bucket.reward / bucket.count, success
