"""Room for a job's actors in its Ray cluster, reserved as a whole before any of them is made.

Ray lets an actor that does not fit wait, and says nothing.  A placement group says whether it has its room, and an autoscaler grows the
cluster for one that waits.  Ours has room for the trainer and the environment managers; the trainer's ranks are on one node if one is
large enough and free, each with a GPU where it computes on one.  When a node dies, Ray looks for another place for its part of the group;
where there is none for the ranks together, they are asked for one by one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from rose.errors import ConfigError
from rose.train.train_config import TrainConfig

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""For a reservation, before the job says what is missing: an earlier job may just be leaving."""
LESS_PATIENCE_S = 1.0
"""The same for fewer managers than nodes, for which the others have left by then: what is missing is said within 10 s."""
LOST_PATIENCE_S = 120.0
"""The same for room that it has had: a node that died is replaced in a minute or two."""
LOOK_EVERY_S = 1


class Room:
    """See the module's docstring.  One event loop; the driver is connected to Ray."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.num_ranks = config.trainer.num_ranks
        self._gpus_per_rank = int(config.trainer.device == "cuda")
        self.num_managers = config.env.num_managers or 1
        self._follows = config.env.num_managers is None
        self._group: Any = None
        self._together = True

    async def hold(self) -> bool:
        """Have room for everybody.

        Returns:
            Whether it is another room: who was in the one before is gone with it, and :attr:`num_managers` may have changed.

        Raises:
            ConfigError: There is none, and ``ray.when_too_small`` is ``fail``.
        """
        is_new = self._group is None
        if is_new:
            await asyncio.to_thread(self._ask, self._config.rollout.num_groups)
        is_less = in_pieces = False
        until_s, said = time.monotonic() + (PATIENCE_S if is_new else LOST_PATIENCE_S), ""
        while not await asyncio.to_thread(self._group.wait, LOOK_EVERY_S):
            if time.monotonic() < until_s:
                continue
            if self._together and self.num_ranks > 1:
                # The node that is large enough is busy, or is gone.
                await asyncio.to_thread(self._ask, self.num_managers, in_pieces=True)
                is_new = in_pieces = True
                until_s = time.monotonic() + LESS_PATIENCE_S
                continue
            if self._follows and self.num_managers > 1:
                # As many as are free now; where that fails (no node has enough in one piece), the least.
                free = 1 if is_less else await asyncio.to_thread(_free_cpus) - self.num_ranks
                least = max(1, min(free, self.num_managers - 1))
                await asyncio.to_thread(self._ask, least, in_pieces=in_pieces)
                is_new = is_less = True
                until_s = time.monotonic() + LESS_PATIENCE_S
                continue
            lack = await asyncio.to_thread(self._lack)
            if self._config.ray.when_too_small == "fail":
                fix = (
                    "add nodes, or ask for less (env.num_managers, trainer.num_ranks); "
                    'ray.when_too_small = "wait" waits for room, ray.address = "local" needs none'
                )
                raise ConfigError(lack, field="ray", fix=fix)
            if lack != said:
                logger.warning("%s; waiting for room, which an autoscaling cluster makes", lack)
                said = lack
        return is_new

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Options of the actor of a trainer's rank."""
        return {**self._at(0 if self._together else rank), "num_gpus": self._gpus_per_rank}

    def of_manager(self, index: int) -> dict[str, Any]:
        """Options of the actor of an environment manager."""
        return self._at((1 if self._together else self.num_ranks) + index)

    def _at(self, bundle: int) -> dict[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        return {"num_cpus": 1, "scheduling_strategy": place}

    def _ask(self, max_managers: int, *, in_pieces: bool = False) -> None:
        from ray.util.placement_group import placement_group, remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
        ranks, nodes = self.num_ranks, [cpus for cpus in _of_nodes("CPU") if cpus]
        if self._follows:
            self.num_managers = max(1, min(len(nodes), sum(nodes) - ranks, max_managers))
        fits = [
            cpus >= ranks and gpus >= ranks * self._gpus_per_rank
            for cpus, gpus in zip(_of_nodes("CPU"), _of_nodes("GPU"), strict=True)
        ]
        self._together = ranks == 1 or (any(fits) and not in_pieces)
        one = {"CPU": 1.0} | ({"GPU": 1.0} if self._gpus_per_rank else {})
        bundles = [{name: ranks * count for name, count in one.items()}] if self._together else [one] * ranks
        # Several nodes of ranks are better neighbours; managers are better spread.
        strategy = "SPREAD" if self._together else "PACK"
        self._group = placement_group(bundles + [{"CPU": 1.0}] * self.num_managers, strategy=strategy)

    def _lack(self) -> str:
        nodes, free = _of_nodes("CPU"), _free_cpus()
        if self.num_ranks * self._gpus_per_rank > sum(_of_nodes("GPU")):
            return (
                f"the cluster has {sum(_of_nodes('GPU'))} GPUs; the job's {self.num_ranks} trainer ranks want one each "
                '(trainer.device = "cuda")'
            )
        left_out = {"trainer rank": self.num_ranks, "environment manager": self.num_managers}
        wanted, places = sum(left_out.values()), free
        for name, count in left_out.items():
            left_out[name] = max(0, count - places)
            places = max(0, places - count)
        without = ", ".join(f"{count} x {name}" for name, count in left_out.items() if count)
        return (
            f"the cluster has {sum(nodes)} CPUs on {len(nodes)} nodes, {free} of them free; the job's actors want {wanted}: "
            f"{self.num_ranks} x trainer rank, {self.num_managers} x environment manager; "
            f"without room: {without or 'some, for no node has enough in one piece'}"
        )


def _of_nodes(resource: str) -> list[int]:
    """CPUs or GPUs of every living node, free or not."""
    import ray

    return [int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]]


def _free_cpus() -> int:
    import ray

    return int(ray.available_resources().get("CPU", 0))
