"""What other serving engines have and this one has not: flags and methods, each with a remedy.

Tables, and the errors made of them; nothing here is ever accepted. A flag that is asked for is
refused with its sentence, a method is missing with its sentence, and `docs/compatibility.md`
lists both. Not for: flags whose one true value is accepted (`absent` in `options.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from octavo.errors import InvalidRequest

# Sentence, and the field names of flags that it answers.
_FLAGS: Final[tuple[tuple[str, str], ...]] = (
    (
        "one server is one engine on one machine in this build; leave it out.",
        "all2all_backend cp_kv_cache_interleave_size cpu_distributed_timeout_seconds "
        "data_parallel_address data_parallel_backend data_parallel_external_lb "
        "data_parallel_hybrid_lb data_parallel_multi_port_external_lb data_parallel_rank "
        "data_parallel_rpc_port data_parallel_size_local data_parallel_start_rank "
        "data_parallel_supervisor_port dbo_decode_token_threshold dbo_prefill_token_threshold "
        "dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate "
        "decode_context_parallel_size device_ids disable_custom_all_reduce "
        "disable_nccl_for_dp_synchronization distributed_timeout_seconds "
        "dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s "
        "dp_supervisor_probe_timeout_s dp_sync_interval elastic_ep_max_dp_size "
        "enable_batch_sharded_sampling enable_dbo enable_elastic_ep enable_ep_weight_filter "
        "enable_eplb enable_fault_tolerance enable_hc_sp enable_nccl_comm_suspend "
        "enable_scale_out eplb_config expert_placement_strategy fault_tolerance_config "
        "prefill_context_parallel_size ray_workers_use_nsight ubatch_size",
    ),
    (
        "prompts are text only; leave it out.",
        "allowed_local_media_path allowed_media_domains disable_chunked_mm_input diffusion_config "
        "ec_manager_config ec_transfer_config enable_mm_embeds enable_prompt_embeds "
        "interleave_mm_strings language_model_only media_io_kwargs mm_device_do_normalize "
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only "
        "mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb "
        "mm_processor_cache_type mm_processor_device mm_processor_kwargs "
        "mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling trust_request_mm_kwargs "
        "video_pruning_method video_pruning_rate io_processor_plugin",
    ),
    (
        "LoRA adapters are not built yet; leave it out.",
        "default_mm_loras enable_mixed_moe_lora_format enable_moe_shared_loras "
        "enable_tower_connector_lora fully_sharded_loras lora_dtype lora_target_modules "
        "max_cpu_loras max_lora_cls_labels max_lora_rank max_loras specialize_active_lora",
    ),
    (
        "there is no model of that kind here; leave it out.",
        "engram_config gdn_prefill_backend kda_decode_backend kda_prefill_backend "
        "enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint "
        "mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode "
        "mamba_cache_philox_rounds mamba_ssm_cache_dtype mamba_ssu_algorithm moe_backend "
        "enable_return_routed_experts replayssm_buffer_len use_replayssm "
        "enable_flash_late_interaction kv_sharing_fast_prefill swa_bounded_replay "
        "disable_hybrid_kv_cache_manager disable_sliding_window disable_cascade_attn",
    ),
    (
        "kernels are chosen by --attention-backend and --kernels; leave it out.",
        "attention_config enable_flashinfer_autotune kernel_config linear_backend ir_op_priority "
        "sparse_indexer_topk_backend use_fp64_gumbel jit_monitor_mode jit_monitor_verbose "
        "enable_layerwise_nvtx_tracing cudagraph_capture_sizes max_cudagraph_capture_size "
        "model_impl allow_deprecated_quantization quantization_config",
    ),
    (
        "weights are read one way only, whatever their number; leave it out.",
        "code_revision config_format hf_config_path ignore_patterns max_parallel_loading_workers "
        "model_loader_extra_config pt_load_map_location safetensors_load_strategy "
        "safetensors_prefetch_block_size safetensors_prefetch_num_threads use_tqdm_on_load "
        "weight_transfer_config",
    ),
    ("set the variable HF_TOKEN; a secret on a command line can be seen by others.", "hf_token"),
    (
        "code that is named by an option is not run; leave it out.",
        "middleware model_class_overrides scheduler_cls worker_cls worker_extension_cls "
        "reasoning_parser_plugin tool_parser_plugin additional_config",
    ),
    (
        "weights and KV cache stay where they are; leave it out.",
        "cpu_offload_params enable_cumem_allocator kv_offloading_backend offload_backend "
        "offload_group_size offload_num_in_group offload_params offload_prefetch_step "
        "sleep_mode_offload_cudagraph sleep_preserve_parameter_names enable_shm_tensor_arena "
        "kv_events_config kv_cache_dtype_skip_layers prefix_cache_retention_interval "
        "prefix_match_unit",
    ),
    (
        "use --gpu-memory-utilization or --kv-cache-memory-bytes.",
        "device_memory_utilization",
    ),
    (
        "each step has one token budget; use --max-num-batched-tokens and --max-num-seqs.",
        "max_num_active_seqs max_num_scheduled_tokens prefill_schedule_interval "
        "scheduler_reserve_full_isl long_prefill_token_threshold_adaptive",
    ),
    (
        "speculation has one option; use --speculative-config.",
        "spec_method spec_model spec_tokens per_request_spec_decode_metrics",
    ),
    (
        "all metrics are on the route /metrics, with fixed buckets; leave it out.",
        "aggregate_engine_logging collect_detailed_traces cudagraph_metrics "
        "custom_histogram_buckets enable_logging_iteration_details enable_mfu_metrics "
        "kv_cache_metrics kv_cache_metrics_sample profiler_config",
    ),
    ("use --metric-aliases legacy.", "show_hidden_metrics_for_version"),
    (
        "texts of requests are never logged; leave it out.",
        "enable_log_deltas enable_log_outputs max_log_len",
    ),
    ("use --log-level.", "log_config_file log_error_stack"),
    (
        "the fingerprint names the version and cannot be changed; leave it out.",
        "fingerprint_mode fingerprint_value",
    ),
    (
        "HTTP limits are fixed, and request heads are bounded; leave it out.",
        "h11_max_header_count h11_max_incomplete_event_size",
    ),
    (
        "there is no gRPC here; use HTTP.",
        "grpc grpc_port",
    ),
    (
        "put a proxy in front that checks client certificates; --ssl-keyfile and --ssl-certfile "
        "serve plain HTTPS.",
        "ssl_ca_certs ssl_cert_reqs ssl_ciphers enable_ssl_refresh",
    ),
    (
        "/docs needs nothing from outside and is closed by --api-key; leave it out.",
        "disable_fastapi_docs enable_offline_docs",
    ),
    ("set return_tokens_as_token_ids in the request.", "return_tokens_as_token_ids"),
    (
        "tools are given to the template as the request says; leave it out.",
        "exclude_tools_when_tool_choice_none tool_strict_level",
    ),
    ("tools are run by the client, never here; leave it out.", "tool_server"),
    (
        "this protocol is not served; leave it out.",
        "anthropic_disabled_thinking_effort cohere_format cohere_is_reasoning_model",
    ),
    ("one pool of threads reads and renders prompts; leave it out.", "renderer_num_workers"),
    ("the tokens are always turned into text; leave it out.", "tokens_only"),
    (
        "it is not built; leave it out.",
        "aux_output_config enable_trace_replay pooler_config reasoning_config "
        "return_sampling_mask watermark watermark_config",
    ),
    (
        "start under `numactl` or `taskset` instead.",
        "numa_bind numa_bind_cpus numa_bind_nodes",
    ),
)
FLAGS: Final[Mapping[str, str]] = {
    name: sentence for sentence, names in _FLAGS for name in names.split()
}

_NO_SLEEP = "an engine cannot sleep yet; stop the server and start it anew"
_NO_PAUSE = "generation cannot be paused; hold requests back in front of the server"
_NO_ADAPTERS = "LoRA adapters are not built yet"
_NO_POOLING = "this server does not classify; use /v1/embeddings, /v1/score or /v1/rerank"
_NO_AUDIO = "prompts are text only"
_NO_TRAINER = "weights are not changed while they are served; start the server anew"
ROUTES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("/sleep", "/wake_up", "/is_sleeping"), _NO_SLEEP),
    **dict.fromkeys(("/pause", "/resume", "/is_paused"), _NO_PAUSE),
    "/abort_requests": "close the connection of a request to end it",
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), _NO_ADAPTERS),
    **dict.fromkeys(("/pooling", "/classify"), _NO_POOLING),
    **dict.fromkeys(
        ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime"), _NO_AUDIO
    ),
    **dict.fromkeys(("/reset_mm_cache", "/reset_encoder_cache"), _NO_AUDIO),
    **dict.fromkeys(("/start_profile", "/stop_profile"), "use a profiler such as py-spy or nsys"),
    "/tokenizer_info": "the files of the model hold it; /tokenize and /detokenize are served",
    "/collective_rpc": "code of callers is not run in the worker",
    **dict.fromkeys(("/update_weights", "/init_weight_transfer_engine"), _NO_TRAINER),
    "/generate": "use /v1/completions, or /v2/models/{name}/generate",
    "/v1/messages": "use /v1/chat/completions",
    "/v1/messages/count_tokens": "use /tokenize with messages",
    "/v2/embed": "use /v1/embeddings",
}

_POOLING = "the model only generates here; leave it to an engine made for that"
_SLEEP = "an engine cannot sleep yet; use shutdown and make it anew"
_PROFILE = "use an external profiler, such as py-spy or nsys"
_REMOTE = "code of callers is not run in the worker"
_ADAPTERS = "LoRA adapters are not built yet"
_PAUSE = "generation cannot be paused; hold requests back in the caller"
_COMMON: Final[Mapping[str, str]] = {
    "encode": _POOLING,
    "sleep": _SLEEP,
    "wake_up": _SLEEP,
    "start_profile": _PROFILE,
    "stop_profile": _PROFILE,
    "collective_rpc": _REMOTE,
    "add_lora": _ADAPTERS,
    "remove_lora": _ADAPTERS,
    "list_loras": _ADAPTERS,
    "pin_lora": _ADAPTERS,
}
LLM_ABSENT: Final[Mapping[str, str]] = {
    **_COMMON,
    "beam_search": "there is no beam search; use generate with n and a temperature",
    "classify": _POOLING,
    "score": _POOLING,
    "reward": _POOLING,
    "apply_model": _REMOTE,
}
LLM_ENGINE_ABSENT: Final[Mapping[str, str]] = {
    **_COMMON,
    "add_logger": "use get_metrics",
    "do_log_stats": "use get_metrics",
}
ASYNC_ENGINE_ABSENT: Final[Mapping[str, str]] = {
    **_COMMON,
    "is_sleeping": _SLEEP,
    "pause_generation": _PAUSE,
    "resume_generation": _PAUSE,
    "is_paused": _PAUSE,
    "add_request": "use generate, which does both",
}


def absent_method(owner: str, name: str, table: Mapping[str, str]) -> AttributeError:
    """The error for an attribute that does not exist, with the remedy if others have it."""
    if name in table:
        return AttributeError(f"{owner}.{name} is not offered: {table[name]}.")
    return AttributeError(f"{owner} has no attribute {name!r}.")


def refuse_lora(lora_request: object) -> None:
    """Raises InvalidRequest if an adapter is asked for."""
    if lora_request is not None:
        raise InvalidRequest("lora_request: LoRA adapters are not built in.", "lora_request")


def refuse_kwargs(**given: dict[str, Any] | None) -> None:
    """Raises InvalidRequest for keywords of processors that there are none of."""
    for name, value in given.items():
        if value:
            remedy = "encode the prompt yourself and send its token ids"
            if name == "mm_processor_kwargs":
                remedy = "prompts are text only; leave it out"
            raise InvalidRequest(f"{name} is not supported: {remedy}.", name)
