"""Workers as actors of a real Ray cluster of two raylets with addresses of their own."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from octavo.config import ParallelConfig, WorkerConfig
from octavo.engine.core import EngineCore
from octavo.errors import ConfigError, EngineDead
from octavo.executor import ray as executor_ray
from octavo.executor.local import LocalExecutor
from octavo.executor.nodes import Node, choose_nodes, shortage
from octavo.executor.ray import RayCrew
from octavo.executor.remote import Patience, RemoteExecutor
from octavo.types import AddRequest, TokenParams
from tests.models.twins import make_twin
from tests.parallel.crews import make_core, new_seed, run_all, tokens_of
from tests.parallel.test_same_tokens import some_requests
from tests.worker.test_worker import config_of
from tests.worker.tiny import write_tiny

HOSTS = ("127.0.0.2", "127.0.0.3")
CPUS = 4  # of each logical node


@dataclass
class Raylets:
    """The cluster, and its second node."""

    cluster: Any
    second: Any

    @property
    def address(self) -> str:
        return str(self.cluster.address)


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    # Before it is imported: that is when Ray reads them.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 64, RAY_USAGE_STATS_ENABLED="0")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": CPUS, "node_ip_address": HOSTS[0], "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(num_cpus=CPUS, node_ip_address=HOSTS[1])
    try:
        yield Raylets(cluster, second)
    finally:
        cluster.shutdown()
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED"):
            del os.environ[name]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), seed=1)


def on_ray(raylets: Raylets, tensor: int, pipeline: int, seconds: float = 60.0) -> ParallelConfig:
    return ParallelConfig(tensor, pipeline, "ray", raylets.address, seconds)


def settings(folder: Path, parallel: ParallelConfig) -> WorkerConfig:
    return config_of(
        folder,
        kernels="reference",
        dtype="float32",
        num_blocks=30,
        max_model_len=96,
        parallel=parallel,
    )


@contextmanager
def actors(config: WorkerConfig) -> Iterator[tuple[EngineCore, RemoteExecutor, RayCrew]]:
    crew = RayCrew(config.parallel, "cpu", 1)
    patience = Patience(silence=5.0, settle=2.0)
    executor = RemoteExecutor(config, crew, patience=patience)
    info = executor.start()
    try:
        yield make_core(executor, info), executor, crew
    finally:
        executor.close()


def addresses(crew: RayCrew) -> list[str]:
    """Of each rank's node."""
    ray = executor_ray.import_ray()
    return [where[0] for where in ray.get([actor.where.remote() for actor in crew._actors])]


def test_stages_on_two_nodes_give_the_tokens_of_one(raylets: Raylets, tmp_path: Path) -> None:
    twin = make_twin("llama")
    twin.model.save_pretrained(tmp_path)
    requests = some_requests(twin, new_seed())
    alone = LocalExecutor(settings(tmp_path, ParallelConfig()))
    expected = tokens_of(run_all(make_core(alone, alone.start()), requests))
    with actors(settings(tmp_path, on_ray(raylets, 1, 2))) as (core, _, crew):
        hosts = addresses(crew)
        assert sorted(hosts) == sorted(HOSTS)
        assert tokens_of(run_all(core, requests)) == expected
        listening = listeners(os.getpid())
        assert listening
        assert not {host for host in listening if host in ("0.0.0.0", "*", "[::]")}
    crew = RayCrew(on_ray(raylets, 64, 1, seconds=2.0), "cpu", 1)
    with pytest.raises(ConfigError, match=r"no room for 64 workers of 1 CPU each .* room for 8"):
        crew.places()
    crew.close(0)
    with pytest.raises(ConfigError, match=r"127.0.0.4:9.*cannot be reached"):
        RayCrew(ParallelConfig(1, 2, "ray", "127.0.0.4:9"), "cpu", 1).places()


