"""Carry out provisioning: ask it now and then, and give workers to jobs as it says.

Where jobs compete, a worker that no job wants is parked: it takes no turn, and its node is told (``active: false`` in the heartbeat's
answer).  In mode ``observe`` nothing is given or taken; what would have been is logged, counted and in ``/metrics``.  What the policy was
told and answered goes to ``provisioning-N.rose`` beside the journal, for ``rose replay``.

Decides nothing; that is ``rose.policy.provisioning``.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rose.decisions.event_format import PROVISIONING
from rose.decisions.log import DecisionLog
from rose.policy import provisioning_events as pe
from rose.policy.assigning import Assigner
from rose.policy.samples import SampleBook
from rose.scheduler.dispatch import Dispatcher
from rose.scheduler.scheduler_config import ProvisioningConfig, SchedulerConfig

log = logging.getLogger("rose.scheduler")


@dataclass(kw_only=True, slots=True)
class Provisioner:
    """``step()`` now and then; does something once per ``period_s``."""

    config: ProvisioningConfig
    dispatcher: Dispatcher
    assigner: Assigner
    decisions: DecisionLog
    decided: Counter[str] = field(default_factory=lambda: Counter[str]())
    """Decisions by reason; activations as ``activate``, adoptions as ``adopt``."""
    _stepped_s: float = -math.inf

    @classmethod
    def make(
        cls, config: SchedulerConfig, dispatcher: Dispatcher, samples: SampleBook, directory: Path
    ) -> Provisioner:
        """``directory``: of the log."""
        provisioning, logged = config.provisioning, config.decisions
        assigner = provisioning.assigner(dispatcher.book, samples.is_training)
        decisions = DecisionLog(
            directory,
            "provisioning",
            PROVISIONING,
            assigner.policy,
            max_bytes=0 if provisioning.mode == "off" else logged.max_bytes,
            max_files=logged.max_files,
        )
        assigner.on_event = decisions.record
        return cls(config=provisioning, dispatcher=dispatcher, assigner=assigner, decisions=decisions)

    @property
    def mode(self) -> Literal["off", "observe", "on"]:
        return self.config.mode

    def wanted(self) -> dict[str, int]:
        """Engines that each job would pay for: for whoever scales dedicated ones elsewhere."""
        return {job: self.assigner.policy.wanted(job) for job in self.assigner.jobs}

    def held(self) -> dict[str, int]:
        """Workers that each job has, or would have in mode ``observe``; those that are everybody's count for each."""
        return {job: self.assigner.num_workers(job) for job in self.assigner.jobs}

    def step(self) -> None:
        at_s = self.dispatcher.now_s()
        if self.mode == "off" or at_s < self._stepped_s + self.config.period_s:
            return
        self._stepped_s = at_s
        would = "would " if self.mode == "observe" else ""
        for action in self.assigner.step(at_s, self.dispatcher.switching):
            match action:
                case pe.Activate():
                    self.decided["activate"] += 1
                    log.info(
                        "worker %s %swork for job %s (gain %.0f s)",
                        action.host,
                        would,
                        action.job,
                        action.gain_s,
                    )
                case pe.Release():
                    self.decided[action.reason] += 1
                    log.info("worker %s %sleave job %s (%s)", action.host, would, action.job, action.reason)
                case pe.Adopt():
                    self.decided["adopt"] += 1
                    log.info("worker %s %sgo on for job %s", action.host, would, action.job)
        self.decisions.flush()
        if self.mode == "on":
            for event in self.assigner.assignments(at_s):
                self.dispatcher.feed(event)

    def close(self) -> None:
        self.decisions.close()
