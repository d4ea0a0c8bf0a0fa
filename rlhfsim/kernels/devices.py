"""From a pool of the cluster to the device that the cost functions read: hardware, and who runs on it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import fields, replace
from functools import lru_cache

from rlhfsim.kernels.curves import KernelCurves, peaks_of
from rlhfsim.kernels.device import Device
from rlhfsim.specs.frameworks.costs import with_software
from rlhfsim.specs.hardware.hardware import Cluster, Fabric, NodeGroup, Profile
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.hardware.wan import WanLink
from rlhfsim.specs.placement.backends import Backend


def device_on(cluster: Cluster, hardware: int, backend: Backend) -> Device:
    """The device of a kind of GPUs of a cluster, with the software costs of who runs and trains there."""
    pool = cluster.node_groups[hardware]
    return device_of(pool, cluster.oversubscription, framework=cluster.framework, backend=backend)


def device_of(
    pool: NodeGroup,
    oversubscription: float = 1.0,
    *,
    framework: str | None = None,
    backend: Backend | None = None,
) -> Device:
    """The device of a pool; the same object for the same profile, so that caches keyed by it hold.

    The scale-up domain is the rack where it spans nodes (NVL72), else the GPUs of one node. Without a
    `framework` software costs are the pooled ones.
    """
    known = DeviceKey(pool.profile)
    fabric = pool.fabric or pool.profile.fabric
    link = pool.wan
    return _device(
        known, domain_of(pool), pool.gpus_per_node, oversubscription, fabric, framework, backend, link
    )


@lru_cache(maxsize=256)
def with_engine(device: Device, engine: str) -> Device:
    """The device with the kernels of an inference engine, where the engine has tables of its own."""
    curves = device.curves.of_engine(engine)
    if curves is device.curves:
        return device
    return replace(device, curves=curves, inside=device.inside and with_engine(device.inside, engine))


def domain_of(pool: NodeGroup) -> int:
    """GPUs of this pool that share one scale-up domain."""
    domain, node = pool.profile.scale_up.domain, pool.profile.node.gpus
    return min(domain, pool.gpus) if domain > node else min(domain, pool.gpus_per_node)


_INTERNED: deque[Profile] = deque(maxlen=64)


def interned(cluster: Cluster) -> Cluster:
    """The cluster on profiles that were seen before, so that what is cached for a profile holds.

    A profile that is read twice is two equal objects. Rent does not count: no cost depends on it.
    """
    return replace(
        cluster,
        node_groups=tuple(replace(p, profile=_interned_profile(p.profile)) for p in cluster.node_groups),
    )


def _interned_profile(profile: Profile) -> Profile:
    names = [f.name for f in fields(Profile) if f.name != "price"]
    for known in _INTERNED:
        if known is profile or all(getattr(known, n) == getattr(profile, n) for n in names):
            return known
    _INTERNED.append(profile)
    return profile


class DeviceKey:
    """A profile hashed by identity: profiles hold dicts."""

    __slots__ = ("profile",)

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def __hash__(self) -> int:
        return id(self.profile)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceKey) and other.profile is self.profile


@lru_cache(maxsize=256)
def _device(
    key: DeviceKey,
    domain: int,
    gpus_per_node: int,
    oversubscription: float,
    fabric: Fabric | None,
    framework: str | None,
    backend: Backend | None,
    wan: WanLink | None,
) -> Device:
    if oversubscription != 1.0:
        whole = _device(key, domain, gpus_per_node, 1.0, fabric, framework, backend, wan)
        return replace(whole, network_bandwidth=whole.network_bandwidth / oversubscription)
    profile = with_software(key.profile, framework, backend)
    device = Device(
        profile=profile,
        curves=_curves(Tables(profile)),
        domain=domain,
        gpus_per_node=gpus_per_node,
        network_bandwidth=profile.nic.value,
        fabric=fabric,
        wan=wan,
    )
    return replace(device, inside=replace(device, network_bandwidth=math.inf))


class Tables:
    """A profile hashed by what kernel curves read: the object that holds its tables, and its peaks."""

    __slots__ = ("peaks", "profile")

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.peaks = peaks_of(profile)

    def __hash__(self) -> int:
        return id(self.profile.curves)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tables):
            return NotImplemented
        return other.profile.curves is self.profile.curves and other.peaks == self.peaks


@lru_cache(maxsize=64)
def _curves(key: Tables) -> KernelCurves:
    """Curves that profiles with other coefficients share: a calibration tries hundreds of those."""
    return KernelCurves(key.profile, load_profile)
