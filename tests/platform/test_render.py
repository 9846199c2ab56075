"""Rendered deployments pass lint in every mode; of specs with flaws nothing is written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.cli.main import main
from octavo.errors import ConfigError
from octavo.options import EngineArgs, ServerArgs, read_file
from octavo.platform.lint import lint
from octavo.platform.render import Rendered, render, write
from octavo.platform.spec import read_spec_file
from octavo.serve import deployment_options, split

BRIEF = """\
name = "deepseek"
namespace = "ai-serving"

[model]
name = "deepseek-ai/DeepSeek-V2.5"
served_name = "deepseek-v2.5"

[engine]
mode = "rayservice"
cpu = 32
memory = "256Gi"

[engine.options]
tensor_parallel_size = 8
gpu_memory_utilization = 0.92
max_model_len = 32768
kv_cache_dtype = "fp8_e4m3"
block_size = 16
max_num_batched_tokens = 8192
metric_aliases = ["seed"]

[gpu]
kind = "H100-80"

[service]
name = "vllm-engine"
"""
SMALL = """\
name = "small"
[model]
name = "meta-llama/Llama-3.1-8B-Instruct"
[engine.options]
max_model_len = 8192
[gpu]
kind = "H100"
"""
MODES = {
    "brief": BRIEF,
    "stages over four nodes": BRIEF.replace(
        "tensor_parallel_size = 8", "tensor_parallel_size = 8\npipeline_parallel_size = 4"
    ),
    "four replicas": BRIEF.replace("cpu = 32", "cpu = 32\nreplicas = 4"),
    "cluster": BRIEF.replace("rayservice", "raycluster")
    + '[ray]\nredis_address = "redis.ai-serving.svc:6379"\n',
    "scaled by Serve": BRIEF + '[autoscale]\nkind = "keda"\n',
    "vllm": BRIEF.replace(
        'mode = "rayservice"', 'mode = "rayservice"\nkind = "vllm"\nversion = "0.32.0"'
    ).replace('metric_aliases = ["seed"]\n', ""),
    "one pod": SMALL,
    "three pods": SMALL.replace("[engine.options]", "[engine]\nreplicas = 3\n[engine.options]"),
    "hpa": SMALL + '[autoscale]\nkind = "hpa"\n',
    "keda": SMALL + '[autoscale]\nkind = "keda"\nmaximum = 9\n',
    "no gateway": SMALL + "[gateway]\nenabled = false\n[monitoring]\nenabled = true\n",
    "vllm in a pod": SMALL.replace(
        "[engine.options]", '[engine]\nkind = "vllm"\nversion = "0.32.0"\n[engine.options]'
    ),
}


def spec_at(path: Path, text: str) -> Path:
    file = path / "cluster.toml"
    file.write_text(text)
    return file


def rendered(path: Path, text: str) -> Rendered:
    return render(read_spec_file(spec_at(path, text)))


def objects(made: Rendered, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, text in made.files.items():
        if name.endswith(".yaml") and not name.startswith("chart/"):
            found += [one for one in yaml.safe_load_all(text) if one["kind"] == kind]
    return found


@pytest.mark.parametrize("name", MODES)
def test_what_is_rendered_passes_lint(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(rendered(tmp_path, MODES[name]), out)
    assert [str(one) for one in lint([out]) if one.level == "error"] == []
    kinds = {one["kind"] for file in out.glob("*.yaml") for one in yaml.safe_load_all(file.open())}
    always = {"Namespace", "ConfigMap", "PersistentVolumeClaim", "Service", "NetworkPolicy"}
    assert always | {"PodDisruptionBudget", "ServiceMonitor", "PrometheusRule"} <= kinds


@pytest.mark.parametrize("gone", ["40-protection.yaml", "60-monitoring.yaml"])
def test_lint_misses_what_is_taken_away(gone: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(rendered(tmp_path, BRIEF), out)
    (out / gone).unlink()
    rules = {one.rule for one in lint([out])}
    assert ("nothing-scraped" in rules) == (gone == "60-monitoring.yaml")
    assert ({"dashboard-open", "availability"} <= rules) == (gone == "40-protection.yaml")


def test_gpus_are_those_that_ranks_need(tmp_path: Path) -> None:
    for name, gpus in (("brief", 8), ("stages over four nodes", 32), ("four replicas", 32)):
        (service,) = objects(rendered(tmp_path, MODES[name]), "RayService")
        (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert group["replicas"] * int(limits["nvidia.com/gpu"]) == gpus
        assert group["rayStartParams"] == {"num-gpus": "8"}


def test_probes_outlast_the_load_and_grace_the_drain(tmp_path: Path) -> None:
    made = rendered(tmp_path, SMALL + "[drain]\nseconds = 77\nload_bandwidth = 0.25\n")
    (one,) = [one for one in objects(made, "Deployment") if one["metadata"]["name"] == "small"]
    pod = one["spec"]["template"]["spec"]
    probe = pod["containers"][0]["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] > 16e9 / 0.25e9
    assert pod["terminationGracePeriodSeconds"] > 77 + 10
    options = json.loads(objects(made, "ConfigMap")[0]["data"]["engine.json"])
    assert options["shutdown_timeout"] == 77


def test_the_engine_reads_its_settings(tmp_path: Path) -> None:
    made = rendered(tmp_path, SMALL)
    file = tmp_path / "engine.json"
    file.write_text(objects(made, "ConfigMap")[0]["data"]["engine.json"])
    read = read_file(str(file))
    server, engine = ServerArgs.gather({}, read, "x"), EngineArgs.gather({}, read, "x")
    server.check()
    engine.check()
    assert engine.max_model_len == 8192
    assert server.served_model_name == ["llama-3.1-8b-instruct"]


@pytest.mark.parametrize("name", ["brief", "stages over four nodes", "scaled by Serve"])
def test_the_application_takes_its_arguments(name: str, tmp_path: Path) -> None:
    (service,) = objects(rendered(tmp_path, MODES[name]), "RayService")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == "octavo.serve:build_app"
    engine, server, own = split(application["args"])
    EngineArgs(**engine).check()
    ServerArgs(**server).check()
    options = deployment_options(EngineArgs(**engine, device="cpu"), own)
    assert options["graceful_shutdown_timeout_s"] > server["shutdown_timeout"]
    assert ("autoscaling_config" in options) == (name == "scaled by Serve")


def test_the_gateway_knows_each_pod(tmp_path: Path) -> None:
    made = rendered(tmp_path, MODES["three pods"])
    config = next(
        yaml.safe_load(one["data"]["config.yaml"])
        for one in objects(made, "ConfigMap")
        if "config.yaml" in one["data"]
    )
    bases = [one["litellm_params"]["api_base"] for one in config["model_list"]]
    names = {one["metadata"]["name"] for one in objects(made, "Service")}
    assert len(bases) == 3
    assert {base.removeprefix("http://").partition(".")[0] for base in bases} <= names
    selectors = [one["spec"]["selector"] for one in objects(made, "Service")]
    assert len({one.get("octavo/replica") for one in selectors}) == 4  # three, and all of them


TOP = 'name = "x"\n[model]\nname = "m"\n'
BAD = {
    "colour = 1\n" + TOP: r":1: colour: is not a key of a spec",
    'nam = "x"\n[model]\nname = "m"\n': r":1: nam: .*did you mean name",
    "engine = 3\n" + TOP: r":1: engine: is 3; it must be a table",
    TOP + '[gpu]\nkind = "H100"\nper_nod = 3\n': r":6: gpu.per_nod: .*did you mean per_node",
    TOP + "[engine]\nreplicas = -1\n": r":5: engine.replicas: is -1; it cannot be below 0",
    TOP + "[engine]\nreplicas = true\n": r":5: engine.replicas: is True; .* of type int",
    TOP + "[engine.options]\nmax_num_seqs = 0\n": r":5: engine.options.max_num_seqs: is 0",
    TOP + "[engine.options]\nport = 3\n": r":5: engine.options.port: is set by the manifests",
    TOP + "[autoscale]\nminimum = 9\n": r":5: autoscale.minimum: is 9, with a maximum of 4",
    TOP + '[[gateway.backends]]\nurl = "u"\n[[gateway.backends]]\nkey = 1\n': r":7: gateway.bac",
    TOP + '[engine]\nversion = "latest"\n': r":5: engine.version: .*another image tomorrow",
    TOP + '[service]\nname = "a_b"\n': r":5: service.name: .*no name that Kubernetes takes",
    "[model]\n": r"cluster.toml:1: .*is missing",
    "name = ": r"cluster.toml: is not TOML",
}


@pytest.mark.parametrize("text", BAD)
def test_a_spec_with_a_flaw_is_refused_by_its_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=BAD[text]):
        read_spec_file(spec_at(tmp_path, text))


def test_a_model_that_does_not_fit_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_at(tmp_path, BRIEF.replace("H100-80", "A100-40"))
    out = tmp_path / "out"
    assert main(["render", "--spec", str(spec), "--out", str(out)]) == 1
    assert "does not fit" in capsys.readouterr().err
    assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.toml"]


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    made = rendered(tmp_path, SMALL)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(ConfigError, match="no render has written"):
        write(made, out)
    assert (out / "mine").read_text() == "x"
    (out / "mine").unlink()
    write(made, out)
    write(made, out)
    assert (out / "20-engine.yaml").is_file()


def test_shapes_that_no_cluster_has(tmp_path: Path) -> None:
    for change, says in (
        (("tensor_parallel_size = 8", "tensor_parallel_size = 16"), "more than the 8 GPUs"),
        (("= 8\n", "= 4\npipeline_parallel_size = 3\n"), "12 GPUs do not fill nodes of 8"),
        (('"rayservice"', '"deployment"'), ""),
    ):
        text = BRIEF.replace(*change, 1)
        if not says:
            text = text.replace("= 8\n", "= 8\npipeline_parallel_size = 2\n", 1)
            says = "a Deployment's pod is on one"
        with pytest.raises(ConfigError, match=says):
            read_spec_file(spec_at(tmp_path, text))


@pytest.mark.parametrize("name", ["brief", "keda", "three pods"])
def test_the_chart_with_its_values_is_the_manifests(name: str, tmp_path: Path) -> None:
    made = rendered(tmp_path, MODES[name])
    values = yaml.safe_load(made.files["chart/values.yaml"])

    def value(match: re.Match[str]) -> str:
        part, key = match.group(1).split(".")
        return str(values[part][key])

    names = [name for name in made.files if name[:1].isdigit() and not name.startswith("00-")]
    assert names
    changeable = 0
    for name in names:
        text = made.files[f"chart/templates/{name}"]
        text = text.removeprefix('{{- include "octavo.check" . -}}\n')
        text, count = re.subn(r"\{\{ \.Values\.([\w.]+) \}\}", value, text)
        changeable += count
        plain = text.replace('{{ "{{" }}', "{{")
        assert list(yaml.safe_load_all(plain)) == list(yaml.safe_load_all(made.files[name]))
    assert changeable > 10
    checks = made.files["chart/templates/_check.tpl"]
    assert "if ne (toJson .Values.engine.mode)" in checks
    assert ".Values.engine.cpu" not in checks
