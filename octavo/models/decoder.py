"""The decoder: embedding, blocks, norm, head. One class for all families of this shape.

A family is data (`ModelSpec` and a name map, see `registry.py`); what it switches on is built
here from the layers. Not for: sampling, paging, or batching, which come in as a ForwardBatch.
Next file: `layers/attention.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from octavo.forward import ForwardBatch
from octavo.layers.attention import Attention, chosen
from octavo.layers.build import Build
from octavo.layers.embedding import Head, VocabEmbedding
from octavo.layers.mlp import MLP
from octavo.layers.norm import RMSNorm
from octavo.layers.parameters import Layer
from octavo.layers.rope import Rope
from octavo.models.sparse import SparseBlock
from octavo.models.spec import ModelSpec
from octavo.parallel.collectives import Sender, receive
from octavo.parallel.mesh import Axis


class Block:
    """One decoder block: attention and MLP, each with its norm before it and a residual around."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(self, spec: ModelSpec, build: Build, rope: Rope, layer: int) -> None:
        self.attention_norm = hidden_norm(build, spec)
        self.attention = Attention(build, spec, rope, layer)
        self.mlp_norm = hidden_norm(build, spec)
        self.mlp = make_mlp(build, spec)

    def __call__(
        self,
        change: Tensor | None,
        residual: Tensor,
        batch: ForwardBatch,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Takes and gives (change, residual), both [T, H]: their sum is the hidden state.

        The sum is left to the next norm, which adds and normalizes in one pass. The first block
        has no change to add. With `rows` i32[S], tokens that alone are wanted: both [S, H].
        """
        if change is None:
            normed = self.attention_norm(residual)
        else:
            normed, residual = self.attention_norm.add(change, residual)
        change, residual = self.attention(normed, batch, rows), chosen(residual, rows)
        normed, residual = self.mlp_norm.add(change, residual)
        return self.mlp(normed), residual

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """Layers with parameters, in the order of use."""
        yield "attention_norm", self.attention_norm
        for name, layer in self.attention.named_layers():
            yield f"attention.{name}", layer
        yield "mlp_norm", self.mlp_norm
        for name, layer in self.mlp.named_layers():
            yield f"mlp.{name}", layer


class SandwichBlock(Block):
    """A block with norms before and after attention and MLP, inside the residual."""

    __slots__ = ("attention_after", "mlp_after")

    def __init__(self, spec: ModelSpec, build: Build, rope: Rope, layer: int) -> None:
        super().__init__(spec, build, rope, layer)
        self.attention_after = hidden_norm(build, spec)
        self.mlp_after = hidden_norm(build, spec)

    def __call__(
        self,
        change: Tensor | None,
        residual: Tensor,
        batch: ForwardBatch,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `Block`."""
        if change is None:
            normed = self.attention_norm(residual)
        else:
            normed, residual = self.attention_norm.add(change, residual)
        change = self.attention_after(self.attention(normed, batch, rows))
        normed, residual = self.mlp_norm.add(change, chosen(residual, rows))
        return self.mlp_after(self.mlp(normed)), residual

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """Layers with parameters."""
        yield from super().named_layers()
        yield "attention_after", self.attention_after
        yield "mlp_after", self.mlp_after


def hidden_norm(build: Build, spec: ModelSpec) -> RMSNorm:
    """A norm over the hidden size."""
    return RMSNorm(build, spec.hidden_size, spec.rms_eps, offset=spec.norm_offset)


def make_mlp(build: Build, spec: ModelSpec) -> MLP:
    """The MLP of a dense block."""
    return MLP(
        build,
        spec.hidden_size,
        spec.intermediate_size,
        bias=spec.mlp_bias,
        activation=spec.activation,
        joined=spec.fused_gate_up,
    )


def make_block(spec: ModelSpec, build: Build, rope: Rope, layer: int) -> Block | SparseBlock:
    """A block of the class that the model has at that layer."""
    if spec.moe is not None or spec.latent is not None:
        return SparseBlock(spec, build, rope, layer)
    return (SandwichBlock if spec.norms == "around" else Block)(spec, build, rope, layer)


class Decoder:
    """A decoder-only language model over paged keys and values.

    After construction its layers have no weights: fill them by `named_layers` (`models/load.py`
    does) and call `finish`. A stage of a pipeline holds its own blocks, the first one the embedding
    too, the last one norm and head; hidden states come from the stage before and go to the next.
    """

    __slots__ = (
        *("blocks", "build", "embedding", "head", "layers", "local_rope", "norm", "rope", "spec"),
        "_sender",
    )

    blocks: tuple[Block | SparseBlock, ...]
    embedding: VocabEmbedding | None
    norm: RMSNorm | None
    head: Head | None

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        stage = build.mesh.pp
        self.layers = stage.stretch(spec.num_layers)
        build = replace(build, first_layer=self.layers.start)
        self.build = build
        self.spec = spec
        self._sender = None if stage.last else Sender(stage)
        self.rope = Rope(build, spec.rope, spec.max_model_len)
        local = spec.local_rope
        self.local_rope = Rope(build, local, spec.max_model_len) if local else self.rope
        self.embedding = self.norm = self.head = None
        if stage.first or (stage.last and spec.tied):
            self.embedding = VocabEmbedding(
                build, spec.vocab_size, spec.hidden_size, scale=spec.embedding_scale
            )
        self.blocks = tuple(
            make_block(spec, build, self._rope_of(layer), layer) for layer in self.layers
        )
        if stage.last:
            self.norm = hidden_norm(build, spec)
            self.head = Head(
                build,
                spec.vocab_size,
                spec.hidden_size,
                tied=self.embedding if spec.tied else None,
                soft_cap=spec.logit_soft_cap,
            )

    def named_layers(self) -> Iterator[tuple[str, Layer]]:
        """Every layer that may have parameters, by dotted name; the embedding before the head."""
        if self.embedding is not None:
            yield "embedding", self.embedding
        for index, block in zip(self.layers, self.blocks, strict=False):
            for name, layer in block.named_layers():
                yield f"blocks.{index}.{name}", layer
        if self.norm is not None:
            yield "norm", self.norm
        if self.head is not None:
            yield "head", self.head

    def other_stages(self) -> Iterator[Decoder]:
        """The decoders of the other stages, without weights: for what they are called."""
        mesh = self.build.mesh
        for rank in range(mesh.pp.size):
            if rank != mesh.pp.rank:
                other = replace(mesh, pp=Axis(rank, mesh.pp.size))
                yield Decoder(self.spec, replace(self.build, mesh=other))

    def _rope_of(self, layer: int) -> Rope:
        layers = self.spec.window_layers
        return self.local_rope if layers and layers[layer] else self.rope

    def finish(self) -> None:
        """Makes every layer ready after its parameters are set."""
        for _, layer in self.named_layers():
            layer.finish()

    def hidden(self, input_ids: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Tensor:
        """Ids i32[T] -> final hidden states [T, H], normalized. Stores KV of all tokens.

        With `rows` i32[S], tokens of which alone they are wanted: [S, H]. The last block then gives
        nothing to other tokens after its keys and values, which nobody would read.
        A stage that is not the last sends its hidden states on, of all tokens, and returns them.
        """
        change: Tensor | None = None
        rows = None if self.norm is None else rows
        residual = self._first(input_ids)
        last = len(self.blocks) - 1
        for index, block in enumerate(self.blocks):
            change, residual = block(change, residual, batch, rows if index == last else None)
        if self.norm is None:
            return self._hand_on(residual if change is None else residual + change)
        if change is None:
            return self.norm(chosen(residual, rows))
        return self.norm.add(change, residual)[0]

    def _first(self, input_ids: Tensor) -> Tensor:
        """Hidden states [T, H] before the first block."""
        stage, build = self.build.mesh.pp, self.build
        if stage.first:
            assert self.embedding is not None
            return self.embedding(input_ids)
        shape = (len(input_ids), self.spec.hidden_size)
        return receive(torch.empty(shape, dtype=build.dtype, device=build.device), stage)

    def _hand_on(self, hidden: Tensor) -> Tensor:
        assert self._sender is not None, "the last stage has a norm"
        self._sender.send(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of `hidden` [S, H] -> f32[S, V]; of the last stage alone."""
        assert self.head is not None, "the last stage has the head"
        return self.head(hidden)

    def forward(self, input_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Ids i32[T] -> logits f32[S, V] of `batch.sample_rows`."""
        return self.logits(self.hidden(input_ids, batch, batch.sample_rows))
