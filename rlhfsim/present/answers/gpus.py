"""What `rlhfsim gpus` answers: the hardware profiles, and one with the source of every number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from rlhfsim import units
from rlhfsim.present.answers.tree import Column, Page, Tile, TypedTable, answer, hidden, table_of
from rlhfsim.present.tables import (
    ALIASES,
    BYTES,
    COUNT,
    CUT,
    PRICE,
    QUANTITIES,
    QUANTITY,
    RATE,
    REST,
    SPEED,
    ValueKind,
    fields,
)
from rlhfsim.present.words import plural
from rlhfsim.specs.hardware.calibrated import Provenance
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import aliases, profile_hash

SCHEMA = "rlhfsim.gpus/1"
LINK = ValueKind({"nvlink": "NVLink", "xgmi": "xGMI", "pcie": "PCIe"}.__getitem__, number=False)
NOTE = (
    "usable: memory that a process gets; bf16: dense; link: inside a node, per GPU, one direction; "
    "price: USD per GPU-hour (- unknown); curves: kernel times measured on this GPU, borrowed from another, "
    "or computed from peaks (roofline)"
)


def _aliases(profile: Profile) -> list[str]:
    named = sorted(alias for alias, owner in aliases().items() if owner == profile.name)
    return named or list(profile.aliases)


def kernels(profile: Profile) -> str:
    """Where kernel times come from: `measured`, `from h100_sxm`, `roofline`."""
    curves = profile.curves or {}
    if borrowed := curves.get("borrow"):
        return f"from {borrowed['from']}"
    return "measured" if curves.get("tables") else "roofline"


def listing(profiles: Iterable[Profile]) -> Page:
    """One line a profile, and what the columns mean."""
    return answer(SCHEMA, _table(profiles))


def _table(profiles: Iterable[Profile]) -> TypedTable:
    return table_of(
        "",
        profiles,
        Column("name"),
        *hidden("title"),
        Column("also", _aliases, ALIASES, "aliases", fit=CUT),
        Column(None, "memory.value", key="memory_bytes"),
        Column("usable", "usable_memory.value", BYTES, "usable_bytes"),
        Column("bf16", _bf16, SPEED, "bf16_flop_per_s"),
        Column("HBM", "hbm.value", RATE, "hbm_bytes_per_s"),
        Column("link", "scale_up.kind", LINK, "link", spare=2),
        Column("its rate", "scale_up.bandwidth.value", RATE, "link_bytes_per_s", spare=1),
        Column(None, "scale_up.domain", key="link_domain"),
        Column(None, "nic.value", key="nic_bytes_per_s"),
        Column("a node", "node.gpus", COUNT, "gpus_per_node"),
        Column("price", lambda p: p.price.value if p.price else None, PRICE, "usd_per_hour"),
        Column("curves", kernels, key="curves"),
        name="gpus",
        notes=(NOTE,),
    )


def _bf16(profile: Profile) -> float | None:
    return profile.peak["bf16"].value if "bf16" in profile.peak else None


def sheet(profile: Profile) -> Page:
    """One profile: aliases, where kernel times come from, datasheet and coefficients with their sources."""
    price, known, facts = profile.price, profile.calibration, _facts(profile)
    coefficients = sorted(profile.coefficients.items())
    details = {
        **_table([profile]).records[0],
        "hash": profile_hash(profile),
        "price": price and fields(price, "value", "low", "high", "date", "source"),
        "datasheet": {
            fact[0]: dict(zip(("value", "dimension", "source"), fact[1:], strict=True)) for fact in facts
        },
        "curves_source": _curves_source(profile),
        "calibration": asdict(known) if known else None,
        "coefficients": {
            n: fields(c, "value", "low", "high", "dimension", "source") for n, c in coefficients
        },
    }
    tiles = {
        "name": profile.name,
        "aliases": ", ".join(_aliases(profile)) or "none",
        "node": f"{plural(profile.node.gpus, 'GPU')}, {plural(profile.node.cpu_cores, 'CPU core')}",
        "curves": _curves_source(profile),
        **({"runs": _calibrated_on(known)} if known else {}),
    }
    return answer(
        SCHEMA,
        table_of(
            "Datasheet",
            facts,
            Column("datasheet", 0),
            Column("value", lambda fact: fact[1:3], QUANTITY),
            Column("source", 3, fit=REST),
        ),
        table_of(
            "Coefficients",
            coefficients,
            Column("coefficient", 0),
            Column("value", lambda item: (item[1].value, item[1].dimension), QUANTITY),
            Column("P10-P90", lambda item: (item[1].low, item[1].high, item[1].dimension), QUANTITIES),
            Column("source", lambda item: item[1].source, fit=REST),
        ),
        title=profile.title,
        tiles=tuple(Tile(label, value) for label, value in tiles.items()),
        data={"gpus": [details]},
    )


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
