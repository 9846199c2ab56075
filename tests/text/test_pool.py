"""Very long texts are encoded in other processes, to the same ids."""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
from array import array
from pathlib import Path

import pytest

from octavo.errors import RequestFailed
from octavo.text.pool import EncoderPool
from octavo.text.tokenizer import PROCESS_FROM
from tests.text.samples import CORPUS, chat_tokenizer


def long_text(size: int) -> str:
    seed = random.randrange(2**32)
    print("seed", seed)
    dice = random.Random(seed)
    parts = [*CORPUS, "\0", "🦉👩‍🚀", "  ", "\r\n", "<|im_end|>"]
    made = "".join(dice.choices(parts, k=size // 20))
    return (made * (size // len(made) + 1))[:size]


async def test_ids_are_those_of_the_tokenizer() -> None:
    tokenizer = chat_tokenizer(add_bos=True)
    pool = EncoderPool(tokenizer)
    try:
        texts = ["", "a", long_text(200_000), long_text(5000)]
        found = await asyncio.gather(*map(pool.encode, texts))
        for text, ids in zip(texts, found, strict=True):
            assert ids.tolist() == tokenizer.encode(text, False)
        assert 1 <= len(pool._all) <= 2
    finally:
        await pool.close()
    assert not pool._all


async def test_only_the_longest_texts_go_there() -> None:
    tokenizer = chat_tokenizer(add_bos=True)
    asked = []

    async def elsewhere(text: str) -> array[int]:
        asked.append(text)
        return array("i", tokenizer.encode(text, False))

    tokenizer.send_long_texts(elsewhere)
    short, long = long_text(20_000), long_text(PROCESS_FROM)
    assert await tokenizer.encode_async(short) == tokenizer.encode(short)
    ids = await tokenizer.encode_async(long)
    assert isinstance(ids, list)
    assert ids == tokenizer.encode(long)
    packed = await tokenizer.encode_packed("<|im_start|>" + long)
    assert isinstance(packed, array)
    assert packed[:1].tolist() == [1] != packed[1:2].tolist()  # not twice
    assert asked == [long, "<|im_start|>" + long]


async def test_a_lost_process_fails_one_text() -> None:
    tokenizer = chat_tokenizer()
    pool = EncoderPool(tokenizer, processes=1)
    try:
        assert (await pool.encode("ab")).tolist() == tokenizer.encode("ab")
        for process in pool._all:
            process.kill()
        with pytest.raises(RequestFailed):
            await pool.encode("ab")
        assert (await pool.encode("ab")).tolist() == tokenizer.encode("ab")
        task = asyncio.create_task(pool.encode(long_text(300_000)))
        await asyncio.sleep(0.05)
        task.cancel()  # what it would still have answered is not taken for another's ids
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await pool.encode("abc")).tolist() == tokenizer.encode("abc")
    finally:
        await pool.close()


async def test_nothing_is_left_of_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pool = EncoderPool(chat_tokenizer(), processes=2)
    try:
        await asyncio.gather(pool.encode("a"), pool.encode("b"))
        assert list(tmp_path.iterdir()) == [], "nor while it is in use"
    finally:
        await pool.close()


async def test_processes_without_work_end() -> None:
    pool = EncoderPool(chat_tokenizer(), idle_seconds=0.05)
    try:
        await pool.encode("a")
        assert len(pool._all) == 1
        while pool._all:
            await asyncio.sleep(0.01)
        assert len(await pool.encode("a")) == 1
    finally:
        await pool.close()


async def test_no_process_finds_half_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chat_tokenizer(add_bos=False)
    pool = EncoderPool(tokenizer)
    writing, go_on = threading.Event(), threading.Event()

    class Slow:
        def save(self, name: str, pretty: bool) -> None:
            writing.set()
            go_on.wait()
            whole.save(name, pretty=pretty)

    whole = tokenizer.backend
    monkeypatch.setattr(tokenizer, "backend", Slow())
    preparing = asyncio.create_task(asyncio.to_thread(pool.prepare))
    try:
        await asyncio.to_thread(writing.wait)
        text = long_text(1000)
        encoding = asyncio.create_task(pool.encode(text))
        await asyncio.sleep(0.2)
        go_on.set()
        ids = await encoding
        assert ids.tolist() == whole.encode(text, add_special_tokens=False).ids
    finally:
        go_on.set()
        await preparing
        await pool.close()
