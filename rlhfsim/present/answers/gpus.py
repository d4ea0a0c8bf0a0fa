"""What `rlhfsim gpus` answers: the hardware profiles, and one with the source of every number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

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
from rlhfsim.units import Dimension

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
        Column(
            "bf16", lambda p: p.peak["bf16"].value if "bf16" in p.peak else None, SPEED, "bf16_flop_per_s"
        ),
        Column("HBM", "hbm.value", RATE, "hbm_bytes_per_s"),
        Column("link", "scale_up.kind", LINK, "link", spare=2),
        Column("its rate", "scale_up.bandwidth.value", RATE, "link_bytes_per_s", spare=1),
        Column(None, "scale_up.domain", key="link_domain"),
        Column(None, "nic.value", key="nic_bytes_per_s"),
        Column("a node", "node.gpus", COUNT, "gpus_per_node"),
        Column("price", "price.value", PRICE, "usd_per_hour"),
        Column("curves", kernels, key="curves"),
        name="gpus",
        notes=(NOTE,),
    )


def sheet(profile: Profile) -> Page:
    """One profile: aliases, where kernel times come from, datasheet and coefficients with their sources."""
    price, calibrated, facts = profile.price, profile.calibration, _facts(profile)
    coefficients = sorted(profile.coefficients.items())
    details = {
        **_table([profile]).records[0],
        "hash": profile_hash(profile),
        "price": price and fields(price, "value", "low", "high", "date", "source"),
        "datasheet": {
            name: {"value": known.value, "dimension": unit, "source": known.source}
            for name, known, unit in facts
        },
        "curves_source": _curves_source(profile),
        "calibration": asdict(calibrated) if calibrated else None,
        "coefficients": {
            n: fields(c, "value", "low", "high", "dimension", "source") for n, c in coefficients
        },
    }
    tiles = {
        "name": profile.name,
        "aliases": ", ".join(_aliases(profile)) or "none",
        "node": f"{plural(profile.node.gpus, 'GPU')}, {plural(profile.node.cpu_cores, 'CPU core')}",
        "curves": _curves_source(profile),
        **({"runs": _calibrated_on(calibrated)} if calibrated else {}),
    }
    return answer(
        SCHEMA,
        table_of(
            "Datasheet",
            facts,
            Column("datasheet", 0),
            Column("value", lambda fact: (fact[1].value, fact[2]), QUANTITY),
            Column("source", "1.source", fit=REST),
        ),
        table_of(
            "Coefficients",
            coefficients,
            Column("coefficient", 0),
            Column("value", lambda item: (item[1].value, item[1].dimension), QUANTITY),
            Column("P10-P90", lambda item: (item[1].low, item[1].high, item[1].dimension), QUANTITIES),
            Column("source", "1.source", fit=REST),
        ),
        title=profile.title,
        tiles=tuple(Tile(label, value) for label, value in tiles.items()),
        data={"gpus": [details]},
    )


def _facts(profile: Profile) -> list[tuple[str, Any, Dimension]]:
    """Name, value with its source, and dimension."""
    link, node, price = profile.scale_up, profile.node, profile.price
    facts: list[tuple[str, Any, Dimension]] = [
        ("memory", profile.memory, "byte"),
        ("usable memory", profile.usable_memory, "byte"),
        *((f"peak {p}", peak, "flop/s") for p, peak in profile.peak.items()),
        ("HBM", profile.hbm, "byte/s"),
        (f"{link.kind} (domain {link.domain})", link.bandwidth, "byte/s"),
        ("PCIe", profile.pcie, "byte/s"),
        ("network", profile.nic, "byte/s"),
        ("host memory", node.host_memory, "byte"),
        ("host bandwidth", node.host_bandwidth, "byte/s"),
        ("local storage", node.local_storage, "byte/s"),
        ("shared storage", node.shared_storage, "byte/s"),
        ("TDP", profile.tdp, "W"),
    ]
    if price is not None:
        facts.append(("price", replace(price, source=f"{price.date}: {price.source}"), "usd/h"))
    return facts


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
