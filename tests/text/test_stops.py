"""Stop texts: the result is that of the whole text, and only beginnings are held back."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text.stops import StopMatcher

LETTERS = st.text(alphabet="ab", max_size=40)
STOPS = st.lists(st.text(alphabet="ab", min_size=2, max_size=6), min_size=1, max_size=4)


def cut(text: str, stops: list[str], *, include: bool, start: int = 0) -> tuple[str, str | None]:
    """The rule in its simplest form: the first place at which a stop text ends, the longest."""
    for end in range(start + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


@settings(max_examples=500)
@given(LETTERS, STOPS, st.lists(st.integers(0, 100)), st.booleans())
def test_any_cutting_gives_the_result_of_the_whole(text, stops, cuts, include):
    matcher = StopMatcher(stops, include)
    sent = ""
    for piece in pieces(text, cuts):
        sent += matcher.push(piece)
        held = matcher.held
        if matcher.matched is None:
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
            assert text.startswith(sent + held)
    sent += matcher.flush()
    assert (sent, matcher.matched) == cut(text, stops, include=include)


@settings(max_examples=500)
@given(LETTERS, STOPS, st.lists(st.integers(0, 100)), st.integers(0, 40), st.booleans())
def test_no_stop_ends_in_the_protected_beginning(text, stops, cuts, start, include):
    start = min(start, len(text))
    matcher = StopMatcher(stops, include)
    sent = ""
    place = 0
    for piece in pieces(text, [*cuts, start]):
        sent += matcher.push(piece, can_stop=place >= start)
        place += len(piece)
    sent += matcher.flush()
    assert (sent, matcher.matched) == cut(text, stops, include=include, start=start)


@given(LETTERS, STOPS)
def test_nothing_is_held_without_need(text, stops):
    matcher = StopMatcher(stops)
    matcher.push(text)
    if matcher.matched is None:
        longest = max(
            (size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])),
            default=0,
        )
        assert len(matcher.held) == longest


def test_after_a_match_all_is_dropped():
    matcher = StopMatcher(["stop"])
    assert matcher.push("a st") == "a "
    assert matcher.push("op and more") == ""
    assert matcher.matched == "stop"
    assert matcher.push("more") == matcher.flush() == ""


def test_a_false_beginning_is_sent():
    matcher = StopMatcher(["14x"])
    assert matcher.push("13, 14") == "13, "
    assert matcher.push(", 1") == "14, "
    assert matcher.flush() == "1"
    assert matcher.push("4x") == "4x"  # nothing of before the flush is remembered


def test_of_two_that_end_together_the_longer_is_cut():
    for stops in (["bc", "abc"], ["abc", "bc"]):
        matcher = StopMatcher(stops)
        assert matcher.push("xabcx") == "x"
        assert matcher.matched == "abc"


def test_a_protected_match_may_be_the_beginning_of_the_next():
    matcher = StopMatcher(["aa"])
    assert matcher.push("aa", can_stop=False) == "a"
    assert matcher.push("a") == ""
    assert matcher.matched == "aa"
