"""Names, labels, buckets and exact counts of the metrics."""

from __future__ import annotations

import bisect
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from octavo.errors import ConfigError
from octavo.obs.instruments import Counter, Histogram
from octavo.obs.metrics import FINISH_REASONS, Metrics, check_aliases, one_two_five
from octavo.obs.stats import RequestTimes
from octavo.types import StepStats

# Names that dashboards ask for, by type, with the labels beside model_name and engine.
GAUGES = {
    "vllm:num_requests_running": (),
    "vllm:num_requests_waiting": (),
    "vllm:num_requests_waiting_by_reason": ("reason",),
    "vllm:kv_cache_usage_perc": (),
    "vllm:cache_config_info": ("block_size", "num_gpu_blocks"),
}
COUNTERS = {
    "vllm:prompt_tokens": (),
    "vllm:generation_tokens": (),
    "vllm:prompt_tokens_by_source": ("source",),
    "vllm:prompt_tokens_cached": (),
    "vllm:prompt_tokens_cached_by_source": ("source",),
    "vllm:prefix_cache_queries": (),
    "vllm:prefix_cache_hits": (),
    "vllm:num_preemptions": (),
    "vllm:request_success": ("finished_reason",),
}
TTFT = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
TOKEN = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
REQUEST = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
LENGTHS = "1 2 5 10 20 50 100 200 500 1000 2000 5000"
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": TTFT,
    "vllm:inter_token_latency_seconds": TOKEN,
    "vllm:request_time_per_output_token_seconds": TOKEN,
    "vllm:e2e_request_latency_seconds": REQUEST,
    "vllm:request_queue_time_seconds": REQUEST,
    "vllm:request_prefill_time_seconds": REQUEST,
    "vllm:request_decode_time_seconds": REQUEST,
    "vllm:request_inference_time_seconds": REQUEST,
    "vllm:request_prompt_tokens": LENGTHS,
    "vllm:request_generation_tokens": LENGTHS,
    "vllm:request_max_num_generation_tokens": LENGTHS,
    "vllm:request_params_max_tokens": LENGTHS,
    "vllm:request_prefill_kv_computed_tokens": LENGTHS,
    "vllm:request_params_n": "1 2 5 10 20",
    "vllm:iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "vllm:request_num_preemptions": "0 1 2 5 10 20",
}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def make(**options: object) -> Metrics:
    config = {"block_size": "16", "num_gpu_blocks": "64"}
    return Metrics("owl", max_model_len=8192, cache_config=config, **options)  # type: ignore[arg-type]


def read(metrics: Metrics) -> Samples:
    body, media_type = metrics.render()
    assert media_type.startswith("text/plain")
    found: Samples = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    """The one sample with this name and at least these labels."""
    wanted = frozenset(labels.items())
    (one,) = [number for (key, has), number in samples.items() if key == name and wanted <= has]
    return one


def test_names_of_triton() -> None:
    lines = make().render()[0].decode().splitlines()
    counters = ["request_success", "count", "exec_count", "request_duration_us"]
    counters += ["queue_duration_us", "compute_input_duration_us", "compute_infer_duration_us"]
    for name in (*counters, "compute_output_duration_us"):
        assert f"# TYPE nv_inference_{name} counter" in lines
        assert f'nv_inference_{name}{{model="owl",version="1"}} 0.0' in lines
    assert "# TYPE nv_inference_request_failure counter" in lines
    for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
        labels = f'model="owl",reason="{reason}",version="1"'
        assert f"nv_inference_request_failure{{{labels}}} 0.0" in lines
    assert "# TYPE nv_inference_pending_request_count gauge" in lines
    assert "# TYPE nv_inference_first_response_histogram_ms histogram" in lines


def test_the_parts_of_an_inference_add_up() -> None:
    metrics = make()
    times = RequestTimes(10.0, 14.0, "stop", scheduled=10.5, first_token=11.5, last_token=13.75)
    metrics.finished(times)
    stats = metrics.triton.statistics()["inference_stats"]
    assert isinstance(stats, dict)
    seconds = {part: entry["ns"] / 1e9 for part, entry in stats.items()}
    assert seconds == {
        "success": 4.0,
        "queue": 0.5,
        "compute_input": 1.0,
        "compute_infer": 2.25,
        "compute_output": 0.25,
        "fail": 0.0,
    }


