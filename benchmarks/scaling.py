"""The paper model of `docs/scaling.md`: what a decode step should take on so many GPUs.

    python benchmarks/scaling.py

Bytes, operations, link speeds and the host's measured cost, and nothing that was measured on the
GPUs themselves: a forecast to hold measurements against. Prints the document's table.
"""

from __future__ import annotations

from dataclasses import dataclass

GB, TB, US = 1e9, 1e12, 1e-6


@dataclass(frozen=True)
class Gpu:
    """An H100 SXM, and the share of its figures that good kernels reach."""

    memory: float = 80 * GB
    rate: float = 0.8 * 3.35 * TB  # bytes a second
    flops: float = 0.6 * 989e12
    launch: float = 3 * US  # of a kernel inside a graph, and what else stands between two
    kernels: int = 8  # of a layer
    usable: float = 0.92


@dataclass(frozen=True)
class Links:
    """Between the GPUs of a node (NVLink 4) and between nodes (400 Gb/s a GPU)."""

    node: float = 300 * GB  # of 450, each way, that an all-reduce reaches
    node_start: float = 12 * US  # of a small all-reduce over 8
    net: float = 40 * GB  # of 50
    net_start: float = 15 * US


@dataclass(frozen=True)
class Host:
    """Measured: planning and committing (docs/log.md), messages (benchmarks/messages.py)."""

    plan: float = 2.3 * US  # a row
    fixed: float = 20 * US
    message: float = 70 * US
    message_row: float = 0.1 * US


@dataclass(frozen=True)
class Model:
    """A decoder in bf16. Sizes in numbers of weights."""

    name: str
    layers: int
    hidden: int
    dense: float  # of all layers but routed experts, and the head
    kv: float  # numbers a token and layer
    kv_shared: bool = False  # every rank has all of them (latents)
    experts: int = 0
    top: int = 0
    expert: float = 0.0  # weights of one
    sparse: int = 0  # layers with experts

    def weights(self) -> float:
        return self.dense + self.experts * self.expert * self.sparse

    def read(self, rows: int) -> float:
        """Weights that a step of so many rows reads: of experts, those that some row goes to."""
        if not self.experts:
            return self.dense
        touched = self.experts * (1 - (1 - self.top / self.experts) ** rows)
        return self.dense + touched * self.expert * self.sparse

    def active(self) -> float:
        return self.dense + self.top * self.expert * self.sparse


MODELS = (
    Model("Llama-3.1-8B", 32, 4096, 7.5e9, 2 * 8 * 128),
    Model("Llama-3.1-70B", 80, 8192, 69.5e9, 2 * 8 * 128),
    Model(
        *("DeepSeek-V2.5", 60, 5120, 13.0e9, 576),
        kv_shared=True,
        experts=160,
        top=6,
        expert=3 * 5120 * 1536,
        sparse=59,
    ),
)
GRIDS = ((1, 1, 1), (8, 1, 1), (8, 4, 1), (8, 1, 4))  # tensor, stages, copies
ROWS = (1, 64, 512)  # of all copies together
CONTEXT = 2048
HEADS = ("rows", "bytes", "all-reduce", "launches", "host", "gap", "tok/s")


@dataclass(frozen=True)
class Step:
    """A decode step of one copy, in seconds."""

    memory: float
    compute: float
    reduce: float
    launch: float
    hop: float
    host: float

    @property
    def device(self) -> float:
        return max(self.memory, self.compute) + self.reduce + self.launch


def step_of(model: Model, tensor: int, stages: int, rows: int) -> Step:
    """Of one stage: a pipeline has as many such steps in flight, each of its share of the rows."""
    gpu, links, host = Gpu(), Links(), Host()
    held = rows / stages  # rows of one step in flight
    part = 1 / (tensor * stages)
    kv = model.layers / stages * held * CONTEXT * model.kv * 2
    kv = kv if model.kv_shared else kv / tensor
    layers = model.layers / stages
    reduce = 0.0
    if tensor > 1:
        size = held * model.hidden * 2
        each = links.node_start + 2 * (tensor - 1) / tensor * size / links.node
        reduce = 2 * layers * each
    hop = links.net_start + held * model.hidden * 2 / links.net if stages > 1 else 0.0
    messages = host.message + host.message_row * held if tensor * stages > 1 else 0.0
    return Step(
        memory=(2 * model.read(max(1, round(held))) * part + kv) / gpu.rate,
        compute=2 * model.active() * held * part / gpu.flops,
        reduce=reduce,
        launch=layers * gpu.kernels * gpu.launch,
        hop=hop,
        host=host.fixed + host.plan * held + messages,
    )


def fits(model: Model, tensor: int, stages: int, rows: int) -> bool:
    gpu = Gpu()
    kv = model.layers / stages * rows * CONTEXT * model.kv * 2
    kv = kv if model.kv_shared else kv / tensor
    return 2 * model.weights() / (tensor * stages) + kv < gpu.usable * gpu.memory - 2 * GB


def line(model: Model, grid: tuple[int, int, int], rows: int) -> str:
    tensor, stages, copies = grid
    count = tensor * stages * copies
    name = f"| {model.name} | {count} = {tensor} x {stages} x {copies} | {rows} |"
    own = max(1, rows // copies)
    if not fits(model, tensor, stages, own):
        return f"{name} does not fit | | | | | |"
    step = step_of(model, tensor, stages, own)
    if stages == 1:
        # With several workers planning and computing take turns; one overlaps them.
        host = step.host if tensor > 1 else max(0.0, step.host - step.device)
        gap = step.device + host
    else:
        # A token passes all stages; meanwhile the others compute steps of other rows.
        gap = max(stages * (step.device + step.hop), step.host * stages)
    rate = own * copies / gap
    ms = [1e3 * one for one in (step.memory, step.reduce, step.launch, step.host, gap)]
    return f"{name} " + " | ".join(f"{one:.2f}" for one in ms) + f" | {rate:,.0f} |"


def main() -> None:
    print(f"| {' | '.join(('model', 'GPUs = TP x PP x DP', *HEADS))} |")
    print(f"| --- | --- |{' ---: |' * len(HEADS)}")
    for model in MODELS:
        for grid in GRIDS:
            for rows in ROWS:
                print(line(model, grid, rows))


if __name__ == "__main__":
    main()
