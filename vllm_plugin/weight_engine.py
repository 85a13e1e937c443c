"""vLLM's side of a weight change: the ``rose`` backend class; see :mod:`vllm_plugin.weights`.

Its own file because its base class is vLLM's: everything else of the plugin imports without vLLM.

Session: ``start_weight_update`` -> ``update_weights({"attempt": a, "version": v})`` ->
``finish_weight_update``. ``update_weights`` commits what was staged and remembers the outcome instead of
raising; between it and ``finish_weight_update`` the caller reads the outcomes of all ranks and may undo.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rose.errors import RoseError, WeightsError
from rose.lineage import WeightVersion
from rose.wire.errors import error_data
from vllm_plugin.plan import NO_CHECKPOINT, check_contents, checkpoint_tensors, record
from vllm_plugin.rank_weights import RankWeights
from vllm_plugin.weights import initial_lineage, model_folder

logger = logging.getLogger("vllm.rose")

MAX_WARNINGS = 10
"""Tensors named in the log; the status route names them all."""


@dataclass
class RoseInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: updates arrive as files."""


@dataclass
class RoseUpdateInfo(WeightTransferUpdateInfo):
    """Which staged version to commit."""

    attempt: int
    version: int


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
        self.rank_weights = RankWeights(plan, initial.version, initial.run)
        self._outcome: dict[str, Any] = {}
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

    def init_transfer_engine(self, init_info: RoseInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        self._outcome = {"committed": False, "more": False, "commit_s": 0.0, "failed": None}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, less the wait for an accelerator when there is none; and nothing raises."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except ValueError as error:
            self._outcome["failed"] = error_data(WeightsError(str(error)))

    def receive_weights(self, update_info: RoseUpdateInfo) -> None:
        try:
            commit_s = self.rank_weights.commit(WeightVersion(update_info.attempt, update_info.version))
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
        except RoseError as error:
            self._outcome["failed"] = error_data(error)
        except Exception as error:  # see vllm_plugin.weights: a raise on one rank breaks all of them
            logger.exception("ROSE: commit failed")
            self._outcome["failed"] = error_data(WeightsError(f"commit failed: {error!r}"[:300]))
        else:
            more = self.rank_weights.more
            commit_s += self._outcome["commit_s"]
            self._outcome |= {"committed": not more, "more": more, "commit_s": commit_s}

    def finish_weight_update(self) -> None:
        self.rank_weights.finish()

    def shutdown(self) -> None:
        """Also vLLM's "release the trainer connection": there is none, and the engine stays usable."""
