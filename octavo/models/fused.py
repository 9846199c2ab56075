"""A decoder whose blocks run in one native call, in place of the loop in `decoder.py`.

`fuse` gathers the decoder's packed weights for `Ops.stack`; where the kernels cannot run the
model it says why, and the decoder runs as it is. Same results to the bit as the decoder over the
same kernels. Not for: other devices. Next file: `octavo/kernels/cpu/stack.py`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from octavo.forward import ForwardBatch
from octavo.kernels.ops import Ops
from octavo.kernels.stack import StackBlock, StackModel
from octavo.layers.attention import chosen
from octavo.models.decoder import Block, Decoder
from octavo.models.spec import ModelSpec


class Stack(Protocol):
    """What `Ops.stack` gives: a model that runs as one call."""

    def logits(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Ids i32[T] -> f32[S, V] of the sampled rows."""

    def hidden(self, ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Ids i32[T] -> [T, H] after the last norm."""


class FusedDecoder:
    """Called as the Decoder that it replaces, and as exact."""

    __slots__ = ("_decoder", "_stack")

    def __init__(self, decoder: Decoder, stack: Stack) -> None:
        self._decoder = decoder
        self._stack = stack

    @property
    def spec(self) -> ModelSpec:
        """The decoder's."""
        return self._decoder.spec

    def hidden(self, input_ids: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Tensor:
        """Ids i32[T] -> final hidden states [T, H], normalized. Stores KV of all tokens.

        With `rows` i32[S] those of such tokens alone.
        """
        return chosen(self._stack.hidden(input_ids, batch), rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of `hidden` [S, H] -> f32[S, V]."""
        return self._decoder.logits(hidden)

    def forward(self, input_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Ids i32[T] -> logits f32[S, V] of `batch.sample_rows`."""
        return self._stack.logits(input_ids, batch)


def fuse(decoder: Decoder, ops: Ops) -> FusedDecoder | str:
    """The fused decoder, or the reason why this one cannot be fused.

    `decoder` is finished, and was built with `ops`.
    """
    if ops.stack is None:
        return f"{ops.name} kernels have no fused stack"
    mesh = decoder.build.mesh
    if mesh.size > 1:
        return f"the layers are spread over {mesh.size} ranks"
    reason = unsupported(decoder.spec)
    if reason:
        return reason
    attention = decoder.blocks[0].attention._backend.name if decoder.blocks else ""
    if attention != "native":
        return f"the pages are laid out for {attention or 'no'} attention"
    stack = ops.stack(_model(decoder))
    return stack if isinstance(stack, str) else FusedDecoder(decoder, stack)


def unsupported(spec: ModelSpec) -> str:
    """Which switch of the model the stack does not have; empty if it has all."""
    if (spec.rope.width or spec.rope.dim) != spec.head_dim:
        return f"rotation of {spec.rope.dim} of {spec.head_dim} dimensions"
    if spec.moe is not None:
        return "routed experts"
    if spec.latent is not None:
        return "latent attention"
    if spec.norms != "before":
        return f"norms {spec.norms} attention and MLP"
    if spec.activation != "silu":
        return f"the activation {spec.activation}"
    if spec.norm_offset:
        return "norms with an offset"
    if spec.local_rope is not None:
        return "two rotary bases"
    if spec.embedding_scale != 1.0:
        return "scaled embeddings"
    if spec.logit_soft_cap:
        return "a soft cap on logits"
    if spec.num_layers == 0:
        return "no layers"
    return ""


def _model(decoder: Decoder) -> StackModel:
    spec, need = decoder.spec, decoder.blocks[0].attention.need
    assert decoder.embedding is not None
    assert decoder.norm is not None
    assert decoder.head is not None
    return StackModel(
        blocks=tuple(_block(block) for block in decoder.blocks if isinstance(block, Block)),
        embedding=decoder.embedding.packed,
        norm=decoder.norm.weight,
        head=decoder.head.packed,
        cos_sin=decoder.rope.cos_sin,
        num_heads=need.num_heads,
        num_kv_heads=need.num_kv_heads,
        head_dim=need.head_dim,
        block_size=need.block_size,
        eps=spec.rms_eps,
        scale=need.scale,
        soft_cap=need.soft_cap,
        cache_dtype=None if need.cache_dtype == need.dtype else need.cache_dtype,
    )


def _block(block: Block) -> StackBlock:
    attention, mlp = block.attention, block.mlp
    return StackBlock(
        norm=block.attention_norm.weight,
        qkv=attention.qkv.packed,
        qkv_bias=attention.qkv.bias,
        query_norm=attention.query_norm.weight if attention.query_norm else None,
        key_norm=attention.key_norm.weight if attention.key_norm else None,
        output=attention.output.packed,
        output_bias=attention.output.bias,
        mlp_norm=block.mlp_norm.weight,
        gate_up=mlp.gate_up.packed,
        gate_up_bias=mlp.gate_up.bias,
        down=mlp.down.packed,
        down_bias=mlp.down.bias,
        window=attention.need.window,
        key_scale=attention.need.key_scale,
        value_scale=attention.need.value_scale,
    )
