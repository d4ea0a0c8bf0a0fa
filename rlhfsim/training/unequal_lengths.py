"""Waits that unequal lengths cause: short micro-batches for their host, ranks for the slowest one (T11)."""

from __future__ import annotations

import math
from typing import NamedTuple

from rlhfsim.kernels.cost import Part, part
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.sequences import Sequences
from rlhfsim.specs.placement.layout import Layout


class Spread(NamedTuple):
    """How unequal lengths make the micro-batches and the ranks."""

    micro_batch: float
    """Standard deviation of the tokens of a micro-batch over their mean."""
    slowest: float
    """Share by which the tokens of the slowest data-parallel rank exceed the mean."""


def spread_of(sequences: Sequences, layout: Layout, steps: int, count: int, pack_len: float | None) -> Spread:
    """Spread of the micro-batches, and of the ranks that wait for each other (T11).

        micro-batch: sigma/mean / sqrt(b) ;  random order of the ranks: sigma/mean sqrt(2 ln d / n);
        balanced over ranks (LPT): sigma/mean / n

    n sequences per rank and step; with ZeRO-3 or expert parallelism the ranks meet at every
    micro-batch, where the n of one micro-batch counts. Frameworks sort or balance by default, so the
    last form holds; packs of equal size have no spread. Ranks of context parallelism share every
    sequence evenly and never wait for each other. Source: order statistics of a normal.
    """
    if pack_len or not sequences.packed or sequences.deviation <= 0:
        return Spread(0.0, 0.0)
    ranks, relative = layout.dp, sequences.deviation / sequences.mean
    tied = layout.zero == 3 or layout.ep > 1
    n = sequences.count / (steps * ranks * (count if tied else 1))
    worst = max(0.0, sequences.maximum / sequences.mean - 1)
    longest = relative / max(1.0, n) * min(1.0, math.sqrt(2 * math.log(ranks)))
    alone = max(1.0, sequences.count / (steps * ranks * count))
    return Spread(relative / math.sqrt(alone), min(worst, longest))


def waits(kernels: float, launch: float, spread: Spread, overlap: float) -> tuple[float, float]:
    """Seconds per micro-batch that unequal lengths add: host floor of the short ones, slowest rank.

        E[max(K, H)] - max(K, H),  K normal of mean k and deviation k sigma ;  max(k (1 + x), H) - max(k, H)

    The host takes H = `launch` whatever the length: short micro-batches do not go below it, so splitting them
    over more ranks wins nothing, and a longest rank that stays under it delays nobody. `overlap` is the share
    of launches that run ahead of kernels. Source: mean of a normal cut from below (Bachelier 1900).
    """
    busy, sigma = max(kernels, launch), kernels * spread.micro_batch
    floor = 0.0
    if sigma > 0:
        z = (kernels - launch) / sigma
        density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        share = (1 + math.erf(z / math.sqrt(2))) / 2
        floor = launch + sigma * density + (kernels - launch) * share - busy
    longest = kernels * spread.slowest
    behind = overlap * max(0.0, kernels + longest - busy) + (1 - overlap) * longest
    return overlap * max(0.0, floor), behind


def late_parts(device: Device, kernels: float, launch: float, spread: Spread, stretch: float) -> list[Part]:
    """The waits of `waits` in a step whose pipeline takes `stretch` times the work of its mean stage."""
    floor, wait = waits(kernels, launch, spread, device["overlap_launch"])
    name = "host_layer_time"
    return [
        part("overhead", floor * stretch, name, spread=device.spread(name)),
        part("tail", wait * stretch, "length balance", spread=(0.3, 2.0)),
    ]
