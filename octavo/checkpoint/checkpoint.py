"""open_checkpoint: from what a person typed to an opened model. Torch-free.

Not for: what is in a Checkpoint (`records.py`), or fetching the bundled model (`pull.py`).
Next file: `folder.py`.
"""

from __future__ import annotations

from pathlib import Path

from octavo.checkpoint.folder import open_folder
from octavo.checkpoint.gguf_model import open_gguf
from octavo.checkpoint.hub import HUB_ID, find_in_hub
from octavo.checkpoint.pull import REGISTRY, pulled_path
from octavo.checkpoint.records import Checkpoint, Encoding, SpecialTokens, TensorEntry
from octavo.errors import CheckpointError

__all__ = ["Checkpoint", "Encoding", "SpecialTokens", "TensorEntry", "open_checkpoint"]
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


def open_checkpoint(
    model: str,
    *,
    revision: str | None = None,
    download_dir: Path | None = None,
    cache_dir: Path | None = None,
    load_format: str = "auto",
    weights: bool = True,
) -> Checkpoint:
    """Opens a folder, a GGUF file, a pulled model's short name, or a hub id such as "org/name".

    `revision` and `download_dir` are for hub ids, `cache_dir` is where `pull` keeps models.
    With load_format "dummy" no weights need to be there; with `weights=False` a folder needs no
    config.json either (a folder of a tokenizer alone). Reads headers only. Raises CheckpointError
    that names the file or model and what to do.
    """
    if load_format not in LOAD_FORMATS:
        raise CheckpointError(
            f"load format {load_format!r} is not known; use one of {', '.join(LOAD_FORMATS)}"
        )
    if not model.strip() or "\0" in model:
        raise CheckpointError(f"{model!r} is not the name of a model")
    path, name = _locate(
        model,
        revision=revision,
        download_dir=download_dir,
        cache_dir=cache_dir,
        weights=weights and load_format != "dummy",
    )
    return _open(path, name, load_format, weights)


def _locate(
    model: str,
    *,
    revision: str | None,
    download_dir: Path | None,
    cache_dir: Path | None,
    weights: bool,
) -> tuple[Path, str]:
    """(path, name) of what `model` means; paths win over names."""
    path = Path(model).expanduser()
    if path.exists():
        if revision is not None:
            raise CheckpointError(
                f"revision {revision!r} is for hub ids; {model!r} is a local path"
            )
        return path, path.resolve().name
    if model in REGISTRY:
        pulled = pulled_path(model, cache_dir=cache_dir)
        if pulled is None:
            raise CheckpointError(f"{model!r} is not here yet: run `octavo pull {model}`")
        return pulled, model
    if HUB_ID.fullmatch(model):
        found = find_in_hub(model, revision=revision, download_dir=download_dir, weights=weights)
        return found, model
    raise CheckpointError(
        f"{model!r} is not a folder or GGUF file here, nor a hub id like org/name, nor one of the "
        f"models that `octavo pull` knows ({', '.join(REGISTRY)})"
    )


def _open(path: Path, name: str, load_format: str, weights: bool) -> Checkpoint:
    if path.is_file():
        if load_format == "safetensors":
            raise CheckpointError(
                f"{path} is a single file; load format safetensors needs a folder"
            )
        if path.suffix == ".safetensors":
            raise CheckpointError(f"{path}: name the folder it lies in; its config.json is needed")
        return open_gguf(path, name)
    ggufs = sorted(path.glob("*.gguf"))
    if load_format == "gguf" or (ggufs and not (path / "config.json").is_file()):
        if load_format == "safetensors":
            raise CheckpointError(f"{path} has no config.json; it holds {ggufs[0].name}")
        if len(ggufs) != 1:
            found = ", ".join(file.name for file in ggufs[:20]) or "none"
            raise CheckpointError(
                f"{path}: must hold exactly one GGUF file to be opened as one, found: {found}; "
                "name the file itself"
            )
        return open_gguf(ggufs[0], name)
    if not weights:
        return open_folder(path, name, need_config=False, weights=False)
    return open_folder(path, name, weights=load_format != "dummy")
