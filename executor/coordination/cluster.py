"""Ray under a plan: connect, compare the cluster with the plan, and reserve every GPU it names.

A GPU of the plan is one `slot`: a `GPU` resource where Ray sees GPUs, else the custom resource `slot`
(a CPU-only machine offers as many as the plan asks for; they share its cores). One placement group a
node of the plan, STRICT_PACK, one bundle a slot, so that ranks lie exactly where the planner put them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from executor.coordination import forks
from executor.coordination.failures import session_logs
from executor.coordination.saving import ended_by_sigterm
from executor.coordination.worker import HOST, LOOPBACK, THREADS
from executor.ranks import Place, bundles, check_room, places
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.ray_token import keep_private

logger = logging.getLogger(__name__)
GPU, SLOT = "GPU", "slot"
OBJECT_STORE_BYTES = 256 * 2**20
"""Bytes of the object store of a cluster that is started here; batches of token ids are small."""
POLL_S = 5.0
"""Between two looks at a reservation that waits."""

LOOPBACK_ONLY = {
    HOST: LOOPBACK,
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": LOOPBACK,
}
"""Environment of workers on a cluster that is started here, which nobody joins; what the user set wins."""
STARTS = 3
"""Most starts of Ray, which gives its processes 30 s: too little at a load of 50 on two cores."""
JOIN_S = 5.0
"""For a connection to the head of a cluster."""
CONNECT_S = 1.0
"""For the answer of a raylet."""
PROBE_SHARE, PROBE_S = 0.01, 60.0
"""Share of a GPU, and seconds, for the question which GPU a bundle has."""


@frozen
class RayNode:
    """What one Ray node offers."""

    id: str
    address: str
    slots: int


def connect(plan: Plan, address: str | None, environment: Mapping[str, str]) -> str:
    """Join the cluster at `address`, or start one on this machine, which ends with this process.

    The resource that its slots are: `GPU` or `slot`.

    Raises:
        RlhfsimError: no cluster there, one that does not start, or fewer GPUs than the plan needs.
    """
    if address is not None:
        return join(address, environment)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # a process a core, none of them used
    gpus = local_gpus()
    options: dict[str, Any] = {"num_gpus": gpus} if gpus else {"resources": {SLOT: len(places(plan))}}
    options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    keep_private(make=True)
    own = {name: os.environ.get(name, usual) for name, usual in LOOPBACK_ONLY.items()}
    _start(options | _quiet(own | dict(environment)))
    return GPU if gpus else SLOT


def _start(options: Mapping[str, Any]) -> None:
    """Start Ray; one that answers too late is started again: a job that is requeued has nobody to do it."""
    for left in reversed(range(STARTS)):
        try:
            with ended_by_sigterm(), forks.in_place_of_new_workers():
                ray.init(address="local", **options)
            return
        except Exception as error:  # Ray raises no class of its own where its processes do not answer
            _end(error)
            reason = f"Ray did not start on this machine: {error}".splitlines()[0]
            if left:
                logger.warning("%s; it is started again", reason)
                continue
            raise RlhfsimError(
                "ray-not-started",
                f"{reason} ({STARTS} starts)",
                help="a busy machine, or one without memory or disk, answers too late: free it, try again",
            ) from error


def _end(error: Exception) -> None:
    """End the processes of a start that failed: Ray knows them in the frames of its error alone."""
    from ray._private.node import Node

    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(node := frame.f_locals.get("self"), Node):
            node.kill_all_processes(check_alive=False, allow_graceful=True)
    ray.shutdown()


def _quiet(environment: Mapping[str, str]) -> dict[str, Any]:
    try:
        " ".join([os.getcwd(), *sys.argv]).encode()
    except UnicodeEncodeError as error:
        raise RlhfsimError(
            "not-utf-8", "Ray takes no command or folder whose name is not UTF-8", help="rename it"
        ) from error
    return {
        "logging_level": logging.ERROR,
        "log_to_driver": False,
        "runtime_env": {"env_vars": dict(environment)},
    }


def join(address: str, environment: Mapping[str, str]) -> str:
    """Join the cluster at `address`; the resource that its slots are.

    Raises:
        RlhfsimError: no cluster there.
    """
    keep_private(make=False)
    try:
        _knock(address)
        with ended_by_sigterm():
            ray.init(address=address, **_quiet(environment))
    except (OSError, RuntimeError, ValueError) as error:
        raise RlhfsimError(
            "no-ray-cluster",
            f"no Ray cluster answers at {address!r}: {error}".splitlines()[0],
            help="start one with: ray start --head, or leave out --address",
        ) from error
    return GPU if ray.cluster_resources().get(GPU, 0) else SLOT


def _knock(address: str) -> None:
    """Connect to `HOST:PORT` and leave: where nobody listens, Ray tries for minutes (seven were seen).

    Raises:
        OSError: nobody listens there.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=JOIN_S).close()


def local_gpus() -> int:
    """GPUs that this process may use, as Ray counts: NVML's, at most those of CUDA_VISIBLE_DEVICES."""
    from ray._private.accelerators import NvidiaGPUAcceleratorManager as Nvidia

    visible = Nvidia.get_current_process_visible_accelerator_ids()
    count: int = Nvidia.get_current_node_num_accelerators()
    return count if visible is None else min(count, len(visible))


def has_gpus(address: str | None, environment: Mapping[str, str]) -> bool:
    """Whether the slots of a run are GPUs: those of the cluster at `address`, whatever this machine has.

    Raises:
        RlhfsimError: no cluster there.
    """
    if address is None:
        return local_gpus() > 0
    try:
        return join(address, environment) == GPU
    finally:
        ray.shutdown()


