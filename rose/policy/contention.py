"""Which devices provisioning has a say over, and which are everybody's.

A device is everybody's where nothing is to be decided: no two jobs of its base model want different weights or have different
weights in sharing, it has the ones that are wanted, and every one of these jobs may hold all devices of its tier.  Such a device takes turns of
all jobs and of none, as if there were no provisioning, and nobody parks it.  So is one of a base model that no job has.

Pure; caller: ``rose.policy.assigning``.
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
