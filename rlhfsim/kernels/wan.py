"""Moving bytes between regions: what TCP makes of bandwidth, round trip and loss.

    W = max( C / sqrt(p),  1.054 (RTT / p)^(3/4) )          segments in flight on one connection
    B = (1 - p) min( n W MSS / RTT,  eta B_link )           n connections
    T_ramp = RTT (1 + log2( W' / 10 ))                      W' = B RTT / (n MSS)

p share of lost packets. The first term of W is Reno's (Mathis, Semke, Mahdavi, Ott 1997, ACM CCR 27(3)), the
second CUBIC's with its constant 0.4 and its factor 0.7 (RFC 9438, section 5.1), which Linux runs: it goes on
as Reno where that is faster. Connections that were idle start again from ten segments (RFC 6928; RFC 5681,
section 4.1) and double them every round trip. Not known here: BBR, which barely slows down at loss (give
a goodput), limits of socket buffers, other traffic, and losses that come in bursts.
"""

from __future__ import annotations

import math

from rlhfsim.kernels.cost import Part, part
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.links import Rate
from rlhfsim.specs.hardware.wan import WanLink

MSS_BYTES = 1448
"""Payload of a segment: 1,500 bytes less the headers of IP and TCP and its time stamps."""
FIRST_WINDOW = 10
"""Segments in flight before the first acknowledgement (RFC 6928)."""
CUBIC = (0.4 * 3.7 / 1.2) ** 0.25
"""Factor of CUBIC's mean window (RFC 9438, section 5.1): 1.054."""


def window(link: WanLink, constant: float) -> float:
    """Segments that one connection keeps in flight at the link's loss; infinite without any."""
    if not link.loss:
        return math.inf
    return max(constant / math.sqrt(link.loss), CUBIC * math.pow(link.rtt / link.loss, 0.75))


def wan_rate(link: WanLink, device: Device) -> Rate:
    """Byte/s of one transfer over all its connections."""
    if link.goodput is not None:
        return Rate(value=link.goodput, resource="wan", rests_on="wan_goodput", spread=(1.0, 1.0))
    assert link.bandwidth is not None
    lossy = link.streams * window(link, device["wan_loss_constant"]) * MSS_BYTES / link.rtt
    shared = device["wan_efficiency"] * link.bandwidth
    name = "wan_loss_constant" if lossy < shared else "wan_efficiency"
    value = (1 - link.loss) * min(lossy, shared)
    return Rate(value=value, resource="wan", rests_on=name, spread=device.spread(name))


def ramp(link: WanLink, device: Device) -> Part:
    """Seconds until a transfer runs at its rate: the request's round trip and slow start."""
    segments = wan_rate(link, device).value * link.rtt / (link.streams * MSS_BYTES)
    return round_trips(link, 1 + math.log2(max(1.0, segments / FIRST_WINDOW)))


def round_trips(link: WanLink, count: float) -> Part:
    """Seconds of `count` exchanges, one after the other."""
    return part("wan", count * link.rtt, "wan_rtt")
