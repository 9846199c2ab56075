"""Hugging Face folders: config, templates, special tokens, and names that can be opened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.checkpoint.checkpoint import open_checkpoint
from octavo.errors import CheckpointError
from tests.checkpoint.toys import (
    ToyGguf,
    expect_error,
    fresh_seed,
    llama_config,
    random_llama,
    write_hf,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "toy", random_llama(fresh_seed()))


def put(folder: Path, **values: object) -> None:
    """Changes tokenizer_config.json."""
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_folder_opens(folder: Path) -> None:
    opened = open_checkpoint(str(folder))
    assert (opened.kind, opened.name, opened.path) == ("hf", "toy", folder)
    assert opened.config == llama_config()
    assert opened.generation == {"eos_token_id": [2, 3]}
    assert opened.chat_template is None


def test_special_tokens(folder: Path) -> None:
    opened = open_checkpoint(str(folder))
    special = opened.special_tokens(opened.load_tokenizer())
    assert (special.bos_id, special.eos_ids, special.unk_id) == (1, (2, 3), 0)
    assert special.pad_id is None
    assert not special.add_bos
    assert special.ids == {0, 1, 2}
    assert special.texts == {"<unk>": 0, "<s>": 1, "</s>": 2}
    assert special.named == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_the_tokenizer_s_end_token_always_counts(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    opened = open_checkpoint(str(folder))
    assert opened.special_tokens(opened.load_tokenizer()).eos_ids == (2, 3)


def test_eos_comes_from_the_config_if_nothing_else_says(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    put(folder, eos_token=None)
    opened = open_checkpoint(str(folder))
    assert opened.special_tokens(opened.load_tokenizer()).eos_ids == (2,)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"add_bos_token": True}, [1, 4]),
        ({"add_bos_token": False, "add_eos_token": True}, [4, 2]),
        ({"add_eos_token": True}, [1, 4, 2]),
        ({}, [4]),
    ],
)
def test_llama_classes_add_tokens_by_flags(
    flags: dict[str, bool], expected: list[int], folder: Path
) -> None:
    put(folder, tokenizer_class="LlamaTokenizer", **flags)
    opened = open_checkpoint(str(folder))
    tokenizer = opened.load_tokenizer()
    assert tokenizer.encode("a").ids == expected
    assert tokenizer.encode("a", add_special_tokens=False).ids == [4]
    assert opened.special_tokens(tokenizer).add_bos == (expected[0] == 1)


def test_a_special_token_that_does_not_exist_is_named(folder: Path) -> None:
    put(folder, eos_token="<nowhere>")
    opened = open_checkpoint(str(folder))
    with pytest.raises(CheckpointError) as caught:
        opened.special_tokens(opened.load_tokenizer())
    expect_error(caught, "eos_token", "<nowhere>")


def test_template_as_string_list_and_file(folder: Path) -> None:
    put(folder, chat_template="one")
    assert open_checkpoint(str(folder)).chat_template == "one"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    put(folder, chat_template=named)
    opened = open_checkpoint(str(folder))
    assert opened.chat_templates == {"default": "two", "tool_use": "three"}
    (folder / "chat_template.jinja").write_text("four")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("five")
    opened = open_checkpoint(str(folder))
    assert opened.chat_template == "four"
    assert opened.chat_templates == {"default": "four", "tool_use": "three", "rag": "five"}


@pytest.mark.parametrize("value", [7, [1], [{"name": "x"}], {}])
def test_a_template_of_another_kind_is_refused(value: object, folder: Path) -> None:
    put(folder, chat_template=value)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder))
    expect_error(caught, "tokenizer_config.json", "chat_template")


@pytest.mark.parametrize("content", ["{", "[]", "1", "\ufeff{"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_broken_json_names_its_file(name: str, content: str, folder: Path) -> None:
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder))
    expect_error(caught, str(folder / name))


def test_missing_and_broken_files(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder)).load_tokenizer()
    expect_error(caught, str(folder / "tokenizer.json"))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder)).load_tokenizer()
    expect_error(caught, str(folder / "tokenizer.json"), "missing")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder))
    expect_error(caught, "model.safetensors", "dummy")
    assert open_checkpoint(str(folder), load_format="dummy").tensors == {}
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder), load_format="dummy")
    expect_error(caught, "config.json")
    assert open_checkpoint(str(folder), weights=False).generation


@pytest.mark.parametrize("name", ["nonsense", "", " ", "a/b/c", "/no/such/folder", "a\0b"])
def test_names_that_mean_nothing(name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(name)
    expect_error(caught, repr(name))


def test_a_gguf_in_a_folder(tmp_path: Path) -> None:
    tensors = random_llama(fresh_seed())
    file = ToyGguf().write(tmp_path / "a.gguf", tensors)
    opened = open_checkpoint(str(tmp_path))
    assert (opened.kind, opened.path) == ("gguf", file)
    assert open_checkpoint(str(file)).name == "a.gguf"
    with pytest.raises(CheckpointError):
        open_checkpoint(str(tmp_path), load_format="safetensors")
    with pytest.raises(CheckpointError):
        open_checkpoint(str(file), load_format="safetensors")
    ToyGguf().write(tmp_path / "b.gguf", tensors)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(tmp_path))
    expect_error(caught, "a.gguf", "b.gguf")
    write_hf(tmp_path, tensors)
    assert open_checkpoint(str(tmp_path)).kind == "hf"


@pytest.mark.parametrize("ranks", ["qwen.tiktoken", "tiktoken.model"])
def test_ranks_without_a_tokenizer_are_refused_with_the_remedy(folder: Path, ranks: str) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / ranks).write_text("IQ== 0\n")
    with pytest.raises(CheckpointError, match=f"{ranks} lacks .*save_pretrained"):
        open_checkpoint(str(folder)).load_tokenizer()


def test_load_format_and_revision_are_checked(folder: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder), load_format="pt")
    expect_error(caught, "'pt'", "safetensors")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder), load_format="gguf")
    expect_error(caught, "GGUF", "none")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder), revision="main")
    expect_error(caught, "revision")
