"""Every field of an engine's configuration, and the values with which ROSE shares that engine: an allowlist.

A field is *harmless* (any value: by reading vLLM, it changes nothing that ROSE counts or moves), or it is *restricted*: the values
that are allowed are listed, those that a real engine ran with (*tried*) apart from those that are allowed by reading vLLM (*read*).
With another one the engine gets what the named row of the table allows (:mod:`rose.policy.compat`); so it does with a value that has a
row of its own.  **A field that is not here is
a new one: the engine is refused, and the field is named.**

Paths are attribute names from vLLM's ``VllmConfig`` and ``KVCacheConfig`` on, joined by dots, of all its supported lines
(``vllm_plugin.lines`` says which of them has what).  ``vllm_plugin.features`` walks the objects; this file knows their names only.  Pure.  ``docs/compatibility.md`` shows :func:`markdown`.
"""

from __future__ import annotations

from dataclasses import dataclass

Value = None | bool | int | float | str
"""Of a field, made plain: an enum's member is its name, an empty container is None, any other object ``<its type>``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """A restricted field.  ``row`` is what decides where its value is none of ``tried`` and ``read``.

    ``tried``: what the engines of the tests run with, on the CPU.  ``read``: not tried; vLLM's source treats it the same.
    ``own``: those of these values that have a row of their own, and that.
    """

    path: str
    tried: tuple[Value, ...]
    read: tuple[Value, ...]
    row: str
    own: tuple[tuple[Value, str], ...] = ()


HARMLESS: dict[str, str] = {
    "": """
        model_config cache_config parallel_config scheduler_config device_config load_config offload_config attention_config
        aux_output_config mamba_config kernel_config structured_outputs_config observability_config logging_config quant_config
        compilation_config profiler_config kv_events_config ec_manager_config reasoning_config weight_transfer_config
        instance_id optimization_level performance_mode shutdown_timeout""",
    "model_config": """
        model model_weights tokenizer tokenizer_mode trust_remote_code dtype seed hf_config hf_text_config
        word_embeddings_untied_by_checkpoint hf_config_path allowed_local_media_path allowed_media_domains revision code_revision
        tokenizer_revision max_model_len spec_target_max_model_len allow_deprecated_quantization enforce_eager max_logprobs
        logprobs_mode use_fp64_gumbel disable_sliding_window disable_cascade_attn skip_tokenizer_init
        served_model_name config_format hf_token hf_overrides generation_config override_generation_config
        sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph renderer_num_workers""",
    "model_config.multimodal_config": """
        language_model_only limit_per_prompt media_io_kwargs mm_processor_kwargs mm_device_do_normalize mm_processor_cache_gb
        mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend
        mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
        interleave_mm_strings skip_mm_profiling video_pruning_method mm_tensor_ipc""",
    "cache_config": """
        block_size user_specified_block_size kv_cache_layout gpu_memory_utilization num_gpu_blocks_override sliding_window
        enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval kv_cache_dtype_skip_layers
        mamba_page_size_padded skip_page_size_padded mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode
        user_specified_mamba_block_size enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm use_kda_recoverssm num_gpu_blocks num_cpu_blocks
        effective_attention_block_size kv_cache_size_tokens kv_cache_max_concurrency hash_block_size cache_hit_alignment_tokens
        swa_bounded_replay kv_cache_memory_bytes kv_offloading_backend _block_size_resolved""",
    "parallel_config": """
        data_parallel_rank data_parallel_rank_local data_parallel_master_ip data_parallel_rpc_port
        dp_sync_interval data_parallel_master_port is_moe_model enable_ep_weight_filter eplb_config
        expert_placement_strategy all2all_backend max_parallel_loading_workers disable_custom_all_reduce elastic_ep_max_dp_size
        dbo_decode_token_threshold dbo_prefill_token_threshold disable_nccl_for_dp_synchronization ray_workers_use_nsight
        ray_runtime_env worker_extension_cls sd_worker_cls master_addr master_port numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids
        distributed_timeout_seconds cpu_distributed_timeout_seconds world_size rank _data_parallel_master_port_list
        _coord_store_port dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate cp_kv_cache_interleave_size
        _allow_auto_resolve_cp_interleave_size data_parallel_index _api_process_rank fault_tolerance_config""",
    "parallel_config.eplb_config": """
        window_size step_interval num_redundant_experts log_balancedness log_balancedness_interval use_async policy communicator
        enable_migration_batching""",
    "parallel_config.fault_tolerance_config": "engine_recovery_timeout_sec",
    "scheduler_config": """
        max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs long_prefill_token_threshold
        long_prefill_token_threshold_adaptive max_num_queued_reqs max_num_queued_tokens enable_chunked_prefill
        max_num_encoder_input_tokens encoder_cache_size disable_chunked_mm_input disable_hybrid_kv_cache_manager
        scheduler_reserve_full_isl async_scheduling stream_interval""",
    "device_config": "device device_type",
    "load_config": """
        load_format download_dir safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
        model_loader_extra_config device ignore_patterns use_tqdm_on_load pt_load_map_location""",
    "offload_config": "offload_backend uva prefetch",
    "offload_config.uva": "cpu_offload_params",
    "offload_config.prefetch": "offload_num_in_group offload_prefetch_step offload_params",
    "attention_config": """
        minimax_m3_msa_decode_backend flash_attn_version flash_attn_max_num_splits_for_cuda_graph
        tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph disable_flashinfer_q_quantization mla_prefill_backend
        use_prefill_query_quantization indexer_kv_dtype indexer_sparse_logits sparse_mla_force_mqa
        sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size""",
    "aux_output_config": "max_bytes",
    "mamba_config": "backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm",
    "kernel_config": """
        ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup enable_jit_warmup
        moe_backend sparse_indexer_topk_backend linear_backend linear_backend_per_quant""",
    "kernel_config.ir_op_priority": "rms_norm fused_add_rms_norm gelu_and_mul_sparse",
    "structured_outputs_config": """
        backend disable_any_whitespace disable_additional_properties reasoning_parser reasoning_parser_plugin
        enable_in_reasoning""",
    "observability_config": """
        show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces per_request_spec_decode_metrics
        kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing
        enable_mfu_metrics enable_mm_processor_stats enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose""",
    "logging_config": "log_level formatter configure_logging pylogging_config_file",
    "compilation_config": """
        mode debug_dump_path cache_dir compile_cache_save_format backend custom_ops ir_enable_torch_wrap splitting_ops
        compile_mm_encoder cudagraph_mm_encoder encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch
        encoder_cudagraph_max_frames_per_batch cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes
        decoder_replay_trim_threshold compile_sizes compile_ranges_endpoints inductor_compile_config inductor_passes
        cudagraph_mode cudagraph_num_of_warmups cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_specialize_lora
        use_inductor_graph_partition pass_config max_cudagraph_capture_size dynamic_shapes_config local_cache_dir
        fast_moe_cold_start enabled_custom_ops disabled_custom_ops traced_files compilation_time encoder_compilation_time
        static_forward_context static_all_moe_layers""",
    "compilation_config.pass_config": """
        fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops fuse_allreduce_rms enable_qk_norm_rope_fusion
        fuse_rope_kvcache_cat_mla fuse_act_padding fuse_mla_dual_rms_norm fuse_rope_kvcache fuse_qk_norm_rope_kvcache
        rope_kvcache_fusion_max_token_num fi_allreduce_fusion_max_size_mb enable_sp fuse_gemm_comms sp_min_token_num""",
    "compilation_config.dynamic_shapes_config": "type evaluate_guards assume_32_bit_indexing",
    "profiler_config": """
        profiler torch_profiler_dir torch_profiler_activities proton_profiler_dir proton_context proton_data proton_backend
        proton_mode proton_hook proton_output_format proton_graph_attribution torch_profiler_with_stack torch_profiler_with_flops
        torch_profiler_use_gzip torch_profiler_dump_cuda_time_total torch_profiler_record_shapes torch_profiler_with_memory
        capture_torch_profiler detailed_trace_annotation ignore_frontend delay_iterations max_iterations warmup_iterations
        active_iterations wait_iterations""",
    "ec_manager_config": "manager_config",
    "kv_events_config": """
        enable_kv_cache_events publisher endpoint replay_endpoint buffer_steps hwm max_queue_size topic""",
    "reasoning_config": """
        reasoning_parser reasoning_start_str reasoning_end_str _reasoning_start_token_ids _reasoning_end_token_ids
        _natural_reasoning_end_token_ids _enabled""",
    "weight_transfer_config": "backend",
    "lora_config": """
        max_lora_rank max_loras fully_sharded_loras max_cpu_loras lora_dtype target_modules default_mm_loras
        specialize_active_lora max_lora_cls_labels""",
    "speculative_config": """
        enforce_eager num_speculative_tokens model draft_tensor_parallel_size tensor_parallel_size moe_backend max_model_len
        revision code_revision index_share_for_mtp_iteration disable_padded_drafter_batch disable_eagle_block_drop
        use_local_argmax_reduction prompt_lookup_max prompt_lookup_min target_model_config target_parallel_config
        num_speculative_tokens_per_batch_size draft_model_config draft_parallel_config suffix_decoding_max_tree_depth
        suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob draft_load_config
        synthetic_acceptance_rates synthetic_acceptance_length draft_sample_method dspark_draft_topk""",
    # What a model says of itself: properties of ModelConfig.  The fields above are what an operator says.
    "model": """
        uses_alibi uses_mrope is_moe is_quantized is_pp_supported is_chunked_prefill_supported is_prefix_caching_supported
        use_sep_token has_noops""",
    "kv_cache_config": """
        num_blocks kv_cache_tensors kv_cache_groups prefix_cache_retention_interval kv_cache_layout hash_block_size
        cache_hit_alignment_tokens kv_tp_replicas""",
    "kv_cache_tensor": "size layers layer_stride block_stride offset",
    "kv_cache_group": "layer_names kv_cache_spec enable_kv_transfer",
    "kv_cache_spec": "block_size max_tp_shards num_kv_heads head_size head_size_v dcp_sharded cache_dtype_str",
    # Of a MambaSpec: nothing of it is lent.
    "state_spec": """
        block_size dcp_sharded block_stride_alignment shapes dtypes page_size_padded mamba_cache_mode num_speculative_blocks
        num_prefill_checkpoint_blocks prefill_checkpoint_alignment num_heads tokens_per_state tp_replicated""",
}  # fmt: skip
"""Section -> names of the fields that may have any value.  A name that is a section of its own is looked into."""


_Values = tuple[Value, ...]


def _restricted(
    row: str,
    *fields: tuple[str, _Values] | tuple[str, _Values, _Values],
    own: tuple[tuple[Value, str], ...] = (),
) -> tuple[Field, ...]:
    """Rows of ``(path, tried)`` or ``(path, tried, read)``; ``own``: as :class:`Field` has it, of each."""
    return tuple(
        Field(path=one[0], tried=one[1], read=one[2] if len(one) == 3 else (), row=row, own=own)
        for one in fields
    )


_UNSET: _Values = (None,)
_OFF: tuple[_Values, _Values] = (False,), (None,)
_ONE: _Values = (1,)

RESTRICTED: tuple[Field, ...] = (
    *_restricted("tensor_parallel", ("parallel_config.tensor_parallel_size", _ONE)),
    *_restricted("kv_connector", ("kv_transfer_config", _UNSET), ("cache_config.kv_offloading_size", _UNSET)),
    *_restricted("encoder_connector", ("ec_transfer_config", _UNSET)),
    *_restricted(
        "data_parallel",
        ("parallel_config.data_parallel_size", _ONE),
        ("parallel_config.data_parallel_size_local", _ONE),
    ),
    *_restricted("data_parallel_moe", ("parallel_config.data_parallel_external_lb", *_OFF)),
    *_restricted("data_parallel_hosts", ("parallel_config.data_parallel_hybrid_lb", *_OFF)),
    *_restricted(
        "expert_parallel",
        ("parallel_config.enable_expert_parallel", *_OFF),
        ("parallel_config.enable_eplb", *_OFF),
        ("parallel_config.enable_elastic_ep", *_OFF),
        ("parallel_config.enable_hc_sp", *_OFF),
    ),
    *_restricted("pipeline_parallel", ("parallel_config.pipeline_parallel_size", _ONE)),
    *_restricted(
        "context_parallel",
        ("parallel_config.prefill_context_parallel_size", _ONE),
        ("parallel_config.decode_context_parallel_size", _ONE),
    ),
    *_restricted("lora", ("lora_config", _UNSET)),
    *_restricted(
        "other_option",
        ("lora_config.enable_tower_connector_lora", *_OFF),
        ("lora_config.enable_mixed_moe_lora_format", *_OFF),
        ("lora_config.enable_moe_shared_loras", *_OFF),
    ),
    *_restricted("speculative", ("speculative_config", _UNSET)),
    *_restricted(
        "drafts",
        ("speculative_config.method", ("ngram", "draft_model", "eagle", "eagle3", "mtp")),
        ("speculative_config.quantization", _UNSET),
        ("speculative_config.attention_backend", _UNSET),
        ("speculative_config.kv_cache_dtype", _UNSET),
        ("speculative_config.parallel_drafting", *_OFF),
        ("speculative_config.use_heterogeneous_vocab", *_OFF),
        ("speculative_config.rejection_sample_method", ("standard",)),
        ("speculative_config.enable_adaptive_verification", *_OFF),
        ("kv_cache_group.is_eagle_group", *_OFF),
    ),
    *_restricted(
        "hybrid",
        ("model.is_hybrid", *_OFF),
        ("model.is_attention_free", *_OFF),
        ("model.has_inner_state", *_OFF),
        ("cache_config.is_attention_free", *_OFF),
    ),
    *_restricted(
        "other_option",
        ("model.attn_type", ("decoder", "hybrid", "attention_free")),
        own=(("hybrid", "hybrid"), ("attention_free", "hybrid")),
    ),
    *_restricted("state_kind", ("state_spec.mamba_type", ("GDN_ATTN", "MAMBA2", "SHORT_CONV"))),
    *_restricted("encoder_decoder", ("model.is_encoder_decoder", *_OFF)),
    *_restricted(
        "multimodal",
        ("model.is_multimodal_model", (False, True), (None,)),
        ("scheduler_config.is_multimodal_model", (False, True), (None,)),
        own=((True, "multimodal"),),
    ),
    *_restricted("multimodal", ("model_config.multimodal_config", _UNSET)),
    *_restricted(
        "modalities",
        ("model.is_multimodal_raw_input_only_model", *_OFF),
        ("model.is_mm_prefix_lm", *_OFF),
        ("model_config.multimodal_config.enable_mm_embeds", *_OFF),
        ("model_config.multimodal_config.allow_missing_mm_embeddings", *_OFF),
        ("model_config.multimodal_config.mm_encoder_only", *_OFF),
        ("model_config.multimodal_config.mm_ipc_gpu_memory_gb", (0,)),
        ("model_config.multimodal_config.video_pruning_rate", _UNSET),
        ("ec_manager_config.encoder_cache_manager_cls", _UNSET),
    ),
    *_restricted(
        "pooling",
        ("model.runner_type", ("generate",)),
        ("model.is_matryoshka", *_OFF),
        ("model_config.runner", ("auto",), ("generate",)),
        ("model_config.convert", ("auto",), ("none",)),
        ("model_config.pooler_config", _UNSET),
        ("model_config.io_processor_plugin", _UNSET),
        ("scheduler_config.runner_type", ("generate",)),
    ),
    *_restricted(
        "kv_quant",
        (
            "cache_config.cache_dtype",
            ("auto", "fp8"),
            ("bfloat16", "float16", "half", "float32", "fp8_e4m3", "fp8_e5m2"),
        ),
        own=(("fp8", "fp8_kv"), ("fp8_e4m3", "fp8_kv"), ("fp8_e5m2", "fp8_kv")),
    ),
    *_restricted("kv_quant", ("kv_cache_spec.dtype", ("bfloat16", "uint8"), ("float16", "float32"))),
    *_restricted(
        "kv_quant",
        ("kv_cache_spec.kv_quant_mode", ("NONE", "FP8_PER_TENSOR")),
        own=(("FP8_PER_TENSOR", "fp8_kv"),),
    ),
    *_restricted("api_servers", ("parallel_config._api_process_count", _ONE)),
    *_restricted(
        "sleep_mode",
        ("model_config.enable_sleep_mode", *_OFF),
        ("model_config.enable_cumem_allocator", *_OFF),
        ("model_config.enable_nccl_comm_suspend", *_OFF),
    ),
    # vLLM's own worker of the platform: the plugin adds it, and ours.
    *_restricted(
        "other_scheduler",
        ("scheduler_config.scheduler_cls", _UNSET),
        ("parallel_config.worker_cls", ()),
    ),
    *_restricted(
        "multi_host",
        ("parallel_config.nnodes", _ONE),
        ("parallel_config.node_rank", (0,)),
        ("parallel_config.distributed_executor_backend", ("mp",), ("uni", None)),
        ("parallel_config.data_parallel_backend", ("mp",)),
        ("parallel_config.placement_group", _UNSET),
    ),
    *_restricted(
        "mla",
        ("model.use_mla", (False, True), (None,)),
        ("model.is_deepseek_mla", (False, True), (None,)),
        own=((True, "mla"),),
    ),
    *_restricted(
        "kv_kind",
        ("model.rswa_window", _UNSET),
        ("kv_cache_spec.attention_chunk_size", _UNSET),
        ("kv_cache_spec.non_causal", *_OFF),
        ("kv_cache_spec.tokens_per_state", _ONE),
        ("kv_cache_spec.alignment", _UNSET),
        ("kv_cache_spec.model_version", _UNSET),
        ("kv_cache_spec.cache_role", ("SPARSE",)),
        ("kv_cache_spec.is_index_group_leader", *_OFF),
        ("kv_cache_spec.non_causal_multi_token_decode", *_OFF),
        ("kv_cache_spec.extra_retained_tokens", (0,)),
        ("kv_cache_spec.storage_block_size", _UNSET),
    ),
    *_restricted("sliding_window", ("kv_cache_spec.sliding_window", _UNSET)),
    *_restricted(
        "kv_layout",
        ("kv_cache_spec.page_size_padded", _UNSET),
        # In kernel blocks: whether any padding comes of it, the geometry tells.
        ("kv_cache_spec.block_stride_alignment", (None, "<MultipleOf>")),
        ("kv_cache_spec.num_head_slots", _UNSET),
        ("kv_cache_spec.state_content_bytes", _UNSET),
    ),
    *_restricted(
        "kv_option",
        ("cache_config.prefix_match_unit", _UNSET),
        ("cache_config.kv_sharing_fast_prefill", *_OFF),
        ("scheduler_config.watermark", (0.0,)),
        ("aux_output_config.enable_return_routed_experts", *_OFF),
        ("offload_config.uva.cpu_offload_gb", (0.0,)),
        ("offload_config.prefetch.offload_group_size", (0,)),
        ("attention_config.use_non_causal", *_OFF),
    ),
    *_restricted(
        "attention_backend",
        ("attention_config.backend", (None,), ("CPU_ATTN",)),
        ("attention_config.backend_per_kind", _UNSET),
        ("attention_config.use_trtllm_attention", (None,)),
    ),
    *_restricted(
        "quantized_weights",
        # vLLM calls AWQ so where it takes kernels of CUDA for it.
        ("model_config.quantization", (None, "compressed-tensors", "awq", "auto_gptq"), ("auto_awq",)),
        own=(
            ("compressed-tensors", "weight_formats"),
            ("awq", "weight_formats"),
            ("auto_awq", "weight_formats"),
            ("auto_gptq", "weight_formats"),
        ),
    ),
    *_restricted("quantized_weights", ("model_config.quantization_config", _UNSET)),
    *_restricted("priority", ("scheduler_config.policy", ("fcfs",))),
    *_restricted("prompt_embeds", ("model_config.enable_prompt_embeds", *_OFF)),
    *_restricted("logits_processors", ("model_config.logits_processors", _UNSET)),
    *_restricted(
        "other_option",
        ("model.is_diffusion", *_OFF),
        ("model.requires_raw_input_tokens", *_OFF),
        ("model_config.is_submodel_config", *_OFF),
        ("model_config.model_class_overrides", _UNSET),
        ("model_config.model_impl", ("auto",), ("vllm",)),
        ("model_config.return_sampling_mask", *_OFF),
        ("model_config.enable_trace_replay", *_OFF),
        ("parallel_config.enable_batch_sharded_sampling", *_OFF),
        ("parallel_config.enable_shm_tensor_arena", *_OFF),
        ("parallel_config.enable_dbo", *_OFF),
        ("parallel_config.ubatch_size", (0,)),
        ("parallel_config.enable_fault_tolerance", *_OFF),
        ("scheduler_config.prefill_schedule_interval", _ONE),
        ("engram_config", _UNSET),
        ("watermark_config", _UNSET),
        ("diffusion_config", _UNSET),
        ("additional_config", _UNSET),
        ("attention_config.hisparse_config", _UNSET),
        ("kv_cache_config.hisparse_host_num_blocks", _UNSET),
        ("kv_cache_config.hisparse_host_block_stride", _UNSET),
        ("kv_cache_config.hisparse_shared_host_pool", *_OFF),
        ("kv_cache_tensor.host_resident", *_OFF),
        ("kv_cache_group.host_resident", *_OFF),
        ("kv_cache_group.role", ("DEFAULT",)),
    ),
)  # fmt: skip

KV_KINDS: dict[str, str | None] = {
    "FullAttentionSpec": None,
    "MLAAttentionSpec": None,
    "HiddenStateCacheSpec": "kv_kind",
    "RSWASpec": "kv_kind",
    "ChunkedLocalAttentionSpec": "kv_kind",
    "SlidingWindowSpec": None,
    "SlidingWindowMLASpec": "kv_kind",
    "CircularBufferSpec": "kv_kind",
    "KpoolTailSpec": "kv_kind",
    "SinkFullAttentionSpec": "kv_kind",
    "UniformTypeKVCacheSpecs": "kv_kind",
    "HiSparseHotSpec": "other_option",
    "HiSparseResidentSpec": "other_option",
    "MambaSpec": "hybrid",
    "EncoderOnlyAttentionSpec": "pooling",
    "CrossAttentionSpec": "encoder_decoder",
}
"""Class of a KV cache group's spec -> the row that decides; None: tried.  One that is not here is unlisted."""

