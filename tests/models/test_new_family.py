"""Adding a family takes what `docs/howto/model.md` says and no more: a toy one goes its steps."""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from octavo.errors import ConfigError
from octavo.executor.local import LocalExecutor
from octavo.models import llama, registry
from octavo.models.registry import FAMILIES, Family, read_spec
from octavo.types import AddRequest, TokenParams
from tests.models import toy_family, twins
from tests.models.driver import KERNELS, Row, start
from tests.models.toy_family import toy_spec
from tests.worker.test_with_core import serve
from tests.worker.test_worker import config_of

ROOT = Path(__file__).parents[2]
NAME = "HeliumForCausalLM"
CASE = {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-8}
LINES = 110  # of a family's file, its line in the registry and its row of cases


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line in the registry, and the row of cases."""
    families = {**FAMILIES, NAME: Family(toy_spec, llama.names)}
    monkeypatch.setattr(registry, "FAMILIES", MappingProxyType(families))
    monkeypatch.setitem(twins.CASES, "toy", ("Helium", CASE))


@pytest.mark.parametrize("kernels", KERNELS)
def test_it_equals_transformers(kernels: str) -> None:
    """Logits whole and in chunks, tokens alone, from the prefix cache and among others."""
    twin = twins.make_twin("toy")
    driver = start(read_spec(twin.config), twin.state, kernels, seed=twin.seed)
    first = Row(twin.prompt(75))
    expected = twin.logits(first.tokens)
    for found in (driver.run(first), driver.run(Row(list(first.tokens)), chunk=7)):
        assert float((found - expected).norm() / expected.norm()) < 1e-5
    prompts = [first.tokens[:40] + twin.prompt(5), twin.prompt(3), twin.prompt(30)]
    wanted = [twin.greedy(prompt, 32) for prompt in prompts]
    hit = driver.share(first, list(prompts[0]))
    assert hit.computed == 32
    assert driver.greedy([hit], 32) == wanted[:1]
    assert driver.greedy([Row(list(one)) for one in prompts], 32, budget=13) == wanted


def test_it_is_served_from_a_folder(tmp_path: Path) -> None:
    twin = twins.make_twin("toy")
    twin.model.save_pretrained(tmp_path)
    executor = LocalExecutor(
        config_of(tmp_path, kernels="reference", dtype="float32", num_blocks=30, max_model_len=96)
    )
    info = executor.start()
    prompt = twin.prompt(20)
    params = TokenParams(max_tokens=32, min_tokens=32, temperature=0.0)
    got, _ = serve(executor, info, [AddRequest("0", prompt, params, 0.0)], ahead=0)
    assert got["0"].ids == twin.greedy(prompt, 32)


def test_a_variant_that_it_does_not_know_is_refused() -> None:
    torch.manual_seed(0)
    config = twins.make_twin("toy").config
    with pytest.raises(ConfigError, match="hidden_act"):
        read_spec({**config, "hidden_act": "gelu"})


def test_families_are_short() -> None:
    """Those that are data alone; of the others, each file is several families."""
    assert toy_family.__file__ is not None
    for path in (Path(toy_family.__file__), *map(_source, ("qwen", "mistral", "phi", "glm"))):
        assert len(path.read_text().splitlines()) < LINES, path.name


def test_the_howto_names_what_exists() -> None:
    text = (ROOT / "docs/howto/model.md").read_text()
    paths = set(re.findall(r"`((?:octavo|tests)/[\w/.]+)`", text)) - {"octavo/models/yours.py"}
    assert len(paths) > 5
    for path in paths:
        assert (ROOT / path).exists(), path


def _source(name: str) -> Path:
    return ROOT / "octavo" / "models" / f"{name}.py"
