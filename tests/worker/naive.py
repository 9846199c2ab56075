"""What sampling must do to one row, written as plain loops over Python numbers."""

from __future__ import annotations

import math

import numpy as np

from octavo.types import TokenLogprobs, TokenParams


def change(
    logits: np.ndarray, params: TokenParams, tokens: list[int], num_prompt: int
) -> np.ndarray:
    """Logits f32[V] after the request's rules; `tokens` is all that came before."""
    output = tokens[num_prompt:]
    changed = [np.float32(value) for value in logits]
    never = np.float32(-math.inf)
    for token in range(len(changed)):
        if params.allowed_ids and token not in params.allowed_ids:
            changed[token] = never
        for word in params.bad_words:
            before = list(word[:-1])
            ends = not before or output[-len(before) :] == before
            if word[-1] == token and ends:
                changed[token] = never
        if len(output) < params.min_tokens and token in params.stop_ids:
            changed[token] = never
        for biased, bias in params.logit_bias:
            if biased == token:
                changed[token] += np.float32(bias)
        if token in tokens:
            repetition = np.float32(params.repetition_penalty)
            value = changed[token]
            changed[token] = value / repetition if value > 0 else value * repetition
        count = np.float32(output.count(token))
        changed[token] -= np.float32(params.frequency_penalty) * count
        if count:
            changed[token] -= np.float32(params.presence_penalty)
    return np.array(changed, np.float32)


def check_logprobs(
    got: TokenLogprobs, logits: np.ndarray, token: int, count: int, extra: tuple[int, ...] = ()
) -> None:
    """Compares with log-softmax in 64 bits within `rounding_bound`; raises AssertionError."""
    wide = [float(value) for value in logits]
    top = max(wide)
    total = top + math.log(sum(math.exp(value - top) for value in wide))
    order = sorted(range(len(wide)), key=lambda t: (-wide[t], t))
    best = order if count == -1 else order[:count]
    assert got.ids == [token, *best, *extra]
    for one, value in zip(got.ids, got.values, strict=True):
        expected = wide[one] - total
        assert abs(value - expected) <= rounding_bound(wide, one), (one, value, expected)
    assert got.rank == 1 + sum(value > wide[token] for value in wide)


def rounding_bound(logits: list[float], token: int) -> float:
    """The most that log-softmax in 32 bits can be off for one token, to first order.

    With m the largest logit, s = sum exp(x - m) and u = 2^-24, the relative error of one operation:
    each x - m is off by u |x - m|, which exp turns into a relative error, and exp itself by one
    unit in the last place, 2u. All terms are positive, so their weighted mean is the error of the
    terms of s, and adding V of them in any order costs at most (V - 1) u more. log turns the
    relative error of s into an absolute one and is itself off by 2u |log s|. The result is
    (x - m) - log s or x - (m + log s), each of two roundings.
    """
    top = max(logits)
    terms = [math.exp(value - top) for value in logits]
    total = sum(terms)
    spread = sum(term * (top - value) for term, value in zip(terms, logits, strict=True)) / total
    log_total = math.log(total)
    of_total = spread + 2 + (len(logits) - 1) + 2 * log_total
    inner = max(top - logits[token], abs(top + log_total))
    outer = top - logits[token] + log_total
    return 2.0**-24 * (of_total + inner + outer)
