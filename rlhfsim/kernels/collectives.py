"""Times of collectives over a group of GPUs, in one scale-up domain or across domains.

Sizes are bytes per GPU: the whole buffer for all-reduce and broadcast, the gathered buffer for
all-gather and reduce-scatter, what one GPU sends with its own part for all-to-all. `g` GPUs of the
group share a domain, the group touches `D` domains, `n` ranks in all. Inside one domain the
measured curves decide (`KernelCurves.collective` stretches them to larger groups).

Not known here: congestion by other jobs, rail-unaware cabling, NCCL's start-up of a communicator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from rlhfsim.elementwise import Size, ceil, each, either, kept, most, number, where
from rlhfsim.kernels.device import Device, Group
from rlhfsim.kernels.routing import Routing
from rlhfsim.specs.placement.layout import Dispatcher

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


def all_reduce(device: Device, size: Size, group: Group) -> Size:
    """Seconds of an all-reduce of `size` bytes.

        one domain:  measured; else 2 (n-1) a + 2 (n-1)/n S/B
        D domains:   max(2 (g-1)/g S/B_in, 2 (D-1)/D (S/g)/B_net) + latency,
                     latency = 2 (g-1) a_in + 2 ceil(log2 D) a_net

    NCCL pipelines chunks through both tiers, so the slower one sets the rate; between domains a
    tree bounds the latency. Source: Patarasuk & Yuan 2009 (ring); NCCL tree and ring, Hu et al.,
    arXiv 2507.04786. Too fast when tiers do not overlap (up to 2x at equal tier times).
    """
    return _ring(device, "all_reduce", size, group, 2)


def all_gather(device: Device, size: Size, group: Group) -> Size:
    """Seconds of an all-gather whose gathered buffer has `size` bytes; half an all-reduce.

        (n-1) a + (n-1)/n S/B in one domain; across domains the slower tier as in `all_reduce`

    Source: Patarasuk & Yuan 2009. NVLS does not help it (measurements/README.md).
    """
    return _ring(device, "all_gather", size, group, 1)


def reduce_scatter(device: Device, size: Size, group: Group) -> Size:
    """Seconds of a reduce-scatter of a buffer of `size` bytes; half an all-reduce, see `all_gather`."""
    return _ring(device, "reduce_scatter", size, group, 1)


def all_to_all(device: Device, size: Size, group: Group) -> Size:
    """Seconds of an all-to-all where each GPU sends `size` bytes, its own n-th part included.

        max((g-1)/n S/B_in, (n-g)/n S/B_net) + (g-1) a_in + (D-1) a_net

    Both tiers work at once. Source: physics.md section 4; tables of one domain where measured.
    """

    def between() -> Size:
        n, g = group.ranks, group.per_domain
        near = (g - 1) / n * size / _bandwidth(device, "all_to_all")
        far = (n - g) / n * size / (device.network_bandwidth * device[exchange_share(device, once=False)])
        return most(near, far) + _latency(device, group, 1)

    return _timed(device, "all_to_all", size, group, between)


def dispatch(
    device: Device,
    tokens: Size,
    token_bytes: float,
    routing: Routing,
    group: Group,
    *,
    skew: Size = 1,
    by: Dispatcher | None = None,
) -> Size:
    """Seconds to send `tokens` tokens of one GPU to the experts that they chose; the mean of there and back.

        alltoall   k copies of a token, by an all-to-all
        deepep-ll  k copies, by one-sided writes
        allgather  n tokens on each rank, by an all-gather; back by a reduce-scatter
        others     a token once to each domain, and once to each GPU inside it:
                   `Routing.copies`, of which (n-1)/n leave

    DeepEP's normal kernels and HybridEP forward inside a domain (DeepSeek-V3, arXiv 2412.19437, section
    3.2.2); a dispatcher that is not said (`by` None) is priced as those, at the rates of NCCL. `skew` is
    busiest over mean rank. An array where one of them is.
    """
    n, sent = group.ranks, tokens * token_bytes * skew

    def there() -> Size:
        match by:
            case "alltoall":
                return all_to_all(device, sent * routing.top_k, group)
            case "deepep-ll":
                return one_sided(device, sent * routing.top_k, group)
            case "allgather":
                whole = n * tokens * token_bytes
                return (all_gather(device, whole, group) + reduce_scatter(device, whole, group)) / 2
        own, copies = by == "deepep", each(routing.copies, n)
        rate = (
            _scale_up(device) * device["deepep_nvlink_efficiency"]
            if own
            else _bandwidth(device, "all_to_all")
        )
        start = device["deepep_latency"] if own else 0.0

        def near() -> Size:
            return (
                sent * copies * (n - 1) / n / rate + start
                if own
                else all_to_all(device, sent * copies, group)
            )

        def far() -> Size:
            away = each(routing.copies, group.domains) * (1 - 1 / group.domains)
            inside = copies * (1 - 1 / group.per_domain)
            network = device.network_bandwidth * device[exchange_share(device, once=True)]
            return most(sent * inside / rate, sent * away / network) + _latency(device, group, 1) + start

        return either(group.domains == 1, near, far)

    return either((n == 1) | (tokens <= 0), _nothing, there)


def exchange_share(device: Device, *, once: bool) -> str:
    """Name of the share of the network that an exchange of tokens reaches on the fabric of these nodes.

    EFA has one for kernels that send a token once (DeepEP and its ports) and one for NCCL's all-to-all.
    """
    if device.fabric is None:
        return "nic_efficiency"
    kind = "once" if once and device.fabric == "efa" else "all_to_all"
    return f"{device.fabric}_{kind}_efficiency"


def one_sided(device: Device, size: Size, group: Group) -> Size:
    """Seconds of an all-to-all by writes into the receivers' memory, each GPU sending `size` bytes.

        max((g-1)/n S/B_in, (n-g)/n S/B_net) + a        a: of the slower tier, for all write at once

    As DeepEP's low-latency kernels, k copies of a token, fitted inside a domain (lab.fits.dispatch). Within
    10 % of their table for 16 to 256 ranks on H800, which nothing is fitted to, with the coefficients of the
    H100 profile (deepseek-ai/DeepEP@docs/legacy.md, commit 0297fc8).
    """
    n, g = group.ranks, group.per_domain
    inside = (g - 1) / n * size / (_scale_up(device) * device["deepep_ll_nvlink_efficiency"])
    near = device["deepep_ll_latency"]

    def far() -> Size:
        network = device.network_bandwidth * device[exchange_share(device, once=True)]
        return most(inside, (n - g) / n * size / network) + max(device["nic_latency"], near)

    return either(group.domains == 1, lambda: inside + near, far)


def p2p(device: Device, size: Size, crosses_domain: Size) -> Size:
    """Seconds of one send of `size` bytes: a + S/B (Hockney 1994, Parallel Computing 20(3))."""
    taken = either(
        crosses_domain,
        lambda: device["nic_latency"] + size / _network(device),
        lambda: device["nvlink_latency"] + size / _bandwidth(device, "all_gather"),
    )
    return where(size > 0, taken, 0.0)


def crosses(device: Device, ranks: Size, stride: Size) -> Size:
    """Whether `ranks` GPUs at a stride of `stride` reach beyond one domain."""
    return (ranks * stride > device.domain) & (ranks > 1)


def _ring(device: Device, op: Op, size: Size, group: Group, passes: int) -> Size:
    def between() -> Size:
        return passes * _tiers(device, size, group) + _latency(device, group, passes)

    return _timed(device, op, size, group, between)


def _timed(device: Device, op: Op, size: Size, group: Group, between: Callable[[], Size]) -> Size:
    """Nothing for one rank or no bytes, the measured curve of one domain, else the time between domains."""

    def some() -> Size:
        return either(group.domains == 1, lambda: _inside(device, op, size, group.ranks), between)

    return either((group.ranks == 1) | (size <= 0), _nothing, some)


def _nothing() -> float:
    return 0.0


def _tiers(device: Device, size: Size, group: Group) -> Size:
    """Seconds of the slower tier."""
    g, d = group.per_domain, group.domains
    inside = (g - 1) / g * size / _bandwidth(device, "all_gather")
    return most(inside, (d - 1) / d * size / g / _network(device))


def _latency(device: Device, group: Group, passes: int) -> Size:
    inside = (group.per_domain - 1) * device["nvlink_latency"]
    return passes * (inside + ceil(each(math.log2, group.domains)) * device["nic_latency"])


def _network(device: Device) -> float:
    return device.network_bandwidth * device["nic_efficiency"]


def _scale_up(device: Device) -> float:
    return device.profile.scale_up.bandwidth.value


def _bandwidth(device: Device, op: Op) -> float:
    name = "nvlink_all_to_all_efficiency" if op == "all_to_all" else "nvlink_efficiency"
    return _scale_up(device) * device[name]


@kept(65536)
def _inside(device: Device, op: Op, size: Size, ranks: Size) -> Size:
    """One domain: the measured curve, which stretches itself beyond the ranks it knows."""
    return number(device.curves.collective(op, size, ranks))
