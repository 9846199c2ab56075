"""Octavo: an LLM serving engine.

`LLM` generates offline, `AsyncLLMEngine` in an event loop, `octavo serve` over HTTP. Names are
loaded when they are first used, so importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.async_engine import AsyncLLMEngine
    from octavo.grammar.request import StructuredOutputs
    from octavo.llm import LLM
    from octavo.llm_engine import LLMEngine
    from octavo.options import AsyncEngineArgs, EngineArgs
    from octavo.outputs import CompletionOutput, EmbeddingRequestOutput, RequestOutput
    from octavo.pooling import PoolingParams
    from octavo.prompts import PromptType, TextPrompt, TokensPrompt
    from octavo.sampling_params import SamplingParams

__version__ = "0.1.0"

_HOME = {
    "LLM": "octavo.llm",
    "LLMEngine": "octavo.llm_engine",
    "AsyncLLMEngine": "octavo.async_engine",
    "AsyncEngineArgs": "octavo.options",
    "EngineArgs": "octavo.options",
    "SamplingParams": "octavo.sampling_params",
    "StructuredOutputs": "octavo.grammar.request",
    "RequestOutput": "octavo.outputs",
    "EmbeddingRequestOutput": "octavo.outputs",
    "PoolingParams": "octavo.pooling",
    "CompletionOutput": "octavo.outputs",
    "PromptType": "octavo.prompts",
    "TextPrompt": "octavo.prompts",
    "TokensPrompt": "octavo.prompts",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "PoolingParams",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
