"""What `nvidia-smi` says of the driver, the GPUs and the links between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree import ElementTree

from rlhfsim.units import MIB

QUERY, TOPOLOGY = ("nvidia-smi", "-q", "-x"), ("nvidia-smi", "topo", "-m")
LEAST_DRIVER: Mapping[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""Oldest Linux driver by the major version of CUDA (NVIDIA, CUDA Compatibility: minor versions)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as the driver shows it."""

    index: int
    name: str
    uuid: str
    memory_bytes: float
    used_bytes: float
    mig: bool
    """It is cut into instances, between which neither NCCL nor CUDA IPC works."""
    fabric: str
    """State of its NVSwitch fabric: `Completed`, `In Progress`, or `N/A` where it has none."""


def parse_query(text: str) -> tuple[str, tuple[Gpu, ...]]:
    """Driver version and GPUs from the XML of `nvidia-smi -q -x`.

    Raises:
        ElementTree.ParseError: it is no such XML.
    """
    root = ElementTree.fromstring(text)
    gpus = [
        Gpu(
            index=index,
            name=gpu.findtext("product_name", "unknown"),
            uuid=gpu.findtext("uuid", ""),
            memory_bytes=_bytes(gpu.findtext("fb_memory_usage/total", "")),
            used_bytes=_bytes(gpu.findtext("fb_memory_usage/used", "")),
            mig=gpu.findtext("mig_mode/current_mig") == "Enabled",
            fabric=gpu.findtext("fabric/state", "N/A"),
        )
        for index, gpu in enumerate(root.iter("gpu"))
    ]
    return root.findtext("driver_version", ""), tuple(gpus)


def _bytes(text: str) -> float:
    match = re.match(r"(\d+) MiB", text)
    return float(match[1]) * MIB if match else 0.0


def fewest_links(text: str) -> int | None:
    """NVLinks between the two GPUs that have the fewest, from `nvidia-smi topo -m`; None: one GPU."""
    rows = [re.sub(r"\x1b\[\d*m", "", line).split() for line in text.splitlines()]
    head = next((row for row in rows if row[:1] == ["GPU0"] and row[1:2] != ["X"]), [])
    count = sum(name.startswith("GPU") and name[3:].isdigit() for name in head)
    links = [
        int(cell[2:]) if re.fullmatch(r"NV\d+", cell) else 0
        for row in rows
        if row and row[0] in head[:count] and row is not head
        for cell in row[1 : 1 + count]
        if cell != "X"
    ]
    return min(links, default=None)


def version(text: str) -> tuple[int, ...]:
    """`580.65.06` as numbers that compare."""
    return tuple(int(part) for part in re.findall(r"\d+", text))
