"""SlotTable: what a worker knows of the sequences that it serves, one numbered row each.

The core hands out the numbers; the worker never sees a request. `SlotTable` is what the host must
know wherever the model runs; `HostSlots` adds the columns that a model on the CPU reads. A device
with its own memory keeps these columns there (`staged.py`). All columns are numpy arrays that torch
tensors may share, as a step's cost on the host counts. Not for: choosing slots or blocks, which
the core does. Next file: `buffers.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.grammar.matcher import Follower, Grammars
from octavo.kernels.ops import SampleRows
from octavo.sampling.logprobs import Want, prompt_want, sample_want
from octavo.sampling.processors import RowRules
from octavo.types import Admit, unpack

Ints = NDArray[np.int32]

# Bits of `SlotTable.special`: why a row leaves the fast path.
RULES = 1  # logits are changed before sampling
LOGPROBS = 2  # log-probs of sampled tokens are wanted
POISONED = 4  # an earlier position of the sequence could not be computed
GRAMMAR = 8  # the rules hold a grammar's follower


@dataclass(frozen=True, slots=True)
class PromptWant:
    """Prompt log-probs that a sequence asks for, and the prompt they are about."""

    want: Want
    prompt: list[int]


class SlotTable:
    """Rows 0..num_slots-1. Columns are public to the room."""

    def __init__(
        self,
        *,
        num_slots: int,
        vocab_size: int,
        grammars: Grammars | None = None,
        draws: bool = True,
    ) -> None:
        """Without `grammars` no sequence may have one, unless another rank `draws` the tokens."""
        self._draws = draws
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self.grammars = grammars
        self.computed: Ints = np.zeros(num_slots, np.int32)  # positions whose KV is written
        self.num_prompt: Ints = np.zeros(num_slots, np.int32)
        self.special = np.zeros(num_slots, np.uint8)
        self.rules: dict[int, RowRules] = {}  # of slots with RULES
        self.wants: dict[int, Want] = {}  # of slots with LOGPROBS
        self.prompt_wants: dict[int, PromptWant] = {}
        self.poolings: dict[int, str] = {}  # of slots whose sequences pool: last or mean

    def admit(self, admit: Admit) -> None:
        """A sequence takes a slot; whatever was there before is forgotten."""
        slot, params = admit.slot, admit.params
        self.computed[slot] = 0
        self.special[slot] = 0
        self.rules.pop(slot, None)
        self.wants.pop(slot, None)
        self.prompt_wants.pop(slot, None)
        self.poolings.pop(slot, None)
        if params.pooling:
            self.poolings[slot] = params.pooling
        self.num_prompt[slot] = admit.num_prompt
        tokens = list(unpack(admit.history))
        if RowRules.wanted(params):
            self.rules[slot] = RowRules(
                params,
                tokens,
                num_prompt=admit.num_prompt,
                vocab=self.vocab_size,
                follower=self._follower(admit, tokens),
            )
            self.special[slot] |= RULES if params.grammar is None else RULES | GRAMMAR
        if (want := sample_want(params)) is not None:
            self.wants[slot] = want
            self.special[slot] |= LOGPROBS
        if (want := prompt_want(params)) is not None:
            self.prompt_wants[slot] = PromptWant(want, tokens[: admit.num_prompt])

    def followers(self, slots: Ints) -> tuple[list[int], list[Follower]]:
        """Which of the slots have a grammar, by index, and their followers."""
        at = np.flatnonzero(self.special[slots] & GRAMMAR).tolist()
        found = (self.rules[int(slots[index])].follower for index in at)
        return at, [follower for follower in found if follower is not None]

    def _follower(self, admit: Admit, tokens: list[int]) -> Follower | None:
        grammar = admit.params.grammar
        if grammar is None or not self._draws:
            return None
        assert self.grammars is not None, "requests with a grammar need a vocabulary"
        return self.grammars.follow(grammar, tokens[admit.num_prompt :])

    def poison(self, slot: int) -> None:
        """The sequence's next sampled token will be reported as bad."""
        self.special[slot] |= POISONED


class HostSlots(SlotTable):
    """With block tables of up to `max_blocks`, last tokens and settings in host memory."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_blocks: int,
        vocab_size: int,
        grammars: Grammars | None = None,
        draws: bool = True,
    ) -> None:
        super().__init__(num_slots=num_slots, vocab_size=vocab_size, grammars=grammars, draws=draws)
        self.blocks: Ints = np.zeros((num_slots, max_blocks), np.int32)
        self.last_token: Ints = np.zeros(num_slots, np.int32)
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_k: Ints = np.zeros(num_slots, np.int32)
        self._top_p = np.ones(num_slots, np.float32)
        self._min_p = np.zeros(num_slots, np.float32)
        self._seed = np.zeros(num_slots, np.int64)
        self._gathered_for = b""
        self._gathered: SampleRows | None = None

    def admit(self, admit: Admit) -> None:
        """As SlotTable's, and the settings."""
        super().admit(admit)
        slot, params = admit.slot, admit.params
        self.last_token[slot] = 0
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot : slot + 1].view(np.uint64)[0] = params.seed
        self._gathered = None

    def attach(self, slots: Ints, at: Ints, blocks: Ints) -> None:
        """Writes new blocks into block tables: block `blocks[i]` at `at[i]` of slot `slots[i]`."""
        self.blocks[slots, at] = blocks

    def sampled(self, slots: Ints, tokens: Ints) -> None:
        """Notes the token just sampled for each slot, for rows that read it from here."""
        self.last_token[slots] = tokens

    def settings(self, slots: Ints, positions: NDArray[np.int64]) -> SampleRows:
        """Sampling settings of S slots for tokens at `positions`.

        While the same slots are asked for step after step the gathered columns are reused.
        """
        key = slots.tobytes()
        known = self._gathered
        if known is None or key != self._gathered_for:
            gather = torch.from_numpy
            known = self._gathered = SampleRows(
                temperature=gather(self._temperature[slots]),
                top_k=gather(self._top_k[slots]),
                top_p=gather(self._top_p[slots]),
                min_p=gather(self._min_p[slots]),
                seed=gather(self._seed[slots]),
                position=gather(positions),
            )
            self._gathered_for = key
            return known
        return SampleRows(
            temperature=known.temperature,
            top_k=known.top_k,
            top_p=known.top_p,
            min_p=known.min_p,
            seed=known.seed,
            position=torch.from_numpy(positions),
        )
