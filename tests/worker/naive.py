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
    """Compares with log-softmax in 64 bits; raises AssertionError."""
    wide = [float(value) for value in logits]
    top = max(wide)
    total = top + math.log(sum(math.exp(value - top) for value in wide))
    order = sorted(range(len(wide)), key=lambda t: (-wide[t], t))
    best = order if count == -1 else order[:count]
    assert got.ids == [token, *best, *extra]
    expected = [wide[t] - total for t in got.ids]
    assert np.allclose(got.values, expected, rtol=0, atol=2e-6)
    assert got.rank == 1 + sum(value > wide[token] for value in wide)
