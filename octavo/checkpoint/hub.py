"""Hugging Face hub ids: the local cache first, then a download, and a clear word if neither works.

Not for: opening what was found (`checkpoint.py`). Needs the optional package huggingface_hub.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SMALL_FILES = ("*.json", "*.jinja")
LEFT_OUT = ("original/*", "onnx/*", "consolidated*", "*.bin", "*.pth")
LOOKUP_SECONDS = 8.0


def find_in_hub(
    model: str, *, revision: str | None, download_dir: Path | None, weights: bool
) -> Path:
    """Folder (or GGUF file) of hub model `model`.

    Raises CheckpointError if the package is missing, the id is unknown or the hub is out of
    reach; nothing is tried twice.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(
            f"{model!r} is not a folder or file here, and looking it up on the hub needs the "
            "package huggingface-hub: pip install 'octavo[hub]', or name a folder"
        ) from error
    options: dict[str, Any] = {"revision": revision, "cache_dir": download_dir}
    cached = _cached(huggingface_hub, model, options)
    if cached is not None and _complete(cached, weights):
        return _inside(cached)
    files = _files_in_hub(huggingface_hub, model, revision)
    patterns = [*SMALL_FILES, *(_weight_files(model, files) if weights else [])]
    try:
        folder = huggingface_hub.snapshot_download(
            model, allow_patterns=patterns, ignore_patterns=list(LEFT_OUT), **options
        )
    except Exception as error:  # network, disk and hub errors of many classes
        raise CheckpointError(
            f"{model!r}: the download from the hub failed ({_first_line(error)}); run it again, "
            "it goes on where it stopped"
        ) from error
    return _inside(Path(folder))


def _cached(library: Any, model: str, options: dict[str, Any]) -> Path | None:
    try:
        return Path(library.snapshot_download(model, local_files_only=True, **options))
    except Exception:  # not there, or half there: then it is fetched
        return None


def _complete(folder: Path, weights: bool) -> bool:
    """A snapshot may hold only some files of a model."""
    ggufs = list(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return True
    if not (folder / "config.json").is_file() or not (folder / "tokenizer.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not weights or not index.is_file():
        return not weights or any(folder.glob("*.safetensors"))
    from octavo.checkpoint.folder import read_json

    shards = set(read_json(index).get("weight_map", {}).values())
    return all((folder / str(shard)).is_file() for shard in shards)


def _inside(folder: Path) -> Path:
    ggufs = list(folder.glob("*.gguf"))
    if len(ggufs) == 1 and not (folder / "config.json").is_file():
        return ggufs[0]
    return folder


def _files_in_hub(library: Any, model: str, revision: str | None) -> list[str]:
    """Asks once what the model consists of, so that a wrong id or no network shows at once."""
    errors = library.errors
    try:
        info = library.HfApi().model_info(model, revision=revision, timeout=LOOKUP_SECONDS)
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{model!r} has no revision {revision!r} on the hub") from error
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{model!r} is gated: accept its terms on the hub, then run `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{model!r} is neither a folder or file here nor a model on the hub that you may see; "
            "check the spelling, or run `hf auth login` if it is private"
        ) from error
    except Exception as error:  # connection errors have no common class
        raise CheckpointError(
            f"{model!r} is not in the local cache and the hub is out of reach "
            f"({_first_line(error)}); connect to the network, or name a folder or GGUF file"
        ) from error
    return [sibling.rfilename for sibling in info.siblings or []]


def _weight_files(model: str, files: list[str]) -> list[str]:
    if any(name.endswith(".safetensors") and "/" not in name for name in files):
        return ["*.safetensors"]
    ggufs = [name for name in files if name.endswith(".gguf")]
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise CheckpointError(
            f"{model!r} holds {len(ggufs)} GGUF files ({', '.join(ggufs[:20])}): download the one "
            "you want and name its path"
        )
    raise CheckpointError(f"{model!r} has no safetensors or GGUF weights on the hub")


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
