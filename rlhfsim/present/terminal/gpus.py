"""What `rlhfsim gpus` shows: the hardware profiles, and one with the source of every number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from rlhfsim import units
from rlhfsim.present.tables import CUT, REST, Fit, grid
from rlhfsim.present.terminal.console import NARROW, console, drawn, labelled
from rlhfsim.specs.hardware.calibrated import Provenance
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import aliases, profile_hash

SCHEMA = "rlhfsim.gpus/1"
LINKS = {"nvlink": "NVLink", "xgmi": "xGMI", "pcie": "PCIe"}
NOTE = (
    "usable: memory that a process gets; bf16: dense TFLOP/s; link: inside a node, per GPU, one direction; "
    "price: USD per GPU-hour (- unknown); curves: kernel times measured on this GPU, borrowed from another, "
    "or computed from peaks (roofline)"
)


def kernels(profile: Profile) -> str:
    """Where kernel times come from: `measured`, `from h100_sxm`, `roofline`."""
    curves = profile.curves or {}
    if borrowed := curves.get("borrow"):
        return f"from {borrowed['from']}"
    return "measured" if curves.get("tables") else "roofline"


def row(profile: Profile) -> dict[str, Any]:
    """What the list shows, in base units."""
    return {
        "name": profile.name,
        "title": profile.title,
        "aliases": sorted(a for a, owner in aliases().items() if owner == profile.name)
        or list(profile.aliases),
        "memory_bytes": profile.memory.value,
        "usable_bytes": profile.usable_memory.value,
        "bf16_flop_per_s": profile.peak["bf16"].value if "bf16" in profile.peak else None,
        "hbm_bytes_per_s": profile.hbm.value,
        "link": profile.scale_up.kind,
        "link_bytes_per_s": profile.scale_up.bandwidth.value,
        "link_domain": profile.scale_up.domain,
        "nic_bytes_per_s": profile.nic.value,
        "gpus_per_node": profile.node.gpus,
        "usd_per_hour": profile.price.value if profile.price else None,
        "curves": kernels(profile),
    }


def listing(rows: Sequence[dict[str, Any]]) -> Sequence[RenderableType]:
    """One line per profile, and what the columns mean."""
    narrow = console().width < NARROW
    titles = ("name", "also", ">usable", ">bf16", ">HBM", *[">link"] * (not narrow), ">price", "curves")
    cells = []
    for each in rows:
        bf16, price = each["bf16_flop_per_s"], each["usd_per_hour"]
        link = f"{LINKS[each['link']]} {_short(each['link_bytes_per_s'], 'byte/s')}"
        cells.append(
            (
                each["name"],
                ", ".join(sorted(each["aliases"], key=len)[:3]),
                _short(each["usable_bytes"], "byte"),
                f"{bf16 / units.TERA:,.0f}" if bf16 else "-",
                _short(each["hbm_bytes_per_s"], "byte/s"),
                *[link] * (not narrow),
                f"{price:.2f}" if price is not None else "-",
                each["curves"],
            )
        )
    return drawn(grid(titles, cells, fit={"also": CUT}), console().width), Text(NOTE)


def _short(value: float, dimension: units.Dimension) -> str:
    return units.format(value, dimension, digits=2 if value < units.TB else 3)


# --- one profile ------------------------------------------------------------------------------------


def details(profile: Profile) -> dict[str, Any]:
    """Everything about one profile, with sources."""
    datasheet = {
        label: {"value": value, "dimension": dimension, "source": source}
        for label, value, dimension, source in _facts(profile)
    }
    price = profile.price
    return {
        **row(profile),
        "hash": profile_hash(profile),
        "price": price and {key: getattr(price, key) for key in ("value", "low", "high", "date", "source")},
        "datasheet": datasheet,
        "curves_source": _curves_source(profile),
        "calibration": asdict(profile.calibration) if profile.calibration else None,
        "coefficients": {
            name: {key: getattr(c, key) for key in ("value", "low", "high", "dimension", "source")}
            for name, c in sorted(profile.coefficients.items())
        },
    }


def _facts(profile: Profile) -> list[tuple[str, float, units.Dimension, str]]:
    link, node, price = profile.scale_up, profile.node, profile.price
    rates = {
        "HBM": profile.hbm,
        f"{link.kind} (domain {link.domain})": link.bandwidth,
        "PCIe": profile.pcie,
        "network": profile.nic,
    }
    facts: list[tuple[str, float, units.Dimension, str]] = [
        ("memory", profile.memory.value, "byte", profile.memory.source),
        ("usable memory", profile.usable_memory.value, "byte", profile.usable_memory.source),
        *((f"peak {p}", peak.value, "flop/s", peak.source) for p, peak in profile.peak.items()),
        *((label, rate.value, "byte/s", rate.source) for label, rate in rates.items()),
        ("host memory", node.host_memory.value, "byte", node.host_memory.source),
        ("host bandwidth", node.host_bandwidth.value, "byte/s", node.host_bandwidth.source),
        ("local storage", node.local_storage.value, "byte/s", node.local_storage.source),
        ("shared storage", node.shared_storage.value, "byte/s", node.shared_storage.source),
        ("TDP", profile.tdp.value, "W", profile.tdp.source),
    ]
    return facts + ([("price", price.value, "usd/h", f"{price.date}: {price.source}")] if price else [])


def _curves_source(profile: Profile) -> str:
    curves = profile.curves or {}
    if borrowed := curves.get("borrow"):
        return (
            f"kernel times of {borrowed['from']}, intervals x{borrowed.get('widen', 1)}: "
            f"{borrowed.get('reason', '')}"
        )
    if tables := curves.get("tables"):
        return (
            f"measured: {len(tables)} tables of kernel times "
            f"({next(iter(tables.values())).get('source', '')}, ...)"
        )
    return "no measured kernels: peaks times the efficiencies below"


def _calibrated_on(provenance: Provenance) -> str:
    """`calibrated from h100_sxm on 6 runs (a, b), 8 x H100, vllm 0.11.0, nvlink 450 GB/s ..., 2026-11-21`."""
    versions = [f"{name} {version}" for name, version in provenance.versions.items()]
    machine = ", ".join([provenance.device, *versions, provenance.interconnect, provenance.date])
    runs = provenance.runs
    return (
        f"calibrated from {provenance.base} on {len(runs)} run{'s' * (len(runs) != 1)} "
        f"({', '.join(runs)}): {machine}"
    )


def sheet(profile: Profile) -> Sequence[RenderableType]:
    """Title, aliases, where kernel times come from, then datasheet and coefficients with their sources."""
    head = {
        "name": profile.name,
        "aliases": ", ".join(row(profile)["aliases"]) or "none",
        "node": f"{profile.node.gpus} GPUs, {profile.node.cpu_cores} CPU cores",
        "curves": _curves_source(profile),
        **({"runs": _calibrated_on(profile.calibration)} if profile.calibration else {}),
    }
    facts = (
        (label, units.format(value, dimension), source) for label, value, dimension, source in _facts(profile)
    )
    sheet = drawn(grid(("datasheet", ">value", "source"), facts, fit={"source": REST}), console().width)
    parts = labelled(head), Text(), sheet, Text(), _coefficients(profile)
    return Text(profile.title, style="bold"), *parts


def _coefficients(profile: Profile) -> RenderableType:
    """Efficiencies and latencies with interval and source."""
    rows = []
    for name, c in sorted(profile.coefficients.items()):
        value, low, high = (units.format(x, c.dimension) for x in (c.value, c.low, c.high))
        rows.append((name, value, f"{low}-{high}", c.source))
    fit = {"coefficient": Fit("cut", max_width=30), "source": REST}
    return drawn(grid(("coefficient", ">value", ">P10-P90", "source"), rows, fit=fit), console().width)