def test_names_labels_and_buckets() -> None:
    body = make().render()[0].decode()
    families = {family.name: family for family in text_string_to_metric_families(body)}
    for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter")):
        for name, extra in names.items():
            family = families[name]
            assert family.type == kind
            for sample in family.samples:
                assert sample.name == (f"{name}_total" if kind == "counter" else name)
                assert set(sample.labels) == {"model_name", "engine", *extra}
                assert sample.labels["model_name"] == "owl"
                assert sample.labels["engine"] == "0"
    for name, text in HISTOGRAMS.items():
        family = families[name]
        assert family.type == "histogram"
        edges = [one.labels["le"] for one in family.samples if one.name.endswith("_bucket")]
        assert [float(edge) for edge in edges] == [*map(float, text.split()), float("inf")]
    rejections = families["vllm:admission_rejections"].samples
    assert all(set(one.labels) == {"model_name", "reason"} for one in rejections)
    assert {"process_cpu_seconds", "python_info", "octavo:step_recoveries"} <= set(families)
    assert "vllm:gpu_cache_usage_factor" not in families
    assert "vllm:gpu_cache_usage_perc" not in families


def test_aliases() -> None:
    metrics = make(aliases=frozenset({"seed", "legacy"}))
    metrics.step(
        StepStats(blocks_used=3, blocks_total=4, prefix_queries=10, prefix_hits=5, running=1)
    )
    metrics.token_gap(0.02, 2)
    samples = read(metrics)
    for name in ("kv_cache_usage_perc", "gpu_cache_usage_factor", "gpu_cache_usage_perc"):
        assert value(samples, f"vllm:{name}") == 0.75
    assert value(samples, "vllm:gpu_prefix_cache_hits_total") == 5
    assert value(samples, "vllm:gpu_prefix_cache_queries_total") == 10
    assert value(samples, "vllm:gpu_prefix_cache_hit_rate") == 0.5
    assert value(samples, "vllm:time_per_output_token_seconds_count") == 2
    assert value(samples, "vllm:cpu_cache_usage_perc") == 0
    assert value(samples, "vllm:num_requests_swapped") == 0
    assert value(samples, "vllm:request_params_best_of_count") == 0
    metrics.step(StepStats())
    with pytest.raises(ConfigError, match="legcy"):
        check_aliases(["legcy"])


def test_counts_are_exact_over_a_random_life() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    dice = random.Random(seed)
    metrics = make()
    ended = dict.fromkeys(FINISH_REASONS, 0)
    prompts = cached = sampled = steps = before = first = gaps = preempted = 0
    previous = read(metrics)
    for _ in range(40):
        stats = StepStats(
            running=dice.randint(0, 9),
            waiting=dice.randint(0, 9),
            sampled_tokens=dice.randint(0, 5),
            prompt_tokens=dice.randint(0, 50),
            preemptions=dice.randint(0, 1),
        )
        metrics.step(stats)
        sampled += stats.sampled_tokens
        preempted += stats.preemptions
        steps += bool(stats.sampled_tokens + stats.prompt_tokens)
        for _ in range(dice.randint(0, 3)):
            reason = dice.choice(FINISH_REASONS)
            length = dice.randint(1, 100)
            hit = dice.randint(0, length - 1)
            began = dice.random() < 0.7
            arrival = dice.uniform(0, 10)
            times = RequestTimes(arrival, prompt_tokens=length, max_tokens=9)
            if began:
                times.scheduled = arrival + 0.5
                times.first_token = arrival + 1
                times.last_token = arrival + 2
                times.cached_tokens = hit
                times.generation_tokens = 2
                metrics.first_token(1.0, prompt_tokens=length, cached_tokens=hit)
                metrics.token_gap(1.0)
                prompts += length
                cached += hit
                first += 1
                gaps += 1
            times.finished = arrival + dice.uniform(-1, 3)
            times.reason = reason
            metrics.finished(times)
            ended[reason] += 1
            before += not began
        metrics.rejected("max_num_queued_reqs")
        now = read(metrics)
        for (name, labels), number in previous.items():
            if name.startswith("python_") or name == "nv_inference_pending_request_count":
                continue
            if name.endswith(("_total", "_count", "_bucket", "_us", "_success", "_failure")):
                assert now[name, labels] >= number, name
        previous = now
    samples = read(metrics)
    for reason, number in ended.items():
        assert value(samples, "vllm:request_success_total", finished_reason=reason) == number
    total = sum(ended.values())
    assert total == first + before
    # The parser adds _total to the names of counters; `test_names_of_triton` reads the text.
    good = ended["stop"] + ended["length"]
    assert value(samples, "nv_inference_request_success_total") == good
    assert value(samples, "nv_inference_exec_count_total") == steps
    for reason, ours in (("CANCELED", "abort"), ("BACKEND", "error")):
        found = value(samples, "nv_inference_request_failure_total", reason=reason)
        assert found == ended[ours]
    everywhere = ("e2e_request_latency_seconds", "request_prompt_tokens", "request_params_n")
    for name in (*everywhere, "request_params_max_tokens"):
        assert value(samples, f"vllm:{name}_count") == total
    for name in ("request_queue_time_seconds", "request_prefill_time_seconds"):
        assert value(samples, f"vllm:{name}_count") == first
    assert value(samples, "vllm:request_decode_time_seconds_sum") == pytest.approx(first)
    assert value(samples, "vllm:time_to_first_token_seconds_count") == first
    assert value(samples, "vllm:inter_token_latency_seconds_count") == gaps
    assert value(samples, "vllm:e2e_request_latency_seconds_sum") >= 0
    assert value(samples, "vllm:prompt_tokens_total") == prompts
    assert value(samples, "vllm:prompt_tokens_cached_total") == cached
    by_source = "vllm:prompt_tokens_by_source_total"
    assert value(samples, by_source, source="local_compute") == prompts - cached
    assert value(samples, by_source, source="local_cache_hit") == cached
    assert value(samples, "vllm:generation_tokens_total") == sampled
    assert value(samples, "vllm:num_preemptions_total") == preempted
    assert value(samples, "vllm:iteration_tokens_total_count") == steps
    rejections = "vllm:admission_rejections_total"
    assert value(samples, rejections, reason="max_num_queued_reqs") == 40


