"""Each family on the GPU's kernels equals transformers, however its tokens are computed.

Tiny random models. In f32: logits by relative error of their norm, and 32 greedy tokens, whole, in
chunks, after a prefix hit, and in one batch. In bf16 and f16: rounding takes no more from the
logits than it does in transformers. Under Triton's interpreter a few cases stand for all.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from octavo.models.registry import read_spec
from tests.gpu.measure import distance

pytest.importorskip("triton")
pytest.importorskip("transformers")

from tests.models.driver import Row, start
from tests.models.twins import CASES, make_twin, shared_twin

COUNT = 32
EXACT = 1e-5  # relative error of logits in f32
BOUND = 2.0  # of our distance from f32 over that of transformers in the same dtype
INTERPRETED = ("qwen3-moe", "deepseek-v2", "deepseek-v3")
# Heads that the kernels do not serve: there the backend in plain torch runs on the GPU.
cases = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def _quick(device: torch.device, request: pytest.FixtureRequest) -> None:
    case = request.node.callspec.params.get("case")
    if device.type != "cuda" and case not in INTERPRETED:
        pytest.skip("takes too long without a GPU")


@pytest.fixture(autouse=True)
def _whole_products() -> None:
    """No product of f32 in fewer bits."""
    torch.backends.cuda.matmul.allow_tf32 = False


@cases
def test_logits(device: torch.device, seed: int, case: str) -> None:
    twin = shared_twin(case)
    where = str(device)
    block_size = random.Random(seed).choice([16, 32, 64, 128])
    driver = start(
        read_spec(twin.config),
        twin.state,
        "triton",
        seed=twin.seed,
        block_size=block_size,
        device=where,
    )
    prompt = twin.prompt(75)
    expected = twin.logits(prompt)
    assert distance(driver.run(Row(list(prompt))), expected) < EXACT
    assert distance(driver.run(Row(list(prompt)), chunk=9), expected) < EXACT


@cases
def test_greedy_tokens(device: torch.device, case: str) -> None:
    """Alone, in chunks of 7, after a prefix hit, and in one batch with prompts cut anywhere."""
    if device.type != "cuda":
        pytest.skip("takes too long without a GPU")
    twin = shared_twin(case)
    first = twin.prompt(41)
    prompts = [first, first[:36] + twin.prompt(5)]
    prompts += [twin.prompt(length) for length in (1, 2, 7, 23, 60)]
    wanted = [twin.greedy(prompt, COUNT) for prompt in prompts]
    driver = start(read_spec(twin.config), twin.state, "triton", seed=twin.seed, device=str(device))
    row = Row(list(prompts[0]))
    assert driver.greedy([row], COUNT) == wanted[:1]
    assert driver.greedy([Row(list(prompts[0]))], COUNT, budget=7) == wanted[:1]
    hit = driver.share(row, list(prompts[1]))
    assert hit.computed == 32
    assert driver.greedy([hit], COUNT) == wanted[1:2]
    assert driver.greedy([Row(list(one)) for one in prompts], COUNT, budget=13) == wanted


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.bfloat16) for case in CASES), ("mixtral", torch.float16)],
)
def test_narrow_types(device: torch.device, case: str, dtype: torch.dtype) -> None:
    """Routed tokens go to all experts: rounding may turn a near tie between two."""
    if device.type != "cuda":
        pytest.skip("Triton's interpreter has no products of bf16")
    twin = make_twin(case, dtype, every_expert=True)
    prompts = [twin.prompt(60) for _ in range(3)]
    narrow = [twin.logits(prompt) for prompt in prompts]
    state = {name: tensor.clone() for name, tensor in twin.state.items()}
    model = twin.model.float()
    ours = theirs = 0.0
    for prompt, rounded in zip(prompts, narrow, strict=True):
        with torch.no_grad():
            exact: Tensor = model(torch.tensor([prompt])).logits[0]
        driver = start(
            read_spec(twin.config),
            state,
            "triton",
            seed=twin.seed,
            dtype=dtype,
            device=str(device),
        )
        row = Row(list(prompt))
        found = torch.cat([driver.step([(row, 30)], every=True)[0], driver.run(row, chunk=3)])
        ours += distance(found, exact) ** 2
        theirs += distance(rounded, exact) ** 2
    print(f"{dtype}: ours {ours**0.5:.4f}, transformers {theirs**0.5:.4f}")
    assert ours < BOUND**2 * theirs


@pytest.mark.parametrize("case", ["deepseek-v2-lite", "deepseek-v3"])
def test_latents_in_fp8(device: torch.device, case: str) -> None:
    """As plain torch has it with such a cache, whole and in chunks.

    In f16, whose rounding seldom moves a latent to another number of FP8.
    """
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    twin = make_twin(case, torch.float16, every_expert=True)
    prompt = twin.prompt(60)

    def logits(kernels: str, chunk: int) -> Tensor:
        driver = start(
            read_spec(twin.config),
            twin.state,
            kernels,
            seed=twin.seed,
            dtype=torch.float16,
            device=str(device),
            cache_dtype=torch.float8_e4m3fn,
        )
        return driver.run(Row(list(prompt)), chunk=chunk)

    expected = logits("reference", 0)
    for chunk in (0, 7):
        assert distance(logits("triton", chunk), expected) < 2e-2
