"""Times of collectives over a group of GPUs, in one scale-up domain or across domains.

Sizes are bytes per GPU: the whole buffer for all-reduce and broadcast, the gathered buffer for
all-gather and reduce-scatter, what one GPU sends with its own part for all-to-all. `g` GPUs of the
group share a domain, the group touches `D` domains, `n` ranks in all. Inside one domain the
measured curves decide (`KernelCurves.collective` stretches them to larger groups).

Not known here: congestion by other jobs, rail-unaware cabling, NCCL's start-up of a communicator.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlhfsim.elementwise import Size, where
from rlhfsim.kernels.device import Device, Group
from rlhfsim.kernels.routing import Routing
from rlhfsim.specs.placement.layout import Dispatcher

Floats = NDArray[np.float64]
Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


def all_reduce(device: Device, size: float, group: Group) -> float:
    """Seconds of an all-reduce of `size` bytes.

        one domain:  measured; else 2 (n-1) a + 2 (n-1)/n S/B
        D domains:   max(2 (g-1)/g S/B_in, 2 (D-1)/D (S/g)/B_net) + latency,
                     latency = 2 (g-1) a_in + 2 ceil(log2 D) a_net

    NCCL pipelines chunks through both tiers, so the slower one sets the rate; between domains a
    tree bounds the latency. Source: Patarasuk & Yuan 2009 (ring); NCCL tree and ring, Hu et al.,
    arXiv 2507.04786. Too fast when tiers do not overlap (up to 2x at equal tier times).
    """
    if group.ranks == 1 or size <= 0:
        return 0.0
    if group.domains == 1:
        return _inside(device, "all_reduce", size, group.ranks)
    inside, between = _tiers(device, size, group)
    return max(2 * inside, 2 * between) + _latency(device, group, 2)


def all_gather(device: Device, size: float, group: Group) -> float:
    """Seconds of an all-gather whose gathered buffer has `size` bytes; half an all-reduce.

        (n-1) a + (n-1)/n S/B in one domain; across domains the slower tier as in `all_reduce`

    Source: Patarasuk & Yuan 2009. NVLS does not help it (measurements/README.md).
    """
    return _half(device, "all_gather", size, group)


def reduce_scatter(device: Device, size: float, group: Group) -> float:
    """Seconds of a reduce-scatter of a buffer of `size` bytes; half an all-reduce, see `all_gather`."""
    return _half(device, "reduce_scatter", size, group)


def all_to_all(device: Device, size: float, group: Group) -> float:
    """Seconds of an all-to-all where each GPU sends `size` bytes, its own n-th part included.

        max((g-1)/n S/B_in, (n-g)/n S/B_net) + (g-1) a_in + (D-1) a_net

    Both tiers work at once. Source: physics.md section 4; tables of one domain where measured.
    """
    n, g = group.ranks, group.per_domain
    if n == 1 or size <= 0:
        return 0.0
    if group.domains == 1:
        return _inside(device, "all_to_all", size, n)
    inside = (g - 1) / n * size / _bandwidth(device, "all_to_all")
    between = (n - g) / n * size / (device.network_bandwidth * device[exchange_share(device, once=False)])
    return max(inside, between) + _latency(device, group, 1)


def dispatch(
    device: Device,
    tokens: float,
    token_bytes: float,
    routing: Routing,
    group: Group,
    *,
    skew: float = 1,
    by: Dispatcher | None = None,
) -> float:
    """Seconds to send `tokens` tokens of one GPU to the experts that they chose; the mean of there and back.

        alltoall   k copies of a token, by an all-to-all
        deepep-ll  k copies, by one-sided writes
        allgather  n tokens on each rank, by an all-gather; back by a reduce-scatter
        others     a token once to each domain, and once to each GPU inside it:
                   `Routing.copies`, of which (n-1)/n leave

    DeepEP's normal kernels and HybridEP forward inside a domain (DeepSeek-V3, arXiv 2412.19437, section
    3.2.2); a dispatcher that is not said (`by` None) is priced as those, at the rates of NCCL. `skew` is
    busiest over mean rank.
    """
    n = group.ranks
    if n == 1 or tokens <= 0:
        return 0.0
    sent = tokens * token_bytes * skew
    match by:
        case "alltoall":
            return all_to_all(device, sent * routing.top_k, group)
        case "deepep-ll":
            return float(one_sided(device, np.asarray(sent * routing.top_k), group))
        case "allgather":
            whole = n * tokens * token_bytes
            return (all_gather(device, whole, group) + reduce_scatter(device, whole, group)) / 2
        case "deepep":
            rate, start = _scale_up(device) * device["deepep_nvlink_efficiency"], device["deepep_latency"]
            if group.domains == 1:
                return sent * routing.copies(n) * (n - 1) / n / rate + start
        case _:
            rate, start = _bandwidth(device, "all_to_all"), 0.0
            if group.domains == 1:
                return all_to_all(device, sent * routing.copies(n), group)
    away = routing.copies(group.domains) * (1 - 1 / group.domains)
    inside = routing.copies(n) * (1 - 1 / group.per_domain)
    network = device.network_bandwidth * device[exchange_share(device, once=True)]
    return max(sent * inside / rate, sent * away / network) + _latency(device, group, 1) + start


def exchange_share(device: Device, *, once: bool) -> str:
    """Name of the share of the network that an exchange of tokens reaches on the fabric of these nodes.

    EFA has one for kernels that send a token once (DeepEP and its ports) and one for NCCL's all-to-all.
    """
    if device.fabric is None:
        return "nic_efficiency"
    kind = "once" if once and device.fabric == "efa" else "all_to_all"
    return f"{device.fabric}_{kind}_efficiency"


def one_sided(device: Device, size: Floats, group: Group) -> Floats:
    """Seconds of an all-to-all by writes into the receivers' memory, each GPU sending `size` bytes.

        max((g-1)/n S/B_in, (n-g)/n S/B_net) + a        a: of the slower tier, for all write at once

    As DeepEP's low-latency kernels, k copies of a token, fitted inside a domain (lab.fits.dispatch). Within
    10 % of their table for 16 to 256 ranks on H800, which nothing is fitted to, with the coefficients of the
    H100 profile (deepseek-ai/DeepEP@docs/legacy.md, commit 0297fc8).
    """
    n, g = group.ranks, group.per_domain
    inside = (g - 1) / n * size / (_scale_up(device) * device["deepep_ll_nvlink_efficiency"])
    if group.domains == 1:
        return inside + device["deepep_ll_latency"]
    network = device.network_bandwidth * device[exchange_share(device, once=True)]
    start = max(device["nic_latency"], device["deepep_ll_latency"])
    return np.maximum(inside, (n - g) / n * size / network) + start


def p2p(device: Device, size: Size, crosses_domain: bool) -> Size:
    """Seconds of one send of `size` bytes: a + S/B (Hockney 1994, Parallel Computing 20(3))."""
    if crosses_domain:
        taken = device["nic_latency"] + size / _network(device)
    else:
        taken = device["nvlink_latency"] + size / _bandwidth(device, "all_gather")
    return where(size > 0, taken, 0.0)


def broadcast(device: Device, size: float, group: Group) -> float:
    """Seconds of a pipelined broadcast of `size` bytes: steps a + S/B of the slowest tier.

    Source: NCCL's ring broadcast (Hu et al., arXiv 2507.04786); chunks hide all but the latency.
    """
    if group.ranks == 1 or size <= 0:
        return 0.0
    rate = _bandwidth(device, "all_gather")
    if group.domains > 1:
        rate = min(rate, _network(device) * group.per_domain)
    return _latency(device, group, 1) + size / rate


def crosses(device: Device, ranks: Size, stride: Size) -> Size:
    """Whether `ranks` GPUs that stand `stride` apart reach beyond one domain."""
    return (ranks * stride > device.domain) & (ranks > 1)


def _half(device: Device, op: Op, size: float, group: Group) -> float:
    if group.ranks == 1 or size <= 0:
        return 0.0
    if group.domains == 1:
        return _inside(device, op, size, group.ranks)
    return max(_tiers(device, size, group)) + _latency(device, group, 1)


def _tiers(device: Device, size: float, group: Group) -> tuple[float, float]:
    g, d = group.per_domain, group.domains
    inside = (g - 1) / g * size / _bandwidth(device, "all_gather") if g > 1 else 0.0
    return inside, (d - 1) / d * size / g / _network(device)


def _latency(device: Device, group: Group, passes: int) -> float:
    inside = (group.per_domain - 1) * device["nvlink_latency"]
    hops = math.ceil(math.log2(group.domains)) if group.domains > 1 else 0
    return passes * (inside + hops * device["nic_latency"])


def _network(device: Device) -> float:
    return device.network_bandwidth * device["nic_efficiency"]


def _scale_up(device: Device) -> float:
    return device.profile.scale_up.bandwidth.value


def _bandwidth(device: Device, op: Op) -> float:
    name = "nvlink_all_to_all_efficiency" if op == "all_to_all" else "nvlink_efficiency"
    return _scale_up(device) * device[name]


@lru_cache(maxsize=65536)
def _inside(device: Device, op: Op, size: float, ranks: int) -> float:
    """One domain: the measured curve, which stretches itself beyond the ranks it knows."""
    return float(device.curves.collective(op, size, ranks))
