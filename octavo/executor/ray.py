"""Workers as Ray actors in one placement group: Ray places, starts and watches them.

The ranks of a stage are kept on one node where one has room for them, and stages go to different
nodes where there are several. Steps travel over encrypted channels of our own (`channel.py`), and
hidden states over torch.distributed. Ray is an extra of the package. Not for: what the workers are
told (`remote.py`) or do (`serving.py`). Next file: `nodes.py`, which chooses the nodes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.config import ParallelConfig, Place
from octavo.errors import ConfigError
from octavo.executor.channel import Binder, Context
from octavo.executor.nodes import Node, choose_nodes, shortage
from octavo.executor.records import RankSettings
from octavo.options import prepare_ray

STDERR = 2
INSTALL = (
    "distributed_executor_backend ray: Ray is not installed; install it with "
    "`pip install 'octavo[ray]'` on every node, or use mp on one machine."
)
REACH_SECONDS = 5.0  # for the head of a cluster to take a connection
PIN = 0.001  # of a node's own resource: a bundle that asks for it can be nowhere else

logger = logging.getLogger("octavo.executor.ray")


class RankActor:
    """One worker, as Ray runs it. Methods run beside each other."""

    def where(self) -> tuple[str, str, int]:
        """This node's address, its id, and a port that nobody has now."""
        ray = import_ray()
        host = str(ray.util.get_node_ip_address())
        with socket.create_server((host, 0)) as free:
            return host, str(ray.get_runtime_context().get_node_id()), int(free.getsockname()[1])

    def serve(self, settings: bytes) -> int:
        """Loads the model and serves until told to leave."""
        from octavo.executor.serving import serve

        return serve(msgspec.json.decode(settings, type=RankSettings))

    def examine(self, settings: bytes) -> int:
        """Answers `octavo doctor` in place of loading a model."""
        from octavo.executor.checkup import examine

        return examine(msgspec.json.decode(settings, type=RankSettings))

    def dump_stacks(self) -> None:
        """Writes the stacks of all threads to this actor's log."""
        faulthandler.dump_traceback(file=STDERR, all_threads=True)


