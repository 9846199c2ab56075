"""News of the engine to news in text, against the decoding of all ids at once."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.sampling_params import SamplingParams
from octavo.text.assembler import LOGPROB_FLOOR, Assembler, Delta
from octavo.types import SequenceOutput, TokenLogprobs
from tests.text.samples import chat_tokenizer
from tests.text.test_stops import cut

CHAT = chat_tokenizer()
EOS = [2]
NUMBERS = " 12, 13, 14, 15, 16,"


def parts(ids: list[int], sizes: list[int]) -> list[list[int]]:
    found, place = [], 0
    for size in [*sizes, *[1] * len(ids)]:
        if place < len(ids):
            found.append(ids[place : place + size])
        place += size
    return found


def feed(assembler: Assembler, news: list[list[int]], reason="length", **last) -> list[Delta]:
    deltas = []
    for place, ids in enumerate(news):
        end = {"reason": reason, **last} if place == len(news) - 1 else {}
        deltas.append(assembler.push(SequenceOutput("r", ids, **end)))
    return deltas


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def ids_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@given(
    st.lists(st.integers(3, CHAT.vocab_size - 1), min_size=1, max_size=30),
    st.lists(st.integers(1, 4)),
)
def test_without_stops_the_text_is_the_decoding(ids, sizes):
    assembler = Assembler(CHAT, SamplingParams(), index=3, eos_ids=EOS)
    deltas = feed(assembler, parts(ids, sizes))
    assert text_of(deltas) == CHAT.decode(ids, inside=True)
    assert ids_of(deltas) == ids
    assert {delta.index for delta in deltas} == {3}
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert assembler.finished
    assert assembler.num_tokens == len(ids)


@given(
    st.text(alphabet="ab🦉é", min_size=1, max_size=30),
    st.lists(st.text(alphabet="ab🦉é", min_size=1, max_size=3), min_size=1, max_size=3),
    st.lists(st.integers(1, 4)),
    st.booleans(),
    st.integers(0, 12),
)
def test_stops_cut_the_text_at_the_same_place_however_it_comes(text, stops, sizes, include, least):
    ids = CHAT.encode(text)
    least = min(least, len(ids))
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, min_tokens=least, max_tokens=99
    )
    assembler = Assembler(CHAT, params, eos_ids=EOS)
    deltas = feed(assembler, parts(ids, sizes))
    protected = len(CHAT.decode(ids[:least]).rstrip("\ufffd"))
    wanted, stop = cut(text, stops, include=include, start=protected)
    assert text_of(deltas) == wanted
    ends = [delta for delta in deltas if delta.finish_reason]
    assert len(ends) == 1
    assert (ends[0].finish_reason, ends[0].stop_reason) == (
        ("stop", stop) if stop else ("length", None)
    )
    kept = ids_of(deltas)
    assert kept == ids[: len(kept)]
    assert assembler.num_tokens == len(kept) >= least
    if stop:  # the last token that counts is the one that completes the stop text
        whole = wanted if include else wanted + stop
        assert whole not in CHAT.decode(kept[:-1])
        assert CHAT.decode(kept).startswith(whole)
    else:
        assert kept == ids


def test_every_piece_of_a_text_as_stop():
    ids = CHAT.encode(NUMBERS)
    for size in range(2, 9):
        for start in range(len(NUMBERS) - size + 1):
            stop = NUMBERS[start : start + size]
            deltas = feed(Assembler(CHAT, SamplingParams(stop=[stop])), [[token] for token in ids])
            assert text_of(deltas) == NUMBERS[: NUMBERS.index(stop)]


def test_a_stop_that_never_comes_loses_nothing():
    for last in range(1, len(CHAT.encode(NUMBERS)) + 1):
        ids = CHAT.encode(NUMBERS)[:last]
        for stop in ("q" * 16, "14x", "16, 17"):
            deltas = feed(Assembler(CHAT, SamplingParams(stop=stop)), [[token] for token in ids])
            assert text_of(deltas) == CHAT.decode(ids)
            assert deltas[-1].finish_reason == "length"


def test_the_end_token_counts_and_is_not_seen():
    ids = [*CHAT.encode("Paris."), 2]
    for skip in (True, False):
        params = SamplingParams(skip_special_tokens=skip)
        deltas = feed(Assembler(CHAT, params, eos_ids=EOS), [ids], "stop", stop_id=2)
        assert text_of(deltas) == "Paris."
        assert ids_of(deltas) == ids
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)
    params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True)
    assert text_of(feed(Assembler(CHAT, params, eos_ids=EOS), [ids], "stop", stop_id=2)) == (
        "Paris.<|im_end|>"
    )


def test_a_stop_token_of_the_caller_is_named():
    ids = CHAT.encode("Paris.")
    stop = ids[-1]
    for include, text in ((False, CHAT.decode(ids[:-1])), (True, "Paris.")):
        params = SamplingParams(stop_token_ids=[stop], include_stop_str_in_output=include)
        deltas = feed(Assembler(CHAT, params, eos_ids=EOS), [ids], "stop", stop_id=stop)
        assert text_of(deltas) == text
        assert deltas[-1].stop_reason == stop
        assert deltas[-1].token_ids == ids
    params = SamplingParams(stop_token_ids=[2], ignore_eos=True)
    deltas = feed(Assembler(CHAT, params, eos_ids=EOS), [[*ids, 2]], "stop", stop_id=2)
    assert deltas[-1].stop_reason == 2


def test_held_back_text_comes_with_an_end_token():
    params = SamplingParams(stop="Paris. And")
    deltas = feed(
        Assembler(CHAT, params, eos_ids=EOS), [[*CHAT.encode("Paris."), 2]], "stop", stop_id=2
    )
    assert text_of(deltas) == "Paris."
    assert deltas[-1].stop_reason is None


def test_a_cut_character_can_complete_a_stop_at_the_end():
    ids = CHAT.encode("🦌")[:-1]
    deltas = feed(Assembler(CHAT, SamplingParams(stop="\ufffd")), [ids])
    assert (text_of(deltas), deltas[-1].finish_reason) == ("", "stop")


def test_nothing_comes_after_the_end():
    assembler = Assembler(CHAT, SamplingParams(stop="b"), eos_ids=EOS)
    first = assembler.push(SequenceOutput("r", [*CHAT.encode("abab"), 7]))
    assert (first.text, first.finish_reason, first.stop_reason) == ("a", "stop", "b")
    count = assembler.num_tokens
    late = assembler.push(SequenceOutput("r", [5], reason="abort"))
    assert (late.text, late.token_ids, late.finish_reason) == ("", [], None)
    assert assembler.num_tokens == count


def test_without_text():
    params = SamplingParams(detokenize=False, logprobs=1)
    assembler = Assembler(None, params, eos_ids=EOS)
    entry = TokenLogprobs(ids=[4, 4], values=[-0.5, -0.5], rank=1)
    delta = assembler.push(SequenceOutput("r", [4], reason="length", logprobs=[entry]))
    assert (delta.text, delta.token_ids) == ("", [4])
    assert delta.logprobs is not None
    assert (delta.logprobs[0].text, delta.logprobs[0].raw) == ("", b"")
    with pytest.raises(AssertionError):
        Assembler(None, SamplingParams())


def test_logprobs_are_finite_and_of_the_kept_tokens():
    ids = CHAT.encode("🦉ab")
    entries = [TokenLogprobs([token, token, 3], [-0.5, -0.5, -math.inf], 1) for token in ids]
    prompt = [None, TokenLogprobs([5], [math.nan], 7)]
    assembler = Assembler(CHAT, SamplingParams(stop="a", logprobs=2))
    output = SequenceOutput(
        "r", ids, logprobs=entries, prompt_logprobs=prompt, num_cached=16, reason="length"
    )
    delta = assembler.push(output)
    assert delta.logprobs is not None
    assert [entry.token_id for entry in delta.logprobs] == delta.token_ids == ids[: len(ids) - 1]
    assert b"".join(entry.raw for entry in delta.logprobs).decode() == "🦉a"
    top = delta.logprobs[0].top
    assert top == [
        (ids[0], -0.5, CHAT.token_text(ids[0]), CHAT.token_bytes(ids[0])),
        (3, LOGPROB_FLOOR, CHAT.token_text(3), CHAT.token_bytes(3)),
    ]
    assert delta.prompt_logprobs is not None
    assert delta.prompt_logprobs[0] is None
    assert delta.prompt_logprobs[1] is not None
    assert delta.prompt_logprobs[1].logprob == LOGPROB_FLOOR
    json.dumps([entry.logprob for entry in delta.logprobs], allow_nan=False)
    assert delta.num_cached == 16


def test_errors_are_handed_on():
    delta = Assembler(CHAT, SamplingParams()).push(
        SequenceOutput("r", [], reason="error", error="not finite")
    )
    assert (delta.finish_reason, delta.error) == ("error", "not finite")
