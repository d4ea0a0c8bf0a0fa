"""On which kind of GPU a run was: from the metadata next to its log, from what it printed, from its own MFU.

A logged MFU is FLOP / (seconds x GPUs x peak), so with the FLOP of the step it tells the peak that the
framework divided by. Kinds of one peak (H100, H800, H200) are told apart by what else is known, else the
first is taken and the others are named. Memory alone names candidates, it decides nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from rlhfsim import units
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.interchange.logs.records import DECIMAL
from rlhfsim.specs.hardware.profile_files import find_profile, profile_names
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.loading import parse_json, read_text
from rlhfsim.units import GB, GIB, MIB

METADATA = "wandb-metadata.json"
"""What W&B writes of the machine (`gpu`, `gpu_nvidia`, `gpu_amd`)."""
_NAMES = (
    r"NVIDIA[ _]((?:GeForce[ _])?(?:RTX[ _])?[A-Z]{1,2}\d{1,4}S?\b"
    r"(?:[ _-](?:SXM\d?|PCIe|NVL|\d+GB|HBM\w+))*)",
    r"Tesla[ _-](V100(?:[ _-](?:SXM\d?|PCIe|\d+GB))*)",
    r"AMD[ _]Instinct[ _](MI\d{3}X?)",
    r"accelerator_type:(?:AMD-Instinct-)?([A-Z]{1,2}\d{2,4}X?)\b",
)
"""As torch, nvidia-smi, vLLM's kernel tables and Ray write a GPU's name."""
_MEMORY = (
    (rf"total_gpu_memory \(({DECIMAL}) ?GiB\)", GIB),
    (rf"total capacity of ({DECIMAL}) GiB", GIB),
    (r"MiB */ *(\d{5,6})MiB", MIB),
)
"""The memory of a GPU as vLLM says it at its start, torch out of memory, and nvidia-smi."""
_CACHE = rf"(before|after) init cache memory allocated: ({DECIMAL})GB, reserved: ({DECIMAL})GB"
"""verl up to v0.3: memory before and after its engine took a share of what was free."""
ALIKE = 0.07
"""Share by which a peak may lie above one of the framework's table: it rounds."""
LOADING = 0.25
"""Share by which it may lie below: a timer also holds what is no work, such as loading offloaded weights."""
SAME_MEMORY = 0.08
"""The same for memory: what an engine finds free and held is less than the nominal."""


@frozen
class GpuEvidence:
    """What is known about the kind of GPU."""

    name: str | None = None
    """Profile; None: not known, or of no kind that has one."""
    how: str = ""
    """Why this one, or what is known instead; empty: nothing is."""
    candidates: tuple[str, ...] = ()
    """Profiles that agree with what is known."""


def gpu_kind(
    path: Path,
    text: str,
    *,
    peak: float | None = None,
    held_bytes: float | None = None,
    utilization: float = 0.0,
    kinds: Mapping[str, float] | None = None,
) -> GpuEvidence:
    """The kind of GPU of a run.

    `text`: its console output; `peak`: FLOP/s that its framework took for 100 % MFU; `held_bytes`: most
    memory that it reserved, a sleeping engine's pool of `utilization` of the GPU among it; `kinds`: profile
    -> peak in the framework's own table, the commonest of one peak first.
    """
    for said, where in (*_metadata(path), *_printed(text)):
        try:
            return GpuEvidence(name=find_profile(said.replace("_", " ")).stem, how=f"{where} says {said}")
        except RlhfsimError:
            return GpuEvidence(how=f"{where} says {said}, which has no profile here")
    total = _memory(text, utilization)
    fits = [name for name in profile_names() if _fits(name, total, held_bytes, utilization)]
    if peak is None:
        if total is None:
            return GpuEvidence()
        big = units.format(total, "byte")
        return GpuEvidence(how=f"the log shows GPUs of about {big}", candidates=tuple(fits))
    how = f"the log's MFU counts {units.format(peak, 'flop/s')} as 100 %"
    known = {name: value for name, value in (kinds or {}).items() if name in fits}
    above = {name: value for name, value in known.items() if value > peak * (1 - ALIKE)}
    nearest = min(above.values(), key=lambda value: abs(value / peak - 1), default=math.inf)
    if nearest > peak * (1 + LOADING):
        return GpuEvidence(how=f"{how} at least", candidates=tuple(above))
    alike = tuple(name for name, value in above.items() if value == nearest)
    others = f"; {' and '.join(alike[1:])} would fit too: say so with --gpu" if alike[1:] else ""
    return GpuEvidence(name=alike[0], how=how + others, candidates=alike)


def _metadata(path: Path) -> Iterator[tuple[str, str]]:
    """The GPU's name in W&B's metadata, in the folder or next to the file."""
    files = sorted(path.rglob(METADATA)) if path.is_dir() else [path.parent / METADATA]
    for file in files[:1]:
        if not file.is_file():
            return
        data = parse_json(read_text(file), str(file)).data
        names = [data.get("gpu")] if isinstance(data, Mapping) else []
        yield from ((str(name), METADATA) for name in names if name)


def _printed(text: str) -> Iterator[tuple[str, str]]:
    """The one name that the log prints; of several none."""
    names = {name.replace("_", " ") for pattern in _NAMES for name in re.findall(pattern, text)}
    whole = [n for n in names if not any(n != other and other.startswith(n) for other in names)]
    if len(whole) == 1:
        yield whole[0], "the log"


def _memory(text: str, utilization: float) -> float | None:
    """Bytes of a GPU as the log says them."""
    for pattern, unit in _MEMORY:
        if match := re.search(pattern, text):
            return float(match[1]) * unit
    cache = {when: (float(used), float(held)) for when, used, held in re.findall(_CACHE, text)}
    if {"before", "after"} <= cache.keys() and utilization > 0:
        free = (cache["after"][0] - cache["before"][0]) / utilization
        return (free + cache["before"][1]) * GB
    return None


@cache
def memory_of(name: str) -> float:
    """Nominal bytes of a kind of GPU."""
    return float(load_profile(name).memory.value)


def _fits(name: str, total: float | None, held: float | None, utilization: float) -> bool:
    """Whether the memory of a kind agrees; a sleeping engine's pool counts as held though it is not there."""
    nominal = memory_of(name)
    if total is not None and not 1 - SAME_MEMORY <= total / nominal <= 1.01:
        return False
    return held is None or held <= nominal * (1 + utilization)
