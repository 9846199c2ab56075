"""What is loaded with what: looked at in a fresh interpreter, not read off the source."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import octavo

HEAVY = ("torch", "transformers", "triton", "ray", "vllm")
TORCH_FREE = [
    "octavo",
    "octavo.async_engine",
    "octavo.checkpoint.checkpoint",
    "octavo.checkpoint.pull",
    "octavo.cli.chat",
    "octavo.cli.serve",
    "octavo.core",
    "octavo.engine.client",
    "octavo.engine.core",
    "octavo.engine.process",
    "octavo.engine.scheduler",
    "octavo.frontend",
    "octavo.launch",
    "octavo.obs.metrics",
    "octavo.options",
    "octavo.resolve",
    "octavo.sampling_params",
    "octavo.server.app",
    "octavo.supervisor",
    "octavo.text.assembler",
    "octavo.text.chat",
    "octavo.text.tokenizer",
    "octavo.text_engine",
]


def loaded_with(module: str) -> set[str]:
    """All modules in memory after `import module`."""
    script = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("module", TORCH_FREE)
def test_rooms_of_the_api_process_load_no_torch(module: str) -> None:
    roots = {name.partition(".")[0] for name in loaded_with(module)}
    assert roots.isdisjoint(HEAVY)


def test_the_package_loads_nothing_heavy() -> None:
    loaded = loaded_with("octavo")
    assert [name for name in loaded if name.startswith("octavo")] == ["octavo"]
    assert loaded.isdisjoint({"numpy", "msgspec", "asyncio", "tokenizers", "httpx", "zmq"})


def test_the_scheduler_needs_few_modules_of_ours() -> None:
    ours = sorted(n for n in loaded_with("octavo.engine.scheduler") if n.startswith("octavo."))
    real = [name for name in ours if name != "octavo.engine"]
    assert len(real) <= 8, real


@pytest.mark.parametrize("name", [name for name in octavo.__all__ if name != "__version__"])
def test_public_names_can_be_imported(name: str) -> None:
    value = getattr(octavo, name)
    assert name in ("AsyncEngineArgs", "PromptType") or value.__name__ == name
    assert name in dir(octavo)


def test_public_names() -> None:
    assert set(octavo.__all__) == {
        *("LLM", "LLMEngine", "AsyncLLMEngine", "AsyncEngineArgs", "EngineArgs", "SamplingParams"),
        *("StructuredOutputs", "RequestOutput", "CompletionOutput", "TextPrompt", "TokensPrompt"),
        *("EmbeddingRequestOutput", "PoolingParams", "PromptType", "__version__"),
    }
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = octavo.Nonsense
