"""`SamplingParams`: what a caller asks of one request, with its rules and their limits.

The fields and defaults are those that callers of such engines know. Each value is checked when
the record is made, by the table in `_RANGES` and the functions below it; what depends on the
model (vocabulary, log-prob limit) is checked by `check_model`. A field that this engine cannot
honour yet is refused by name when set. Not for: the engine's own form of the settings, which is
`TokenParams` in `types.py`, made here by `to_token_params`.
Next file: `text/assembler.py`.
"""

from __future__ import annotations

import enum
import hashlib
import math
import numbers
from collections.abc import Collection
from typing import Any, NoReturn, Protocol

import msgspec

from octavo.errors import InvalidRequest
from octavo.grammar.request import (
    Form,
    StructuredOutputs,
    StructuredOutputsParams,
    structured_outputs,
)
from octavo.types import Grammar, TokenParams

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputsParams", "choice_seed"]

MAX_CHOICES = 128
MAX_STOP_LENGTH = 1024  # characters
MAX_LIST = 1024  # entries of logit_bias, bad_words, stop, stop_token_ids, logprob_token_ids
MAX_ALLOWED = 2**20  # entries of allowed_token_ids: more than any vocabulary has
GREEDY_BELOW = 1e-5  # a temperature under this is greedy: the division would overflow

# name: (least, greatest, least is allowed itself)
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.01, 10.0, True),  # near 0 the division would overflow
}
_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)
# Fields that are known and not built; each is refused unless it has a value that asks nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "flat_logprobs": (False,),
    "stream_interval": (None, 1),
    "extra_args": (None, {}),
    "skip_reading_prefix_cache": (None, False),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
}


POOLINGS = ("last", "mean")