class RayCrew:
    """An actor for each rank."""

    def __init__(
        self,
        parallel: ParallelConfig,
        device: str,
        threads: int | None = None,
        *,
        check: bool = False,
    ) -> None:
        """`device` decides what a rank asks for: a GPU, or as many CPUs as it has `threads`.

        With `check` the actors answer `octavo doctor` in place of loading a model.
        """
        self._check = check
        # What Ray reads of the environment it reads when it is imported, which may be long ago.
        fresh = parallel.ray_address is None and "ray" not in sys.modules
        self._protected = prepare_ray(own=fresh)
        self._ray = import_ray()
        self._parallel = parallel
        self._need = {"GPU": 1.0} if device.startswith("cuda") else {"CPU": float(threads or 1)}
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []  # futures of `serve`, which end when a worker does
        self._connected = False

    def binder(self, context: Context) -> Binder:
        """Encrypted ports of the interface by which this node is known in the cluster."""
        return Binder(context, host=str(self._ray.util.get_node_ip_address()))

    def places(self) -> list[Place]:
        """Connects, waits for room, starts the actors and asks where they are.

        Raises ConfigError if the cluster cannot be reached, or has no room in time.
        """
        parallel, ray = self._parallel, self._ray
        self._connect()
        self._reserve()
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        make = ray.remote(RankActor).options
        self._actors = [
            make(
                num_cpus=self._need.get("CPU", 0),
                num_gpus=self._need.get("GPU", 0),
                max_restarts=0,
                max_concurrency=3,
                scheduling_strategy=strategy(self._group, placement_group_bundle_index=rank),
            ).remote()
            for rank in range(parallel.size)
        ]
        try:
            found = ray.get(
                [actor.where.remote() for actor in self._actors], timeout=parallel.placement_seconds
            )
        except ray.exceptions.RayError as error:
            raise ConfigError(
                f"Ray could not start the workers within {parallel.placement_seconds:g} s: {error}",
                "distributed_executor_backend",
            ) from None
        host, _, port = found[0]
        nodes = [node for _, node, _ in found]
        return [
            Place(
                rank=rank,
                tensor=parallel.tensor,
                pipeline=parallel.pipeline,
                local_rank=0,  # an actor sees no GPU but its own
                local_size=nodes.count(node),
                store=f"tcp:{host}:{port}",
                host=own,
            )
            for rank, (own, node, _) in enumerate(found)
        ]

    def start(self, settings: Sequence[RankSettings]) -> None:
        """Has the actors serve."""
        self._runs = [
            (actor.examine if self._check else actor.serve).remote(msgspec.json.encode(one))
            for actor, one in zip(self._actors, settings, strict=True)
        ]

    def lost(self) -> str:
        """By Ray's word that an actor has ended."""
        if not self._runs:
            return ""
        done, _ = self._ray.wait(self._runs, num_returns=1, timeout=0)
        if not done:
            return ""
        rank = self._runs.index(done[0])
        try:
            code = self._ray.get(done[0])
        except Exception as error:  # of any kind that Ray has for it
            first = str(error).strip().partition("\n")[0]
            return f"worker rank {rank} (Ray actor) is gone: {first}"
        return f"worker rank {rank} (Ray actor) ended with code {code}"

    def dump_stacks(self) -> None:
        """Asks each actor; one that hangs as a whole does not."""
        for actor in self._actors:
            actor.dump_stacks.remote()

    def close(self, patience: float) -> None:
        """Ends actors, gives their room back, and leaves the cluster."""
        if not self._connected:
            return
        ray = self._ray
        with contextlib.suppress(Exception):  # what is gone already need not be ended
            if self._runs:
                ray.wait(self._runs, num_returns=len(self._runs), timeout=patience)
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
        self._connected = False
        self._actors, self._runs, self._group = [], [], None
        ray.shutdown()

    def _connect(self) -> None:
        ray, address = self._ray, self._parallel.ray_address
        reach(address)
        try:
            ray.init(
                address=address,
                namespace="octavo",
                include_dashboard=False if address is None else None,
                log_to_driver=True,
                configure_logging=False,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"ray_address {address!r}: the cluster cannot be joined: {error}", "ray_address"
            ) from None
        self._connected = True
        if not self._protected:
            logger.warning(
                "event=ray_open action=none reason='the cluster has no token authentication: who "
                "can reach its ports can run code on it; set RAY_AUTH_MODE=token'"
            )

    def _reserve(self) -> None:
        """A bundle for each rank, on chosen nodes; where none have room, wherever Ray finds it."""
        ray, parallel = self._ray, self._parallel
        end = time.monotonic() + parallel.placement_seconds
        chosen = choose_nodes(self._nodes(), parallel.tensor, parallel.pipeline)
        bundles = [dict(self._need) for _ in range(parallel.size)]
        for bundle, pin in zip(bundles, chosen or (), strict=False):
            bundle[pin] = PIN
        # Without a choice the request stands all the same: a cluster that grows by demand sees it.
        self._group = ray.util.placement_group(bundles, strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=max(1.0, end - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            nodes = self._nodes()
            raise ConfigError(
                shortage(nodes, self._need, parallel.size, parallel.placement_seconds),
                "distributed_executor_backend",
            ) from None

    def _nodes(self) -> list[Node]:
        """Nodes that live, with the number of ranks that each has room for."""
        ray = self._ray
        free: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
        found: list[Node] = []
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            left = free.get(node["NodeID"], {})
            room = min(int(left.get(name, 0.0) // count) for name, count in self._need.items())
            most = min(
                int(node["Resources"].get(name, 0.0) // count) for name, count in self._need.items()
            )
            found.append(Node(node["NodeManagerAddress"], pin_of(node["Resources"]), room, most))
        return found


def reach(address: str | None) -> None:
    """Raises ConfigError if nobody listens at HOST:PORT; Ray itself would wait for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), REACH_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"ray_address {address!r}: the head of the cluster cannot be reached: {error}; start "
            "it with `ray start --head`, or correct the address.",
            "ray_address",
        ) from None


def pin_of(resources: dict[str, float]) -> str:
    """A resource that this node alone has."""
    names = (name for name in resources if name.startswith("node:"))
    return next((name for name in names if name != "node:__internal_head__"), "")


def import_ray() -> Any:
    """Ray. Raises ConfigError, which says how to install it."""
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise ConfigError(INSTALL, "distributed_executor_backend") from None
    return ray
