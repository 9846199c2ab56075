"""Lint: a runbook with known flaws yields each by name; rules are quiet where they should be."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from octavo.cli.main import main
from octavo.errors import ConfigError
from octavo.platform.lint import LintOptions, lint
from octavo.platform.spec import LITELLM_VERSION, RAY_VERSION

RUNBOOK = Path(__file__).parent / "data" / "first_runbook.md"
NINETEEN = (
    *("nothing-serves", "ray-not-in-image", "version-not-pinned", "worker-group-bounds"),
    *("worker-ray-start-params", "head-num-cpus", "gpu-count", "worker-resources"),
    *("shared-memory", "service-unreachable", "gpu-placement", "weights-volume"),
    *("probes-and-drain", "collective-network", "dashboard-open", "availability"),
    *("operator-not-installed", "nothing-scraped", "triton-not-there"),
)
# A change to the runbook's text, and the rule that then has nothing to say.
MENDED = {
    "ray-not-in-image": ("vllm/vllm-openai:latest", "registry.example.com/vllm-ray:0.32.0"),
    "version-not-pinned": ("vllm-openai:latest", "vllm-openai:v0.32.0"),
    "worker-group-bounds": (
        "    replicas: 4",
        "    replicas: 4\n    minReplicas: 4\n    maxReplicas: 4",
    ),
    "worker-ray-start-params": (
        "    replicas: 4",
        '    replicas: 4\n    rayStartParams: {num-gpus: "8"}',
    ),
    "head-num-cpus": ("      dashboard-host", '      num-cpus: "0"\n      dashboard-host'),
    "gpu-count": ("    replicas: 4", "    replicas: 1"),
    "dashboard-open": ("'0.0.0.0'", "'127.0.0.1'"),
    "triton-not-there": ("Triton & Prometheus Metrics", "Prometheus Metrics"),
    "metric-name": ("vllm:gpu_cache_usage_factor", "vllm:kv_cache_usage_perc"),
    "operator-not-installed": (
        "  name: vllm-h100-cluster",
        "  name: vllm-h100-cluster\n  annotations: {octavo/requires: kuberay}",
    ),
    "service-unreachable": ("http://vllm-engine.ai-serving.svc:8000", "http://127.0.0.1:8000"),
}


def rules(path: Path) -> set[str]:
    return {finding.rule for finding in lint([path])}


def test_the_runbook_has_all_its_flaws() -> None:
    found = {finding.rule: finding for finding in lint([RUNBOOK])}
    assert len(NINETEEN) == 19
    assert [name for name in NINETEEN if name not in found] == []
    assert {"dead-variable", "metric-name", "old-module", "kernel-ruled-out"} <= set(found)
    lines = RUNBOOK.read_text().splitlines()
    assert "vllm:gpu_cache_usage_factor" in lines[found["metric-name"].line - 1]
    assert "resources:" in lines[found["gpu-count"].line - 1]
    assert "24 stand idle" in found["gpu-count"].problem


@pytest.mark.parametrize("name", MENDED)
def test_a_flaw_that_is_mended_is_no_longer_found(name: str, tmp_path: Path) -> None:
    before, after = MENDED[name]
    text = RUNBOOK.read_text()
    assert before in text
    file = tmp_path / "runbook.md"
    file.write_text(text.replace(before, after))
    assert name in rules(RUNBOOK)
    assert name not in rules(file)


def test_a_model_that_does_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "serve.sh"
    file.write_text("# on one H100\nvllm serve --model deepseek-ai/DeepSeek-V2.5\n")
    found = [finding for finding in lint([file]) if finding.rule == "model-fit"]
    assert len(found) == 1
    assert "does not fit" in found[0].problem
    assert found[0].line == 2


def test_flags_that_nobody_knows(tmp_path: Path) -> None:
    file = tmp_path / "serve.sh"
    file.write_text("octavo serve m --max-num-seq 3\nvllm serve m --swap-space 4\n")
    found = {finding.line: finding for finding in lint([file]) if finding.rule == "unknown-flag"}
    assert "did you mean --max-num-seqs" in found[1].remedy
    assert "--swap-space is gone" in found[2].problem


def test_dashboards_name_real_metrics_and_take_rates(tmp_path: Path) -> None:
    exprs = [
        "avg(vllm:time_to_first_token_seconds_sum) / avg(vllm:time_to_first_token_seconds_count)",
        "vllm:gpu_prefix_cache_hit_rate",
        "rate(vllm:time_to_first_token_seconds_sum[5m])",
        "vllm:num_requests_waiting",
    ]
    panels = [{"title": expr, "targets": [{"expr": expr}]} for expr in exprs]
    file = tmp_path / "board.json"
    file.write_text(json.dumps({"panels": panels}, indent=1))
    found = lint([file])
    assert sorted({one.rule for one in found}) == ["histogram-without-rate", "metric-name"]
    assert sum(one.rule == "histogram-without-rate" for one in found) == 4  # titles too
    stored = "# TYPE vllm:gpu_prefix_cache_hit_rate gauge\n"
    other = lint([file], LintOptions(metrics=stored))
    assert not any("hit_rate" in one.problem for one in other)
    assert any("vllm:num_requests_waiting" in one.problem for one in other)


def test_selectors_and_volumes_must_meet(tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(
        """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: a}
