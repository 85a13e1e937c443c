"""What production's board would say of a simulated engine, between two of its steps."""

from __future__ import annotations

from rose.policy.admission import BoardView
from rose.policy.coserving.timing import latest_start, prompt_work_s
from rose.sim.engine import SimEngine


def board_of(serving: SimEngine, now_s: float, slo_ttft_s: float, slo_tpot_s: float) -> BoardView:
    """Latest starts, serving's own work taken off."""
    decode_s = (
        serving.base_s + serving.running * serving.decode_s + serving.context_tokens * serving.context_s
    )
    first = serving.prefilling[0] if serving.prefilling else serving.waiting[0] if serving.waiting else None
    ttft_s = None
    if first is not None and first.first_s is None:
        pending = serving.pending_tokens or first.prompt
        work_s = prompt_work_s(
            pending,
            chunk_tokens=serving.chunk_tokens,
            decode_step_s=decode_s,
            prefill_token_s=serving.prefill_s,
            attention_s=(
                serving.prompt_attention_s(pending)[0]
                if serving.prefilling
                else serving.attention_s * pending * pending / 2
            ),
        )
        ttft_s = latest_start(first.arrived_s, slo_ttft_s, work_s)
    return BoardView(
        running=serving.running,
        waiting=len(serving.prefilling) + len(serving.waiting),
        ttft_deadline_s=ttft_s,
        # Between two steps: its last token has just come.
        tpot_deadline_s=latest_start(now_s, slo_tpot_s, decode_s) if serving.running else None,
    )
