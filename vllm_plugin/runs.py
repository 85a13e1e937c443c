"""A request samples from one run's weights, or not at all.

rose-scheduler names in each request the run whose weights it believes to be here (``sampling_params.extra_args``, key
:data:`~rose.wire.turns.ASKED_RUN`).  Its belief is half a second old at best, and a version number says nothing across runs; so the engine itself
looks, at admission and again before other weights are put in place: whatever asked for another run, or has sampled under the one
that goes, ends at once with ``finish_reason "abort"``, ``stop_reason "rose:other_run"`` and its tokens so far, all of them
the old run's.  Who placed it places it elsewhere.

Engine thread only.
"""

from __future__ import annotations

import logging
from typing import Any

from rose.lineage import check_run
from rose.policy.stop_reasons import OTHER_RUN
from rose.wire.turns import ASKED_RUN
from vllm_plugin import internals

logger = logging.getLogger("vllm.rose")


class Runs:
    """One engine's run, as its core knows it.

    Attributes:
        run: Whose weights are in place; empty before anybody has said.
        num_refused: Requests that asked for another, or were here when it changed.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.run = ""
        self.num_refused = 0

    def status(self) -> dict[str, Any]:
        return {"run": self.run, "refused": self.num_refused}

    def admits(self, request: Any) -> bool:
        """May it sample here?  One that asks for no run may, anywhere."""
        return _asked(request) in ("", self.run)

    def refuse(self, engine: Any, request_ids: list[str]) -> int:
        """End requests with the tokens that they have."""
        count = internals.finish_with_partial_output(self._scheduler, engine, request_ids, OTHER_RUN)
        self.num_refused += count
        return count

    def on_switch(self, engine: Any, run: str | None) -> dict[str, Any]:
        """The engine is paused and other weights come next (or the old ones are back): ``run`` is whose.  None asks for the status."""
        if run is not None and run != self.run:
            before, self.run = self.run, check_run(run) if run else ""
            leave = [
                name
                for name, request in list(self._scheduler.requests.items())
                if not self.admits(request) or (not _asked(request) and request.num_output_tokens)
            ]
            count = self.refuse(engine, leave) if leave else 0
            logger.info(
                "ROSE: weights of run %s come after %s; %d requests leave", run or "-", before or "-", count
            )
        return self.status()


def _asked(request: Any) -> str:
    params = request.sampling_params
    asked = ((params.extra_args or {}) if params is not None else {}).get(ASKED_RUN)
    return asked if isinstance(asked, str) else ""
