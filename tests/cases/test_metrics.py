"""MH: gauges that fall, counters that agree, health that is never held up.

MH-3, a core that is killed and one that is paused, is in `tests/e2e/test_serve.py`:
`test_a_dead_core_costs_its_requests_and_not_the_service` and
`test_a_paused_core_is_a_stall_and_no_loss`.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import pytest

from tests.cases.client import CHAT, COMPLETIONS, Box, check_refusal, fresh, prose, together

MIB = 2**20


def test_mh_1_gauges_fall_when_all_leave_at_once(box: Box) -> None:
    with ExitStack() as stack:
        kept = [
            stack.enter_context(
                box.opened(
                    COMPLETIONS, {"prompt": f"Story {n}", "max_tokens": 300, "ignore_eos": True}
                )
            )
            for n in range(16)
        ]
        waiting = [threading.Thread(target=leave_soon, args=(box,), daemon=True) for _ in range(4)]
        for thread in waiting:
            thread.start()
        box.until(lambda: box.gauges()[:2] == [16, 4], 20, "16 running, 4 waiting")
        assert box.gauges()[2] > 0
        assert len(kept) == 16
        for thread in waiting:
            thread.join()
    assert box.until_idle(3) < 2
    for _ in range(4):
        time.sleep(0.1)
        assert box.gauges() == [0, 0, 0]


def leave_soon(box: Box) -> None:
    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        box.post(COMPLETIONS, body, timeout=httpx.Timeout(10, read=2))


def histograms(samples: dict[Any, float]) -> set[str]:
    return {name.removesuffix("_bucket") for name, _ in samples if name.endswith("_bucket")}


def check_scrape(samples: dict[Any, float], before: dict[Any, float]) -> None:
    """Counters and buckets never fall, buckets rise to the count, sums are not negative."""
    for key, value in before.items():
        name = key[0]
        if name.endswith(("_total", "_count", "_bucket", "_sum")):
            assert samples[key] >= value, key
    for name in histograms(samples):
        rows: dict[Any, list[tuple[float, float]]] = {}
        for (sample, labels), value in samples.items():
            if sample == f"{name}_bucket":
                rest = tuple(pair for pair in labels if pair[0] != "le")
                rows.setdefault(rest, []).append((float(dict(labels)["le"]), value))
        for rest, buckets in rows.items():
            heights = [height for _, height in sorted(buckets)]
            assert heights == sorted(heights), (name, rest)
            assert heights[-1] == samples[(f"{name}_count", rest)], (name, rest)
            assert samples[(f"{name}_sum", rest)] >= 0


def test_mh_2_counters_agree_with_what_was_asked(box: Box) -> None:
    dice, seed = fresh()
    box.until_idle()
    before = box.scrape()
    each = 6

    def stopped(number: int) -> None:
        answer = box.complete("20, 21, 22, 23, 24, 25,", max_tokens=16, stop=[","])
        assert answer["choices"][0]["finish_reason"] == "stop"

    def limited(number: int) -> None:
        box.complete(f"Number {number}", max_tokens=3, ignore_eos=True)

    def left(number: int) -> None:
        body = {"prompt": f"Long {number}", "max_tokens": 300, "ignore_eos": True}
        with box.opened(COMPLETIONS, body) as lines:
            next(lines)

    def refused(number: int) -> None:
        box.refused(COMPLETIONS, {"prompt": "x", "top_p": -number}, "top_p")

    jobs = [
        partial(job, n) for job in (stopped, limited, left, refused) for n in range(1, each + 1)
    ]
    dice.shuffle(jobs)
    scrapes: list[dict[Any, float]] = [before]
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            scrapes.append(box.scrape())
            time.sleep(0.02)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    together(jobs)
    box.until_idle()
    done.set()
    watcher.join(10)
    for older, newer in itertools.pairwise(scrapes):
        check_scrape(newer, older)
    after = box.scrape()
    check_scrape(after, scrapes[-1])
    rose = {key: value - before.get(key, 0) for key, value in after.items()}

    def total(name: str, **labels: str) -> float:
        return sum(
            v for (n, have), v in rose.items() if n == name and labels.items() <= dict(have).items()
        )

    for reason, expected in (
        ("stop", each),
        ("length", each),
        ("abort", each),
        ("timeout", 0),
        ("error", 0),
    ):
        found = total("vllm:request_success_total", finished_reason=reason)
        assert found == expected, f"{reason}, seed {seed}"
    assert total("vllm:e2e_request_latency_seconds_count") == 3 * each
    assert total("vllm:request_generation_tokens_count") == 3 * each
    assert total("vllm:time_to_first_token_seconds_count") == 3 * each
    # Refused and odd requests make no new series.
    assert {name for name, _ in after} == {name for name, _ in before}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_mh_2_a_thousand_scrapes_under_load(box: Box) -> None:
    dice, seed = fresh()
    over = time.monotonic() + 60

    def load(number: int) -> None:
        own = random.Random(seed + number)
        while time.monotonic() < over:
            body = {
                "prompt": prose(own, 5),
                "max_tokens": own.randint(1, 40),
                "n": own.randint(1, 3),
            }
            with box.opened(COMPLETIONS, body) as lines:
                for _ in range(own.randint(1, 30)):
                    next(lines, None)

    threads = [threading.Thread(target=load, args=(n,), daemon=True) for n in range(6)]
    for thread in threads:
        thread.start()
    last = box.scrape()
    for _ in range(1000):
        now = box.scrape()
        check_scrape(now, last)
        last = now
        time.sleep(0.02)
    for thread in threads:
        thread.join(60)
    assert dice


def test_mh_4_a_large_body_holds_up_nobody(box: Box) -> None:
    """Words that no context could take, in bodies within the limit of 32 MiB."""
    bodies = []
    for size in (5, 27):
        text = ("the harbour of amber island " * (size * MIB // 28 + 1))[: size * MIB]
        message = [{"role": "user", "content": text}]
        bodies.append(json.dumps({"messages": message, "max_tokens": 4}).encode())
    stream = box.background("Far away", max_tokens=200, ignore_eos=True)
    answers: list[httpx.Response] = []
    sender = threading.Thread(
        target=lambda: answers.extend(box.post(CHAT, content=raw) for raw in bodies), daemon=True
    )
    sender.start()
    longest = 0.0
    while sender.is_alive():
        start = time.monotonic()
        assert box.http.get("/health").status_code == 200
        longest = max(longest, time.monotonic() - start)
        time.sleep(0.05)
    assert len(answers) == 2
    for reply in answers:
        check_refusal(reply, "messages")
    assert stream.events.ending() == "length"
    assert longest < 1
    assert stream.largest_gap < 1
