"""What each request must give, found by running it alone; and what each prefix hash must name.

Written without a look into the engine: limits, stops and the hash chain are spelled out again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from octavo.config import SchedulerConfig
from octavo.types import AddRequest, TokenLogprobs, pack
from tests.engine.machine import WEIGHTS, Behaviour, choose, contexts_of, score


@dataclass
class Expected:
    """A request's whole life, were it alone."""

    request: AddRequest
    reason: str
    new_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    refused: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.request.prompt_ids + self.request.emitted_ids + self.new_ids


def expect(request: AddRequest, behaviour: Behaviour, config: SchedulerConfig) -> Expected:
    prompt, known = request.prompt_ids, request.prompt_ids + request.emitted_ids
    params, capacity = request.params, config.num_blocks * config.block_size
    limit = min(len(prompt) + params.max_tokens, config.max_model_len, capacity + 1)
    if not prompt or len(prompt) >= config.max_model_len or len(known) > capacity:
        return Expected(request, "error", refused=True)
    if len(known) >= limit:
        return Expected(request, "length", refused=True)
    out = Expected(request, "length")
    contexts = contexts_of(np.array(known), request.adapter).tolist()
    if params.prompt_logprobs is not None:
        out.prompt_logprobs = [None]
        out.prompt_logprobs += [score(token, contexts[at]) for at, token in enumerate(prompt[1:])]
    tokens, context = list(known), contexts[-1]
    while len(tokens) < limit:
        at = len(tokens) - 1
        faults = [p for p in (behaviour.poison_at, behaviour.bad_at) if p is not None]
        if any(at >= fault for fault in faults):
            out.reason = "error"
            break
        token = choose(context, params, len(tokens) - len(prompt), behaviour)
        tokens.append(token)
        out.new_ids.append(token)
        out.logprobs.append(score(token, context))
        if token in params.stop_ids and len(tokens) - len(prompt) >= params.min_tokens:
            out.reason = "stop"
            break
        context += token * int(WEIGHTS[len(tokens) - 1])
    return out


class ContentOracle:
    """Every digest that may ever be registered, with the cells that it names."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.named: dict[bytes, np.ndarray] = {}  # [3, block_size], as `Machine.contents`

    def add(self, expected: Expected) -> None:
        request, size = expected.request, self.config.block_size
        group = "" if self.config.prefix_caching else request.group
        if expected.refused or not (self.config.prefix_caching or group):
            return
        root = b""
        for text in (request.cache_salt, request.adapter, group):
            root += len(text.encode()).to_bytes(8, "little") + text.encode()
        digest, tokens = blake2b(root, digest_size=16).digest(), expected.tokens
        cells = np.stack(
            [tokens, np.arange(len(tokens)), contexts_of(np.array(tokens), request.adapter)]
        )
        for end in range(size, len(tokens) + 1, size):
            data = digest + pack(tokens[end - size : end])
            digest = blake2b(data, digest_size=16).digest()
            self.named[digest] = cells[:, end - size : end]
