"""`EncoderPool`: encodes very long texts in processes of their own.

The library frees the interpreter while it encodes, but not while its result becomes a list and is
freed: a quarter of a second for a text of 18 MB, in which a server answers nobody. So such texts
go to another process, and their ids come back as bytes. A process is started when it is first
needed and ends after a while without work. Not for: prompts of a usual length, for which a thread
will do (`tokenizer.py`). Next file: `encoder.py`, the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import threading
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass

from octavo.errors import RequestFailed
from octavo.text.tokenizer import Tokenizer

PROCESSES = 2  # at most; a text that finds all at work waits
IDLE_SECONDS = 60.0  # after which a process without work ends
READ_AHEAD = 2**20  # bytes


@dataclass(slots=True)
class _Worker:
    process: asyncio.subprocess.Process
    ending: asyncio.TimerHandle | None = None  # while it has no work


class EncoderPool:
    """Belongs to one event loop. `close` ends what runs."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        processes: int = PROCESSES,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._tokenizer = tokenizer
        self._idle_seconds = idle_seconds
        self._turns = asyncio.Semaphore(processes)
        self._file: int | None = None  # a descriptor: the file has no name, and nothing is left
        self._preparing = threading.Lock()  # a process must not find half a file
        self._idle: list[_Worker] = []
        self._all: set[asyncio.subprocess.Process] = set()

    def prepare(self) -> None:
        """Writes the tokenizer down for the processes; holds the interpreter for a moment.

        Nothing is left of the file if this process is killed.
        """
        with self._preparing:
            if self._file is None:
                handle, name = tempfile.mkstemp(prefix="octavo-", suffix=".tokenizer.json")
                try:
                    self._tokenizer.backend.save(name, pretty=False)
                except BaseException:
                    os.close(handle)
                    raise
                finally:
                    os.unlink(name)
                self._file = handle

    async def encode(self, text: str) -> array[int]:
        """Token ids of a text as i32. Raises RequestFailed if the process is lost."""
        async with self._turns:
            worker = self._idle.pop() if self._idle else await self._start()
            if worker.ending is not None:
                worker.ending.cancel()
            try:
                data = await self._ask(worker.process, text.encode())
            except BaseException as error:  # what it would still answer must not be read by others
                await self._end(worker.process)
                if isinstance(error, (OSError, EOFError)):
                    raise RequestFailed(
                        "The text could not be encoded: its process died."
                    ) from None
                raise
            later = asyncio.get_running_loop().call_later
            worker.ending = later(self._idle_seconds, self._retire, worker)
            self._idle.append(worker)
        return array("i", data)

    async def close(self) -> None:
        """Ends all processes and frees the file."""
        for worker in self._idle:
            if worker.ending is not None:
                worker.ending.cancel()
        self._idle.clear()
        for process in tuple(self._all):
            await self._end(process)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    async def _start(self) -> _Worker:
        await asyncio.to_thread(self.prepare)
        assert self._file is not None, "it has been prepared"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "octavo.text.encoder", f"/dev/fd/{self._file}"),
            pass_fds=(self._file,),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=READ_AHEAD,
        )
        self._all.add(process)
        return _Worker(process)

    async def _ask(self, process: asyncio.subprocess.Process, text: bytes) -> bytes:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(len(text).to_bytes(8, "little"))
        process.stdin.write(text)
        await process.stdin.drain()
        size = int.from_bytes(await process.stdout.readexactly(8), "little")
        return await process.stdout.readexactly(size)

    def _retire(self, worker: _Worker) -> None:
        """Ends a process that has had no work for a while, by ending its input."""
        self._idle.remove(worker)
        self._all.discard(worker.process)
        if worker.process.stdin is not None:
            worker.process.stdin.close()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        self._all.discard(process)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def long_texts(tokenizer: Tokenizer) -> AsyncIterator[None]:
    """Within it, `tokenizer` sends its longest texts to a pool."""
    pool = EncoderPool(tokenizer)
    tokenizer.send_long_texts(pool.encode)
    preparing = asyncio.create_task(asyncio.to_thread(pool.prepare))
    try:
        yield
    finally:
        await preparing
        await pool.close()
