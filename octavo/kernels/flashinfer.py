"""FlashInfer's compiled modules: which there are, and whether they are built.

Not for: running them (`octavo/attention/flashinfer.py`). Next file: `gpu.py`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from octavo.errors import ConfigError

HEADS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class Module:
    """What one compiled module serves."""

    dtype: torch.dtype
    head_dim: int
    window: bool
    soft_cap: bool


def spec_of(module: Module) -> Any:
    """FlashInfer's own description: it has `name`, `is_compiled` and `build()`.

    Raises ConfigError if FlashInfer cannot be imported, or makes nothing for this machine.
    """
    kind = (module.dtype, module.dtype, module.dtype, torch.int32)
    try:
        attention = importlib.import_module("flashinfer.jit.attention")
        return attention.gen_batch_prefill_module(
            "fa3", *kind, module.head_dim, module.head_dim, 0, module.window, module.soft_cap, False
        )
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"flashinfer: {reason}", "attention_backend") from None
