"""The forms that a prompt may have in the Python interface, and the one that the engine takes.

Not for: chat messages, which `text/chat.py` renders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypedDict

from octavo.errors import InvalidRequest
from octavo.text.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; `prompt` is its text, if it is known."""

    prompt_token_ids: list[int]
    prompt: str


MOST = 10**15  # tokens that are spoken of in a message

PromptType: TypeAlias = str | TextPrompt | TokensPrompt | list[int]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids, and the text that they stand for where there is one."""

    ids: list[int]
    text: str | None = None


def is_single(prompts: PromptType | Sequence[PromptType]) -> bool:
    """True for one prompt, False for a list of prompts."""
    if isinstance(prompts, (str, dict)):
        return True
    return bool(prompts) and all(isinstance(item, int) for item in prompts)


def encode_prompt(prompt: PromptType, tokenizer: Tokenizer) -> EncodedPrompt:
    """Any form to token ids. Raises InvalidRequest that names what is wrong."""
    if isinstance(prompt, str):
        return EncodedPrompt(tokenizer.encode(prompt), prompt)
    if isinstance(prompt, list):
        return EncodedPrompt(_checked(prompt, tokenizer))
    if not isinstance(prompt, dict):
        raise InvalidRequest(
            f"prompt is a {type(prompt).__name__}; use a text, a list of token ids, "
            "TextPrompt or TokensPrompt.",
            "prompt",
        )
    if unknown := sorted(set(prompt) - {"prompt", "prompt_token_ids"}):
        raise InvalidRequest(
            f"prompt has the key {unknown[0]!r}, which is not supported.", "prompt"
        )
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise InvalidRequest(f"prompt['prompt'] is a {type(text).__name__}; use a text.", "prompt")
    if isinstance(ids, list):
        return EncodedPrompt(_checked(ids, tokenizer), text)
    if text is None:
        raise InvalidRequest("prompt has neither 'prompt' nor 'prompt_token_ids'.", "prompt")
    return EncodedPrompt(tokenizer.encode(text), text)


def check_length(count: int, max_model_len: int, max_tokens: int | None) -> None:
    """Raises InvalidRequest if a prompt is empty or leaves no room for `max_tokens`."""
    if count == 0:
        raise InvalidRequest("prompt is empty; send at least one token.", "prompt")
    wanted = 1 if max_tokens is None else min(max_tokens, MOST)  # to be shown in few digits
    if count + wanted > max_model_len:
        raise InvalidRequest(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {count + wanted} tokens ({count} in the prompt, {wanted} in the "
            "completion). Shorten the prompt or ask for fewer tokens.",
            "prompt" if count + 1 > max_model_len else "max_tokens",
        )


def _checked(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    for index, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool):
            raise InvalidRequest(f"prompt[{index}] = {token!r} is not a token id.", "prompt")
        if not 0 <= token < tokenizer.vocab_size:
            raise InvalidRequest(
                f"prompt[{index}] = {token} is outside the vocabulary; token ids of this model "
                f"are 0 to {tokenizer.vocab_size - 1}.",
                "prompt",
            )
    return list(ids)