def listeners(pid: int) -> set[str]:
    """Addresses at which a process listens, by /proc."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link) if link.is_symlink() else "")
        if found:
            inodes.add(found[1])
    hosts = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            number = int(fields[1].split(":")[0], 16)
            hosts.add(".".join(str(byte) for byte in number.to_bytes(4, "little")))
    return hosts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "tensor", "pipeline"),
    [("llama", 2, 1), ("qwen3-moe", 2, 2), ("deepseek-v2", 2, 1)],
)
def test_ranks_on_two_nodes_give_the_tokens_of_one(
    case: str, tensor: int, pipeline: int, raylets: Raylets, tmp_path: Path
) -> None:
    twin = make_twin(case)
    twin.model.save_pretrained(tmp_path)
    requests = some_requests(twin, new_seed())
    alone = LocalExecutor(settings(tmp_path, ParallelConfig()))
    expected = tokens_of(run_all(make_core(alone, alone.start()), requests))
    with actors(settings(tmp_path, on_ray(raylets, tensor, pipeline))) as (core, _, crew):
        hosts = addresses(crew)
        for stage in range(pipeline):  # each on one node, and no two on the same
            assert len(set(hosts[stage * tensor : (stage + 1) * tensor])) == 1
        assert len(set(hosts)) == pipeline
        assert tokens_of(run_all(core, requests)) == expected


@pytest.mark.slow
def test_a_killed_actor_and_then_a_killed_raylet(raylets: Raylets, tiny: Path) -> None:
    ray = executor_ray.import_ray()
    config = settings(tiny, on_ray(raylets, 1, 2))
    params = TokenParams(max_tokens=60, temperature=0.0)
    with actors(config) as (core, _, crew):
        core.add(AddRequest("a", [5, 6, 7], params, 0.0))
        core.step()
        ray.kill(crew._actors[1])
        assert time_to_death(core) < 5
    with actors(config) as (core, _, crew):  # its room has been given back
        core.add(AddRequest("b", [5, 6, 7], params, 0.0))
        core.step()
        for process in raylets.second.all_processes["raylet"]:
            os.kill(process.process.pid, signal.SIGKILL)
        assert time_to_death(core) < 60  # Ray ends the workers of a dead raylet in its own time
    raylets.cluster.remove_node(raylets.second, allow_graceful=False)
    raylets.second = raylets.cluster.add_node(num_cpus=CPUS, node_ip_address=HOSTS[1])
    with actors(config) as (core, _, crew):
        assert sorted(addresses(crew)) == sorted(HOSTS)
        news = run_all(core, [AddRequest("c", [5, 6, 7], TokenParams(max_tokens=4), 0.0)])
        assert len(tokens_of(news)["c"]) == 4


def time_to_death(core: EngineCore) -> float:
    """Seconds; new requests come all the while."""
    began = time.monotonic()
    params = TokenParams(max_tokens=60, temperature=0.0)
    for number in itertools.count():
        try:
            if not core.has_work():
                core.check()
                core.add(AddRequest(f"more-{number}", [5, 6, 7], params, 0.0))
            core.step()
        except EngineDead as error:
            print(error)
            return time.monotonic() - began
    raise AssertionError("it never ends")


def test_nodes_are_chosen_by_stage() -> None:
    nodes = [Node("a", "node:a", 8, 8), Node("b", "node:b", 8, 8), Node("c", "node:c", 3, 8)]
    assert choose_nodes(nodes, 8, 2) == ["node:a"] * 8 + ["node:b"] * 8
    assert choose_nodes(nodes, 2, 1) == ["node:c"] * 2  # where the least is left over
    assert choose_nodes(nodes, 2, 3) == ["node:c"] * 2 + ["node:a"] * 2 + ["node:b"] * 2
    assert (
        choose_nodes(nodes, 4, 4)
        == ["node:a"] * 4 + ["node:b"] * 4 + ["node:a"] * 4 + ["node:b"] * 4
    )
    assert choose_nodes(nodes, 9, 1) == []
    assert choose_nodes([nodes[0], nodes[0]], 1, 1) == []  # one pin for two
    text = shortage(nodes, {"GPU": 1.0}, 64, 5)
    assert "64 workers of 1 GPU each" in text
    assert "room for 19" in text


def test_without_ray_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[ray\]'"):
        RayCrew(ParallelConfig(2, 1, "ray", "auto"), "cpu")
