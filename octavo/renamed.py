"""Names that people still type, and what to use instead.

Tables only: flags and fields of earlier or other serving engines, and environment variables that
nothing reads any more. They make a refusal useful; nothing here is ever accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_ONE_ENGINE = "there is one engine, without that choice; leave it out."
_BATCHED = "each step has one token budget; use --max-num-batched-tokens."

# Field names (flags with "_" for "-").
REMOVED: Final[Mapping[str, str]] = {
    "swap_space": "pages are recomputed, never swapped; leave it out.",
    "disable_log_requests": "requests are logged only with --enable-log-requests; leave it out.",
    "disable_frontend_multiprocessing": _ONE_ENGINE,
    "enable_reasoning": "use --reasoning-parser.",
    "task": "the engine generates text only; leave it out.",
    "use_v2_block_manager": _ONE_ENGINE,
    "num_scheduler_steps": _ONE_ENGINE,
    "multi_step_stream_outputs": _ONE_ENGINE,
    "preemption_mode": "a preempted request is always recomputed; leave it out.",
    "guided_decoding_backend": "there is no backend to choose; leave it out.",
    "rope_scaling": """use --hf-overrides '{"rope_scaling": {...}}'.""",
    "rope_theta": """use --hf-overrides '{"rope_theta": ...}'.""",
    "max_seq_len_to_capture": "no graphs are captured on the CPU; leave it out.",
    "max_context_len_to_capture": "no graphs are captured on the CPU; leave it out.",
    "worker_use_ray": "use --distributed-executor-backend.",
    "engine_use_ray": "use --distributed-executor-backend.",
    "speculative_model": "use --speculative-config.",
    "num_speculative_tokens": "use --speculative-config.",
    "enable_prompt_adapter": "prompt adapters do not exist any more; leave it out.",
    "max_num_partial_prefills": _BATCHED,
    "max_long_partial_prefills": _BATCHED,
    "long_prefill_token_threshold": _BATCHED,
    "prefix_caching_hash_algo": "prefixes are always hashed with BLAKE2b (128 bit); leave it out.",
    "cpu_kvcache_space": "use --kv-cache-memory-bytes (VLLM_CPU_KVCACHE_SPACE works too, in GiB).",
    "max_paddings": _ONE_ENGINE,
    "use_beam_search": "beam search is not offered; use n with a temperature.",
    "best_of": "best_of does not exist any more; use n of a request.",
    "quantization_param_path": "scales are read from the checkpoint; leave it out.",
    "fail_on_environ_validation": "dead variables always stop the start; leave it out.",
    "master_addr": "more than one machine is not supported in this build.",
    "master_port": "more than one machine is not supported in this build.",
}

DEAD_VARIABLES: Final[Mapping[str, str]] = {
    "VLLM_ATTENTION_BACKEND": "unset it and use --attention-backend.",
    "VLLM_USE_V1": "unset it, there is one engine.",
}
