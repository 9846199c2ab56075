"""Families: from an architecture's name to how its config and its tensors are read.

To add a family, write one file with a `spec_of` (see `llama.py`) and add a line to FAMILIES.
Imports no torch. Next file: `llama.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from octavo.errors import ConfigError
from octavo.models import deepseek, gemma, glm, gpt_oss, llama, mistral, moe, phi, qwen
from octavo.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture is read."""

    spec_of: Callable[[Mapping[str, object]], ModelSpec]
    # (dotted name of ours with the parameter, part) -> name in the checkpoint
    names: Callable[[str, str], str]
    ignored: tuple[str, ...] = ()  # patterns of whole checkpoint names
    ignored_if_tied: tuple[str, ...] = (r"lm_head\.weight",)  # a second copy of the embedding

    def ignored_names(self, spec: ModelSpec) -> tuple[str, ...]:
        """Patterns of checkpoint tensors that a model of `spec` has no use for."""
        first = spec.num_layers
        extra = tuple(
            rf"model\.layers\.{layer}\..*" for layer in range(first, first + spec.extra_layers)
        )
        return self.ignored + extra + (self.ignored_if_tied if spec.tied else ())


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": Family(deepseek.v2_spec, deepseek.names),
        "DeepseekV3ForCausalLM": Family(deepseek.v3_spec, deepseek.names),
        "Gemma2ForCausalLM": Family(gemma.gemma2_spec, gemma.names),
        "Gemma3ForCausalLM": Family(gemma.gemma3_spec, gemma.names),
        "Gemma3ForConditionalGeneration": Family(
            gemma.gemma3_text_spec,
            gemma.text_names,
            ignored=(r"vision_tower\..*", r"multi_modal_projector\..*"),
            ignored_if_tied=(r"language_model\.lm_head\.weight",),
        ),
        "Glm4ForCausalLM": Family(glm.glm4_spec, glm.names),
        "GlmForCausalLM": Family(glm.glm_spec, glm.first_names),
        "GptOssForCausalLM": Family(gpt_oss.gpt_oss_spec, gpt_oss.names),
        "LlamaForCausalLM": Family(llama.spec_of, llama.names),
        "MistralForCausalLM": Family(mistral.spec_of, llama.names),
        "Phi3ForCausalLM": Family(phi.phi3_spec, phi.names),
        "MixtralForCausalLM": Family(moe.mixtral_spec, moe.mixtral_names),
        "Qwen2ForCausalLM": Family(qwen.qwen2_spec, llama.names),
        "Qwen2MoeForCausalLM": Family(moe.qwen2_spec, moe.qwen_names),
        "Qwen3ForCausalLM": Family(qwen.qwen3_spec, llama.names),
        "Qwen3MoeForCausalLM": Family(moe.qwen3_spec, moe.qwen_names),
    }
)


def family_of(architecture: str) -> Family:
    """The family of that name; ConfigError with the known ones if there is none."""
    family = FAMILIES.get(architecture)
    if family is not None:
        return family
    near = difflib.get_close_matches(architecture, FAMILIES, n=1, cutoff=0.0)
    raise ConfigError(
        f"architecture {architecture!r} is not supported; known are {', '.join(FAMILIES)}; "
        f"the nearest is {near[0]}",
        "architectures",
    )


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """The spec of a parsed `config.json`, by its `architectures`. Raises ConfigError."""
    return family_of(architecture_of(config)).spec_of(config)


def architecture_of(config: Mapping[str, object]) -> str:
    """The one name under `architectures`. Raises ConfigError."""
    found = config.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], str):
        raise ConfigError(
            f"config.json: architectures ({found!r}) must be a list of one name, such as "
            "['LlamaForCausalLM']",
            "architectures",
        )
    return found[0]
