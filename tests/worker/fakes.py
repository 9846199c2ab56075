"""A small model with real paged memory, and the same model computed naively, for tests.

Its "keys" are the token and position of each cell, so a wrong block, slot map or length changes the
answer. All arithmetic is done row by row: results cannot depend on the batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.device.cpu import CpuDevice
from octavo.forward import CacheLayout, ForwardBatch, KVCache
from octavo.kernels.ops import SampleRows
from octavo.worker.buffers import HostInputs
from octavo.worker.cache import allocate_cache
from octavo.worker.choose import HostChooser
from octavo.worker.graphs import Eager
from octavo.worker.runner import Runner
from octavo.worker.slots import HostSlots

VOCAB = 29
HIDDEN = 6


class FakeModel:
    """Logits are a function of all tokens of the context and their positions."""

    def __init__(self, seed: int, vocab: int = VOCAB) -> None:
        random = np.random.default_rng(seed)
        self.embedding = random.normal(size=(vocab, HIDDEN))
        self.head = random.normal(size=(HIDDEN, vocab))
        self.scratch = -1  # the block of idle rows, whose cells hold anything
        self.poison: set[int] = set()  # tokens whose presence in the context gives NaN
        self.poison_head: set[int] = set()  # tokens that give NaN logits as the last one

    def context_state(self, tokens: list[int]) -> np.ndarray:
        state = np.zeros(HIDDEN)
        for position, token in enumerate(tokens):
            state = np.tanh(0.7 * state + self.embedding[token] + 0.01 * (position % 7))
            if token in self.poison:
                state = state * np.nan
        if tokens[-1] in self.poison_head:
            state = np.append(state[:-1], np.nan)
        return state

    def logits_of(self, tokens: list[int]) -> np.ndarray:
        return (self.context_state(tokens).astype(np.float32) @ self.head).astype(np.float32)

    def hidden(self, input_ids: Tensor, batch: ForwardBatch, rows: Tensor | None = None) -> Tensor:
        keys, values = batch.kv.keys[0], batch.kv.values[0]
        size = batch.kv.block_size
        flat = batch.slot_map.long()
        keys.view(-1)[flat] = input_ids.float() + 1
        values.view(-1)[flat] = batch.positions.float()
        states = []
        for row in range(batch.num_rows):
            low, high = batch.q_indptr[row].item(), batch.q_indptr[row + 1].item()
            length = int(batch.kv_lens[row])
            assert high - low <= batch.max_q
            assert length <= batch.max_kv
            assert (high - low == 1) or row >= batch.num_decodes
            cells = [(int(batch.block_table[row, p // size]), p % size) for p in range(length)]
            found = [int(values[block, at]) for block, at in cells]
            idle = length > 0 and cells[0][0] == self.scratch
            assert idle or found == list(range(length)), "a cell holds another position"
            tokens = [int(keys[block, at]) - 1 for block, at in cells]
            for end in range(length - (high - low) + 1, length + 1):
                states.append(self.context_state(tokens[:end]))
        found = torch.from_numpy(np.array(states)).float()
        return found if rows is None else found[rows.long()]

    def logits(self, hidden: Tensor) -> Tensor:
        rows = [(row.numpy() @ self.head).astype(np.float32) for row in hidden]
        return torch.from_numpy(np.array(rows).reshape(len(rows), self.head.shape[1]))

    def forward(self, input_ids: Tensor, batch: ForwardBatch) -> Tensor:
        return self.logits(self.hidden(input_ids, batch, batch.sample_rows))


class FakeAttention:
    """Only the part that the runner calls."""

    name = "fake"

    def plan(self, batch: ForwardBatch) -> object:
        return ("planned", batch.num_rows)


def fake_sample(logits: Tensor, rows: SampleRows) -> Tensor:
    """Greedy, or Gumbel noise that is a function of seed and position; filters are left out."""
    assert torch.isfinite(logits.amax(dim=1)).all()
    chosen = []
    for index, row in enumerate(logits.numpy()):
        temperature = float(rows.temperature[index])
        noise = np.zeros_like(row)
        if temperature > 0:
            seed = [int(rows.seed[index]) & (2**64 - 1), int(rows.position[index])]
            noise = np.random.default_rng(seed).gumbel(size=row.shape) * temperature
        chosen.append(int(np.argmax(row + noise)))
    return torch.tensor(chosen, dtype=torch.int32)


def make_cache(num_blocks: int, block_size: int) -> KVCache:
    layout = CacheLayout((num_blocks, block_size), (num_blocks, block_size), torch.float32)
    return allocate_cache(layout, num_layers=1, block_size=block_size, device=CpuDevice(1))


def make_runner(
    model: FakeModel, *, num_blocks: int, block_size: int, slots: int = 8, blocks_per: int = 32
) -> Runner:
    kv = make_cache(num_blocks, block_size)
    table = HostSlots(num_slots=slots, max_blocks=blocks_per, vocab_size=VOCAB)
    return Runner(
        model=model,
        forward=Eager(model, FakeAttention()),  # type: ignore[arg-type]
        slots=table,
        inputs=HostInputs(table, kv, max_tokens=256, max_rows=slots, max_blocks=blocks_per),
        chooser=HostChooser(fake_sample, table),
    )
