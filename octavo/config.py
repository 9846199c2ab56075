"""Frozen records of settings: what each room is told, and nothing more.

`SchedulerConfig` and `WorkerConfig` are what the two halves of the engine get; they are made by
`resolve.py` from the options a person sets (`options.py`), after every "auto" has been decided.
Not for: reading variables of the environment, which `options.py` alone does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Policy: TypeAlias = Literal["fcfs", "priority", "fair"]
Backend: TypeAlias = Literal["uni", "mp", "ray"]  # how workers are started


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Settings of the engine room; all in tokens, blocks or sequences."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_caching: bool = True
    chunked_prefill: bool = True
    policy: Policy = "fcfs"
    depth: int = 1  # steps in flight
    lookahead: int = 0  # unknown tokens a sequence may run ahead
    enough_prompt: int = 0  # prompt tokens after which a step takes no further prompt; 0: no limit
    trace: bool = True  # outputs tell what befell their sequence


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of a model's tokens, and which of them are no text; see `grammar/vocabulary.py`."""

    data: bytes  # of all tokens, one after the other
    lengths: bytes  # i32, one a token
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Over how many workers a model is spread, and who starts them."""

    tensor: int = 1  # ranks that share each layer
    pipeline: int = 1  # stages of layers, one after the other
    backend: Backend = "uni"
    ray_address: str | None = None  # of a running cluster; None: one on this machine
    placement_seconds: float = 60.0  # in which the cluster must have room
    replicas: int = 1  # of the whole, on this machine too

    @property
    def size(self) -> int:
        """Workers in all."""
        return self.tensor * self.pipeline


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank stands, and how it meets the others; see `parallel/world.py`."""

    rank: int = 0
    tensor: int = 1
    pipeline: int = 1
    local_rank: int = 0  # among the ranks of its machine
    local_size: int = 1
    store: str = ""  # "file:PATH" or "tcp:HOST:PORT"
    host: str = "127.0.0.1"  # address of the interface that collectives use

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline

    @property
    def answers(self) -> bool:
        """True for the one rank that draws tokens: the last stage's first."""
        return self.rank == self.size - self.tensor


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of one worker. `None` means: the worker decides and says why in its notes."""

    model: str  # folder, GGUF file, or pulled model, already resolved to a path
    device: str = "cpu"  # cpu, cuda or cuda:N
    load_format: str = "auto"  # auto, safetensors, gguf, dummy
    dtype: str = "auto"  # auto, bfloat16, float32, float16
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    block_size: int | None = None  # None: the device's, 16 on the CPU and 64 on a GPU
    max_model_len: int | None = None  # None: the model's; -1: fit to the memory left
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    num_blocks: int | None = None  # --num-gpu-blocks-override
    kv_cache_memory_bytes: int | None = None
    memory_fraction: float = 0.92  # --gpu-memory-utilization
    attention_backend: str = "auto"
    kernels: str = "auto"  # auto, native, onednn, triton, reference
    enforce_eager: bool = False  # no graphs
    threads: int | None = None  # None: OMP_NUM_THREADS, else the physical cores
    cache_dir: str | None = None  # of built kernels; None: ~/.cache/octavo
    seed: int = 0  # of dummy weights
    hf_overrides: tuple[tuple[str, object], ...] = ()
    parallel: ParallelConfig = ParallelConfig()
    # For grammars; None: no request has one.
    vocabulary: Vocabulary | None = field(default=None, repr=False)
