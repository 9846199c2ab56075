"""Grammars in the engine: in batches with others, ahead or not, preempted or not, all as alone."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from msgspec.structs import replace

from octavo.config import SchedulerConfig, Vocabulary
from octavo.engine.core import EngineCore
from octavo.engine.scheduler import Scheduler
from octavo.executor.local import LocalExecutor
from octavo.grammar.compiler import GrammarCompiler
from octavo.grammar.request import StructuredOutputs
from octavo.grammar.vocabulary import vocabulary_of
from octavo.types import AddRequest, Grammar, TokenParams, WorkerInfo
from tests.worker.later import LaterDevice
from tests.worker.test_runner import SLOTS
from tests.worker.test_staged import agree, executor_of, serve
from tests.worker.test_with_core import Got, requests_of
from tests.worker.test_worker import config_of
from tests.worker.tiny import VOCAB, write_tiny

END = 2
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["t", 1]}},
    "required": ["a"],
}
DEMANDS: list[tuple[StructuredOutputs, Callable[[str], bool]]] = [
    (StructuredOutputs(json=SCHEMA), lambda text: _valid(text)),
    (StructuredOutputs(regex="[a-f]{3,9}-[0-9]{2}"), lambda text: _matches(text)),
    (StructuredOutputs(choice=["yes", "yes!", "maybe"]), lambda text: text in _CHOICES),
]
_CHOICES = ("yes", "yes!", "maybe")


class Words:
    """A token a character, and few of more."""

    eos_ids = (END,)
    special_ids = frozenset((0, 1, END))
    bytes_table = [
        *(b"<0>", b"<1>", b"<end>", b"\n"),
        *(bytes([byte]) for byte in range(32, 118)),
        *(b'{"', b'":', b"12", b"}", b"y", b"{"),
    ][:VOCAB]


def text_of(got: Got) -> str:
    return b"".join(Words.bytes_table[token] for token in got.ids if token != END).decode()


def _valid(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def _matches(text: str) -> bool:
    return re.fullmatch("[a-f]{3,9}-[0-9]{2}", text) is not None


def vocabulary() -> Vocabulary:
    return vocabulary_of(Words())


def compiled() -> list[Grammar]:
    compiler = GrammarCompiler(vocabulary())
    forms = [compiler.compile(demand) for demand, _ in DEMANDS]
    compiler.close()
    return [Grammar(form.text, (END,), form.json) for form in forms]


@pytest.fixture(scope="module")
def grammars() -> list[Grammar]:
    return compiled()


def mixed(grammars: list[Grammar], draw: random.Random, count: int) -> dict[str, int]:
    """Which requests demand which form."""
    return {str(i): draw.randrange(len(grammars)) for i in range(count) if draw.random() < 0.6}


def demanding(
    grammars: list[Grammar], draw: random.Random, count: int
) -> tuple[list[AddRequest], dict[str, int]]:
    """Requests with all kinds of rules, over half of them with a grammar too."""
    forms = mixed(grammars, draw, count)
    requests = []
    for request in requests_of(draw, count):
        params = replace(request.params, stop_ids=(END,), min_tokens=draw.choice([0, 0, 4, 12]))
        if request.id in forms:
            params = replace(params, grammar=grammars[forms[request.id]], max_tokens=40)
            params = replace(params, allowed_ids=(), bad_words=(), logit_bias=())
        requests.append(AddRequest(request.id, request.prompt_ids, params, 0.0))
    return requests, forms


def check(got: dict[str, Got], forms: dict[str, int], note: str) -> int:
    """Whatever ended by itself has its form; how many did."""
    ended = 0
    for name, form in forms.items():
        assert got[name].reason in ("stop", "length"), (note, got[name])
        assert (got[name].ids[-1] == END) == (got[name].reason == "stop"), note
        assert END not in got[name].ids[:-1], note
        if got[name].reason == "stop":
            ended += 1
            assert DEMANDS[form][1](text_of(got[name])), (note, text_of(got[name]))
    return ended


def host(folder: Path) -> tuple[LocalExecutor, WorkerInfo]:
    executor = LocalExecutor(
        config_of(
            folder,
            kernels="reference",
            attention_backend="sdpa",
            dtype="float32",
            num_blocks=20,
            max_model_len=64,
            vocabulary=vocabulary(),
        )
    )
    return executor, executor.start()


@pytest.mark.parametrize("seed", range(4))
def test_on_the_host_each_gets_what_it_would_get_alone(
    tmp_path: Path, grammars: list[Grammar], seed: int
) -> None:
    executor, info = host(write_tiny(tmp_path, seed=1))
    requests, forms = demanding(grammars, random.Random(seed), 14)
    together = serve(executor, info, requests, depth=1)
    assert check(together, forms, f"seed {seed}") > 0
    for request in requests:
        alone = serve(executor, info, [request], depth=1)
        agree(together[request.id], alone[request.id])


@pytest.mark.parametrize(("depth", "eager"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("seed", range(3))
def test_a_device_that_works_ahead_gives_what_the_host_gives(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    grammars: list[Grammar],
    seed: int,
    depth: int,
    eager: bool,
) -> None:
    folder = write_tiny(tmp_path, seed=1)
    requests, forms = demanding(grammars, random.Random(seed), 14)
    executor, info = executor_of(
        folder, LaterDevice(), monkeypatch, enforce_eager=eager, vocabulary=vocabulary()
    )
    got = serve(executor, info, requests, depth=depth)
    assert check(got, forms, f"seed {seed}") > 0
    expected = serve(*host(folder), requests, depth=1)
    for request in requests:
        agree(got[request.id], expected[request.id])


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_and_failed_steps_lose_no_place_in_a_grammar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grammars: list[Grammar], depth: int
) -> None:
    """Few blocks, and steps that raise now and then."""
    folder = write_tiny(tmp_path, seed=1)
    seed = random.randrange(2**31)
    requests, forms = demanding(grammars, random.Random(seed), 24)
    executor, info = executor_of(folder, LaterDevice(), monkeypatch, vocabulary=vocabulary())
    expected = serve(executor, info, requests, depth=1)
    submit, count = executor._worker.submit, 0  # type: ignore[union-attr]

    def failing(plan):  # type: ignore[no-untyped-def]
        nonlocal count
        count += 1
        if count in (7, 30):
            raise RuntimeError("a step fails")
        return submit(plan)

    monkeypatch.setattr(executor._worker, "submit", failing)
    core = EngineCore(
        Scheduler(
            SchedulerConfig(
                num_blocks=info.num_blocks,
                block_size=info.block_size,
                max_model_len=info.max_model_len,
                max_num_seqs=SLOTS,
                max_num_batched_tokens=24,
                depth=depth,
                lookahead=depth - 1,
            )
        ),
        executor,
    )
    got = {request.id: Got() for request in requests}
    for request in requests:
        core.add(request)
    preemptions = recoveries = 0
    while core.has_work():
        news = core.step()
        if news is None:
            continue
        preemptions += news.stats.preemptions
        recoveries += news.stats.recoveries
        for output in news.outputs:
            one = got[output.id]
            one.ids += output.new_ids
            one.reason, one.error = output.reason, output.error
    assert preemptions > 0
    assert recoveries == 2
    check(got, forms, f"seed {seed}")
    for name in forms:
        assert (got[name].ids, got[name].reason) == (expected[name].ids, expected[name].reason), (
            f"seed {seed} request {name}"
        )


@pytest.mark.parametrize("ahead", [False, True])
def test_rules_beside_a_grammar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grammars: list[Grammar], ahead: bool
) -> None:
    folder = write_tiny(tmp_path, seed=1)
    if ahead:
        executor, info = executor_of(folder, LaterDevice(), monkeypatch, vocabulary=vocabulary())
    else:
        executor, info = host(folder)
    base = TokenParams(max_tokens=40, stop_ids=(END,), grammar=grammars[2], temperature=0.0)
    y, m, bang = (Words.bytes_table.index(letter) for letter in (b"y", b"m", b"!"))
    later = [i for i, word in enumerate(Words.bytes_table) if word == b"y"]
    never_y = tuple((token, -100.0) for token in later)
    cases = {
        "maybe": replace(base, logit_bias=never_y),
        "yes": replace(base, bad_words=((m,), (bang,))),
        "yes!": replace(base, bad_words=((m,),), min_tokens=5),
        # The grammar ends sooner than it may: it ends all the same.
        "maybe ": replace(base, logit_bias=never_y, min_tokens=30),
        "error": replace(base, allowed_ids=(bang,)),
        "length": replace(base, max_tokens=2),
        "stopped": replace(base, stop_ids=(END, y, m, *later)),
        "logprobs": replace(base, logprobs=3, logit_bias=never_y),
    }
    requests = [AddRequest(name, [5, 6, 7], params, 0.0) for name, params in cases.items()]
    got = serve(executor, info, requests, depth=1 + ahead)
    for name in ("maybe", "yes", "yes!", "maybe "):
        assert (text_of(got[name]), got[name].reason) == (name.strip(), "stop")
        assert got[name].ids[-1] == END
        assert got[name].ids.count(END) == 1
    assert got["error"].reason == "error"
    assert "structured_outputs" in got["error"].error
    assert (len(got["length"].ids), got["length"].reason) == (2, "length")
    assert (len(got["stopped"].ids), got["stopped"].reason) == (1, "stop")
    assert len(got["logprobs"].logprobs) == len(got["logprobs"].ids)
    # Log-probs are the model's own, before the grammar took most tokens away.
    assert any(found.rank > 1 for found in got["logprobs"].logprobs)
