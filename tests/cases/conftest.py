"""Three servers for all cases, in float32, and the check after each case that they are well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers

from octavo.checkpoint.checkpoint import open_checkpoint
from tests.cases.client import Box
from tests.e2e.servers import serving

FLOAT32 = ("--dtype", "float32", "--served-model-name", "small", "--max-num-batched-tokens", "512")
KEY = "sk-cases"
# Refuses the system role, and is otherwise the model's own without the default text.
REFUSING = (
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('no system role in this house') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/cases/" in item.nodeid:
            item.add_marker(pytest.mark.model)


@pytest.fixture(scope="session")
def box(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """The default: context 2,048, 10,240 tokens of KV cache, 16 sequences."""
    flags = ("--max-model-len", "2048", "--num-gpu-blocks-override", "640", "--max-num-seqs", "16")
    flags += ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    log = tmp_path_factory.mktemp("box") / "log"
    with serving(smollm2_gguf, log, *FLOAT32, *flags) as server:
        yield Box(server)


@pytest.fixture(scope="session")
def tiny(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """A pool of 40 blocks, which eight sequences soon outgrow."""
    flags = ("--max-model-len", "512", "--num-gpu-blocks-override", "40", "--max-num-seqs", "8")
    log = tmp_path_factory.mktemp("tiny") / "log"
    with serving(smollm2_gguf, log, *FLOAT32, *flags) as server:
        yield Box(server)


@pytest.fixture(scope="session")
def edge(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """Context 512, no prefix cache, a key, a template that refuses the system role."""
    folder = tmp_path_factory.mktemp("edge")
    template = folder / "refusing.jinja"
    template.write_text(REFUSING)
    flags = ("--max-model-len", "512", "--num-gpu-blocks-override", "256", "--max-num-seqs", "8")
    more = ("--no-enable-prefix-caching", "--api-key", KEY, "--chat-template", str(template))
    with serving(smollm2_gguf, folder / "log", *FLOAT32, *flags, *more) as server:
        yield Box(server, KEY)


@pytest.fixture(autouse=True)
def alive(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each case its servers answer, and hold nothing of it."""
    used = [
        request.getfixturevalue(n) for n in ("box", "tiny", "edge") if n in request.fixturenames
    ]
    yield
    for server in used:
        server.check_alive()


@pytest.fixture(scope="session")
def reference(smollm2_gguf: Path) -> tokenizers.Tokenizer:
    """The tokenizer library itself, for counts to compare with."""
    return open_checkpoint(str(smollm2_gguf)).load_tokenizer()


SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def render(*messages: tuple[str, str], default: bool = True) -> str:
    """The model's chat template, written by hand."""
    if default and messages[0][0] != "system":
        messages = (("system", SYSTEM), *messages)
    turns = (f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    return "".join(turns) + "<|im_start|>assistant\n"


def count(tokenizer: tokenizers.Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)
