"""Opens a Hugging Face folder: config, generation config, tokenizer, template, safetensors.

Not for: GGUF files (`gguf_model.py`), or finding the folder (`checkpoint.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.checkpoint.affixes import set_affixes
from octavo.checkpoint.records import Checkpoint, TensorEntry, token_text
from octavo.checkpoint.safetensors_file import read_entries
from octavo.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INDEX = "model.safetensors.index.json"
# Tokenizer classes whose add_bos_token and add_eos_token override tokenizer.json.
REBUILT_CLASSES = frozenset(
    f"{family}Tokenizer{suffix}"
    for family in ("Llama", "CodeLlama", "Gemma")
    for suffix in ("", "Fast")
)


def open_folder(
    folder: Path, name: str, *, need_config: bool = True, weights: bool = True
) -> Checkpoint:
    """Opens `folder`; `weights=False` does not look for weights (`--load-format dummy`).

    Raises CheckpointError naming the file that is missing, damaged or unsupported.
    """
    config = read_json(folder / "config.json", missing_is_empty=not need_config)
    generation = read_json(folder / "generation_config.json", missing_is_empty=True)
    tokenizer_config = read_json(folder / "tokenizer_config.json", missing_is_empty=True)
    templates = read_chat_templates(folder, tokenizer_config)
    return Checkpoint(
        path=folder,
        kind="hf",
        name=name,
        config=config,
        generation=generation,
        chat_template=templates.get("default"),
        chat_templates=templates,
        tokenizer_config=tokenizer_config,
        tensors=read_folder_entries(folder) if weights else {},
    )


def read_json(file: Path, *, missing_is_empty: bool = False) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError with the file's name and the line of a mistake."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if missing_is_empty:
            return {}
        raise CheckpointError(
            f"{file} is missing: a model folder needs {file.name}; download it again"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: must hold a JSON object, not {type(value).__name__}")
    return value


def read_chat_templates(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Templates by name; the main one is "default". Files win over tokenizer_config.json."""
    templates: dict[str, str] = {}
    value = tokenizer_config.get("chat_template")
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        for item in value:
            if not (isinstance(item, dict) and isinstance(item.get("template"), str)):
                raise CheckpointError(
                    f"{folder / 'tokenizer_config.json'}: chat_template lists something that is "
                    'not {"name": ..., "template": ...}'
                )
            templates[str(item.get("name"))] = item["template"]
    elif value is not None:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be a string or a list, "
            f"not {type(value).__name__}"
        )
    if (folder / "chat_template.json").is_file():
        text = read_json(folder / "chat_template.json").get("chat_template")
        if isinstance(text, str):
            templates["default"] = text
    files = [folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*"))]
    for file in files:
        if file.is_file() and file.suffix == ".jinja":
            name = "default" if file.parent == folder else file.stem
            templates[name] = _read_text(file)
    return templates


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read as text: {error}") from error


def read_folder_entries(folder: Path) -> dict[str, TensorEntry]:
    """Tensors of model.safetensors, of the shards named by the index, or of all shards."""
    if (folder / INDEX).is_file():
        return _sharded_entries(folder)
    files = sorted(folder.glob("*.safetensors"))
    if (folder / "model.safetensors") in files:
        files = [folder / "model.safetensors"]
    if not files:
        old = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
        if old:
            raise CheckpointError(
                f"{old[0]}: pickled weights can run code when they are read, so they are not "
                "loaded; convert the model to safetensors"
            )
        raise CheckpointError(
            f"{folder}: has no model.safetensors, no {INDEX} and no GGUF file; download the "
            "model again, or use --load-format dummy for random weights"
        )
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_entries(file).items():
            if name in entries:
                raise CheckpointError(f"{name!r} is in {entries[name].file} and again in {file}")
            entries[name] = entry
    return entries


def _sharded_entries(folder: Path) -> dict[str, TensorEntry]:
    """The index maps each tensor to its shard; both sides must agree."""
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index}: {shard!r} is not the name of a file in this folder")
    missing = sorted({shard for shard in weight_map.values() if not (folder / shard).is_file()})
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of the shards named in {INDEX} are missing: "
            f"{', '.join(missing[:20])}; download the model again"
        )
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        for name, entry in read_entries(folder / shard).items():
            if weight_map.get(name) != shard:
                raise CheckpointError(
                    f"{folder / shard}: holds {name!r}, which {INDEX} places in "
                    f"{weight_map.get(name)!r}"
                )
            entries[name] = entry
    absent = [name for name in weight_map if name not in entries]
    if absent:
        raise CheckpointError(
            f"{index}: names {len(absent)} tensors that their shards do not hold: "
            f"{', '.join(absent[:20])}"
        )
    return entries


def load_folder_tokenizer(folder: Path, tokenizer_config: dict[str, Any]) -> Tokenizer:
    """tokenizer.json, with the begin and end tokens that tokenizer_config.json asks for."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        ranks = sorted([*folder.glob("*.tiktoken"), *folder.glob("tiktoken.model")])
        if ranks:  # ranks alone: where texts are split and what is special stands in code
            raise CheckpointError(
                f"{file} is missing, and {ranks[0].name} lacks how texts are split and which "
                "tokens are special; convert it with transformers "
                "(AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)), or name the "
                "folder of a converted one with --tokenizer"
            )
        hint = ""
        if (folder / "tokenizer.model").is_file():
            hint = " (tokenizer.model alone is not enough: convert it to tokenizer.json)"
        raise CheckpointError(f"{file} is missing{hint}; download the model again")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{file}: is not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer_config.get("tokenizer_class") in REBUILT_CLASSES:
        _set_affixes(tokenizer, tokenizer_config)
    return tokenizer


def _set_affixes(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Llama-like classes add begin and end tokens by flags, whatever tokenizer.json says."""
    if config.get("add_bos_token") is None and config.get("add_eos_token") is None:
        return
    first = token_text(config.get("bos_token")) if config.get("add_bos_token", True) else None
    last = token_text(config.get("eos_token")) if config.get("add_eos_token", False) else None
    set_affixes(tokenizer, first, last)
