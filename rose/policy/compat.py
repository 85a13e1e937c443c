"""What ROSE can share with which engine configuration: one table for code, docs and ``rose node status``.

A *row* is a feature of an engine's configuration and what it allows: ``elastic`` (memory and compute), ``compute-only`` (its
KV memory is never unmapped; rollouts get a fixed budget of their own), or ``refused`` (the engine runs as plain
vLLM).  The least that any feature of a configuration allows is what that engine gets.

**Not listed is refused**: :func:`judge` answers for a name that the table does not know.  The plugin finds the names
(``vllm_plugin.features``, by the allowlist of ``rose.policy.engine_fields``); the number of the row travels in ``serving.lease``,
so numbers are never given out twice.

Pure.  ``docs/compatibility.md`` is :func:`markdown`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Support(IntEnum):
    """What an engine can share, least first."""

    REFUSED = 0
    COMPUTE_ONLY = 1
    ELASTIC = 2

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table.  ``rollout`` is what the feature means for a rollout engine; mostly the same.

    ``unmeasured``: what both get where the operator says that they may run what nobody has measured; None: no more than that.
    """

    number: int
    name: str
    feature: str
    serving: Support
    rollout: Support
    reason: str
    unmeasured: Support | None = None


def _row(
    number: int,
    name: str,
    feature: str,
    serving: Support,
    reason: str,
    rollout: Support | None = None,
    unmeasured: Support | None = None,
) -> Row:
    return Row(
        number=number,
        name=name,
        feature=feature,
        serving=serving,
        rollout=serving if rollout is None else rollout,
        reason=reason,
        unmeasured=unmeasured,
    )


_NO, _COMPUTE, _ALL = Support.REFUSED, Support.COMPUTE_ONLY, Support.ELASTIC
UNLISTED = _row(0, "unlisted", "anything that is not in this table", _NO, "nobody has tried it")