def nodes(resource: str) -> list[RayNode]:
    """Nodes with slots that are alive, most slots first, then by address: the order is stable."""
    offers = [
        RayNode(id=n["NodeID"], address=n["NodeManagerAddress"], slots=int(n["Resources"].get(resource, 0)))
        for n in ray.nodes()
        if n["Alive"]
    ]
    return sorted((n for n in offers if n.slots), key=lambda n: (-n.slots, n.address, n.id))


def node_is_gone(node_id: str) -> bool:
    """Whether a Ray node ended: its raylet refuses connections at once; Ray's check takes 15 s or more."""
    [node] = [n for n in ray.nodes() if n["NodeID"] == node_id] or [None]
    if node is None or not node["Alive"]:
        return True
    try:
        socket.create_connection(
            (node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=CONNECT_S
        ).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # slow or behind a firewall: Ray decides
        return False
    return False


def check(plan: Plan, resource: str) -> None:
    """Compare plan and cluster before anything is reserved.

    Raises:
        RlhfsimError: with the plan's need and the cluster's offer, node by node.
    """
    kind = "GPUs" if resource == GPU else "slots"
    check_room(plan, [n.slots for n in nodes(resource)], kind)


@ray.remote
def _gpu_ids() -> list[str]:
    """GPUs of the bundle that this runs in."""
    return [str(i) for i in ray.get_gpu_ids()]


@frozen
class Reservation:
    """Reserved slots: where an actor of a place is scheduled."""

    resource: str
    groups: Mapping[int, PlacementGroup]
    """Plan node -> its placement group."""
    bundles: Mapping[Place, int]
    """Place -> bundle of its node's group."""

    def options(self, place: Place, share: float) -> dict[str, Any]:
        """Ray options of an actor that takes `share` of the slot at `place`."""
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.groups[place[0]],
            placement_group_bundle_index=self.bundles[place],
            placement_group_capture_child_tasks=False,
        )
        amount = {"num_gpus": share} if self.resource == GPU else {"resources": {SLOT: share}}
        return {"num_cpus": 0, "scheduling_strategy": strategy, **amount}

    def devices(self, places: Sequence[Place]) -> dict[str, str]:
        """Environment of one process that uses the GPUs of several places of a node; empty without GPUs.

        Ray shows an actor the GPUs of its own bundle only, so the process is told all of them.
        """
        if self.resource != GPU or len(places) < 2:
            return {}
        probes = [_gpu_ids.options(**self.options(place, PROBE_SHARE)).remote() for place in places]
        ids = [str(i) for of_place in ray.get(probes, timeout=PROBE_S) for i in of_place]
        return {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": ",".join(ids)}

    def slots(self, place: Place, environment: Mapping[str, str]) -> int | None:
        """Slots of the plan on the node of `place`; None where `environment` says how many threads to use."""
        return None if THREADS in environment else sum(node == place[0] for node, _ in self.bundles)

    def release(self) -> None:
        """Give every slot back."""
        for group in self.groups.values():
            with contextlib.suppress(Exception):  # the cluster may be gone already
                remove_placement_group(group)


def reserve(plan: Plan, resource: str, timeout_s: float) -> Reservation:
    """Reserve the plan's slots; a wait that is bounded and says what it waits for.

    Raises:
        RlhfsimError: not enough free slots in time.
    """
    by_node = bundles(plan)
    groups = {
        node: placement_group([{resource: 1.0} for _ in slots], strategy="STRICT_PACK")
        for node, slots in by_node.items()
    }
    reservation = Reservation(
        resource=resource,
        groups=groups,
        bundles={place: i for slots in by_node.values() for i, place in enumerate(slots)},
    )
    try:
        _wait(plan, groups, resource, timeout_s)
    except RlhfsimError:
        reservation.release()
        raise
    return reservation


def _wait(plan: Plan, groups: Mapping[int, PlacementGroup], resource: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for node, group in groups.items():
        while not group.wait(timeout_seconds=min(POLL_S, max(0.1, deadline - time.monotonic()))):
            free = ray.available_resources().get(resource, 0)
            total = ray.cluster_resources().get(resource, 0)
            check(plan, resource)  # a node that is lost is noticed late
            logger.warning("waiting for node %d of the plan: %g of %g %s free", node, free, total, resource)
            if time.monotonic() >= deadline:
                raise RlhfsimError(
                    "cluster-busy",
                    f"node {node} of the plan needs {len(group.bundle_specs)} {resource} on one node; "
                    f"{free:g} of {total:g} are free after {timeout_s:g} s",
                    help="see who holds them with: ray status",
                )


@contextlib.contextmanager
def joined(
    plan: Plan,
    address: str | None,
    environment: Mapping[str, str],
    timeout_s: float,
    logs: Path | None = None,
) -> Iterator[Reservation]:
    """A cluster that fits the plan, reserved; released and left at the end, its logs copied to `logs`."""
    with ended_by_sigterm():
        resource = connect(plan, address, environment)
        try:
            check(plan, resource)
            reservation = reserve(plan, resource, timeout_s)
            try:
                yield reservation
            finally:
                reservation.release()
        finally:
            source = session_logs() if logs is not None and address is None else None
            ray.shutdown()
            for path in (
                sorted(source.glob("worker-*")) if source is not None else ()
            ):  # not Ray's own daemons
                if logs is not None and path.stat().st_size:
                    with contextlib.suppress(OSError):
                        shutil.copy(path, logs / path.name)
