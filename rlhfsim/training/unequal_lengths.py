"""Waits that unequal lengths cause: short micro-batches for their host, ranks for the slowest one (T11)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from rlhfsim.elementwise import Size, each, given, least, most, some, where
from rlhfsim.kernels.cost import Part, part
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.sequences import Sequences
from rlhfsim.specs.placement.layout_columns import AnyLayout


class Spread(NamedTuple):
    """How unequal lengths make the micro-batches and the ranks."""

    micro_batch: Size
    """Standard deviation of the tokens of a micro-batch over their mean."""
    slowest: Size
    """Share by which the tokens of the slowest data-parallel rank exceed the mean."""


def spread_of(
    sequences: Sequences, layout: AnyLayout, steps: int, count: Size, pack_len: Size | None
) -> Spread:
    """Spread of the micro-batches, and of the ranks that wait for each other (T11).

        micro-batch: sigma/mean / sqrt(b) ;  random order of the ranks: sigma/mean sqrt(2 ln d / n);
        balanced over ranks (LPT): sigma/mean / n

    n sequences per rank and step; with ZeRO-3 or expert parallelism the ranks meet at every
    micro-batch, where the n of one micro-batch counts. Frameworks sort or balance by default, so the
    last form holds; packs of equal size have no spread. Ranks of context parallelism share every
    sequence evenly and never wait for each other. Source: order statistics of a normal.
    """
    packs = given(pack_len)
    if not some(where(packs, False, True)) or not sequences.packed or sequences.deviation <= 0:
        return Spread(0.0, 0.0)
    ranks, relative = layout.dp, sequences.deviation / sequences.mean
    tied = (layout.zero == 3) | (layout.ep > 1)
    n = sequences.count / (steps * ranks * where(tied, count, 1))
    worst = max(0.0, sequences.maximum / sequences.mean - 1)
    extreme = each(lambda ranks: min(1.0, math.sqrt(2 * math.log(ranks))), ranks)
    longest = relative / most(1.0, n) * extreme
    alone = most(1.0, sequences.count / (steps * ranks * count))
    of_micro_batch = relative / np.sqrt(alone)
    return Spread(where(packs, 0.0, of_micro_batch), where(packs, 0.0, least(worst, longest)))


def waits(kernels: Size, launch: Size, spread: Spread, overlap: float) -> tuple[Size, Size]:
    """Seconds per micro-batch that unequal lengths add: host floor of the short ones, slowest rank.

        E[max(K, H)] - max(K, H),  K normal of mean k and deviation k sigma ;  max(k (1 + x), H) - max(k, H)

    The host takes H = `launch` whatever the length: short micro-batches do not go below it, so splitting them
    over more ranks wins nothing, and a longest rank that stays under it delays nobody. `overlap` is the share
    of launches that run ahead of kernels. Source: mean of a normal cut from below (Bachelier 1900).
    """
    busy, sigma = most(kernels, launch), kernels * spread.micro_batch
    floor = 0.0
    if some(sigma > 0):
        z = (kernels - launch) / where(sigma > 0, sigma, 1.0)
        density, share = each(_normal, z)
        floor = where(sigma > 0, launch + sigma * density + (kernels - launch) * share - busy, 0.0)
    longest = kernels * spread.slowest
    behind = overlap * most(0.0, kernels + longest - busy) + (1 - overlap) * longest
    return overlap * most(0.0, floor), behind


def _normal(z: float) -> tuple[float, float]:
    """Density and distribution of the standard normal law."""
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi), (1 + math.erf(z / math.sqrt(2))) / 2


def late_parts(device: Device, kernels: Size, launch: Size, spread: Spread, stretch: Size) -> list[Part]:
    """The waits of `waits` in a step whose pipeline takes `stretch` times the work of its mean stage."""
    floor, wait = waits(kernels, launch, spread, device["overlap_launch"])
    name = "host_layer_time"
    return [
        part("overhead", floor * stretch, name, spread=device.spread(name)),
        part("tail", wait * stretch, "length balance", spread=(0.3, 2.0)),
    ]