TABLE: tuple[Row, ...] = (
    UNLISTED,
    _row(1, "decoder", "decoder-only text model, dense or mixture of experts, with one KV cache group of full attention", _ALL, "tested on the CPU build"),
    _row(2, "tensor_parallel", "tensor parallelism on one host", _ALL, "one lease per engine; usable is the minimum over ranks"),
    _row(3, "kv_connector", "KV connector, KV offload, prefill/decode disaggregation", _COMPUTE, "its KV memory is registered with the transport and must not be unmapped", _NO),
    _row(4, "encoder_connector", "encoder-cache connector", _NO, "nobody has tried it"),
    _row(5, "data_parallel", "data parallelism of a dense model on one host (with an external load balancer vLLM wants servers of their own: the first row)", _ALL, "its engine cores know nothing of each other, and each has a node directory and an agent of its own; not tried with a policy", _NO),
    _row(51, "data_parallel_moe", "data parallelism of a mixture-of-experts model, with any load balancer", _NO, "a rank without requests steps along with the others, and no board says so: rollouts beside it would slow all ranks"),
    _row(52, "data_parallel_hosts", "data parallelism over several hosts (--headless), or with the hybrid load balancer", _NO, "nobody has tried which core has which directory there"),
    _row(6, "expert_parallel", "expert parallelism, MoE load balancing", _NO, "within one engine core it could not be tried: the kernel of vLLM's CPU build does not know that a rank has some of the experts only, and crashes at the first prompt; with several, or where experts move, ranks step for each other's sake and no board says so"),
    _row(7, "pipeline_parallel", "pipeline parallelism on one host", _COMPUTE, "a step is in flight in every stage, and the board counts from when each was put together: what a token takes, not the gaps between steps; stages have other layers each, so no loan was tried", _NO),
    _row(8, "context_parallel", "context parallelism", _NO, "KV blocks are spread over ranks in another way"),
    _row(9, "lora", "LoRA adapters", _ALL, "who waits for an adapter's slot claims no memory, and prefixes are keyed by adapter; a weight update knows no adapters", _NO),
    _row(10, "speculative", "speculative decoding by n-grams of the prompt, a draft model, EAGLE, EAGLE 3 or a layer of the model's own (MTP, as in DeepSeek V3)", _ALL, "the step model counts the drafts that a step verifies, and a drafter's keys and values lie in the same blocks; a weight update does not reach a drafter", _NO),
    _row(40, "drafts", "speculative decoding in another way (Medusa, MTP of another model, ...), or an option of it that is not listed below", _NO, "nobody has tried it; of Qwen3-Next with MTP it could not be tried: vLLM's CPU build does not answer"),
    _row(11, "hybrid", "hybrid and attention-free models with a state of Mamba-2 (Granite 4), a gated delta rule (Qwen3-Next) or short convolutions (LFM2)", _COMPUTE, "a state is not cut into equal blocks, so nothing is lent; that a prompt's steps end where its state is cached is counted", _NO),
    _row(54, "state_kind", "hybrid and attention-free models with a state of another kind (Mamba-1 as in Jamba, linear attention as in MiniMax)", _NO, "vLLM's CPU build does not answer with them, so nobody has tried it"),
    _row(12, "encoder_decoder", "encoder-decoder models", _NO, "cross-attention memory is not accounted for"),
    _row(13, "multimodal", "multimodal models of text and images (a text and a vision part, as in SmolVLM and Qwen-VL)", _ALL, "the decoder's blocks are as any other's; the encoder's time is counted in its step, and who waits for the encoder claims no memory; tried with Idefics 3 (SmolVLM), video not; a rollout's trace has token ids only", _NO),
    _row(55, "modalities", "multimodal models of another kind (audio, attention both ways within an image as in Gemma 3, inputs as embeddings)", _NO, "nobody has tried it"),
    _row(14, "pooling", "pooling models", _NO, "they have no time between tokens to promise"),
    _row(15, "fp8_kv", "fp8 KV cache, with one scale for each tensor", _ALL, "the scales are the layers' own and do not lie in the blocks; a rollout's log-probs would be those of rounded keys and values", _NO),
    _row(41, "kv_quant", "KV cache quantised in another way", _NO, "scales may lie beside the blocks; not tested"),
    _row(16, "api_servers", "several API server processes", _ALL, "only the engine core takes part; a rollout engine keeps weight updates in its API server", _NO),
    _row(17, "rust_frontend", "vLLM's Rust front end", _NO, "deadlines count from the arrival times that it states, and nobody has checked those: vLLM's CPU build has no such front end"),
    _row(18, "mig", "a MIG slice", _NO, "driver figures and green contexts mean something else there; not tested"),
    _row(19, "sleep_mode", "sleep mode, the cumem allocator, expandable segments", _NO, "asleep, at level 1 as at 2, production has no KV memory, and a lease would still count it; awake, it takes all of it at once; compute alone could not be tried: vLLM's CPU build does not start with it"),
    _row(20, "unknown_version", "a vLLM version outside the supported lines, or a hook that changed", _NO, "private names may have moved"),
    _row(21, "gpu", "CUDA", _NO, "not measured on a GPU: off unless allow_unmeasured = true (production: ROSE_ALLOW_UNMEASURED=1)", unmeasured=_ALL),
    _row(22, "other_scheduler", "another --scheduler-cls or --worker-cls", _NO, "ours takes that place"),
    _row(23, "multi_host", "workers on several hosts, or under Ray", _NO, "files and loans are one host's, and Ray starts its workers apart from the engine core, without its directory; on one host --distributed-executor-backend mp does the same"),
    _row(24, "small_cache", "a KV cache of fewer than four chunks", _NO, "nothing could be lent from it"),
    _row(25, "other_device", "accelerators other than CUDA", _NO, "nobody has tried it"),
    _row(26, "kv_groups", "several KV cache groups over one pool of equal blocks (sliding window and full attention, as in Gemma 3 and gpt-oss)", _ALL, "a chunk is the same blocks of every group, and claims are vLLM's own count; gpt-oss's attention sinks are weights of its layers and lie in no block; not tried with a policy", _NO),
    _row(50, "sliding_window", "sliding windows beside full attention", _ALL, "its blocks come and go as others do; not tried with a policy", _NO),
    _row(53, "grouped_drafts", "speculative decoding beside several KV cache groups", _COMPUTE, "which blocks of a prefix a drafter leaves out was tried with one group only", _NO),
    _row(42, "mla", "multi-head latent attention (MLA, as in DeepSeek)", _ALL, "its blocks are of one kind and size, one latent per token; a weight update does not reach the matrices that vLLM makes of its weights", _NO),
    _row(27, "kv_kind", "a KV cache of another kind than full attention or MLA, or of sliding windows alone (chunked, or with static sink tokens as in openPangu)", _COMPUTE, "no loan of such blocks was tried", _NO),
    _row(28, "kv_layout", "a KV cache whose layers do not fill one allocation exactly", _COMPUTE, "nobody can say what a chunk of it takes", _NO),
    _row(29, "kv_option", "an option of the KV cache, of offload or of attention with a value that is not listed below", _COMPUTE, "its memory may be used, or waited for, in another way", _NO),
    _row(30, "attention_backend", "an attention backend that was asked for by name", _COMPUTE, "it may read memory that is on loan; not tried", _NO),
    _row(31, "quantized_weights", "weights quantised in another way (fp8, ...)", _COMPUTE, "no loan was tried beside them: vLLM's CPU build has no kernel for fp8 weights; and a weight update has no unquantised weight to write to", _NO),
    _row(57, "weight_formats", "quantised weights of a checkpoint in the format compressed-tensors (int-quantized), AWQ or GPTQ", _ALL, "they are the layers' own and lie in no block; tried with 8-bit integer weights and activations, and with 4-bit weights; a weight update has no unquantised weight to write to", _NO),
    _row(32, "priority", "priority scheduling", _NO, "the oldest request is not the next one: the deadlines would be another request's"),
    _row(33, "prompt_embeds", "prompts as embeddings", _ALL, "a rollout's trace has token ids only", _NO),
    _row(34, "logits_processors", "logits processors of the operator's", _ALL, "a rollout's log-probs would not be those of what was sampled", _NO),
    _row(36, "cuda_graphs", "CUDA graphs (CUDA without --enforce-eager)", _ALL, "a rollout engine's warm-up and capture write to KV memory, of which it has none yet", _NO),
    _row(56, "untried_line", "a feature of this table that has run on the newest line of vLLM and not on this one", _NO, "its tests have not passed on an engine of this line: off unless ROSE_ALLOW_UNMEASURED=1"),
    _row(35, "other_option", "an option with a value that is not listed below, or vLLM's front end over gRPC (--grpc)", _NO, "nobody has tried it"),
)  # fmt: skip
_TOGETHER = {"grouped_drafts": ("kv_groups", "speculative")}
_BY_NAME = {row.name: row for row in TABLE}
_BY_NUMBER = {row.number: row for row in TABLE}


