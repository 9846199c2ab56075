"""Decides every "auto" that can be decided without touching the device.

Two steps, because the worker alone can measure memory: `worker_config` and `planned_scheduler`
before it starts, `scheduler_config` from what it reports. All are pure and refuse what cannot be
honoured.
Not for: reading options (`options.py`), sizing the cache (`worker/`).
Next file: `launch.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.config import Backend, ParallelConfig, Policy, SchedulerConfig, WorkerConfig
from octavo.errors import ConfigError
from octavo.options import EngineArgs, cache_dir, visible_gpus
from octavo.probe import built_for_cuda, gpu_count, has_gpu, torch_folder
from octavo.types import WorkerInfo

FIT_TO_MEMORY = -1
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")  # formats of a KV cache


@dataclass(frozen=True, slots=True)
class Defaults:
    """Sizes of a step that suit a kind of device."""

    batched_tokens: int
    sequences: int
    # Where products of so many tokens run at the device's full rate, a step with more prompts
    # serves none of them faster and the first of them later.
    enough_prompt: int = 0


ON_CPU = Defaults(batched_tokens=2048, sequences=128)
ON_GPU = Defaults(batched_tokens=8192, sequences=512, enough_prompt=512)
ON_GPU_OFFLINE = Defaults(batched_tokens=16384, sequences=512)


def worker_config(
    args: EngineArgs,
    model: str | None = None,
    *,
    model_max_len: int | None = None,
    offline: bool = False,
) -> WorkerConfig:
    """Settings of the worker. `model` is the path that `args.model` stands for.

    `model_max_len` is the longest context the checkpoint allows, if it is known by now. `offline`
    is for work where no client waits for a first token.
    Raises ConfigError.
    """
    args.check()
    device = device_name(args)
    defaults = _defaults(device, offline=offline)
    longest = _max_model_len(args, model_max_len)
    tokens = _batched_tokens(args, longest if (longest or 0) > 0 else model_max_len, defaults)
    return WorkerConfig(
        model=model or args.model,
        device=device,
        load_format=args.load_format,
        dtype=args.dtype,
        quantization=args.quantization,
        kv_cache_dtype=_kv_cache_dtype(args),
        block_size=args.block_size,
        max_model_len=longest,
        max_num_seqs=_sequences(args, tokens, defaults),
        max_num_batched_tokens=tokens,
        num_blocks=args.num_gpu_blocks_override,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        memory_fraction=args.gpu_memory_utilization,
        attention_backend=args.attention_backend,
        kernels=args.kernels,
        enforce_eager=args.enforce_eager,
        threads=args.threads,
        cache_dir=str(cache_dir(args)),
        seed=args.seed,
        hf_overrides=tuple(sorted(args.hf_overrides.items())),
        parallel=parallel_config(args, device),
    )


def parallel_config(args: EngineArgs, device: str) -> ParallelConfig:
    """How many workers there are and who starts them. Raises ConfigError."""
    size = args.tensor_parallel_size * args.pipeline_parallel_size
    backend = args.distributed_executor_backend
    if backend == "uni" and size > 1:
        raise ConfigError(
            f"{args.label('distributed_executor_backend')}: it is one worker in the engine's "
            f"process, and {size} are asked for; use mp or ray, or leave it out.",
            "distributed_executor_backend",
        )
    if size > 1 and device.startswith("cuda:"):
        raise ConfigError(
            f"{args.label('device')}: {size} workers need a GPU each, and this names one; use "
            "cuda, and CUDA_VISIBLE_DEVICES to choose among them.",
            "device",
        )
    return ParallelConfig(
        tensor=args.tensor_parallel_size,
        pipeline=args.pipeline_parallel_size,
        backend=_backend(args, device, size),
        ray_address=args.ray_address,
        replicas=args.data_parallel_size,
    )


def is_in_core(args: EngineArgs) -> bool:
    """True if the one worker will run in the engine core's process."""
    size = args.tensor_parallel_size * args.pipeline_parallel_size
    return size == 1 and args.distributed_executor_backend in (None, "uni")


def _backend(args: EngineArgs, device: str, size: int) -> Backend:
    known: dict[str | None, Backend] = {"uni": "uni", "mp": "mp", "ray": "ray"}
    chosen = known.get(args.distributed_executor_backend)
    if chosen is not None:
        return chosen
    if size == 1:
        return "uni"
    here = size if device == "cpu" else gpu_count(Path("/"), visible_gpus())
    return "ray" if args.ray_address is not None or size > here else "mp"


