"""Makes a tokenizer add a begin or an end token of its own. Not for: building tokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def set_affixes(tokenizer: Tokenizer, first: str | None, last: str | None) -> None:
    """Encoding a text will put `first` before and `last` behind it; None puts nothing.

    Raises CheckpointError if the tokenizer does not know one of them.
    """
    from tokenizers.processors import ByteLevel, TemplateProcessing

    texts = [text for text in (first, last) if text is not None]
    if not texts:
        tokenizer.post_processor = ByteLevel(trim_offsets=False)
        return
    pairs: list[tuple[str, int]] = []
    for text in dict.fromkeys(texts):
        number = tokenizer.token_to_id(text)
        if number is None:
            raise CheckpointError(f"the tokenizer does not know {text!r}, which it is told to add")
        pairs.append((text, number))

    def around(sequence: str, kind: int) -> list[str]:
        parts = (first, sequence, last)
        return [f"{part}:{kind}" for part in parts if part is not None]

    tokenizer.post_processor = TemplateProcessing(
        single=around("$A", 0), pair=[*around("$A", 0), *around("$B", 1)], special_tokens=pairs
    )
