"""The daemons' own configuration, for the simulated fleet: one construction path.

:func:`configs_of` makes the :class:`SchedulerConfig` and the :class:`NodeConfig` that this fleet would run with; the cluster builds
its policies from them by the methods that ``rose-scheduler`` and ``rose node`` use.  A default that changes there changes here.

Every parameter of the two has an effect here or stands in one of the lists below; a test looks at all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rose.coserve.node_config import EngineConfig, NodeConfig, SchedulerLink, ServingConfig
from rose.scheduler.scheduler_config import SchedulerConfig
from rose.sim.scenario import Scenario
from rose.sim.systems import System

STATIC_SHARE = 0.5
"""Of the KV memory, under static co-location, where the scenario does not say ``lending.max_lend_pages``."""

_WIRE = "programs, addresses and files; nothing is sent here"
_BOUNDS = "bounds against hostile or forgotten clients; agents here are neither"
_STORE = "nothing is stored or read back"
_ENGINE = "how vLLM is started; [fleet] and [efficiency] say how fast an engine is, fleet.restart_s how long a start takes"
_COMPUTE = "rungs of the compute ladder; fleet.sharing says how two engines share a device"
_WEIGHTS = "[links] says how long an update takes"

NOT_SIMULATED: dict[str, str] = {
    **dict.fromkeys(
        ("scheduler.host", "scheduler.port", "scheduler.render_url", "scheduler.metrics_public", "scheduler.workers"), _WIRE
    ),
    **dict.fromkeys(
        ("scheduler.history", "scheduler.render_cache_entries"), "turns are counts of tokens; there is no text to render"
    ),
    "scheduler.stream_upstream": "a crash loses what was not answered; a cut and a preempted spot engine lose nothing",
    **dict.fromkeys(
        (
            *(f"scheduler.limits.{name}" for name in (
                "max_body_bytes", "max_intake_bytes", "max_connections", "requests_per_s", "max_messages", "max_trajectories",
                "max_turns_per_trajectory", "max_workers", "max_running", "max_n", "max_info_bytes", "max_job_bytes",
                "max_held_bytes", "retained_finals", "retained_bytes",
            )),
            *(f"scheduler.timeouts.{name}" for name in (
                "connect_s", "attempt_s", "render_s", "read_s", "turn_s", "trajectory_idle_s", "unleased_s", "max_trajectory_s",
                "keepalive_s", "drain_s", "max_wait_s",
            )),
            "scheduler.batches.max_ttl_s",
        ),
        _BOUNDS,
    ),
    **dict.fromkeys(
        ("scheduler.limits.max_queued", "scheduler.timeouts.max_queue_s"),
        "an agent that was turned away asks again: here its turn waits until it is placed",
    ),
    "node.gate.stop_at_layers": "[fleet] preempt_s says whether, and how soon, a step stops",
    "scheduler.tracing.otlp_endpoint": _WIRE,
    "scheduler.standby.dead_s": "there is one scheduler, and it does not die",
    **dict.fromkeys(
        ("scheduler.journal.compact_bytes", "scheduler.decisions.max_bytes", "scheduler.decisions.max_files"), _STORE
    ),
    **dict.fromkeys(
        ("node.node_id", "node.dir", "node.token_file", "node.serving.metrics_url", "node.scheduler.url",
         "node.scheduler.timeout_s"),
        _WIRE,
    ),
    **dict.fromkeys(
        (f"node.engine.{name}" for name in (
            "model", "served_model_name", "command", "args", "env", "host", "port", "advertise_url", "cores", "nice", "log_path",
            "start_timeout_s", "stop_grace_s", "allow_unmeasured", "max_restarts", "restart_window_s", "restart_pause_s",
        )),
        _ENGINE,
    ),
    "node.scheduler.group": "nobody switches the fleet off and on while it is simulated",
    "node.borrowed": "[fleet] trainers says how many devices are borrowed, and the job when",
    "node.engine.warm": "activation: a node's mode does not change while a run lasts",
    "node.engine.profile": "job.profile says how long steps are, and admission knows it; a live engine learns it",
    **dict.fromkeys(
        ("node.engine.sched", "node.engine.sm_share", "node.engine.compute_rung", "node.engine.allow_mps",
         "node.engine.mps_pipe_directory"),
        _COMPUTE,
    ),
    **dict.fromkeys(
        ("node.device.kind", "node.device.gpu", "node.device.reserve_bytes"), "fleet.reserve_gb is never lent"
    ),
    **dict.fromkeys(
        ("node.lending.max_slo_breaches", "node.lending.slo_window_s"), "no node switches itself off after broken promises"
    ),
    **dict.fromkeys(
        (f"node.weights.{name}" for name in ("relay_url", "run_id", "public_key", "signed", "max_policies", "directory", "poll_s", "timeout_s", "threads")), _WEIGHTS
    ),
    **dict.fromkeys(
        ("node.decisions.max_bytes", "node.decisions.max_files", "node.decisions.directory"), _STORE
    ),
}  # fmt: skip
"""Parameter -> why the simulated fleet has no such thing."""

NO_OCCASION: dict[str, str] = {
    **dict.fromkeys(
        ("scheduler.timeouts.suspect_s", "scheduler.timeouts.dead_s", "node.lending.dead_after_s"),
        "nobody falls silent here",
    ),
    "scheduler.timeouts.tick_s": "the scheduler's clock ticks with the heartbeats, and nothing stops it",
    "scheduler.timeouts.detach_s": "no agent goes away",
    "scheduler.timeouts.stall_s": "engines do not wedge",
    "node.lending.max_hit_rate_loss": "no cache of the whole device is kept beside production's, so no lost hit is reported",
    "node.gate.serialise": "both engines are asked between two steps, when neither runs one",
}
"""The policies have these parameters, but nothing happens here to which they apply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Configs:
    """What the daemons of this fleet would have read; the nodes of a tier are alike."""

    scheduler: SchedulerConfig
    harvested: NodeConfig
    dedicated: NodeConfig


