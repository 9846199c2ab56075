"""Presence, frequency and repetition penalties, on the tokens that a sequence has seen.

Not for: masks and biases (`processors.py`), or keeping count (`history.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.sampling.history import TokenHistory


@dataclass(frozen=True, slots=True)
class Penalties:
    """A sequence's settings. Off are 0, 0 and 1."""

    presence: float
    frequency: float
    repetition: float


def apply_penalties(
    logits: Tensor, rows: Sequence[int], settings: Sequence[Penalties], seen: Sequence[TokenHistory]
) -> None:
    """Changes contiguous logits f32[S, V] in place; item i of the sequences is of row `rows[i]`.

    Repetition divides positive logits and multiplies others, for tokens of prompt and output
    (Keskar et al. 2019, arXiv 1909.05858); then frequency is taken off once for each time that the
    token stands in the output, and presence once if it stands there at all.
    """
    sizes = [len(history.ids) for history in seen]
    starts = np.repeat(np.asarray(rows, np.int64) * logits.shape[1], sizes)
    at = torch.from_numpy(starts + np.concatenate([history.ids for history in seen]))
    counts = torch.from_numpy(np.concatenate([history.counts for history in seen]))
    per_row = np.array([[s.presence, s.frequency, s.repetition] for s in settings], np.float32)
    per_token = torch.from_numpy(np.repeat(per_row, sizes, axis=0))

    flat, device = logits.view(-1), logits.device
    at, counts = at.to(device), counts.to(device)
    presence, frequency, repetition = per_token.to(device).unbind(1)
    values = flat.index_select(0, at)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts
    values -= presence * (counts > 0)
    flat.index_copy_(0, at, values)