def test_gauges_fall_to_zero_when_the_engine_is_lost() -> None:
    metrics = make(aliases=frozenset({"seed"}))
    metrics.step(StepStats(running=3, waiting=2, blocks_used=4, blocks_total=8, queued_tokens=9))
    assert value(read(metrics), "vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    metrics.core_died()
    samples = read(metrics)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value(samples, f"vllm:{name}") == 0
    assert value(samples, "vllm:gpu_cache_usage_factor") == 0
    assert value(samples, "octavo:queued_prompt_tokens") == 0


def test_cache_facts_can_come_late() -> None:
    metrics = Metrics("owl", max_model_len=10)
    assert value(read(metrics), "vllm:cache_config_info", model_name="owl") == 1
    metrics.set_cache_config({"block_size": "32"})
    assert value(read(metrics), "vllm:cache_config_info", block_size="32") == 1


@given(st.lists(st.floats(-1, 30), max_size=50), st.integers(1, 5))
def test_histograms_count_as_defined(values: list[float], times: int) -> None:
    bounds = (0.0, 0.5, 1.0, 10.0)
    histogram = Histogram("x", "x", ("a",), bounds=bounds)
    for number in values:
        histogram.observe(number, ("b",), times)
    for family in histogram.families():
        buckets = [one.value for one in family.samples if one.name == "x_bucket"]
        clipped = sorted(max(0.0, number) for number in values)
        assert (
            buckets
            == [
                *(times * bisect.bisect_right(clipped, bound) for bound in bounds),
                times * len(values),
            ]
            or not values
        )
        assert sum(one.value for one in family.samples if one.name == "x_sum") == pytest.approx(
            times * sum(clipped)
        )


def test_a_counter_never_falls_and_a_gap_needs_tokens() -> None:
    counter = Counter("x", "x", ())
    counter.add(2, ())
    counter.add(-5, ())
    assert counter.values[()] == 2
    metrics = make()
    metrics.token_gap(1.0, 0)
    metrics.token_gap(1.0, 4)
    samples = read(metrics)
    assert value(samples, "vllm:inter_token_latency_seconds_count") == 4
    assert value(samples, "vllm:inter_token_latency_seconds_sum") == 1.0


@pytest.mark.parametrize(
    ("limit", "bounds"),
    [(0, ()), (1, (1,)), (7, (1, 2, 5)), (100, (1, 2, 5, 10, 20, 50, 100))],
)
def test_one_two_five(limit: int, bounds: tuple[int, ...]) -> None:
    assert one_two_five(limit) == bounds


def test_times_of_a_request_that_never_ran() -> None:
    times = RequestTimes(5.0, finished=4.0)
    assert times.end_to_end == 0
    assert times.queue is times.prefill is times.decode is times.inference is None
    assert times.time_per_output_token is None
    lived = RequestTimes(
        1.0, finished=9.0, scheduled=2.0, first_token=3.0, last_token=8.0, generation_tokens=6
    )
    assert (lived.end_to_end, lived.queue, lived.prefill) == (8, 1, 1)
    assert (lived.decode, lived.inference, lived.time_per_output_token) == (5, 6, 1)
