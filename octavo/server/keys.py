"""Who may call: keys with a name, scopes and a weight, from options or from a file.

The texts of keys are not kept, only their SHA-256; a given key is compared with all of them in
equal time. Not for: which route needs which scope (`auth.py`, the next file).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from octavo.errors import ConfigError

SCOPES: Final = ("inference", "metrics", "admin")
_FIELDS = ("key", "key_sha256", "name", "scopes", "weight", "share_cache")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Key:
    """One key. Several keys may have one name; their holder is one tenant."""

    name: str
    digest: bytes  # SHA-256 of its text
    scopes: frozenset[str] = frozenset(SCOPES)
    weight: float = 1.0  # of the tenant's share under --scheduling-policy fair
    share_cache: bool = True  # may meet others in the prefix cache

    def may(self, scope: str) -> bool:
        """True if it has the scope; admin has all, and an empty scope is everybody's."""
        return not scope or scope in self.scopes or "admin" in self.scopes


def digest_of(text: bytes) -> bytes:
    """SHA-256."""
    return hashlib.sha256(text).digest()


def keys_of(texts: Iterable[str]) -> tuple[Key, ...]:
    """Keys of `--api-key`: equal rights, named by their place."""
    return tuple(
        Key(f"key-{number}", digest_of(text.encode())) for number, text in enumerate(texts, 1)
    )


def find(keys: Iterable[Key], given: bytes) -> Key | None:
    """The key whose text is `given`; all are looked at, whichever it is."""
    digest, found = digest_of(given), None
    for key in keys:
        if hmac.compare_digest(digest, key.digest) and found is None:
            found = key
    return found


def read_keys(path: str) -> tuple[Key, ...]:
    """The keys in a TOML file (`[[keys]]`) or a JSON one (`{"keys": [...]}`).

    Fields: `name`, `key` or `key_sha256`, and if wanted `scopes`, `weight`, `share_cache` (false
    if left out: each name has a prefix cache of its own). Raises ConfigError.
    """
    loaded = _load(Path(path))
    entries = loaded.get("keys")
    if set(loaded) != {"keys"} or not isinstance(entries, list) or not entries:
        raise _wrong(path, "it must hold one list, keys, with at least one entry")
    keys = tuple(_key(path, number, entry) for number, entry in enumerate(entries, 1))
    if len({key.digest for key in keys}) != len(keys):
        raise _wrong(path, "a key is there twice")
    for key in keys:
        if any(key.weight != other.weight for other in keys if other.name == key.name):
            raise _wrong(path, f"the keys of {key.name} have different weights; they share one")
    return keys


def _wrong(path: str, problem: str) -> ConfigError:
    return ConfigError(f"--api-keys-file {path}: {problem}.", "api_keys_file")


def _load(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise _wrong(str(path), f"it cannot be read ({error})") from None
    try:
        loaded = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML (or name it .json)"
        raise _wrong(str(path), f"it is not {kind}: {error}") from None
    if not isinstance(loaded, dict):
        raise _wrong(str(path), "it must hold one list, keys")
    return loaded


def _key(path: str, number: int, entry: object) -> Key:
    if not isinstance(entry, dict):
        raise _wrong(path, f"entry {number} is not a table")
    if unknown := sorted(set(entry) - set(_FIELDS)):
        raise _wrong(path, f"entry {number}: {unknown[0]!r} is none of {', '.join(_FIELDS)}")
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(path, f"entry {number}: name must be 1 to 64 letters, digits, '.', '_' or '-'")
    return Key(
        name,
        _digest(path, name, entry),
        _scopes(path, name, entry.get("scopes", ["inference"])),
        _weight(path, name, entry.get("weight", 1.0)),
        _flag(path, name, entry.get("share_cache", False)),
    )


def _digest(path: str, name: str, entry: Mapping[str, Any]) -> bytes:
    text, hashed = entry.get("key"), entry.get("key_sha256")
    if (text is None) == (hashed is None):
        raise _wrong(path, f"{name}: give either key or key_sha256")
    if text is not None:
        if not isinstance(text, str) or len(text) < 8 or not text.isascii() or " " in text:
            raise _wrong(path, f"{name}: key must be at least 8 ASCII characters without spaces")
        return digest_of(text.encode())
    if not isinstance(hashed, str) or not _DIGEST.fullmatch(hashed):
        raise _wrong(path, f"{name}: key_sha256 must be 64 hexadecimal digits in small letters")
    return bytes.fromhex(hashed)


def _scopes(path: str, name: str, value: object) -> frozenset[str]:
    if not isinstance(value, list) or not value or any(one not in SCOPES for one in value):
        raise _wrong(path, f"{name}: scopes must be a list of {', '.join(SCOPES)}")
    return frozenset(value)


def _weight(path: str, name: str, value: object) -> float:
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not 0.01 <= number <= 100:
        raise _wrong(path, f"{name}: weight must be a number from 0.01 to 100")
    return float(number)


def _flag(path: str, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(path, f"{name}: share_cache must be true or false")
    return value