def row(name: str) -> Row:
    """The row of a feature; :data:`UNLISTED` for a name that is not there."""
    return _BY_NAME.get(name, UNLISTED)


def row_of_number(number: int) -> Row:
    """The row that a lease names; a number from a newer program is unlisted."""
    return _BY_NUMBER.get(number, UNLISTED)


def together(features: Iterable[str]) -> list[str]:
    """Rows that apply because of several features at once, each of which may be well alone."""
    names = set(features)
    return [name for name, of in _TOGETHER.items() if names.issuperset(of)]


def judge(role: str, features: Iterable[str], *, allow_unmeasured: bool = False) -> tuple[Support, Row]:
    """What an engine of ``role`` with these features can share, and the row that says so.

    Of several rows that allow equally little the first decides: callers list the most telling first.  Without any it is the plain decoder's.
    """
    worst, which = Support.ELASTIC, None
    for name in features:
        found = row(name)
        support = found.rollout if role == "rollout" else found.serving
        if allow_unmeasured and found.unmeasured is not None:
            support = found.unmeasured
        if which is None or support < worst:
            worst, which = support, found
    return worst, which or _BY_NAME["decoder"]


def markdown() -> str:
    """The table as ``docs/compatibility.md`` shows it."""
    lines = [
        "| row | feature of the engine | production | rollout engine | why |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{one.name}` | {one.feature} | {one.serving.label} | {one.rollout.label} | {one.reason} |"
        for one in (*TABLE[1:], UNLISTED)
    ]
    return "\n".join(lines) + "\n"
