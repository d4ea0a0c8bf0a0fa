"""What a GPU, a node and a cluster can do: datasheet numbers and efficiencies, each with its source."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Annotated, Literal

from pydantic import Field

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.hardware.calibrated import FrameworkBiases, Provenance, WorkloadMeasured
from rlhfsim.specs.hardware.kernel_tables import CurvesText
from rlhfsim.specs.hardware.wan import WanLink
from rlhfsim.specs.loading import checked
from rlhfsim.specs.quantities import (
    Bandwidth,
    Capacity,
    Coefficient,
    CoefficientText,
    Peak,
    Precision,
    Text,
    UsdPerHour,
    Watts,
)

MAX_GPUS = 1_000_000
"""A larger cluster is a slip."""
MAX_OVERSUBSCRIPTION = 1000.0
Count = Annotated[int, Field(ge=1, le=MAX_GPUS, strict=True)]


@checked
@frozen
class Price:
    """Rent of one GPU for an hour."""

    value: UsdPerHour
    low: UsdPerHour
    high: UsdPerHour
    date: Annotated[str, Field(pattern=r"^(given|[12]\d{3}(-[01]\d(-[0-3]\d)?)?)$")]
    """Date of the quotation: a year, a month as `2026-05`, or a day; `given` where the user says it."""
    source: Text

    def __post_init__(self) -> None:
        """Check that the interval holds the value."""
        if not self.low <= self.value <= self.high:
            raise RlhfsimError(
                "interval-without-value",
                f"interval [{self.low}, {self.high}] does not hold the price {self.value}",
                help="give low <= value <= high",
            )


@checked
@frozen
class Power:
    """Thermal design power of one GPU."""

    value: Watts
    source: Text


@checked
@frozen
class ScaleUp:
    """The fast fabric inside a node or rack: NVLink, xGMI, or PCIe where there is none."""

    kind: Literal["nvlink", "xgmi", "pcie"]
    bandwidth: Bandwidth
    """Per GPU, one direction."""
    domain: Count
    """GPUs that reach each other over this fabric (8 in an HGX node, 72 in an NVL72 rack)."""
    in_switch_reduction: bool = False
    """NVLS: the switch reduces, so all-reduce exceeds the ring's limit (Hopper and later)."""


@checked
@frozen
class Node:
    """The server around the GPUs; bandwidths and sizes are per node."""

    gpus: Count
    host_memory: Capacity
    host_bandwidth: Bandwidth
    """DDR of the whole node, read plus write."""
    cpu_cores: Count
    local_storage: Bandwidth
    """NVMe of the node, sequential read; write is `local_storage_write` of the coefficients."""
    shared_storage: Bandwidth
    """What one node draws from the shared file system."""
    power: Power | None = None
    """Draw of the server without its GPUs; unknown when absent."""


Fabric = Literal["infiniband", "roce", "efa"]
SHARES = ("_efficiency", "_fraction", "_share", "_write")
"""Ends of the names of efficiencies and shares."""
AT_MOST_ONE = ("overlap_", "sm_share_")
"""Starts of the names of what ends at 1."""
AT_LEAST_ONE = ("fragmentation", "moe_imbalance", "ep_hot_rank_factor", "pue", "rank_contention")
"""Factors of 1 and above."""
MAX_EFFICIENCY = 1.2
"""A measured efficiency may pass 1 where the datasheet is cautious; far above it is a slip."""


def _check_range(name: str, coefficient: Coefficient) -> None:
    """Efficiencies and shares lie in (0, 1.2], overlaps in [0, 1], factors and PUE at 1 or above."""
    if name.endswith(SHARES):
        ok = coefficient.low > 0 and coefficient.high <= MAX_EFFICIENCY
        rule = f"above 0 and at most {MAX_EFFICIENCY}"
    elif name.startswith(AT_MOST_ONE):
        ok, rule = coefficient.high <= 1, "between 0 and 1"
    elif name in AT_LEAST_ONE:
        ok, rule = coefficient.low >= 1, "at least 1"
    elif name.endswith("_rate") or name == "mtbf_per_gpu":
        ok, rule = coefficient.low > 0, "above 0"
    else:
        return
    if not ok:
        raise RlhfsimError(
            "coefficient-out-of-range",
            f"coefficient {name!r} has the interval [{coefficient.low}, {coefficient.high}]",
            help=f"it must be {rule}; 85 % is written 0.85 or 85 %",
        )


