"""What the node agent tells others: ``rose node status``, rose-scheduler's heartbeat, and the proof that memory is back.

Builds plain dictionaries from what the agent and its parts know; asks nobody but the engine (:func:`proof`), changes nothing.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict
from typing import Any, Literal

from rose.coserve.links import WeightLoop
from rose.coserve.node import Node
from rose.coserve.records import Mode, Phase, RolloutLease, ServingLease, phase_name
from rose.errors import RoseError
from rose.policy.admission import Rule
from rose.policy.compat import Support, row_of_number
from rose.policy.lending import Lending
from rose.policy.lending_events import ALL_PAGES
from rose.policy.lending_policy import LendingPolicy
from rose.units import PAGE_BYTES
from rose.wire.workers import MAX_COPIES, Heartbeat

_MODES: dict[Mode, Literal["off", "observe", "on"]] = {
    Mode.OFF: "off",
    Mode.OBSERVE: "observe",
    Mode.ON: "on",
}


def heartbeat(
    node: Node, engine_status: dict[str, Any], stopping: bool, incarnation: str, seq: int
) -> Heartbeat:
    """A heartbeat to rose-scheduler."""
    device = node.device
    ready = node.engine.state == "ready" and node.mode == Mode.ON and not stopping
    rollout = device.rollout if node.engine.running else None
    lease = device.lease if device.serving_alive() else None
    budget, used = _tokens_of(rollout, engine_status)
    p99_s = {} if node.latency is None else node.latency.p99_s
    return Heartbeat(
        incarnation=incarnation,
        seq=seq,
        version=node.engine.version,
        run=node.engine.run,
        follows=node.weights.serves if node.weights is not None else None,
        **_switching(node.weights),
        state="ready" if ready else "stopping" if stopping else "starting",
        kv_budget_tokens=budget,
        kv_used_tokens=used,
        running=_count(engine_status.get("running")) or 0,
        waiting=_count(engine_status.get("waiting")) or 0,
        num_preemptions=_count(engine_status.get("num_preemptions")) or 0,
        decoded_tokens=rollout.decoded if rollout is not None else None,
        gated=rollout is not None and not rollout.gate_open,
        lent_s=node.lent_s,
        reclaim_seq=rollout.reclaim_seq if rollout is not None else 0,
        slack_s=device.slack_s() if node.config.serving is not None else None,
        serving_use=_serving_use(node),
        slo_breaches=device.board.breaches if device.board is not None else 0,
        serving_ttft_p99_s=p99_s.get("ttft"),
        serving_tpot_p99_s=p99_s.get("tpot"),
        slo_ttft_s=node.slo_ttft_ms / 1e3 if "ttft" in p99_s else None,
        slo_tpot_s=node.slo_tpot_ms / 1e3 if "tpot" in p99_s else None,
        group=None if node.config.scheduler is None else node.config.scheduler.group,
        mode=_MODES[node.mode],
        held=node.assignment.held or not node.told,
        held_pages=rollout.reserved_pages if rollout is not None else 0,
        lent_pages=node.policy.lend_pages,
        slo_breaches_while_lending=node.breaches_while_lending,
        engine_kills=node.engine.num_kills,
        switched_off=node.switched_off,
        stranded_pages=lease.stranded_pages if lease else 0,
        plugin_errors=lease.errors if lease else 0,
    )


def status(node: Node) -> dict[str, Any]:
    """Everything in force on this device, for ``rose node status``."""
    uplink, device = node.uplink, node.device
    observed = node.observed.report()
    rollout = device.rollout
    return {
        "node_id": node.config.node_id,
        "pid": os.getpid(),
        "tier": node.config.tier,
        "mode": node.mode.name.lower(),
        "epoch": node.epoch,
        "page_bytes": PAGE_BYTES,
        "slo_ttft_ms": node.slo_ttft_ms,
        "slo_tpot_ms": node.slo_tpot_ms,
        "floor_pages": node.floor_pages,
        "lending": {
            "policy": node.policy_name,
            "max_lend_pages": node.max_lend_pages if node.max_lend_pages < ALL_PAGES else None,
            "rule": node.rule.name.lower()
            + (", serialised" if node.serialise else "")
            + (", stops at layers" if node.stop_at_layers else "")
            + (
                f", leaves {node.first_token_reserve:.0%} of the first-token limit"
                if node.first_token_reserve and node.rule is Rule.SLACK
                else ""
            ),
            **_lending(node.policy),
            "reason": _reason(node),
        },
        "device": {
            "kind": node.free.memory.kind,
            "free_bytes": node.free.num_bytes,
            "reserve_bytes": node.free.reserve_bytes,
            "short": node.policy.short_of_reserve,
            "breaches": node.policy.num_reserve_breaches,
        },
        "audit": node.audit.report(),
        "observed": None if observed is None else asdict(observed),
        "serving": _serving(node),
        "rollout": {
            "alive": device.rollout_alive(),
            "phase": _phase(rollout),
            "reserved_pages": rollout.reserved_pages if rollout else 0,
            "resident_pages": sum(device.resident_pages().values()),
            "gate_open": bool(rollout.gate_open) if rollout else False,
            "steps": rollout.steps if rollout else 0,
            "tokens": rollout.tokens if rollout else 0,
            "reclaim_seq": rollout.reclaim_seq if rollout else 0,
            "cut_requests": rollout.cut_requests if rollout else 0,
        },
        "engine": {**node.engine.describe(), "waits_for": node.waits_for()},
        "scheduler": None if uplink is None else {"connected": uplink.connected, "error": uplink.error},
        "assignment": {
            "job": node.assignment.job,
            "run": node.assignment.run,
            "active": not node.released,
            "because": node.released_because,
            "held": node.assignment.held or not node.told,
            "told": node.told,
        },
        "lent_s": node.lent_s,
        "weights": None if node.weights is None else _weights(node.weights),
        "errors": dict(node.errors),
    }


async def proof(node: Node, timeout_s: float) -> dict[str, Any]:
    """What the rollout engine holds, from three sources that do not know each other.

    Args:
        timeout_s: What it gets to answer; without one the others speak.
    """
    engine, rollout = node.engine, node.device.rollout
    try:
        answer = await engine.refresh_status(timeout_s) if engine.state == "ready" else {}
    except RoseError:
        answer = {}  # dead or too busy to answer: the files and the kernel still speak
    scheduler = answer.get("scheduler")
    resident = scheduler.get("resident_bytes") if isinstance(scheduler, dict) else None
    return {
        "reserved_pages": rollout.reserved_pages if rollout and engine.running else 0,
        "resident_pages": sum(node.device.resident_pages().values()),
        "engine_kv_resident_bytes": resident if isinstance(resident, int) else None,
        "engine_rss_bytes": await asyncio.to_thread(engine.rss_bytes),
        "gate_open": bool(rollout.gate_open) if rollout and engine.running else False,
        "steps": rollout.steps if rollout else 0,
    }


def _reason(node: Node) -> str:
    """Why so much is lent.  To its policy a device that is kept back is one in mode off."""
    if node.mode != Mode.ON:
        return f"mode is {node.mode.name.lower()}"
    return node.released_because or node.policy.stands_because


def _lending(policy: Lending) -> dict[str, Any]:
    found: dict[str, Any] = {
        "lend_pages": policy.lend_pages,
        "cap_pages": policy.cap_pages,
        "headroom_pages": policy.headroom_pages,
        "reclaim_p99_s": policy.reclaim_p99_s,
        "worst_reclaim_s": policy.worst_reclaim_s,
        "cuts": policy.num_cuts,
    }
    if isinstance(policy, LendingPolicy):
        found["need_pages"] = policy.need_pages
        found["watermark_pages"] = policy.watermark_pages
        found["harvestable_pages"] = policy.target_pages
        found["cache_limit_pages"] = None if policy.cache is None else policy.cache.limit_pages
        found["hit_rate_loss"] = None if policy.cache is None else policy.cache.loss_fraction
    return found


def _serving(node: Node) -> dict[str, Any]:
    device = node.device
    lease, board = device.lease, device.board
    support = _support(lease)
    judged = lease if support != "unknown" else None
    return {
        "alive": device.serving_alive(),
        "phase": _phase(lease),
        "support": support,
        "because": row_of_number(judged.row).feature if judged else "",
        "found": device.found() if judged else "",
        "total_pages": lease.total_pages if lease else 0,
        "reserved_pages": lease.reserved_pages if lease else 0,
        "used_pages": board.used_pages if board else 0,
        "stranded_pages": lease.stranded_pages if lease else 0,
        "claim_pages": board.claim_pages(lease.reserved_pages) if board and lease else 0,
        "pressure_seq": board.pressure_seq if board else 0,
        "errors": lease.errors if lease else 0,
        "queried_tokens": lease.queried_tokens if lease else 0,
        "lost_tokens": lease.lost_tokens if lease else 0,
        "cold_pages": lease.cold_pages if lease else 0,
        "kept_pages": lease.kept_pages if lease else 0,
        "slo_breaches": board.breaches if board else 0,
        "slo_breaches_while_lending": node.breaches_while_lending,
        "p99_s": None if node.latency is None else dict(node.latency.p99_s),
        "metrics_error": None if node.latency is None else node.latency.error,
    }


def _switching(weights: WeightLoop | None) -> dict[str, Any]:
    """What a heartbeat says of changes of the run."""
    if weights is None:
        return {}
    return {
        "commit_s": weights.commit_s,
        "pull_s": weights.pull_s,
        "num_switches": weights.num_switches,
        "copies": weights.copies()[:MAX_COPIES],
    }


def _weights(weights: WeightLoop) -> dict[str, Any]:
    return {
        "run_id": weights.own,
        "serves": weights.serves,
        "switches": weights.num_switches,
        "commit_s": weights.commit_s,
        "pull_s": weights.pull_s,
        "copies": weights.copies(),
        "newest": str(weights.newest) if weights.newest is not None else None,
        "commits": weights.num_commits,
        "error": weights.error,
        "last": weights.last,
    }


def _serving_use(node: Node) -> float:
    """Share of the device's KV memory that production uses."""
    lease, board = node.device.lease, node.device.board
    if board is None or lease is None or not lease.total_pages:
        return 0.0
    return min(1.0, board.used_pages / lease.total_pages)


def _tokens_of(rollout: RolloutLease | None, status: dict[str, Any]) -> tuple[int | None, int | None]:
    """KV budget and use in tokens; the budget follows the lease, which is newer than the engine's status."""
    budget, used = _count(status.get("budget_tokens")), _count(status.get("used_tokens"))
    pages = _count(status.get("usable_pages"))
    if rollout is None or budget is None or not pages:
        return budget, used
    return budget * rollout.reserved_pages // pages, used


def _count(value: Any) -> int | None:
    """A count out of an engine's answer; None unless it is one."""
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def _support(lease: ServingLease | None) -> str:
    """``elastic``, ``compute-only``, ``refused``; ``unknown`` while production is not there, or starts and has not said it."""
    if lease is None or lease.support not in list(Support):
        return "unknown"
    support = Support(lease.support)
    # Its first word is a phase alone; one that is refused says phase off.
    return "unknown" if lease.phase == Phase.STARTING and support is Support.REFUSED else support.label


def _phase(lease: ServingLease | RolloutLease | None) -> str:
    return "absent" if lease is None else phase_name(lease.phase)
