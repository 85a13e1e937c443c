"""vLLM's side of a weight change: the ``rose`` backend class; see :mod:`vllm_plugin.weights`.

Its own file because its base class is vLLM's: everything else of the plugin imports without vLLM.

Session: ``start_weight_update`` -> ``update_weights({"attempt": a, "version": v})`` ->
``finish_weight_update``.

*Under a role* the node agent brings files.  ``update_weights`` commits what was staged and remembers the outcome instead of
raising; between it and ``finish_weight_update`` the caller reads the outcomes of all ranks and may undo.

*In a stock server* (no ``ROSE_ROLE``) the engine fetches for itself: ``init_transfer_engine`` says where from
(:mod:`vllm_plugin.weight_feed`), and ``update_weights`` fetches, stages, commits and, where any rank failed, undoes.  The ranks agree
among themselves, so that all change or none, and what went wrong is raised, for vLLM's route to answer.  Only the last rank raises:
vLLM's executor stops reading answers at the first rank that failed and would take those of the ranks behind it for answers to its next call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rose.errors import ConfigError, RoseError, WeightsError
from rose.lineage import Lineage, WeightVersion
from rose.weights.folder import checkpoint_tensors
from rose.wire.errors import error_data
from vllm_plugin.checkpoint import check_contents
from vllm_plugin.plan import NO_CHECKPOINT
from vllm_plugin.plan_recorder import record
from vllm_plugin.rank_weights import RankWeights
from vllm_plugin.roles import role
from vllm_plugin.weight_feed import ANY, FeedInfo, WeightFeed, open_copy, read_info
from vllm_plugin.weight_vote import judge
from vllm_plugin.weights import initial_lineage, model_folder, staging_threads

T = TypeVar("T")
logger = logging.getLogger("vllm.rose")

MAX_WARNINGS = 10
"""Tensors named in the log; the status route names them all."""


@dataclass
class RoseInitInfo(WeightTransferInitInfo):
    """Where a stock server's weights come from; under a role nothing: updates arrive as files."""

    posted: dict[str, Any]
    """Not looked at yet: vLLM reads it on every rank, and a raise is the last rank's."""


@dataclass
class RoseUpdateInfo(WeightTransferUpdateInfo):
    """Which version to commit: under a role one that was staged, else one of the run."""

    attempt: int
    version: int
    base: str | None = None
    """Stock server: the version that the engine has to be at, or ``any``: every tensor comes whole."""
    timeout_s: float = 60.0
    """Stock server: how long the version may take to arrive.  The engine computes nothing meanwhile."""