@checked
@frozen
class Profile:
    """One kind of GPU in its usual node: `hardware_profiles/<name>.yaml`."""

    name: str
    title: str
    """As people write it: `H100 SXM 80GB`."""
    vendor: Literal["nvidia", "amd", "cpu"]
    aliases: tuple[str, ...] = ()
    memory: Capacity
    """Datasheet size of device memory."""
    usable_memory: Capacity
    """What the driver offers to a process on an idle device."""
    peak: dict[Precision, Peak]
    """Dense FLOP/s; a precision that is absent is not supported by the hardware."""
    hbm: Bandwidth
    scale_up: ScaleUp
    pcie: Bandwidth
    """GPU to host, per GPU, one direction (C2C where there is no PCIe)."""
    nic: Bandwidth
    """Share of the node's network that one GPU has, one direction."""
    node: Node
    tdp: Power
    fabric: Fabric | None = None
    """What joins its nodes, which decides how fast tokens reach experts of other nodes; None: not said."""
    price: Price | None = None
    coefficients: dict[str, CoefficientText] = field(default_factory=dict)
    """Efficiencies and latencies; those of `common.yaml` fill in what a profile leaves out."""
    calibration: Provenance | None = None
    """Where the coefficients were fitted on runs: on which, and how far they reach."""
    biases: dict[str, FrameworkBiases] = field(default_factory=dict)
    """Framework -> how much longer its calls take than priced, measured on runs."""
    workload: tuple[WorkloadMeasured, ...] = ()
    """What rewards by rules, environments and own parts of the algorithm took in runs."""
    curves: CurvesText | None = None
    """Kernel timings as compact curves (see `rlhfsim.kernels.curves`); written by the fit command."""

    def __post_init__(self) -> None:
        """Check what the types cannot."""
        if self.usable_memory.value > self.memory.value:
            raise RlhfsimError(
                "bad-value",
                "usable_memory is larger than memory",
                help="80 GB cards hold 80 GiB, of which about 79.2 GiB are usable",
            )
        if not {"bf16", "fp16", "fp32"} & set(self.peak):
            raise RlhfsimError(
                "missing-key", "peak holds none of bf16, fp16, fp32", help="give at least one dense rate"
            )
        for name, coefficient in self.coefficients.items():
            _check_range(name, coefficient)

    def coefficient(self, name: str) -> Coefficient:
        """An efficiency or latency by name; unknown names are our own bug."""
        assert name in self.coefficients, f"profile {self.name} has no coefficient {name}"
        return self.coefficients[name]

    def __getitem__(self, name: str) -> float:
        """The value of a coefficient: `profile["pcie_efficiency"]`."""
        return self.coefficient(name).value


@checked
@frozen
class NodeGroup:
    """Nodes of one profile inside a cluster."""

    profile: Profile
    gpus: Count
    gpus_per_node: Count
    fabric: Fabric | None = None
    """What joins these nodes; None: what the profile says."""
    wan: WanLink | None = None
    """The link to the nodes that train, where these are in another region: they generate only."""

    @property
    def nodes(self) -> int:
        """Servers, the last one possibly part-filled."""
        return -(-self.gpus // self.gpus_per_node)

    def sized(self, gpus: int, per_node: int) -> NodeGroup:
        """The same nodes with so many GPUs, at most `per_node` in each."""
        return replace(self, gpus=gpus, gpus_per_node=min(gpus, per_node))


@checked
@frozen
class Cluster:
    """N nodes, of one kind or mixed, behind one fabric."""

    node_groups: tuple[NodeGroup, ...]
    oversubscription: float = 1.0
    """Factor by which the fabric between nodes is thinner than the sum of the NICs (>= 1)."""
    framework: str | None = None
    """Whose software runs on it and is priced (`rlhfsim.specs.frameworks.costs`); None: pooled over all."""

    def __post_init__(self) -> None:
        """Check what the types cannot."""
        if not self.node_groups:
            raise RlhfsimError("missing-key", "the cluster has no node_groups", help="give one pool or more")
        if not 1 <= self.oversubscription <= MAX_OVERSUBSCRIPTION:
            raise RlhfsimError(
                "bad-value",
                f"oversubscription is {self.oversubscription}",
                help=f"1 is a full fabric, 4 a quarter of it; at most {MAX_OVERSUBSCRIPTION:g}",
            )

        if self.node_group.wan is not None:
            raise RlhfsimError(
                "wan-to-itself",
                "the first nodes train, so the link to another region is not theirs",
                help="give wan to the nodes that generate, behind the first",
            )

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return sum(pool.gpus for pool in self.node_groups)

    def behind(self, link: WanLink) -> Cluster:
        """The same cluster with its last nodes in a second region."""
        if len(self.node_groups) == 1:
            raise RlhfsimError(
                "missing-value",
                "a link to a second region, and no GPUs there",
                help="give the GPUs that generate there: --rollout-gpus 32",
            )
        *near, far = self.node_groups
        return replace(self, node_groups=(*near, replace(far, wan=link)))

    @property
    def vendors(self) -> frozenset[str]:
        """Vendors of the kinds of GPU."""
        return frozenset(pool.profile.vendor for pool in self.node_groups)

    @property
    def node_group(self) -> NodeGroup:
        """The pool that trains: the first one."""
        return self.node_groups[0]
