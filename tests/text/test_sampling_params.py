"""The public settings: every limit from both sides, and their form in token ids."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidRequest
from octavo.sampling_params import RequestOutputKind, SamplingParams, choice_seed
from tests.text.samples import chat_tokenizer

CHAT = chat_tokenizer()


def refused(**fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)
    assert caught.value.param in fields
    assert caught.value.param in caught.value.message
    assert len(caught.value.message) < 400
    return caught.value


RANGES = [
    ("temperature", [0, 1.5, 100, np.float32(0.5)], [-0.1, 100.1, 2.5e38]),
    ("top_p", [1e-9, 1, 0.5], [0, -1, 1.01]),
    ("min_p", [0, 1, 0.5], [-0.01, 1.01]),
    ("presence_penalty", [-2, 2, 0], [-2.1, 99]),
    ("frequency_penalty", [-2, 2, 0], [-2.1, 99]),
    ("repetition_penalty", [0.01, 10, 1], [0, -1, 0.009, 5e-324, 10.1]),
    ("top_k", [-1, 0, 1, 10**12, np.int64(3)], [-5, -2, 1.0]),
    ("n", [1, 128], [0, -1, 129, 1_000_000]),
    ("max_tokens", [1, 10**18, None], [0, -1, 1.5]),
    ("min_tokens", [0, 16], [-1, 17]),
    ("seed", [None, 0, -(2**63), 2**64 - 1], [2**64, -(2**63) - 1, 10**5000]),
    ("logprobs", [None, -1, 0, 5], [-2, 1.5]),
    ("prompt_logprobs", [None, -1, 0, 5], [-2, 1.5]),
    ("stop", [None, "a", ["a"], ("a",), "x" * 1024], ["x" * 1025, [""], [3], 3, ["\ud800"]]),
    ("bad_words", [None, [], ["a"]], ["a", [""], [None], ["a"] * 1025]),
    ("stop_token_ids", [None, [], [0, 5]], [3, [-1], [True], ["1"], [2**31], [1] * 1025]),
    ("allowed_token_ids", [None, [0, 5]], [[], 3, [-1], [1.5]]),
    ("logit_bias", [None, {}, {5: -100, "6": 100}], [3, {-1: 0}, {"x": 0}, {"-1": 0}, {5: 101}]),
    ("output_kind", list(RequestOutputKind), [1, "DELTA"]),
    ("ignore_eos", [True, False], [1, None, "yes"]),
    ("detokenize", [True, False], [0]),
    ("flat_logprobs", [False], [True]),
    ("stream_interval", [None, 1], [2, True]),
    (
        "structured_outputs",
        [None, {"json": {}}, {"choice": ["a"]}],
        [{"json": {}, "regex": "a"}, 3],
    ),
    ("extra_args", [None, {}], [{"a": 1}]),
    ("skip_reading_prefix_cache", [None, False], [True]),
    ("thinking_token_budget", [None], [5]),
    ("repetition_detection", [None], [{}]),
]
NUMBERS = [row[0] for row in RANGES[:13]]


@pytest.mark.parametrize(("name", "good", "bad"), RANGES, ids=[row[0] for row in RANGES])
def test_limits(name, good, bad):
    for value in good:
        SamplingParams(**{name: value})
    for value in bad:
        assert refused(**{name: value}).param == name


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "1", [1], {}, 1e999])
def test_what_is_no_finite_number_is_refused(name, value):
    refused(**{name: value})


def test_more_refusals():
    refused(temperature=10**400)
    refused(logit_bias={5: "a"})
    refused(logit_bias={5: math.nan})
    refused(logit_bias={True: 1})
    refused(logit_bias={"1" * 11: 1})
    refused(logit_bias={"²": 1})
    refused(logit_bias=dict.fromkeys(range(1025), 1))
    refused(stop="a", detokenize=False)
    refused(logprob_token_ids=[5])
    refused(min_tokens=5, max_tokens=4)
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    refused(temperature=deep)
    SamplingParams(min_tokens=50, max_tokens=None)
    SamplingParams(logprob_token_ids=[5, 6], logprobs=1)
    with pytest.raises(TypeError):
        SamplingParams(best_of=2)


def test_normal_forms():
    params = SamplingParams(temperature=1, logit_bias={"7": 2}, seed=-1, stop=("a", "b"))
    assert type(params.temperature) is float
    assert params.logit_bias == {7: 2.0}
    assert params.seed is None
    assert params.stops == params.stop == ["a", "b"]
    assert SamplingParams(stop="ab").stops == ["ab"]
    assert SamplingParams().stops == []
    assert SamplingParams(seed=-2).seed == 2**64 - 2
    params.top_p = 7.0
    with pytest.raises(InvalidRequest):
        params.verify()


def test_clone_shares_nothing():
    params = SamplingParams(
        stop=["a"], logit_bias={5: 1}, output_kind=RequestOutputKind.DELTA, bad_words=["x"]
    )
    copy = params.clone()
    assert copy == params
    copy.stop.append("b")
    copy.logit_bias[6] = 1.0
    assert (params.stop, params.logit_bias) == (["a"], {5: 1.0})


def test_limits_of_the_model():
    SamplingParams(stop_token_ids=[9], logit_bias={9: 1}, logprobs=20).check_model(vocab_size=10)
    SamplingParams(logprobs=-1).check_model(vocab_size=10)
    SamplingParams(logprobs=-1, prompt_logprobs=500).check_model(vocab_size=1000, max_logprobs=-1)
    bad: list[dict] = [
        {"stop_token_ids": [10]},
        {"allowed_token_ids": [1, 10]},
        {"logit_bias": {10: 1}},
        {"logprob_token_ids": [10], "logprobs": 1},
        {"logprobs": 21},
        {"prompt_logprobs": 21},
    ]
    for fields in bad:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**fields).check_model(vocab_size=10)
        assert caught.value.param in fields
    with pytest.raises(InvalidRequest, match="logprobs = -1"):
        SamplingParams(logprobs=-1).check_model(vocab_size=1000)


def test_token_params():
    params = SamplingParams(
        temperature=0.7, top_k=5, stop_token_ids=[7, 2], logit_bias={3: 1}, seed=11,
        allowed_token_ids=[4, 4, 5], logprobs=2, logprob_token_ids=[9], min_tokens=3,
    )  # fmt: skip
    made = params.to_token_params(CHAT, eos_ids=[2, 3], max_tokens=8, seed=99)
    assert made.stop_ids == (7, 2, 3)
    assert (made.seed, made.max_tokens, made.min_tokens, made.top_k) == (11, 8, 3, 5)
    assert (made.allowed_ids, made.logit_bias) == ((4, 5), ((3, 1.0),))
    assert (made.logprobs, made.logprob_ids, made.bad_words) == (2, (9,), ())
    made = SamplingParams(ignore_eos=True, temperature=1e-9, top_k=-1).to_token_params(
        None, eos_ids=[2], max_tokens=1, seed=99
    )
    assert (made.stop_ids, made.temperature, made.top_k, made.seed) == ((), 0.0, 0, 99)
    assert SamplingParams(top_k=10**12).to_token_params(None, eos_ids=[], max_tokens=1).top_k == 0
    assert (
        SamplingParams(min_tokens=9).to_token_params(None, eos_ids=[], max_tokens=4).min_tokens == 4
    )


@given(st.integers(-(2**63), 2**64 - 1))
def test_seeds_of_choices(seed):
    seeds = [choice_seed(seed, index) for index in range(16)]
    assert seeds[0] == seed % 2**64
    assert len(set(seeds)) == 16
    assert all(0 <= one < 2**64 for one in seeds)
    assert seeds == [choice_seed(seed, index) for index in range(16)]


def test_bad_words_become_ids_with_and_without_a_space():
    params = SamplingParams(bad_words=["Paris", " Paris", "<|im_end|>"])
    made = params.to_token_params(CHAT, eos_ids=[], max_tokens=1).bad_words
    assert tuple(CHAT.encode("Paris")) in made
    assert tuple(CHAT.encode(" Paris")) in made
    assert len(made) == 4
    assert all(2 not in word for word in made)
    assert (
        SamplingParams(bad_words=["a"])
        .to_token_params(
            type("Empty", (), {"encode_plain": lambda self, text: []})(), eos_ids=[], max_tokens=1
        )
        .bad_words
        == ()
    )
    with pytest.raises(InvalidRequest, match="bad_words"):
        params.to_token_params(None, eos_ids=[], max_tokens=1)
