"""A GPU as the cost functions see it: datasheet, coefficients and kernel curves in one hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlhfsim.elementwise import Size, least, most
from rlhfsim.frozen import frozen
from rlhfsim.kernels.curves import KernelCurves
from rlhfsim.specs.hardware.hardware import Fabric, Profile
from rlhfsim.specs.hardware.wan import WanLink
from rlhfsim.specs.quantities import Coefficient


@frozen
class Group:
    """Ranks that communicate: how many, and how many of them share one scale-up domain."""

    ranks: Size
    per_domain: Size
    """Ranks of the group inside one NVLink (xGMI, PCIe) domain; equal to `ranks` when all are."""

    @property
    def domains(self) -> Size:
        """Domains that the group touches."""
        return -(-self.ranks // self.per_domain)


def group(ranks: Size, stride: Size, domain: int) -> Group:
    """The group of `ranks` GPUs at a stride of `stride` in domains of `domain` GPUs.

    Ranks are laid out TP first, then CP, DP, PP (Megatron's order): a TP group has stride 1, a DP
    group stride tp x cp.
    """
    return Group(ranks=ranks, per_domain=most(1, least(ranks, domain // stride)))


class Spreads(dict[str, tuple[float, float]]):
    """P10 and P90 of coefficients relative to their values, by name; worked out when first asked for."""

    def __init__(
        self, known: Mapping[str, Coefficient], of: Callable[[Coefficient], tuple[float, float]]
    ) -> None:
        super().__init__()
        self._known, self._of = known, of

    def __missing__(self, name: str) -> tuple[float, float]:
        """The first time."""
        found = self[name] = self._of(self._known[name])
        return found


def spread_of(known: Coefficient) -> tuple[float, float]:
    """P10 and P90 relative to the value; a value of 0 is certain."""
    return (known.low / known.value, known.high / known.value) if known.value else (1.0, 1.0)


def inverse_of(known: Coefficient) -> tuple[float, float]:
    """The same of what is divided by the coefficient."""
    low, high = spread_of(known)
    return 1 / high, 1 / low


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Device:
    """Profile and curves; hashed by identity, so that costs can be cached per device."""

    profile: Profile
    curves: KernelCurves
    domain: int
    """GPUs per scale-up domain in this cluster."""
    gpus_per_node: int
    network_bandwidth: float
    """Per GPU between domains, one direction, byte/s, before efficiency (NIC / oversubscription)."""
    fabric: Fabric | None = None
    """What joins the nodes; None: not said."""
    wan: WanLink | None = None
    """The link to the nodes that train, where these are in another region."""
    inside: Device | None = None
    """The device for ranks that stay in one domain: it has no network, so that clusters that differ in theirs
    share what is kept for it. None: it is one."""
    _values: dict[str, float] = field(init=False, repr=False)
    _spreads: Spreads = field(init=False, repr=False)
    _inverses: Spreads = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Keep the coefficients as plain numbers: they are read at every step of every sum."""
        twin = self.inside
        if twin and (
            twin.profile is not self.profile or twin.curves is not self.curves or twin.domain != self.domain
        ):
            object.__setattr__(self, "inside", None)  # it was that of another device, from which this is made
        known = self.profile.coefficients
        object.__setattr__(self, "_values", {name: c.value for name, c in known.items()})
        object.__setattr__(self, "_spreads", Spreads(known, spread_of))
        object.__setattr__(self, "_inverses", Spreads(known, inverse_of))

    def __getitem__(self, name: str) -> float:
        """A coefficient's value; unknown names are our own bug."""
        return self._values[name]

    def peak(self, precision: str) -> float:
        """Dense FLOP/s of a precision; where the GPU lacks it, of BF16, FP16 or FP32 in that order.

        FP8 weights then save memory but not time: the engine computes in BF16.
        """
        rates = self.profile.peak
        return next(rates[p] for p in (precision, "bf16", "fp16", "fp32") if p in rates).value

    @property
    def hbm(self) -> float:
        """Bytes a second of GPU memory that kernels reach."""
        return self.profile.hbm.value * self["hbm_efficiency"]

    def spread(self, name: str) -> tuple[float, float]:
        """P10 and P90 of a coefficient relative to its value."""
        return self._spreads[name]

    def inverse_spread(self, name: str) -> tuple[float, float]:
        """P10 and P90 of what is divided by a coefficient, relative to its value."""
        return self._inverses[name]

    def borrowed(self, spread: tuple[float, float]) -> tuple[float, float]:
        """The interval of kernels: wider where their times are another GPU's and no run was on this one."""
        if not self.curves.borrowed or self.profile.calibration is not None:
            return spread
        widen = float(self.curves.borrowed.get("widen", 1.0))
        return spread[0] / widen, spread[1] * widen
