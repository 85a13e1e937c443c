"""What is written down of a turn: its record in the journal, its summary on the wire, and what of its sampling a trainer needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rose.lineage import format_version
from rose.policy import turn_events as te
from rose.scheduler.dispatch import TurnHandle
from rose.scheduler.ids import pack_ids, pack_logprobs
from rose.scheduler.inflight_request import Finished, Inflight
from rose.scheduler.prompts import Prompt
from rose.scheduler.records import TurnRecord
from rose.scheduler.trajectory import Trajectory
from rose.wire.constraints import constraints_of

RECORDED_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "allowed_token_ids",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
)
"""What shapes the distribution a token was drawn from; the trainer applies the same."""


def record_of(
    trajectory: Trajectory,
    inflight: Inflight,
    done: Finished,
    turn: int,
    *,
    kind: str,
    prompt_of: int | None,
    **fields: Any,
) -> TurnRecord:
    """A finished turn as the journal has it.

    Args:
        turn: Its number.
        prompt_of: An earlier choice of its request that began with the same prompt.
        fields: What its protocol adds.
    """
    params, prompt, result, asked = (
        done.handle.sampling_params,
        done.prompt,
        done.ended.result,
        inflight.asked,
    )
    suffix = prompt.token_ids[prompt.num_inherited :] if prompt_of is None else ()
    return TurnRecord(
        trajectory_id=trajectory.id,
        turn=turn,
        kind=kind,
        parent=prompt.parent,
        fork=done.fork,
        suffix_ids=pack_ids(suffix),
        prompt_of=prompt_of,
        token_ids=pack_ids(result.token_ids),
        logprobs=pack_logprobs(result.logprobs),
        finish_reason=done.ended.reason,
        stop_reason=done.ended.stop_reason,
        versions=done.summary["versions"],
        segments=done.summary["segments"],
        usage=done.summary["usage"],
        timing=done.summary["timing"],
        sampling={k: params[k] for k in RECORDED_SAMPLING if params.get(k) is not None},
        constraints=constraints_of(params),
        context=prompt.context,
        digest=asked.digest,
        turn_key=asked.turn_key,
        key=asked.idempotency_key,
        retry=inflight.retry,
        created=done.created,
        attempts=result.num_attempts,
        kv_mixed=result.kv_mixed,
        id=result.turn_id,
        routed_experts=done.handle.routed,
        **fields,
    )


def summary_of(result: te.TurnResult, handle: TurnHandle, prompt: Prompt) -> dict[str, Any]:
    """What the wire says about a turn besides its tokens."""
    first_s = result.first_token_at_s
    return {
        "versions": [(format_version(s.version), s.start, s.num_tokens) for s in result.spans],
        "segments": [
            {
                "worker": s.worker_id,
                "tier": s.tier.value,
                "attempt": s.attempt,
                "start": s.start,
                "n": s.num_tokens,
                **({"run": s.run} if s.run else {}),
                **({"logprobs_mode": mode} if (mode := handle.logprobs_modes.get(s.attempt)) else {}),
            }
            for s in result.segments
        ],
        "usage": {
            "prompt": len(prompt.token_ids),
            "cached": result.num_cached_tokens,
            "generated": len(result.token_ids),
            "recomputed": result.num_recomputed_tokens,
        },
        "timing": {
            "queue_ms": round(handle.queued_s * 1e3, 3),
            "ttft_ms": round((((first_s or result.ended_at_s) - result.submitted_at_s) * 1e3), 3),
            "total_ms": round((result.ended_at_s - result.submitted_at_s) * 1e3, 3),
        },
        "attempts": result.num_attempts,
        "kv_mixed": result.kv_mixed,
    }


_STATEFUL = frozenset(
    (
        "presence_penalty",
        "frequency_penalty",
        "structured_outputs",
        "bad_words",
        "thinking_token_budget",
        "repetition_detection",
        "logits_processors",
    )
)


def is_resumable(params: Mapping[str, Any], *, streamed: bool) -> bool:
    """Can another engine go on in the middle, as if nothing had happened?

    No for a seed (its draws would repeat), penalties that count output only, and anything that keeps state
    per request.  A stop string may lie across the seam: a stream is watched by the gateway, other turns
    start again.
    """
    if params.get("seed") is not None:
        return False
    for name in _STATEFUL.intersection(params):
        if params[name]:
            return False
    return streamed or not params.get("stop")