_HARMLESS = {(section, name) for section, names in HARMLESS.items() for name in names.split()}
_RESTRICTED = {field.path: field for field in RESTRICTED}


def is_section(path: str) -> bool:
    """Is this a configuration whose fields are listed one by one?"""
    return path in HARMLESS


def is_restricted(path: str) -> bool:
    """Does a value of this field decide?  Of a section: that there is one."""
    return path in _RESTRICTED


def row_of_field(path: str, value: Value, also_allowed: tuple[Value, ...] = ()) -> str | None:
    """The row that decides where ``path`` has ``value``; None: it changes nothing, ``unlisted``: nobody knows the field."""
    field = _RESTRICTED.get(path)
    if field is not None:
        for one, row in field.own:
            if _same(value, one):
                return row
        allowed = (*field.tried, *field.read, *also_allowed)
        return None if any(_same(value, one) for one in allowed) else field.row
    section, _, name = path.rpartition(".")
    return None if (section, name) in _HARMLESS else "unlisted"


def _same(value: Value, allowed: Value) -> bool:
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _shown(value: Value, field: Field) -> str:
    row = next((row for one, row in field.own if _same(value, one)), "")
    return f"`{value}` ({row})" if row else f"`{value}`"


def markdown() -> str:
    """The allowlist as ``docs/compatibility.md`` shows it."""
    lines = ["| field | tried | read, not tried | with another value |", "|---|---|---|---|"]
    for field in RESTRICTED:
        tried, read = (
            ", ".join(_shown(value, field) for value in values) for values in (field.tried, field.read)
        )
        lines.append(f"| `{field.path}` | {tried or 'of vLLM itself'} | {read} | {field.row} |")
    lines += [
        "",
        "| section | fields that may have any value (read; the engines of the tests have a few) |",
        "|---|---|",
    ]
    for section, names in HARMLESS.items():
        shown = ", ".join(
            f"`{name}`" for name in names.split() if not is_section(f"{section}.{name}".lstrip("."))
        )
        if shown:
            lines.append(f"| `{section or 'VllmConfig'}` | {shown} |")
    lines += ["", "| kind of KV cache | |", "|---|---|"]
    lines += [f"| `{kind}` | {row or 'tried'} |" for kind, row in KV_KINDS.items()]
    return "\n".join(lines) + "\n"
