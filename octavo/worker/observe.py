"""Runs a plain model over texts and keeps what its linear layers were given.

For `octavo quantize`. Not for: serving. The model is computed by the plainest kernels, on the host.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo.attention.sdpa import SdpaAttention
from octavo.checkpoint.records import Checkpoint
from octavo.config import WorkerConfig
from octavo.device.cpu import CpuDevice
from octavo.forward import ForwardBatch, KVCache
from octavo.kernels import reference
from octavo.kernels.ops import Ops, PackedWeight
from octavo.layers.build import Build
from octavo.layers.linear import Linear
from octavo.models.decoder import Decoder
from octavo.models.load import attention_need, build_model, load_weights
from octavo.models.registry import read_spec
from octavo.parallel.mesh import Mesh
from octavo.quant.none import Unquantized
from octavo.worker.cache import allocate_cache

BLOCK = 16


class Recorder:
    """Keeps up to `most` rows of each weight's inputs."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows: dict[int, list[Tensor]] = {}
        self.largest: list[tuple[float, float]] = []  # key and value of each layer

    def table(self, dtype: torch.dtype) -> Ops:
        """The reference kernels, with a `linear` that keeps its inputs."""

        def linear(
            x: Tensor, weight: PackedWeight, bias: Tensor | None, out: torch.dtype | None
        ) -> Tensor:
            kept = self._rows.setdefault(weight.data.data_ptr(), [])
            room = self._most - sum(map(len, kept))
            if room > 0:
                kept.append(x[:: max(1, len(x) // room)][:room].float().clone())
            return reference.linear(x, weight, bias, out)

        return replace(reference.reference_ops(dtype), linear=linear)

    def see(self, kv: KVCache) -> None:
        """Takes the cache's largest keys and values into account."""
        found = [
            (float(k.abs().max()), float(v.abs().max()) if v.numel() else 0.0)
            for k, v in zip(kv.keys, kv.values, strict=True)
        ]
        before = self.largest or found
        self.largest = [
            (max(a, c), max(b, d)) for (a, b), (c, d) in zip(before, found, strict=True)
        ]

    def inputs(self, layer: Linear) -> Tensor:
        """f32[T, K] that the layer was given."""
        return torch.cat(self._rows[layer.packed.data.data_ptr()])


def observe(checkpoint: Checkpoint, texts: list[list[int]], most: int) -> tuple[Decoder, Recorder]:
    """The model in f32, after all texts, and what its layers were given."""
    dtype = torch.float32
    recorder = Recorder(most)
    ops = recorder.table(dtype)
    spec = read_spec(checkpoint.config)
    mesh = Mesh.single()
    need = attention_need(spec, mesh=mesh, device="cpu", block_size=BLOCK, dtype=dtype)
    attention = SdpaAttention()
    decoder = build_model(
        spec,
        Build(
            mesh=mesh,
            device="cpu",
            dtype=dtype,
            ops=ops,
            quant=Unquantized(ops, dtype),
            attention=attention,
            need=need,
        ),
    )
    load_weights(decoder, checkpoint)
    pages = -(-max(map(len, texts)) // BLOCK)
    kv = allocate_cache(
        attention.layout(need, pages),
        num_layers=spec.num_layers,
        block_size=BLOCK,
        device=CpuDevice(WorkerConfig("").threads),
    )
    for ids in texts:
        every = torch.arange(len(ids), dtype=torch.int32)
        count = torch.tensor([len(ids)], dtype=torch.int32)
        batch = ForwardBatch(
            num_rows=1,
            num_tokens=len(ids),
            num_decodes=0,
            positions=every,
            slot_map=every,
            q_indptr=torch.tensor([0, len(ids)], dtype=torch.int32),
            kv_lens=count,
            block_table=torch.arange(pages, dtype=torch.int32).unsqueeze(0),
            sample_rows=every[-1:],
            max_q=len(ids),
            max_kv=len(ids),
            kv=kv,
        )
        with torch.inference_mode():
            decoder.hidden(
                torch.tensor(ids, dtype=torch.int32), replace(batch, attn=attention.plan(batch))
            )
        recorder.see(kv)
    return decoder, recorder