spec:
  selector: {matchLabels: {app: a}}
  template:
    metadata: {labels: {app: b}}
    spec:
      containers:
      - {name: c, image: "x:1", volumeMounts: [{name: none, mountPath: /m}]}
---
apiVersion: v1
kind: Service
metadata: {name: s}
spec: {selector: {app: z}, ports: [{port: 1}]}
"""
    )
    found = lint([file])
    assert {one.rule for one in found} == {"schema", "service-unreachable"}
    assert any("volume none" in one.problem and one.line == 10 for one in found)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "kind: Pod\nmetadata: {a: b: c}\n", r"a.yaml:2: is not YAML"),
        ("a.json", "{", r"a.json: is not JSON"),
    ],
)
def test_unreadable_files(name: str, text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        lint([file])
    with pytest.raises(ConfigError, match="no such file"):
        lint([tmp_path / "nothing"])


def test_definitions_of_custom_resources(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {
            "spec": {
                "type": "object",
                "required": ["rayVersion"],
                "properties": {"rayVersion": {"type": "string"}},
            }
        },
    }
    crds = tmp_path / "crds"
    crds.mkdir()
    (crds / "ray.yaml").write_text(
        json.dumps(
            {
                "kind": "CustomResourceDefinition",
                "spec": {
                    "group": "ray.io",
                    "names": {"kind": "RayCluster"},
                    "versions": [{"name": "v1", "schema": {"openAPIV3Schema": schema}}],
                },
            }
        )
    )
    file = tmp_path / "ray.yaml"
    file.write_text(
        "apiVersion: ray.io/v1\nkind: RayCluster\nmetadata: {name: r}\nspec: {rayVerson: '2'}\n"
    )
    found = [one for one in lint([file], LintOptions(crds=crds)) if one.rule == "schema"]
    assert any("'rayVersion' is a required property" in one.problem for one in found)
    assert any("spec.rayVerson is no key" in one.problem and one.line == 4 for one in found)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(RUNBOOK)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"first_runbook.md:44: error: nothing-serves: ", out)
    assert main(["lint", str(RUNBOOK), "--json"]) == 1
    assert {"rule", "file", "line", "problem", "remedy", "level"} == set(
        json.loads(capsys.readouterr().out)[0]
    )


DEPLOY = Path(__file__).parents[2] / "deploy"


def test_what_is_shipped_has_no_flaws() -> None:
    assert [str(one) for one in lint([DEPLOY]) if one.level == "error"] == []
    assert len(list(DEPLOY.rglob("*Dockerfile"))) == 3


def test_images_have_the_versions_that_specs_have() -> None:
    cuda = (DEPLOY / "docker" / "cuda.Dockerfile").read_text()
    gateway = (DEPLOY / "docker" / "gateway.Dockerfile").read_text()
    assert f"ARG RAY={RAY_VERSION}\n" in cuda
    assert f"ARG LITELLM={LITELLM_VERSION}\n" in gateway


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("FROM python\nUSER 1\n", "python is another image tomorrow"),
        ("ARG V=latest\nFROM python:${V}\nUSER 1\n", "python:latest is another image"),
        ("FROM python:3.12\n", "run as root"),
        ("FROM a:1 AS b\nUSER 1\nFROM a:1\nCOPY --from=b / /\n", "run as root"),
        ("FROM a:1\nRUN apt-get install -y g++\nUSER 1\n", "leaves its lists"),
    ],
)
def test_dockerfiles(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    file.write_text(text)
    assert [one.problem for one in lint([tmp_path]) if says in one.problem]
