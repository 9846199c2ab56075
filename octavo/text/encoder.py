"""The program of an encoding process: texts in on standard input, token ids out.

Started by `pool.py` with the file of a tokenizer. Each message, both ways, is its length in eight
bytes (little-endian) and then UTF-8, or ids as packed i32. It ends with its input, so it never
outlives the server. Not for: special tokens at the start, which the server's own side adds.
"""

from __future__ import annotations

import sys
from array import array
from typing import BinaryIO

import tokenizers


def main() -> int:
    """Serves until the input ends."""
    backend = tokenizers.Tokenizer.from_file(sys.argv[1])
    while (text := _read(sys.stdin.buffer)) is not None:
        encoding = backend.encode_batch_fast([text.decode()], add_special_tokens=False)[0]
        ids = array("i", encoding.ids).tobytes()
        sys.stdout.buffer.write(len(ids).to_bytes(8, "little"))
        sys.stdout.buffer.write(ids)
        sys.stdout.buffer.flush()
        del encoding, ids, text
    return 0


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(8)
    size = int.from_bytes(head, "little")
    data = source.read(size)
    return data if len(head) == 8 and len(data) == size else None


if __name__ == "__main__":
    sys.exit(main())
