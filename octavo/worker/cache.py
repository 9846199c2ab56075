"""Takes the memory of the KV cache.

Not for: deciding its size (`memory.py`). Next file: `slots.py`.
"""

from __future__ import annotations

from octavo.device.base import Device
from octavo.forward import CacheLayout, KVCache


def allocate_cache(
    layout: CacheLayout, *, num_layers: int, block_size: int, device: Device
) -> KVCache:
    """Pages of all layers, zero: a NaN among old bytes would spread through masked attention."""
    return KVCache(
        keys=tuple(device.zeros(layout.key, layout.dtype) for _ in range(num_layers)),
        values=tuple(device.zeros(layout.value, layout.dtype) for _ in range(num_layers)),
        block_size=block_size,
    )
