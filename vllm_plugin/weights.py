"""Weight updates inside a vLLM worker: the ``rose`` backend of weight transfer, and its collective calls.

:class:`RoseWeightTransferEngine` is built by vLLM at the end of ``load_model``.  It records the shard
plan, checks it against the checkpoint, hashes every tensor, and from then on owns the rank's
:class:`~vllm_plugin.rank_weights.RankWeights`.  :class:`WeightWorkerMixin` adds the collective calls that
stage an update in the background and vote on it.

vLLM's own session carries the change itself: ``start_weight_update`` / ``update_weights`` /
``finish_weight_update``, all on the engine thread between two steps.

**No call here raises.**  vLLM's multi-process executor stops reading answers at the first rank that
fails; the answers of the others stay queued, and the next collective call reads them as its own.  So each
rank answers with plain data that says how it went, and :mod:`vllm_plugin.engine_control` decides for all of
them.

It does not fetch, decode a wire format, or decide which version to run.  This module imports no vLLM before the engine is built, and nothing heavy in a
process that serves production traffic.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.errors import ConfigError, RoseError, WeightsError
from rose.wire.errors import error_data
from vllm_plugin.roles import BACKEND, role

if TYPE_CHECKING:
    from vllm_plugin.rank_weights import RankWeights

logger = logging.getLogger("vllm.rose")

ENV_VERSION = "ROSE_WEIGHT_VERSION"
"""``attempt.version`` of the checkpoint that the engine is started with; ``0.0`` when it is not set."""
ENV_RUN = "ROSE_WEIGHT_RUN"
"""The run that it is of; nobody's when it is not set."""


ENV_THREADS = "ROSE_WEIGHTS_THREADS"
"""That stage an update, of all ranks together; one of each rank when it is not set."""


def staging_threads(num_ranks: int) -> int:
    """Of one rank of ``num_ranks``.

    Raises:
        ConfigError: The variable is no whole number of 1 to 256.
    """
    text = os.environ.get(ENV_THREADS) or "1"
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= 256):
        raise ConfigError(f"must be a whole number of 1..256, got {text[:40]!r}", field=ENV_THREADS)
    return max(1, int(text) // num_ranks)


def register_backend() -> None:
    """Make ``--weight-transfer-config '{"backend": "rose"}'`` known to this process.  Idempotent."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "vllm_plugin.weight_engine", "RoseWeightTransferEngine"
        )
    except ValueError:  # registered already
        pass


def stand_alone() -> None:
    """A stock server that takes its weights by our back end: make it known, and nothing else.  On CPU linear layers and experts are
    kept as the checkpoint has them besides: vLLM's CPU build packs them after loading, and nothing would be left to write to."""
    register_backend()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm_plugin import compat

        compat.patch_cpu_gemm()
        compat.patch_cpu_experts()


def initial_lineage() -> Any:
    """What the checkpoint on disk is called.

    Raises:
        ConfigError: A variable is set to something else than ``attempt.version`` or the name of a run.
    """
    from rose.lineage import Lineage, WeightVersion, check_run

    text, run = os.environ.get(ENV_VERSION) or "0.0", os.environ.get(ENV_RUN) or ""
    try:
        version = WeightVersion.parse(text, field=ENV_VERSION)
        return Lineage(check_run(run, field=ENV_RUN) if run else "", version)
    except RoseError as error:
        raise ConfigError(error.message, field=error.field) from error


class WeightWorkerMixin:
    """Collective calls on the weights, for a subclass of vLLM's worker.

    Every call returns plain data and raises nothing; ``{"ok": False, "error": {...}}`` when it did not work.
    """

    weight_transfer_engine: Any
    vllm_config: Any

    def load_model(self, **kwargs: Any) -> None:
        if role() == "rollout":
            from vllm.config.weight_transfer import WeightTransferConfig

            register_backend()
            if self.vllm_config.weight_transfer_config is None:
                self.vllm_config.weight_transfer_config = WeightTransferConfig(backend=BACKEND)
        super().load_model(**kwargs)  # type: ignore[misc]  # vLLM's worker follows in the resolution order

    def rose_weights_prefetch(self, path: str, attempt: int, version: int, run: str = "") -> dict[str, Any]:
        """Begin to stage an update file in the background."""
        from rose.lineage import WeightVersion

        return self._answer(lambda rank: rank.prefetch(path, WeightVersion(attempt, version), run))

    def rose_weights_staged(self) -> dict[str, Any]:
        """Where this rank stands: :meth:`RankWeights.report`, and whether vLLM has an update session open."""
        from vllm_plugin import internals

        answer = self._answer(lambda rank: rank.report())
        answer["session"] = internals.has_open_weight_session(self)
        return answer

    def rose_weights_outcome(self) -> dict[str, Any]:
        """How the last ``update_weights`` went."""
        return self._answer(lambda rank: self.weight_transfer_engine.outcome())

    def rose_weights_undo(self) -> dict[str, Any]:
        """Take back what the open session wrote; also a no-op on a rank that wrote nothing."""
        return self._answer(lambda rank: rank.undo())

    def rose_weights_discard(self) -> dict[str, Any]:
        """Forget a staged update."""
        return self._answer(lambda rank: rank.discard())

    def rose_weights_hash(self) -> dict[str, Any]:
        """Full scan: this rank's state hash per tensor, in hex; of its part where it holds a part."""

        def scan(rank: RankWeights) -> dict[str, Any]:
            from rose.weights import statehash

            return {
                "version": str(rank.version),
                "run": rank.run,
                "hashes": {name: statehash.to_hex(value) for name, value in rank.scan().items()},
            }

        return self._answer(scan)

    def _answer(self, call: Any) -> dict[str, Any]:
        try:
            rank = getattr(getattr(self, "weight_transfer_engine", None), "rank_weights", None)
            if rank is None:
                raise WeightsError(f"the engine has no weight backend '{BACKEND}'")
            return {"ok": True} | (call(rank) or {})
        except RoseError as error:
            return {"ok": False, "error": error_data(error)}
        except Exception as error:  # a raise would desynchronise the executor; see the module docstring
            logger.exception("ROSE: a weight call failed")
            return {"ok": False, "error": error_data(WeightsError(f"failed: {error!r}"[:300]))}


def model_folder(model: str) -> Path:
    """The local folder of a model that vLLM was given by path or by a name in the local cache.

    Raises:
        ConfigError: It is neither.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError) as error:
        raise ConfigError(f"'{model}' is no folder and not in the local cache", field="model") from error
