"""Whether a model can be spread over so many ranks, and over how many it can be.

Pure arithmetic on the spec. Not for: cutting anything, which each layer does itself (`layers/`).
Next file: `load.py`.
"""

from __future__ import annotations

from octavo.errors import ConfigError
from octavo.models.spec import ModelSpec


def check_sizes(spec: ModelSpec, tensor: int, pipeline: int) -> None:
    """Raises ConfigError if the model cannot be spread over `tensor` ranks and `pipeline` stages.

    Heads, key/value heads and the widths of MLPs and experts are shared evenly, or with fewer
    key/value heads than ranks, copied evenly. The vocabulary may be uneven.
    """
    problem = uneven(spec, tensor)
    if problem:
        sizes = ", ".join(str(size) for size in even_sizes(spec))
        raise ConfigError(
            f"tensor_parallel_size is {tensor}: {problem}; sizes that divide this model are "
            f"{sizes}. More devices can be used with --pipeline-parallel-size or "
            "--data-parallel-size.",
            "tensor_parallel_size",
        )
    if pipeline > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {pipeline}: the model has {spec.num_layers} layers, and "
            f"each stage needs one; use at most {spec.num_layers}.",
            "pipeline_parallel_size",
        )


def even_sizes(spec: ModelSpec) -> list[int]:
    """All numbers of ranks that the model's layers can be shared over."""
    return [size for size in range(1, spec.num_heads + 1) if not uneven(spec, size)]


def uneven(spec: ModelSpec, ranks: int) -> str:
    """What `ranks` ranks cannot share evenly; empty if they can share all."""
    if spec.num_heads % ranks:
        return f"its {spec.num_heads} attention heads are no multiple of it"
    heads = spec.num_kv_heads
    if spec.latent is None and heads % ranks and ranks % heads:
        return f"its {heads} key/value heads neither divide nor are divided by it"
    for name, width in _widths(spec):
        if width % ranks:
            return f"the width of its {name}, {width}, is no multiple of it"
    return ""


def _widths(spec: ModelSpec) -> list[tuple[str, int]]:
    moe = spec.moe
    widths: list[tuple[str, int]] = []
    if moe is None or not all(moe.layers):
        widths.append(("MLP", spec.intermediate_size))
    if moe is not None:
        widths.append(("experts", moe.intermediate_size))
        if moe.shared_size:
            widths.append(("shared experts", moe.shared_size))
    return widths
