"""Log-probs in the two forms of the API.

Chat has a list of objects with real bytes. Completions have four parallel lists, in which a token
that is no whole character is written `bytes:\\xf0\\x9f`: as text, such tokens would look alike.
`as_ids` writes every token as `token_id:17`. Not for: computing anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from octavo.text.assembler import TokenLogprob
from octavo.text.tokenizer import Tokenizer

MAX_PARTS = 2**15  # tokens whose JSON is remembered

encode = msgspec.json.encode


def chat_logprobs(entries: Iterable[TokenLogprob], *, as_ids: bool) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    return {"content": [_chat_entry(entry, as_ids) for entry in entries], "refusal": None}


class ChatLogprobs:
    """Writes `choices[].logprobs` of chat events: the JSON of what `chat_logprobs` gives.

    All but the numbers is the same whenever a token comes, and is encoded once.
    """

    def __init__(self, *, as_ids: bool) -> None:
        self._as_ids = as_ids
        self._parts: dict[int, tuple[bytes, bytes]] = {}  # before and after the number

    def write(self, entries: Iterable[TokenLogprob]) -> bytes:
        """Of tokens that came together."""
        return b'{"content":[' + b",".join(map(self._entry, entries)) + b'],"refusal":null}'

    def _entry(self, entry: TokenLogprob) -> bytes:
        known, top = self._parts, entry.top
        before, after = known.get(entry.token_id) or self._make(
            entry.token_id, entry.text, entry.raw
        )
        numbers = encode([entry.logprob, *[one[1] for one in top]])[1:-1].split(b",")
        made = [before, numbers[0], after, b',"top_logprobs":[']
        for (token, _, text, raw), number in zip(top, numbers[1:], strict=True):
            before, after = known.get(token) or self._make(token, text, raw)
            made += (before, number, after, b"},")
        if top:
            made[-1] = b"}"
        made.append(b"]}")
        return b"".join(made)

    def _make(self, token: int, text: str, raw: bytes) -> tuple[bytes, bytes]:
        if len(self._parts) >= MAX_PARTS:
            self._parts.clear()
        shown = _chat_token(token, 0.0, text, raw, self._as_ids)
        before = b'{"token":' + encode(shown["token"]) + b',"logprob":'
        parts = self._parts[token] = before, b',"bytes":' + encode(shown["bytes"])
        return parts


def _chat_entry(entry: TokenLogprob, as_ids: bool) -> dict[str, Any]:
    return {
        **_chat_token(entry.token_id, entry.logprob, entry.text, entry.raw, as_ids),
        "top_logprobs": [
            _chat_token(token, value, text, raw, as_ids) for token, value, text, raw in entry.top
        ],
    }


def _chat_token(token: int, value: float, text: str, raw: bytes, as_ids: bool) -> dict[str, Any]:
    shown = f"token_id:{token}" if as_ids else text
    return {"token": shown, "logprob": value, "bytes": list(raw)}


EVERY = -1  # as a number of alternatives: the whole vocabulary


class CompletionLogprobs:
    """Writes `choices[].logprobs` of one choice of a completion, in one piece or several.

    `text_offset` of a token is the sum of the lengths of the tokens before it, as written here.
    With 0 alternatives asked for, `top_logprobs` holds the chosen token alone.
    """

    def __init__(self, *, as_ids: bool) -> None:
        self._as_ids = as_ids
        self._offset = 0

    def write(self, tokens: Sequence[tuple[str, TokenLogprob | None]]) -> dict[str, list[Any]]:
        """Four lists for these tokens; one without log-prob gets nulls."""
        texts, values, tops, offsets = [], [], [], []
        for text, entry in tokens:
            texts.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            values.append(None if entry is None else entry.logprob)
            tops.append(None if entry is None else self._tops(entry))
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": texts,
            "top_logprobs": tops,
        }

    def name(self, token: int, raw: bytes) -> str:
        """A token as it is written in the lists."""
        if self._as_ids:
            return f"token_id:{token}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def generated(self, entries: Iterable[TokenLogprob]) -> list[tuple[str, TokenLogprob | None]]:
        """Generated tokens as `write` takes them."""
        return [(self.name(entry.token_id, entry.raw), entry) for entry in entries]

    def prompt(
        self, ids: Sequence[int], entries: Sequence[TokenLogprob | None], tokenizer: Tokenizer
    ) -> list[tuple[str, TokenLogprob | None]]:
        """Prompt tokens as `write` takes them; the first has no log-prob."""
        names = [self.name(token, tokenizer.token_bytes(token)) for token in ids]
        return list(zip(names, entries, strict=True))

    def _tops(self, entry: TokenLogprob) -> dict[str, float]:
        found = {self.name(token, raw): value for token, value, _, raw in reversed(entry.top)}
        best_first = dict(reversed(found.items()))
        best_first.setdefault(self.name(entry.token_id, entry.raw), entry.logprob)
        return best_first


def best_of(
    entries: list[TokenLogprob | None] | None, count: int
) -> list[TokenLogprob | None] | None:
    """The same with the `count` best alternatives of each token; EVERY leaves all."""
    if entries is None or count == EVERY:
        return entries
    return [None if entry is None else replace(entry, top=entry.top[:count]) for entry in entries]


def prompt_logprobs_body(
    entries: Sequence[TokenLogprob | None] | None,
) -> list[dict[str, Any] | None] | None:
    """`prompt_logprobs`: for each prompt token a map of ids to value, rank and text."""
    if entries is None:
        return None
    return [None if entry is None else _prompt_entry(entry) for entry in entries]


def _prompt_entry(entry: TokenLogprob) -> dict[str, Any]:
    found = {
        str(token): {"logprob": value, "rank": place + 1, "decoded_token": text}
        for place, (token, value, text, _) in enumerate(entry.top)
    }
    own = {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.text}
    return {
        str(entry.token_id): own,
        **{k: v for k, v in found.items() if int(k) != entry.token_id},
    }
