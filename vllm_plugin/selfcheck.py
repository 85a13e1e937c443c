"""Every name of vLLM's that the plugin leans on, and the look at them before anything is touched.

vLLM promises none of these names: what is private, what is an attribute that only its constructor makes, and which parameters a
method has.  :func:`problems` looks at what production's processes need, at the start of each; :func:`require` at what only a
rollout engine's API server or a worker needs, where it is needed.  A test walks the plugin's source and fails where it uses a name of
vLLM's that is not here.

Nothing is constructed: an attribute counts where the class has it, declares it, or stores it in ``__init__``.
"""

from __future__ import annotations

import dataclasses
import dis
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rose.errors import ConfigError
from vllm_plugin import lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """A class or a module of vLLM's (``module:Class``, or ``module``), and what of it is used.

    ``calls`` maps a method to the parameters that are relied on, by their names.
    """

    where: str
    names: str = ""
    calls: dict[str, str] = field(default_factory=dict)

    def problems(self) -> Iterator[str]:
        """What has changed, each in words."""
        module, _, kind = self.where.partition(":")
        try:
            owner: Any = importlib.import_module(module)
            owner = getattr(owner, kind) if kind else owner
        except (ImportError, AttributeError) as error:
            yield f"{self.where} has moved: {error}"
            return
        label = kind or module
        for name in self.names.split():
            if lines.has(f"{self.where}:{name}") and not has_name(owner, name):
                yield f"{label}.{name} is gone"
        for name, needed in self.calls.items():
            if not lines.has(f"{self.where}:{name}"):
                continue
            call = getattr(owner, name, None)
            if call is None:
                yield f"{label}.{name} is gone"
                continue
            parameters = inspect.signature(call).parameters
            missing = [each for each in needed.split() if each not in parameters]
            if missing:
                yield f"{label}.{name} lacks {', '.join(missing)}"


def has_name(owner: Any, name: str) -> bool:
    """Has a module, a class, or what a class constructs, an attribute of this name?"""
    if hasattr(owner, name):
        return True
    if not inspect.isclass(owner):
        return False
    if dataclasses.is_dataclass(owner) and any(one.name == name for one in dataclasses.fields(owner)):
        return True
    return any(
        name in vars(one).get("__annotations__", ()) or name in _stored_by(vars(one).get("__init__"))
        for one in owner.__mro__
    )


