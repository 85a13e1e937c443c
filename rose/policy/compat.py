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
    _row(5, "data_parallel", "data parallelism", _NO, "several engine cores would write the files of one device"),
    _row(6, "expert_parallel", "expert parallelism, MoE load balancing", _NO, "all ranks must step together; a gate that differs between them would hang"),
    _row(7, "pipeline_parallel", "pipeline parallelism", _NO, "several steps are in flight; the board knows one"),
    _row(8, "context_parallel", "context parallelism", _NO, "KV blocks are spread over ranks in another way"),
    _row(9, "lora", "LoRA adapters", _NO, "adapter slots and their prefixes are not accounted for"),
    _row(10, "speculative", "speculative decoding", _NO, "the step model knows no drafts, and a draft model has a cache of its own"),
    _row(11, "hybrid", "hybrid, Mamba and attention-free models", _NO, "their state is not cut into equal blocks"),
    _row(12, "encoder_decoder", "encoder-decoder models", _NO, "cross-attention memory is not accounted for"),
    _row(13, "multimodal", "multimodal models", _NO, "the encoder's memory and time are not accounted for"),
    _row(14, "pooling", "pooling models", _NO, "they have no time between tokens to promise"),
    _row(15, "fp8_kv", "quantised KV cache (fp8 and others)", _NO, "scales may lie beside the blocks; not tested"),
    _row(16, "api_servers", "several API server processes", _ALL, "only the engine core takes part; a rollout engine keeps weight updates in its API server", _NO),
    _row(17, "rust_frontend", "vLLM's Rust front end", _NO, "it loads no endpoint plugins, and its arrival times are not checked"),
    _row(18, "mig", "a MIG slice", _NO, "driver figures and green contexts mean something else there; not tested"),
    _row(19, "sleep_mode", "sleep mode, the cumem allocator, expandable segments", _NO, "another allocator moves the same memory"),
    _row(20, "unknown_version", "a vLLM version outside the supported line, or a hook that changed", _NO, "private names may have moved"),
    _row(21, "gpu", "CUDA", _NO, "not measured on a GPU: off unless allow_unmeasured = true (production: ROSE_ALLOW_UNMEASURED=1)", unmeasured=_ALL),
    _row(22, "other_scheduler", "another --scheduler-cls or --worker-cls", _NO, "ours takes that place"),
    _row(23, "multi_host", "workers on several hosts, or under Ray", _NO, "the shared files of a device are one host's"),
    _row(24, "small_cache", "a KV cache of fewer than four chunks", _NO, "nothing could be lent from it"),
    _row(25, "other_device", "accelerators other than CUDA", _NO, "nobody has tried it"),
    _row(26, "kv_groups", "several KV cache groups (sliding window and full attention, as in Gemma 3 and gpt-oss)", _COMPUTE, "layers of several groups lie over the same bytes, and the books count one group", _NO),
    _row(27, "kv_kind", "a KV cache of another kind than full attention (MLA, sliding window, chunked, sinks)", _COMPUTE, "no loan of such blocks was tried", _NO),
    _row(28, "kv_layout", "a KV cache whose layers do not fill one allocation exactly", _COMPUTE, "nobody can say what a chunk of it takes", _NO),
    _row(29, "kv_option", "an option of the KV cache, of offload or of attention with a value that is not listed below", _COMPUTE, "its memory may be used, or waited for, in another way", _NO),
    _row(30, "attention_backend", "an attention backend that was asked for by name", _COMPUTE, "it may read memory that is on loan; not tried", _NO, unmeasured=_ALL),
    _row(31, "quantized_weights", "quantised weights", _COMPUTE, "no loan was tried beside them, and a weight update has no unquantised weight to write to", _NO),
    _row(32, "priority", "priority scheduling", _NO, "the oldest request is not the next one: the deadlines would be another request's"),
    _row(33, "prompt_embeds", "prompts as embeddings", _ALL, "a rollout's trace has token ids only", _NO),
    _row(34, "logits_processors", "logits processors of the operator's", _ALL, "a rollout's log-probs would not be those of what was sampled", _NO),
    _row(36, "cuda_graphs", "CUDA graphs (CUDA without --enforce-eager)", _ALL, "a rollout engine's warm-up and capture write to KV memory, of which it has none yet", _NO),
    _row(35, "other_option", "an option with a value that is not listed below", _NO, "nobody has tried it"),
)  # fmt: skip
_BY_NAME = {row.name: row for row in TABLE}
_BY_NUMBER = {row.number: row for row in TABLE}


def row(name: str) -> Row:
    """The row of a feature; :data:`UNLISTED` for a name that is not there."""
    return _BY_NAME.get(name, UNLISTED)


def row_of_number(number: int) -> Row:
    """The row that a lease names; a number from a newer program is unlisted."""
    return _BY_NUMBER.get(number, UNLISTED)


def judge(role: str, features: Iterable[str], *, allow_unmeasured: bool = False) -> tuple[Support, Row]:
    """What an engine of ``role`` with these features can share, and the row that says so.

    Of several rows that allow equally little the first decides: callers list the most telling first.
    """
    worst, which = Support.ELASTIC, _BY_NAME["decoder"]
    for name in features:
        found = row(name)
        support = found.rollout if role == "rollout" else found.serving
        if allow_unmeasured and found.unmeasured is not None:
            support = found.unmeasured
        if support < worst:
            worst, which = support, found
    return worst, which


def markdown() -> str:
    """The table as ``docs/compatibility.md`` shows it."""
    lines = [
        "| feature of the engine | production | rollout engine | why |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {one.feature} | {one.serving.label} | {one.rollout.label} | {one.reason} |"
        for one in (*TABLE[1:], UNLISTED)
    ]
    return "\n".join(lines) + "\n"
