"""One request of a caller to the sequences that the core is asked for: one for each choice.

Shared by the server's side (`text_engine.py`) and `LLM`, so that both mean the same by a request.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from random import Random

from octavo.errors import InvalidRequest
from octavo.grammar.request import Form
from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer
from octavo.types import AddRequest

PRIORITY_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class Scheduling:
    """When a request came, before which others it goes, and when it is too late for it."""

    arrival: float
    priority: int = 0  # lower is served first
    deadline: float = 0.0  # 0 is none
    cache_salt: str = ""
    tenant: str = ""  # whose share of the engine it takes
    weight: float = 1.0  # of that share

    def __post_init__(self) -> None:
        whole = isinstance(self.priority, int) and not isinstance(self.priority, bool)
        if not whole or not -PRIORITY_LIMIT <= self.priority < PRIORITY_LIMIT:
            raise InvalidRequest(
                f"priority = {self.priority!r} must be a whole number of 32 bits.", "priority"
            )


def request_seeds(seed: int | None) -> Random:
    """Seeds for requests that bring none. Without a `seed` no two engines answer alike."""
    return Random(secrets.randbits(64) if seed is None else seed)


def expand(
    prompt_ids: list[int],
    params: SamplingParams,
    scheduling: Scheduling,
    *,
    group: str,
    tokenizer: Tokenizer,
    max_model_len: int,
    vocab_size: int,
    seed: int,
    grammar: Form | None = None,
) -> list[AddRequest]:
    """`params.n` sequences with ids made of `group`; `seed` is for a request that has none.

    `grammar` is what was compiled of the settings' structured outputs.
    Raises InvalidRequest for what the core could not serve.
    """
    if prompt_ids and max(prompt_ids) >= vocab_size:
        raise InvalidRequest(
            f"the prompt holds token {max(prompt_ids)}, and the model has embeddings for 0 to "
            f"{vocab_size - 1} only; its tokenizer is larger than the model.",
            "prompt",
        )
    room = max_model_len - len(prompt_ids)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens = {params.min_tokens} is not allowed: the prompt leaves room for "
            f"{max_tokens} of {max_model_len} tokens.",
            "min_tokens",
        )
    return [
        AddRequest(
            id=f"{group}-{index}",
            prompt_ids=prompt_ids,
            params=params.to_token_params(
                tokenizer,
                eos_ids=tokenizer.eos_ids,
                max_tokens=max_tokens,
                index=index,
                seed=seed,
                grammar=grammar,
            ),
            arrival=scheduling.arrival,
            group=group,
            priority=scheduling.priority,
            deadline=scheduling.deadline,
            cache_salt=scheduling.cache_salt,
            tenant=scheduling.tenant,
            weight=scheduling.weight,
        )
        for index in range(params.n)
    ]
