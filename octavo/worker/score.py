"""Scorer: a model that gives the logits of every token of a text, one text at a time.

For comparing number formats. Not for: serving, or texts of many requests (`worker.py`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo.attention.base import AttentionNeed
from octavo.config import WorkerConfig
from octavo.errors import ConfigError
from octavo.forward import ForwardBatch, KVCache
from octavo.models.decoder import Decoder
from octavo.worker.assemble import (
    Choices,
    build,
    choose,
    fill,
    finish,
    open_device,
    open_model,
    scale_cache,
    scheme_of,
)
from octavo.worker.cache import allocate_cache
from octavo.worker.runner import Model


class Scorer:
    """A loaded model with a cache for one text of up to `max_tokens` tokens."""

    def __init__(self, config: WorkerConfig, max_tokens: int) -> None:
        """Raises ConfigError and CheckpointError."""
        self._device = open_device(config)
        self._device.start()
        checkpoint, spec = open_model(config)
        self.choices: Choices = choose(config, spec, self._device, scheme_of(config, checkpoint))
        self.decoder: Decoder = build(config, self.choices, self._device.name, checkpoint)
        fill(self.decoder, checkpoint, config, self._device, _quiet)
        note = scale_cache(self.decoder, checkpoint, self.choices)
        self._model: Model = finish(self.decoder, self.choices.ops)[0]
        self.notes = (*self.choices.notes, *filter(None, (note,)))
        if self.choices.ops.name != "native":
            self._device.compute_in_torch()
        need = self.choices.need
        self._pages = -(-max_tokens // need.block_size)
        self._kv: KVCache = allocate_cache(
            self.choices.attention.layout(need, self._pages),
            num_layers=spec.num_layers,
            block_size=need.block_size,
            device=self._device,
        )

    def needs(self) -> tuple[AttentionNeed, ...]:
        """What each layer asks of attention."""
        return tuple(block.attention.need for block in self.decoder.blocks)

    def largest(self) -> list[tuple[float, float]]:
        """The largest key and value of each layer in the last text.

        Of a cache in the model's own format.
        """
        pairs = zip(self._kv.keys, self._kv.values, strict=True)
        return [
            (float(k.abs().max()), float(v.abs().max()) if v.numel() else 0.0) for k, v in pairs
        ]

    def logits(self, ids: list[int]) -> Tensor:
        """f32[n, V] on the host. Raises ConfigError if the text is too long."""
        count, size = len(ids), self._kv.block_size
        if count > self._pages * size:
            raise ConfigError(f"a text of {count} tokens, for a cache of {self._pages * size}")
        name = self._device.name

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=name)

        every = list(range(count))
        batch = ForwardBatch(
            num_rows=1,
            num_tokens=count,
            num_decodes=0,
            positions=ints(every),
            slot_map=ints(every),
            q_indptr=ints([0, count]),
            kv_lens=ints([count]),
            block_table=ints(list(range(self._pages))).unsqueeze(0),
            sample_rows=ints(every),
            max_q=count,
            max_kv=count,
            kv=self._kv,
        )
        batch = replace(batch, attn=self.choices.attention.plan(batch))
        with torch.inference_mode():
            return self._model.forward(ints(ids), batch).float().cpu()


def _quiet(_done: int, _total: int) -> None:
    """Nobody watches this load."""
