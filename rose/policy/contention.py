"""Which devices provisioning assigns to jobs, and which are shared by all.

A device is shared where there is nothing to decide: all jobs of its base model want the same weights and have the same weight in
fair sharing, the device has those weights, and each of these jobs may hold every device of its tier.  A device of a base model that no
job uses is shared too.  A shared device takes turns of every job, as it would without provisioning, and is never parked.

Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from rose.policy.provisioning_events import JobSeen
from rose.policy.worker import Tier, Worker


def open_to_all(workers: Collection[Worker], jobs: Iterable[JobSeen]) -> set[str]:
    """Workers, by name, that no job has to be given."""
    of_model: defaultdict[str, list[JobSeen]] = defaultdict(list)
    for job in jobs:
        of_model[job.model].append(job)
    runs = {model: {job.run for job in same if job.run} for model, same in of_model.items()}
    are_alike = {
        model: len(runs[model]) <= 1 and len({job.weight for job in same}) <= 1
        for model, same in of_model.items()
    }
    caps = {
        (model, tier): min(_cap(job, tier) for job in same)
        for model, same in of_model.items()
        for tier in Tier
    }
    counts = Counter((worker.model, worker.tier) for worker in workers)
    return {
        worker.worker_id
        for worker in workers
        if worker.model not in of_model
        or (
            are_alike[worker.model]
            and (not runs[worker.model] or worker.run in runs[worker.model])
            and counts[worker.model, worker.tier] <= caps[worker.model, worker.tier]
        )
    }


def _cap(job: JobSeen, tier: Tier) -> int:
    match tier:
        case Tier.DEDICATED:
            return job.n_dedicated
        case Tier.HARVESTED:
            return job.n_harvested
        case Tier.BORROWED:
            return job.n_borrowed