def _stored_by(init: Any) -> set[str]:
    code = getattr(inspect.unwrap(init), "__code__", None) if init is not None else None
    return (
        set() if code is None else {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR"}
    )


CORE: tuple[Owner, ...] = (
    Owner(where="vllm.engine.arg_utils:EngineArgs", calls={"create_engine_config": "self"}),
    Owner(where="vllm.config.model:ModelConfig", names="architectures"),
    Owner(where="vllm.v1.executor.abstract:Executor", calls={"__init__": "self vllm_config"}),
    Owner(where="vllm.platforms", names="current_platform"),
    Owner(where="vllm.platforms.interface:Platform", names="is_cpu is_cuda"),
    Owner(where="vllm.config", names="CompilationMode"),
    Owner(where="vllm.config.compilation:CompilationMode", names="NONE"),
    Owner(
        where="vllm.v1.engine.core:EngineCoreProc",
        names="input_queue output_queue _idle_state_callbacks is_running scheduler model_executor",
        calls={"run_busy_loop": "self"},
    ),
    Owner(where="vllm.v1.engine.core:EngineCore", names="scheduler model_executor"),
    Owner(where="vllm.v1.engine:EngineCoreRequestType", names="WAKEUP"),
    Owner(where="vllm.v1.engine:FinishReason", names="ABORT"),
    Owner(
        where="vllm.v1.engine:EngineCoreOutput",
        names="request_id new_token_ids finish_reason stop_reason events trace_headers kv_transfer_params",
    ),
    Owner(where="vllm.v1.engine:EngineCoreOutputs", names="outputs finished_requests"),
    Owner(where="vllm.v1.core.sched.async_scheduler:AsyncScheduler", calls={"schedule": "self"}),
    Owner(
        where="vllm.v1.core.sched.scheduler:Scheduler",
        names="""
            waiting kv_holding_waiting running requests kv_cache_manager block_size max_num_scheduled_tokens pause_state
            max_num_active_reqs num_waiting_for_streaming_input _is_blocked_waiting_status lora_config use_eagle_block_drop
            kv_cache_config cache_config need_mamba_block_aligned_split max_num_encoder_input_tokens
            encoder_cache_manager use_pp""",
        calls={
            "schedule": "self throttle_prefills",
            "update_from_output": "self scheduler_output model_runner_output",
            "finish_requests": "self request_ids finished_status",
            "add_request": "self request",
            "_request_remaining_blocks": "self request",
            "get_num_unfinished_requests": "self",
            "reset_prefix_cache": "self reset_running_requests reset_connector",
            "get_kv_cache_usage": "self",
            "make_stats": "self",
        },
    ),
    Owner(where="vllm.v1.core.sched.interface:PauseState", names="UNPAUSED PAUSED_ALL"),
    Owner(
        where="vllm.v1.core.sched.output:SchedulerOutput",
        names="""
            num_scheduled_tokens total_num_scheduled_tokens preempted_req_ids scheduled_new_reqs
            scheduled_cached_reqs scheduled_spec_decode_tokens scheduled_encoder_inputs""",
    ),
    Owner(
        where="vllm.v1.core.sched.output:NewRequestData",
        names="req_id prompt_token_ids block_ids num_computed_tokens",
    ),
    Owner(where="vllm.v1.core.sched.output:CachedRequestData", names="new_block_ids"),
    Owner(where="vllm.v1.metrics.stats:SchedulerStats", names="kv_cache_usage"),
    Owner(
        where="vllm.v1.core.kv_cache_manager:KVCacheManager",
        names="block_pool",
        calls={"get_block_ids": "self request_id"},
    ),
    Owner(
        where="vllm.v1.core.block_pool:BlockPool",
        names="blocks free_block_queue cached_block_hash_to_block num_gpu_blocks enable_caching",
        calls={
            "evict_blocks": "self block_ids",
            "free_blocks": "self ordered_blocks",
            "_maybe_evict_cached_block": "self block",
            "get_cached_block": "self block_hash kv_cache_group_ids",
            "get_num_free_blocks": "self",
        },
    ),
    Owner(where="vllm.v1.core.block_pool:BlockHashToBlockMap", names="__len__", calls={"get_one_block": "self key"}),
    Owner(
        where="vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue",
        names="fake_free_list_head fake_free_list_tail",
        calls={"remove": "self block", "get_all_free_blocks": "self"},
    ),
    Owner(where="vllm.v1.core.kv_cache_utils", names="make_block_hash_with_group_id"),
    Owner(
        where="vllm.v1.core.kv_cache_utils:KVCacheBlock",
        names="block_id ref_cnt block_hash is_null next_free_block",
    ),
    Owner(
        where="vllm.v1.request:Request",
        names="""
            request_id num_tokens num_computed_tokens num_output_tokens arrival_time block_hashes cache_salt client_index
            trace_headers skip_reading_prefix_cache status sampling_params lora_request mm_features has_encoder_inputs""",
        calls={
            "take_events": "self",
            "update_block_hashes": "self",
            "get_num_encoder_embeds": "self input_id",
        },
    ),
    Owner(where="vllm.multimodal.inputs:MultiModalFeatureSpec", names="identifier mm_position"),
    Owner(where="vllm.multimodal.inputs:PlaceholderRange", names="offset length"),
    Owner(
        where="vllm.v1.core.encoder_cache_manager:EncoderCacheManager", names="cached num_freeable_slots"
    ),
    Owner(where="vllm.lora.request:LoRARequest", names="lora_int_id"),
    Owner(where="vllm.config.lora:LoRAConfig", names="max_loras"),
    Owner(where="vllm.v1.request:RequestStatus", names="FINISHED_ABORTED"),
)  # fmt: skip
"""What every process of an engine looks at when the plugin is switched on.  Without it nothing is patched."""

API: tuple[Owner, ...] = (
    Owner(
        where="vllm.v1.engine.async_llm:AsyncLLM",
        names="engine_core model_config vllm_config errored dead_error",
        calls={
            "collective_rpc": "self method args",
            "pause_generation": "self mode clear_cache",
            "resume_generation": "self",
            "is_paused": "self",
            "update_weight_version": "self",
            "start_weight_update": "self",
            "update_weights": "self request",
            "finish_weight_update": "self",
            "abort": "self request_id",
        },
    ),
    Owner(where="vllm.v1.engine.core_client:AsyncMPClient", calls={"call_utility_async": "self method"}),
    Owner(where="vllm.sampling_params:SamplingParams", names="extra_args"),
    Owner(where="vllm.distributed.weight_transfer.base:WeightTransferUpdateRequest", names="update_info"),
    Owner(where="vllm.config.model:ModelConfig", calls={"get_vocab_size": "self"}),
    # Text from tokens, as vLLM's own answers have it.
    Owner(where="vllm.renderers.chat_utils", names="make_tool_call_id"),
    Owner(
        where="vllm.renderers.online_derenderer:OnlineDerenderer",
        names="renderer model_config enable_auto_tools",
        calls={"_resolve_chat_template_kwargs": "self chat_request"},
    ),
    Owner(
        where="vllm.renderers.online_derenderer",
        names="_resolve_logprobs _convert_chat_logprobs_to_completion_logprobs",
    ),
    Owner(where="vllm.renderers", names="online_derenderer"),  # a module: behind those that load it
    Owner(where="vllm.renderers.base:BaseRenderer", names="_executor", calls={"get_tokenizer": "self"}),
    Owner(
        where="vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat",
        names="_include_reasoning_tokens_details",
    ),
    Owner(
        where="vllm.entrypoints.openai.chat_completion.protocol",
        names="ChatMessage ChatCompletionRequest",
    ),
    Owner(
        where="vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
        names="""
            tools tool_choice parallel_tool_calls include_reasoning include_stop_str_in_output skip_special_tokens
            spaces_between_special_tokens""",
    ),
    Owner(where="vllm.entrypoints.openai.completion.protocol", names="CompletionRequest"),
    Owner(where="vllm.entrypoints.generate.base.protocol", names="ToolCall"),
    Owner(where="vllm.entrypoints.scale_out.token_in_token_out.protocol", names="GenerateLogProbs"),
    Owner(where="pydantic:BaseModel", calls={"model_dump": "self mode exclude_none"}),
    Owner(where="vllm.sampling_params", names="SamplingParams"),
    Owner(where="vllm.v1.engine.detokenizer", names="IncrementalDetokenizer"),
    Owner(
        where="vllm.v1.engine.detokenizer:IncrementalDetokenizer",
        calls={"from_new_request": "tokenizer request"},
    ),
    Owner(where="vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer", names="output_text"),
)
"""Of a rollout engine's API server."""

WORKER: tuple[Owner, ...] = (
    Owner(
        where="vllm.v1.worker.worker_base:WorkerBase",
        names="rank vllm_config cache_config parallel_config model_config device",
        calls={
            "init_device": "self",
            "execute_model": "self scheduler_output",
            "sample_tokens": "self grammar_output",
            "get_model": "self",
            "load_model": "self",
            "shutdown": "self",
        },
    ),
    Owner(
        where="vllm.v1.worker.gpu_worker:Worker",
        names="weight_transfer_engine _weight_update_active",
        calls={"initialize_from_config": "self kv_cache_config"},
    ),
    Owner(
        where="vllm.distributed.weight_transfer.base:WeightTransferEngine",
        names="device init_info_cls update_info_cls supports_draft_weight_update",
        calls={
            "__init__": "self config vllm_config device model",
            "init_transfer_engine": "self init_info",
            "parse_init_info": "self init_dict",
            "parse_update_info": "self update_dict",
            "start_weight_update": "self",
            "update_weights": "self update_info",
            "receive_weights": "self update_info",
            "finish_weight_update": "self",
            "shutdown": "self",
        },
    ),
    Owner(
        where="vllm.distributed.weight_transfer.base", names="WeightTransferInitInfo WeightTransferUpdateInfo"
    ),
    Owner(
        where="vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory", names="register_engine"
    ),
    Owner(where="vllm.distributed.parallel_state", names="get_world_group"),
    Owner(where="vllm.distributed.parallel_state:GroupCoordinator", names="cpu_group rank_in_group"),
    Owner(where="vllm.config", names="set_current_vllm_config"),
    Owner(where="vllm.config.vllm:VllmConfig", names="num_lookahead_tokens"),
    Owner(where="vllm.config.weight_transfer:WeightTransferConfig", names="backend"),
    Owner(where="vllm.utils.torch_utils", names="current_stream"),
    Owner(where="torch._dynamo", names="config"),
    Owner(where="torch.nn:Module", names="_parameters _buffers modules"),
    Owner(where="torch._ops:OpOverload", names="_schema"),
    Owner(where="torch.ops:aten", names="_local_scalar_dense"),
)
"""Of a rollout engine's workers."""

CPU_WORKER: tuple[Owner, ...] = (
    Owner(
        where="vllm.v1.worker.cpu_worker:CPUWorker",
        names="model_runner",
        calls={"determine_available_memory": "self", "_should_warm_up_model": "self"},
    ),
    Owner(where="vllm.v1.worker.cpu_model_runner:CPUModelRunner", calls={"warming_up_model": "self"}),
    Owner(where="vllm.model_executor.layers.fused_moe.config:FusedMoEConfig", names="activation"),
    Owner(where="vllm.model_executor.layers.utils", names="dispatch_cpu_unquantized_gemm"),
    Owner(
        where="vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts",
        names="moe_config w1_bias w2_bias",
        calls={
            "process_weights_after_loading": "self layer",
            "apply": """
                self output hidden_states w1 w2 topk_weights topk_ids expert_map apply_router_weight_on_input""",
        },
    ),
    Owner(where="vllm.model_executor.layers.fused_moe.activation:MoEActivation", names="SILU GELU GELU_TANH"),
    Owner(
        where="vllm.distributed.device_communicators.shm_broadcast:SpinCondition",
        calls={"wait": "self timeout_ms", "notify": "self"},
    ),
)
"""Of those on the CPU build, besides.  (That the queue's condition is gone costs time only: see ``compat.patch_spin``.)"""

DOCTOR: tuple[Owner, ...] = (
    Owner(
        where="vllm.entrypoints.cli.serve",
        names="run_server run_multi_api_server run_headless run_dp_supervisor",
    ),
    Owner(
        where="vllm.entrypoints.cli.serve:ServeSubcommand",
        calls={"subparser_init": "self subparsers", "validate": "self args", "cmd": "args"},
    ),
    Owner(where="vllm.entrypoints.launchers.cli_args", names="propagate_flash_late_interaction"),
    Owner(where="vllm.utils.argparse_utils", names="FlexibleArgumentParser"),
    Owner(where="vllm.usage.usage_lib", names="UsageContext"),
    Owner(where="vllm.usage.usage_lib:UsageContext", names="OPENAI_API_SERVER"),
    Owner(
        where="vllm.engine.arg_utils:AsyncEngineArgs",
        names="_api_process_count _api_process_rank",
        calls={"from_cli_args": "args", "create_engine_config": "self usage_context headless"},
    ),
    Owner(where="vllm.engine.arg_utils", names="AsyncEngineArgs"),
    Owner(
        where="vllm.config.model:ModelConfig",
        calls={
            "get_sliding_window": "self",
            "get_num_kv_heads": "self parallel_config",
            "get_head_size": "self",
            "get_num_layers": "self parallel_config",
        },
    ),
    Owner(where="vllm.utils.torch_utils", names="kv_cache_dtype_str_to_dtype"),
    Owner(
        where="vllm.v1.kv_cache_interface",
        names="FullAttentionSpec SlidingWindowSpec ChunkedLocalAttentionSpec MLAAttentionSpec get_kv_quant_mode",
    ),
    Owner(
        where="vllm.v1.core.kv_cache_utils",
        names="get_kv_cache_configs",
        calls={"get_kv_cache_configs": "vllm_config kv_cache_specs available_memory"},
    ),
    Owner(where="vllm.v1.core.single_type_kv_cache_manager", names="register_all_kvcache_specs"),
)
"""Of ``rose doctor``'s look at an engine that is not started."""

GROUP_BYTES = 4
"""A key of the prefix cache is a block's hash and the number of its KV group."""


def problems(role: str) -> list[str]:
    """What keeps an engine of this role from running with ROSE on this vLLM; empty when nothing does."""
    problem = lines.problem(role)
    if problem is not None:
        return [problem]  # Not looked at further: in another line the modules themselves may be elsewhere.
    return [*problems_of(CORE), *_key_problems()]


def moved() -> str:
    """For porting to another vLLM: the names that ROSE uses and that this vLLM does not have."""
    owners = (*CORE, *API, *WORKER, *CPU_WORKER, *DOCTOR)
    found: list[str] = []
    for owner in owners:
        try:
            found += owner.problems()
        except Exception as error:  # noqa: BLE001 - another line's modules may do anything when they are loaded
            found.append(f"{owner.where} cannot be looked at: {error!r}")
    found = list(dict.fromkeys(found))
    if not found:
        return "none of the names that are used has moved, but nobody has tried it"
    return f"{len(found)} of the names that are used have moved: {'; '.join(found)}"


def problems_of(owners: tuple[Owner, ...]) -> list[str]:
    return [problem for owner in owners for problem in owner.problems()]


def require(owners: tuple[Owner, ...]) -> None:
    """Raise where something of ``owners`` has changed.

    Raises:
        ConfigError: It names all of it.
    """
    found = problems_of(owners)
    if found:
        raise ConfigError(
            "; ".join(found),
            field="vLLM",
            fix=f"run a release line that ROSE knows: {', '.join(lines.LINES['rollout'])}",
        )


def _key_problems() -> Iterator[str]:
    """Do keys of the prefix cache look as :mod:`vllm_plugin.compat` makes them?"""
    try:
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        key = make_block_hash_with_group_id(b"hash", 1)  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001  # whatever it is, they are not what we know
        yield f"keys of the prefix cache cannot be made: {error!r}"
        return
    if key != b"hash" + (1).to_bytes(GROUP_BYTES, "big"):
        yield "keys of the prefix cache are another"