def device_name(args: EngineArgs) -> str:
    """The device that `args.device` stands for, as torch names it but for a missing number."""
    if args.device != "auto":
        return args.device
    usable = has_gpu(Path("/"), visible_gpus()) and built_for_cuda(torch_folder())
    return "cuda" if usable else "cpu"


def planned_scheduler(
    args: EngineArgs, worker: WorkerConfig, *, offline: bool = False
) -> SchedulerConfig:
    """Settings of the engine room; the sizes that the worker will find are zero."""
    policies: dict[str, Policy] = {"priority": "priority", "fair": "fair"}
    return SchedulerConfig(
        num_blocks=0,
        block_size=0,
        max_model_len=0,
        max_num_seqs=worker.max_num_seqs,
        max_num_batched_tokens=worker.max_num_batched_tokens,
        prefix_caching=args.enable_prefix_caching,
        chunked_prefill=args.enable_chunked_prefill,
        policy=policies.get(args.scheduling_policy, "fcfs"),
        enough_prompt=0 if offline else _defaults(worker.device).enough_prompt,
        trace=args.timeline_requests > 0,
    )


def notes(args: EngineArgs, info: WorkerInfo) -> list[str]:
    """One line for each choice that was made for the person, with its reason."""
    lines = list(info.notes)
    if args.max_num_batched_tokens is None:
        tokens = _batched_tokens(args, info.max_model_len, _defaults(info.device))
        lines.append(f"max_num_batched_tokens={tokens}: default")
    if args.max_model_len in ("auto", FIT_TO_MEMORY):
        lines.append(f"max_model_len={info.max_model_len}: fitted to the KV cache")
    return lines


def _defaults(device: str, *, offline: bool = False) -> Defaults:
    if device == "cpu":
        return ON_CPU
    return ON_GPU_OFFLINE if offline else ON_GPU


def _max_model_len(args: EngineArgs, model_max_len: int | None) -> int | None:
    wanted = args.max_model_len
    if wanted is None:
        return None
    if isinstance(wanted, str) or wanted == FIT_TO_MEMORY:
        return FIT_TO_MEMORY
    if wanted < 1:
        raise ConfigError(f"{args.label('max_model_len')}: use a positive number or auto.")
    if model_max_len is not None and wanted > model_max_len:
        raise ConfigError(
            f"{args.label('max_model_len')}: the model's own limit is {model_max_len} tokens; "
            "lower it, or leave it out to take the model's.",
            "max_model_len",
        )
    return wanted


def _batched_tokens(args: EngineArgs, longest: int | None, defaults: Defaults) -> int:
    chosen = args.max_num_batched_tokens
    if chosen is not None and args.max_num_seqs is not None and chosen < args.max_num_seqs:
        raise ConfigError(
            f"{args.label('max_num_batched_tokens')}: each of {args.max_num_seqs} sequences takes "
            f"a token of every step; use at least {args.max_num_seqs}, or lower --max-num-seqs.",
            "max_num_batched_tokens",
        )
    if args.enable_chunked_prefill:
        return chosen or defaults.batched_tokens
    if longest is None or longest < 1:
        raise ConfigError(
            "enable_chunked_prefill=False: a step must then hold a whole prompt; "
            "set --max-num-batched-tokens or --max-model-len as well.",
            "enable_chunked_prefill",
        )
    if chosen is not None and chosen < longest:
        raise ConfigError(
            f"{args.label('max_num_batched_tokens')}: without chunked prefill a step must hold a "
            f"whole prompt of up to {longest} tokens; raise it, lower --max-model-len, or leave "
            "chunked prefill on.",
            "max_num_batched_tokens",
        )
    return chosen or max(defaults.batched_tokens, longest)


def _sequences(args: EngineArgs, tokens: int, defaults: Defaults) -> int:
    """A running sequence takes at least one token of a step's budget."""
    return args.max_num_seqs or min(defaults.sequences, tokens)


def _kv_cache_dtype(args: EngineArgs) -> str:
    known = args.kv_cache_dtype
    if known in FP8:
        return known
    if known != "auto" and args.dtype not in ("auto", known):
        raise ConfigError(
            f"{args.label('kv_cache_dtype')}: the model runs in {args.dtype}, and keys and values "
            "are kept in the model's format; use auto.",
            "kv_cache_dtype",
        )
    return known
