"""A device that hangs: health says so, the log shows where, and both end when it moves again."""

from __future__ import annotations

import asyncio
import logging
import sys
import time

import pytest

from octavo.admission import Admission
from octavo.config import SchedulerConfig, WorkerConfig
from octavo.launch import watch_stalls
from octavo.obs.metrics import Metrics
from octavo.sampling_params import SamplingParams
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings
from octavo.supervisor import Supervisor
from octavo.text_engine import TextEngine
from tests.server.asgi import call
from tests.text.samples import chat_tokenizer

LIMIT = 0.6
HANG = 2.5


async def until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within the time"
        await asyncio.sleep(0.02)


async def test_a_hang_is_seen_and_shown(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "octavo")
    supervisor = Supervisor(
        WorkerConfig("none"),
        SchedulerConfig(0, 0, 0, 4, 32),
        program=(sys.executable, "-m", "tests.front.stuck_core", str(HANG)),
    )
    await supervisor.start()
    watch = asyncio.create_task(watch_stalls(supervisor, LIMIT))
    try:
        await supervisor.ready()
        engine = TextEngine(
            supervisor,
            tokenizer=chat_tokenizer(),
            chat_template=None,
            model_names=("m",),
            max_logprobs=5,
            admission=Admission(4, 4),
            metrics=Metrics("m", max_model_len=64),
            generation_defaults={},
            settings=[],
        )
        app = create_app(engine, ServerSettings(stall_limit=LIMIT))

        async def statuses() -> list[int]:
            paths = ("live", "ready", "progress")
            return [(await call(app, "GET", f"/health/{path}")).status for path in paths]

        assert await statuses() == [200, 200, 200]
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        deltas = engine.generate([5, 6, 7], params, request_id="r", arrival=time.monotonic())
        answer = asyncio.create_task(anext_all(deltas))
        await until(lambda: engine.health.stalled_for > LIMIT)
        assert await statuses() == [200, 503, 503]
        reason = (await call(app, "GET", "/health/progress")).json["reason"]
        assert "no progress" in reason
        await until(lambda: "event=stalled" in caplog.text)
        shown = ""

        def seen() -> bool:
            nonlocal shown
            shown += capfd.readouterr().err
            return "the_device_does_not_answer" in shown

        await until(seen)
        assert "heartbeat" in shown or "_beat" in shown  # all threads, not the main one alone
        assert await answer == 12  # nothing was lost by it
        await until(lambda: "event=moving_again" in caplog.text)
        assert await statuses() == [200, 200, 200]
        assert caplog.text.count("event=stalled") == 1
    finally:
        watch.cancel()
        await supervisor.stop()


async def anext_all(deltas) -> int:
    """Tokens of an answer."""
    return sum([len(delta.token_ids) async for delta in deltas])
