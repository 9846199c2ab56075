"""How far a model in one number format is from itself in another: of logits over the same texts.

Not for: computing them (`octavo/worker/score.py`), or printing (`octavo/cli/check.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

USE, FINE = 0.01, 0.05  # growth of perplexity up to which a format is recommended, and acceptable
FLIPS_USE, FLIPS_FINE = 0.05, 0.12  # the same of changed likeliest tokens


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one format against another, over all tokens."""

    tokens: int
    log_prob_error: float  # root mean square over tokens and vocabulary, of natural logarithms
    worst: float  # the largest such difference
    divergence: float  # mean Kullback-Leibler divergence, nats a token
    flips: int  # tokens after which another one is likeliest
    perplexity: float
    base_perplexity: float

    @property
    def growth(self) -> float:
        """Of the perplexity, as a share."""
        return self.perplexity / self.base_perplexity - 1

    @property
    def advice(self) -> str:
        """A recommendation in one line."""
        flips = self.flips / max(1, self.tokens)
        if self.growth <= USE and flips <= FLIPS_USE:
            return "recommended: hardly to be told from the plain model on these texts"
        if self.growth <= FINE and flips <= FLIPS_FINE:
            return "acceptable: answers differ a little; look at your own before you rely on it"
        return "not recommended for these texts: answers differ visibly"


class Comparison:
    """Adds up differences text by text."""

    def __init__(self) -> None:
        self._tokens = self._flips = self._scored = 0
        self._squares = self._worst = self._divergence = 0.0
        self._nats = self._base_nats = 0.0
        self._width = 1

    def add(self, ids: list[int], base: Tensor, other: Tensor) -> None:
        """Logits f32[n, V] of the same text in both formats."""
        first, second = base.log_softmax(-1), other.log_softmax(-1)
        change = second - first
        self._width = base.shape[1]
        self._tokens += len(ids)
        self._squares += float(change.square().sum())
        self._worst = max(self._worst, float(change.abs().max()))
        self._divergence += float((first.exp() * -change).sum())
        self._flips += int((base.argmax(-1) != other.argmax(-1)).sum())
        following = torch.tensor(ids[1:]).unsqueeze(1)
        self._scored += len(ids) - 1
        self._base_nats -= float(first[:-1].gather(1, following).sum())
        self._nats -= float(second[:-1].gather(1, following).sum())

    def result(self) -> Difference:
        """Of all texts so far."""
        count, scored = max(1, self._tokens), max(1, self._scored)
        return Difference(
            tokens=self._tokens,
            log_prob_error=math.sqrt(self._squares / (count * self._width)),
            worst=self._worst,
            divergence=self._divergence / count,
            flips=self._flips,
            perplexity=math.exp(self._nats / scored),
            base_perplexity=math.exp(self._base_nats / scored),
        )