class RequestOutputKind(enum.Enum):
    """What each `RequestOutput` of a stream holds."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # only what is new
    FINAL_ONLY = 2  # one output, at the end


class TextEncoder(Protocol):
    """What `to_token_params` needs of a tokenizer."""

    def encode_plain(self, text: str) -> list[int]: ...


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Settings of one request; see the module for the rules.

    Raises `InvalidRequest` from the constructor, naming the field, the value and what is allowed.
    """

    n: int = 1  # choices, 1 to 128
    presence_penalty: float = 0.0  # -2 to 2, on generated tokens
    frequency_penalty: float = 0.0  # -2 to 2, on generated tokens
    repetition_penalty: float = 1.0  # 0.01 to 10; on prompt and generated tokens
    temperature: float = 1.0  # 0 to 100; 0 is greedy
    top_p: float = 1.0  # above 0, to 1
    top_k: int = 0  # 0 or -1 is off; above the vocabulary is off too
    min_p: float = 0.0  # 0 to 1
    seed: int | None = None  # 64 bit, signed or not; None and -1 draw one
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: what is left of the context
    min_tokens: int = 0
    logprobs: int | None = None  # alternatives a token; -1 is the whole vocabulary
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    # No supported tokenizer puts spaces there, so both values give the same text.
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    structured_outputs: StructuredOutputs | None = None
    logit_bias: dict[int, float] | None = None  # id: -100 to 100
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    pooling: str | None = None  # "last" or "mean" of the hidden states: needs max_tokens 1, n 1

    def __post_init__(self) -> None:
        self.verify()

    @property
    def stops(self) -> list[str]:
        """The stop texts as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def verify(self) -> None:
        """Check and normalize all fields; call it again after changing one."""
        values = msgspec.structs.asdict(self)
        for name, harmless in UNSUPPORTED.items():
            if not any(type(values[name]) is type(one) and values[name] == one for one in harmless):
                _refuse(name, values[name], "it is not supported by this engine; leave it out")
        for name, limits in _RANGES.items():
            setattr(self, name, _number(name, values[name], limits))
        for name in _FLAGS:
            if not isinstance(values[name], bool):
                _refuse(name, values[name], "use true or false")
        if self.pooling is not None:
            self._verify_pooling()
        if not isinstance(self.output_kind, RequestOutputKind):
            _refuse("output_kind", self.output_kind, "use a member of RequestOutputKind")
        self._verify_counts()
        self._verify_texts()
        self._verify_ids()
        if self.structured_outputs is not None:
            self.structured_outputs = structured_outputs(self.structured_outputs)
            if self.ignore_eos:
                _refuse(
                    "ignore_eos", True, "structured_outputs end an answer; leave one of them out"
                )

    def _verify_pooling(self) -> None:
        if self.pooling not in POOLINGS:
            _refuse("pooling", self.pooling, f"use {' or '.join(POOLINGS)}")
        if self.max_tokens != 1 or self.n != 1 or self.prompt_logprobs is not None:
            _refuse("pooling", self.pooling, "it goes with max_tokens=1 and n=1, without log-probs")

    def _verify_counts(self) -> None:
        self.n = _integer("n", self.n, 1, MAX_CHOICES)
        self.top_k = _integer("top_k", self.top_k, -1)
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                _refuse("min_tokens", self.min_tokens, f"use at most max_tokens, {self.max_tokens}")
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, -(2**63), 2**64 - 1)
            self.seed = None if self.seed == -1 else self.seed % 2**64
        if self.logprobs is not None:
            self.logprobs = _integer("logprobs", self.logprobs, -1)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = _integer("prompt_logprobs", self.prompt_logprobs, -1)

    def _verify_texts(self) -> None:
        if self.stop is not None and not isinstance(self.stop, str):
            self.stop = _texts("stop", self.stop)
        elif self.stop is not None:
            _texts("stop", [self.stop])
        if self.stop and not self.detokenize:
            _refuse("stop", self.stop, "stop texts need detokenize=True; use stop_token_ids")
        if self.bad_words is not None:
            self.bad_words = _texts("bad_words", self.bad_words)

    def _verify_ids(self) -> None:
        if self.stop_token_ids is not None:
            self.stop_token_ids = _ids("stop_token_ids", self.stop_token_ids, MAX_LIST)
        if self.logprob_token_ids is not None:
            self.logprob_token_ids = _ids("logprob_token_ids", self.logprob_token_ids, MAX_LIST)
            if self.logprob_token_ids and self.logprobs is None:
                _refuse("logprob_token_ids", self.logprob_token_ids, "set logprobs as well")
        if self.allowed_token_ids is not None:
            ids = _ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED)
            self.allowed_token_ids = list(dict.fromkeys(ids))  # once here, not for each choice
            if not ids:
                _refuse("allowed_token_ids", [], "name at least one token id, or leave it out")
        if self.logit_bias is not None:
            self.logit_bias = _bias(self.logit_bias)

    def check_model(self, *, vocab_size: int, max_logprobs: int = 20) -> None:
        """Check what depends on the model: ids below `vocab_size`, log-probs at most
        `max_logprobs` (-1: no limit).
        """
        values = msgspec.structs.asdict(self)
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "logit_bias"):
            last = max(values[name] or (), default=0)
            if last >= vocab_size:
                _refuse(name, last, f"token ids of this model are 0 to {vocab_size - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            wanted = values[name]
            if wanted is None or max_logprobs == -1:
                continue
            if wanted > max_logprobs or (wanted == -1 and vocab_size > max_logprobs):
                _refuse(name, wanted, f"use 0 to {max_logprobs}, the limit of this server")

    def to_token_params(
        self,
        tokenizer: TextEncoder | None,
        *,
        eos_ids: Collection[int],
        max_tokens: int,
        index: int = 0,
        seed: int = 0,
        grammar: Form | None = None,
    ) -> TokenParams:
        """The settings in token ids, for choice `index` of a request.

        `max_tokens` is the resolved number; `seed` is one that the caller drew, used if the
        record has none. Choice 0 has the seed itself, the others one derived from it. `tokenizer`
        may be None if there are no `bad_words`. `grammar` is what was compiled of
        `structured_outputs`.
        """
        assert (grammar is None) == (self.structured_outputs is None), "compile it first"
        own = seed if self.seed is None else self.seed
        ends = () if self.ignore_eos else tuple(eos_ids)
        return TokenParams(
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            temperature=0.0 if self.temperature < GREEDY_BELOW else self.temperature,
            top_p=self.top_p,
            # Far above every vocabulary means off, and must fit the 32 bits of the sampler.
            top_k=self.top_k if 0 < self.top_k < 2**31 else 0,
            min_p=self.min_p,
            seed=choice_seed(own, index),
            stop_ids=tuple(dict.fromkeys((*(self.stop_token_ids or ()), *ends))),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((self.logit_bias or {}).items()),
            allowed_ids=tuple(self.allowed_token_ids or ()),
            bad_words=self._bad_word_ids(tokenizer),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            logprob_ids=tuple(dict.fromkeys(self.logprob_token_ids or ())),
            pooling=self.pooling or "",
            grammar=None if grammar is None else Grammar(grammar.text, tuple(ends), grammar.json),
        )

    def _bad_word_ids(self, tokenizer: TextEncoder | None) -> tuple[tuple[int, ...], ...]:
        """Each word as it is written and with a space before it, as it stands inside a text."""
        if not self.bad_words:
            return ()
        if tokenizer is None:
            _refuse("bad_words", self.bad_words, "they need a tokenizer; use logit_bias")
        found: dict[tuple[int, ...], None] = {}
        for word in self.bad_words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(tokenizer.encode_plain(text))
                if ids:
                    found[ids] = None
        return tuple(found)

    def clone(self) -> SamplingParams:
        """A copy that shares nothing with this record."""
        return msgspec.convert(msgspec.to_builtins(self, str_keys=False), SamplingParams)


def choice_seed(seed: int, index: int) -> int:
    """The unsigned 64-bit seed of choice `index`: `seed` itself for choice 0."""
    seed %= 2**64
    if index == 0:
        return seed
    data = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _refuse(name: str, value: object, remedy: str) -> NoReturn:
    shown = _shown(value)
    raise InvalidRequest(f"{name} = {shown} is not allowed: {remedy}.", param=name)


def _shown(value: object) -> str:
    """The value in at most 80 characters, however large it is."""
    if isinstance(value, int) and abs(value) >= 2**256:  # int to text has a length limit
        return "a number of more than 77 digits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _number(name: str, value: object, limits: tuple[float, float, bool]) -> float:
    least, greatest, closed = limits
    remedy = f"use a number {'from' if closed else 'above'} {least:g} {'to' if closed else 'up to'}"
    remedy += f" {greatest:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        _refuse(name, value, remedy)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (least <= number <= greatest) or (number == least and not closed):
        _refuse(name, value, remedy)
    return number


def _integer(name: str, value: object, least: int, greatest: int | None = None) -> int:
    remedy = f"use a whole number from {least}" + ("" if greatest is None else f" to {greatest}")
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        _refuse(name, value, remedy)
    number = int(value)
    if number < least or (greatest is not None and number > greatest):
        _refuse(name, value, remedy)
    return number


def _texts(name: str, value: object) -> list[str]:
    if not isinstance(value, (list, tuple)):
        _refuse(name, value, "use a list of texts")
    if len(value) > MAX_LIST:
        _refuse(name, f"a list of {len(value)}", f"use at most {MAX_LIST} texts")
    for text in value:
        if not isinstance(text, str) or not text or len(text) > MAX_STOP_LENGTH:
            _refuse(name, text, f"each text has 1 to {MAX_STOP_LENGTH} characters")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            _refuse(name, text, "half a surrogate pair is not text")
    return list(value)


def _ids(name: str, value: object, limit: int) -> list[int]:
    if not isinstance(value, (list, tuple)):
        _refuse(name, value, "use a list of token ids")
    if len(value) > limit:
        _refuse(name, f"a list of {len(value)}", f"use at most {limit} token ids")
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**31:
        return list(value)  # the usual case; a list may be as long as the vocabulary
    return [_integer(name, token, 0, 2**31 - 1) for token in value]


def _bias(value: object) -> dict[int, float]:
    """Ids may be written as decimal texts, as JSON demands of keys."""
    if not isinstance(value, dict):
        _refuse("logit_bias", value, "use a mapping of token ids to numbers")
    if len(value) > MAX_LIST:
        _refuse("logit_bias", f"a mapping of {len(value)}", f"use at most {MAX_LIST} entries")
    found: dict[int, float] = {}
    for key, bias in value.items():
        token = key
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10:
            token = int(key)
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            _refuse("logit_bias", key, "use token ids, whole numbers from 0, as keys")
        try:
            found[token] = _number("logit_bias", bias, (-100.0, 100.0, True))
        except InvalidRequest as error:
            raise InvalidRequest(f"Of key {token}: {error.message}", "logit_bias") from None
    return found