class RoseWeightTransferEngine(WeightTransferEngine[RoseInitInfo, RoseUpdateInfo]):
    """One rank's policy weights behind vLLM's weight-transfer interface."""

    init_info_cls = RoseInitInfo
    update_info_cls = RoseUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        began_s = time.monotonic()
        if vllm_config.load_config.load_format == "dummy":
            # Made up, for measurements: of no checkpoint, so there is nothing an update could be checked against.
            plan, recorded_s = NO_CHECKPOINT, began_s
        else:
            folder = model_folder(vllm_config.model_config.model)
            with set_current_vllm_config(vllm_config):
                plan = record(model, checkpoint_tensors(folder))
            recorded_s = time.monotonic()
            plan = check_contents(plan, folder)
        checked_s = time.monotonic()
        initial = initial_lineage()
        threads = staging_threads(vllm_config.parallel_config.world_size)
        self.rank_weights = RankWeights(plan, initial.version, initial.run, num_threads=threads)
        self._outcome: dict[str, Any] = {}
        self._is_stock = role() is None
        self._feed: WeightFeed | None = None
        """Of rank 0 of a stock server that was told where its weights come from."""
        self._run = ""
        self.start_weight_update()
        logger.info(
            "ROSE weights %s: %d tensors, %d boxes, plan %s; record %.3f s, check %.3f s, hash %.3f s",
            self.rank_weights.version,
            len(plan.tensors),
            sum(len(boxes) for boxes in plan.boxes.values()),
            plan.digest,
            recorded_s - began_s,
            checked_s - recorded_s,
            time.monotonic() - checked_s,
        )
        for name, reason in list(plan.fallback.items())[:MAX_WARNINGS]:
            logger.warning("ROSE weights: %s cannot be updated in place: %s", name, reason)
        if len(plan.fallback) > MAX_WARNINGS:
            logger.warning("ROSE weights: %d tensors cannot be updated in place", len(plan.fallback))

    def outcome(self) -> dict[str, Any]:
        """How the last commit went: ``{"committed", "more", "commit_s", "failed": error data or None}``; ``more``: call it again."""
        return dict(self._outcome)

    def parse_init_info(self, init_dict: dict[str, Any]) -> RoseInitInfo:
        return RoseInitInfo(init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> RoseUpdateInfo:
        return read_info(RoseUpdateInfo, update_dict)

    def start_weight_update(self) -> None:
        self._outcome = {"committed": False, "more": False, "commit_s": 0.0, "failed": None}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, less the wait for an accelerator when there is none.  Under a role nothing raises."""
        try:
            # Ranks may be sent different ones (a list): the first one's counts, once all of them can be read.
            info, *_ = self._agree(lambda _: self.parse_update_info(update_info))
            self.receive_weights(info)
        except RoseError as error:
            self._outcome["failed"] = error_data(error)
            self._refuse(error)

    def receive_weights(self, update_info: RoseUpdateInfo) -> None:
        target = WeightVersion(update_info.attempt, update_info.version)
        if self._is_stock:
            self._take(target, update_info)
        else:
            self._commit(target)

    def _commit(self, target: WeightVersion) -> None:
        try:
            commit_s = self.rank_weights.commit(target)
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
        except RoseError:
            raise
        except Exception as error:  # see vllm_plugin.weights: a raise on one rank breaks all of them
            logger.exception("ROSE: commit failed")
            raise WeightsError(f"commit failed: {error!r}"[:300]) from error
        more = self.rank_weights.more
        commit_s += self._outcome["commit_s"]
        self._outcome |= {"committed": not more, "more": more, "commit_s": commit_s}

    def finish_weight_update(self) -> None:
        self.rank_weights.finish()

    # -- a stock server -----------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: RoseInitInfo) -> None:
        """Follow the run that this names from now on, in place of any other.

        Raises:
            RoseError: In a stock server: something is missing or cannot be used; what was followed still is.
        """
        if not self._is_stock:
            logger.warning("ROSE: the node agent feeds this engine; what vLLM's route was told is not used")
            return
        try:
            self._run, *_ = self._agree(lambda rank: self._connect(init_info) if rank == 0 else "")
        except RoseError as error:
            self._refuse(error)

    def _connect(self, given: RoseInitInfo) -> str:
        info = read_info(FeedInfo, given.posted)
        if self.parallel_config.data_parallel_size > 1:
            raise ConfigError(
                "its engines step together, and a version would come to one before the others",
                field="data_parallel_size",
                fix="start a server for each",
            )
        copy = open_copy(info)
        self.shutdown()
        self._feed = WeightFeed(copy, info.run)
        return info.run

    def _take(self, target: WeightVersion, info: RoseUpdateInfo) -> None:
        """Fetch, stage and commit ``target`` on all ranks, or leave all as they are.  Each :meth:`_agree` is a call of all of them."""
        weights = self.rank_weights
        if info.base not in (None, ANY):
            WeightVersion.parse(info.base, field="base")
        weights.finish()  # of an update before it in the same session
        if self._run and (weights.run, weights.version) == (self._run, target):
            return  # asked for again: an answer was lost
        try:
            path, *_ = self._agree(lambda rank: self._fetch(target, info) if rank == 0 else "")
            judge(self._agree(lambda _: self._stage(path, target)), target)
            while any(self._agree(lambda _: self._commit_some(target))):
                pass
        except RoseError as error:
            # A commit that failed has undone itself; the other ranks undo theirs, or forget what they have staged.
            try:
                self._agree(lambda _: weights.undo())
                self._agree(lambda _: weights.discard())
            except RoseError as worse:
                raise WeightsError(f"{error}; {worse}", field="version", fix="restart the server") from worse
            raise

    def _fetch(self, target: WeightVersion, info: RoseUpdateInfo) -> str:
        if self._feed is None:
            raise WeightsError(
                "this engine was not told where its weights come from",
                field="store",
                fix="POST /init_weight_transfer_engine",
            )
        held = Lineage(self.rank_weights.run, self.rank_weights.version)
        return str(self._feed.take(target, held, info.base, info.timeout_s))

    def _stage(self, path: str, target: WeightVersion) -> dict[str, Any]:
        self.rank_weights.prefetch(path, target, self._run)
        self.rank_weights.join()
        return self.rank_weights.report()

    def _commit_some(self, target: WeightVersion) -> bool:
        self._commit(target)
        return self.rank_weights.more

    def _agree(self, work: Callable[[int], T]) -> list[T]:
        """Do ``work(rank)`` on every rank of this engine; all have the answers of all, or the same error.  Under a role each rank does it
        for itself: the caller asks them one by one.

        Raises:
            RoseError: Of the first rank that failed.
        """
        if not self._is_stock:
            return [work(0)]
        mine: T | None = None
        failed: RoseError | None = None
        rank, gather = _ranks(self.parallel_config.world_size)
        try:
            mine = work(rank)
        except RoseError as error:
            failed = error
        except Exception as error:  # the others wait for this rank's answer, whatever it is
            logger.exception("ROSE: a weight update failed on rank %d", rank)
            failed = WeightsError(f"failed: {error!r}"[:300])
        told = None if failed is None else (failed.message, failed.field, failed.fix)
        answers = gather((mine, told))
        for number, (_, problem) in enumerate(answers):
            if problem is not None:
                if number == rank and failed is not None:
                    raise failed
                message, field, fix = problem
                raise WeightsError(f"rank {number}: {message}", field=field, fix=fix)
        return [answer for answer, _ in answers]

    def _refuse(self, error: RoseError) -> None:
        """Raise, where that is how a caller learns of it; see the module."""
        if self._is_stock:
            rank, _ = _ranks(self.parallel_config.world_size)
            logger.warning("ROSE: weights refused: %s", error)
            if rank == self.parallel_config.world_size - 1:
                raise error  # the ranks before it answer as if all were well, and their session stays open: see docs/weights.md

    def shutdown(self) -> None:
        """Follow no store any more; the engine and its weights stay usable.  vLLM's "release the trainer connection"."""
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()


def _ranks(world_size: int) -> tuple[int, Callable[[Any], list[Any]]]:
    """This worker's rank in its engine, and what brings one object of each rank to all of them."""
    if world_size == 1:
        return 0, lambda mine: [mine]
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()

    def gather(mine: Any) -> list[Any]:
        found: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(found, mine, group=group.cpu_group)
        return found

    return group.rank_in_group, gather
