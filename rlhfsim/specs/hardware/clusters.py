"""A cluster from a file: pools of nodes, mixed or not, and overrides of fabric, storage and price.

    node_groups:
      - {gpu: h100, gpus: 64}
      - {gpu: h20, gpus: 32, nic: 200 Gbit/s, price: 2.10 USD/h, storage: 5 GB/s}
      - {gpu: h100, gpus: 32, wan: {bandwidth: 10 Gbit/s, rtt: 60 ms, loss: 0.01 %}}
    oversubscription: 2

The first pool trains; one behind `wan` is in another region and generates. `gpu` is a profile name, an alias
or a path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.hardware.hardware import MAX_OVERSUBSCRIPTION, Cluster, Count, Fabric, NodeGroup, Profile
from rlhfsim.specs.hardware.profiles import load_profile, node_group
from rlhfsim.specs.hardware.wan import WanLink
from rlhfsim.specs.loading import Source, checked, convert
from rlhfsim.specs.quantities import Bandwidth, BytesPerSecond, Positive, Text, UsdPerHour


@checked
@frozen
class NodeGroupText:
    """One pool as it is written in a file; its size is `gpus`, or `nodes` times GPUs per node."""

    gpu: Text
    gpus: Count | None = None
    nodes: Count | None = None
    gpus_per_node: Count | None = None
    nic: Annotated[BytesPerSecond, Positive] | None = None
    """Per GPU, one direction; replaces the profile's."""
    fabric: Fabric | None = None
    """What joins the nodes: infiniband, roce or efa; replaces the profile's."""
    wan: WanLink | None = None
    """The link to the first nodes, where these are in another region."""
    price: UsdPerHour | None = None
    """Per GPU; replaces the profile's."""
    storage: Annotated[BytesPerSecond, Positive] | None = None
    """What one node draws from the shared file system; replaces the profile's."""


@checked
@frozen
class ClusterText:
    """A cluster as it is written in a file."""

    node_groups: Annotated[tuple[NodeGroupText, ...], Field(min_length=1, max_length=100)]
    oversubscription: Annotated[float, Field(ge=1, le=MAX_OVERSUBSCRIPTION)] = 1.0


def cluster_from(
    source: Source,
    data: Any = None,
    path: tuple[int | str, ...] = (),
    load: Callable[[str], Profile] = load_profile,
) -> Cluster:
    """The cluster in `data`, which is at `path` of a larger document (default: all of it).

    `load`: reads profiles; whoever reads many clusters passes one that remembers them.
    """
    given = source.data if data is None else data
    if not isinstance(given, Mapping):
        raise RlhfsimError(
            "not-a-mapping",
            "a cluster is a mapping with the key node_groups",
            place=source.place(path),
            help="as in node_groups: [{gpu: h100, gpus: 64}]",
        )
    text = convert(ClusterText, source, given, path)
    groups = tuple(
        _node_group(group, source, (*path, "node_groups", i), load)
        for i, group in enumerate(text.node_groups)
    )
    try:
        return Cluster(node_groups=groups, oversubscription=text.oversubscription)
    except RlhfsimError as error:
        raise error.at(source.place((*path, "node_groups", 0))) from error


def _node_group(
    text: NodeGroupText, source: Source, path: tuple[int | str, ...], load: Callable[[str], Profile]
) -> NodeGroup:
    try:
        group = node_group(
            load(text.gpu),
            text.gpus,
            nodes=text.nodes,
            gpus_per_node=text.gpus_per_node,
            nic=text.nic,
            fabric=text.fabric,
            wan=text.wan,
            price=text.price,
        )
    except RlhfsimError as error:
        key = "gpu" if error.code.startswith("unknown-") else "gpus"
        raise error.at(source.place((*path, key))) from error
    if text.storage is None:
        return group
    rate = Bandwidth(value=text.storage, source="given by the user")
    node = replace(group.profile.node, shared_storage=rate)
    return replace(group, profile=replace(group.profile, node=node))
