"""The link between two regions in words: what it is, and what TCP makes of it."""

from __future__ import annotations

import math

from rlhfsim.kernels.device import Device
from rlhfsim.kernels.wan import wan_rate, window
from rlhfsim.specs.hardware.wan import WanLink
from rlhfsim.units import format


def link_words(link: WanLink) -> str:
    """`10 Gbit/s, 60 ms, 0.1 % lost`."""
    rate = link.goodput if link.bandwidth is None else link.bandwidth
    reached = " reached" if link.bandwidth is None else ""
    lost = f", {100 * link.loss:.3g} % lost" if link.loss else ""
    return f"{_bits(rate or 0.0)}{reached}, {format(link.rtt, 's')}{lost}"


def reached(link: WanLink, device: Device) -> str:
    """What a transfer reaches, and how many connections would fill the link where loss keeps it below."""
    rate = wan_rate(link, device)
    if link.bandwidth is None:
        return f"a transfer between the regions reaches {_bits(rate.value)}, as given"
    of = f"{link.streams:,} TCP connections between the regions reach {_bits(rate.value)}"
    if rate.rests_on != "wan_loss_constant":
        return of
    segments = window(link, device["wan_loss_constant"])
    needed = math.ceil(link.streams * device["wan_efficiency"] * link.bandwidth / rate.value)
    return f"{of} ({segments:,.0f} segments in flight each); {needed:,} would fill the link, or give goodput="


def _bits(rate: float) -> str:
    return format(8 * rate, "byte/s").replace("B/s", "bit/s")