def configs_of(scenario: Scenario, system: System, serving_pages: int) -> Configs:
    """The scenario's ``[scheduler]``, ``[lending]`` and ``[gate]`` with what ``system`` does otherwise.

    Args:
        serving_pages: KV pages of a shared device; half of them is what static co-location lends.
    """
    job, serving = scenario.job, scenario.serving
    batches = scenario.scheduler.batches
    if system.training == "sync":
        batches = batches.model_copy(update={"alpha": 0, "jobs": {}})
    if job.algorithm == "dapo":
        batches = batches.model_copy(update={"filter_equal": True})
    scheduler = scenario.scheduler.model_copy(update={"seed": scenario.seed, "batches": batches})
    if system.routing is not None:
        scheduler = scheduler.model_copy(update={"policy": system.routing})
    if system.plain_queue:
        names = ("oldest_first_s", "affine_wait_s", "longest_first_s", "tail_fraction", "migrate_ratio")
        plain: dict[str, float] = dict.fromkeys(names, 0.0)
        keep = scheduler.provisioning.model_copy(update={"mode": "off"})  # each job its part, for good
        scheduler = scheduler.model_copy(update={**plain, "provisioning": keep})
    lending, gate = scenario.lending, scenario.gate
    if system.lending is not None:
        lending = lending.model_copy(update={"policy": system.lending})
    if lending.policy == "static" and "max_lend_pages" not in lending.model_fields_set:
        lending = lending.model_copy(update={"max_lend_pages": int(STATIC_SHARE * serving_pages)})
    if system.rule is not None:
        gate = gate.model_copy(update={"rule": system.rule})
    dedicated = NodeConfig(
        node_id="node",
        dir=Path("/nonexistent"),
        mode="on",
        engine=EngineConfig(model=job.model, max_model_len=job.max_model_len),
        lending=lending,
        gate=gate,
        scheduler=SchedulerLink(url="http://simulated", heartbeat_s=scenario.heartbeat_s),
    )
    promises = ServingConfig(slo_ttft_ms=serving.slo_ttft_ms, slo_tpot_ms=serving.slo_tpot_ms)
    return Configs(
        scheduler=scheduler,
        harvested=dedicated.model_copy(update={"serving": promises}),
        dedicated=dedicated,
    )
