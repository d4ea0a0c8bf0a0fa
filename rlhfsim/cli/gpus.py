"""`rlhfsim gpus`: the hardware profiles, and where their numbers come from."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from rlhfsim import units
from rlhfsim.cli.inputs import json_option, on_command_line
from rlhfsim.present.terminal.words import NARROW, WIDTH, console, labelled, new_table
from rlhfsim.specs.hardware.calibrated import Provenance
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import aliases, load_profile, profile_hash, profile_names
from rlhfsim.specs.quantities import Coefficient

SCHEMA = "rlhfsim.gpus/1"
EPILOG = """\b
Examples:
  rlhfsim gpus
  rlhfsim gpus h100
  rlhfsim gpus my_gpu.yaml --json
"""


@click.command(epilog=EPILOG)
@click.argument("name", required=False)
@json_option
def gpus(name: str | None, as_json: bool) -> None:
    """List the GPUs rlhfsim knows, or show one with the source of every number.

    NAME is a profile, an alias, or a YAML file of your own (docs/hardware.md).
    """
    if name is None:
        profiles = [load_profile(known) for known in profile_names()]
        data = {"schema": SCHEMA, "gpus": [row(profile) for profile in profiles]}
        shown: tuple[Any, ...] = (listing([row(profile) for profile in profiles]), Text(NOTE))
    else:
        with on_command_line():
            profile = load_profile(name)
        data = {"schema": SCHEMA, "gpus": [details(profile)]}
        shown = (*sheet(profile), coefficients(profile))
    if as_json:
        click.echo(json.dumps(data, indent=1))
        return
    for part in shown:
        console().print(part)


LINKS = {"nvlink": "NVLink", "xgmi": "xGMI", "pcie": "PCIe"}
NOTE = (
    "usable: memory that a process gets; bf16: dense TFLOP/s; link: inside a node, per GPU, one direction; price: USD per "
    "GPU-hour (- unknown); curves: kernel times measured on this GPU, borrowed from another, or computed from peaks (roofline)"
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


def listing(rows: list[dict[str, Any]], width: int | None = None) -> Table:
    """One line per profile."""
    table = new_table(width or console().width)
    table.add_column("name", no_wrap=True)
    table.add_column("also", ratio=1, no_wrap=True, overflow="ellipsis")
    narrow = table.width is not None and table.width < NARROW
    for name in ("usable", "bf16", "HBM", *(() if narrow else ("link",)), "price"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("curves", no_wrap=True)
    for each in rows:
        bf16 = each["bf16_flop_per_s"]
        price = each["usd_per_hour"]
        table.add_row(
            each["name"],
            ", ".join(sorted(each["aliases"], key=len)[:3]),
            _short(each["usable_bytes"], "byte"),
            f"{bf16 / units.TERA:,.0f}" if bf16 else "-",
            _short(each["hbm_bytes_per_s"], "byte/s"),
            *([] if narrow else [f"{LINKS[each['link']]} {_short(each['link_bytes_per_s'], 'byte/s')}"]),
            f"{price:.2f}" if price is not None else "-",
            each["curves"],
        )
    return table


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
        "price": None
        if price is None
        else {
            "value": price.value,
            "low": price.low,
            "high": price.high,
            "date": price.date,
            "source": price.source,
        },
        "datasheet": datasheet,
        "curves_source": _curves_source(profile),
        "calibration": asdict(profile.calibration) if profile.calibration else None,
        "coefficients": {
            name: {
                "value": c.value,
                "low": c.low,
                "high": c.high,
                "dimension": c.dimension,
                "source": c.source,
            }
            for name, c in sorted(profile.coefficients.items())
        },
    }


def _facts(profile: Profile) -> list[tuple[str, float, units.Dimension, str]]:
    link, node = profile.scale_up, profile.node
    facts: list[tuple[str, float, units.Dimension, str]] = [
        ("memory", profile.memory.value, "byte", profile.memory.source),
        ("usable memory", profile.usable_memory.value, "byte", profile.usable_memory.source),
        *((f"peak {p}", peak.value, "flop/s", peak.source) for p, peak in profile.peak.items()),
        ("HBM", profile.hbm.value, "byte/s", profile.hbm.source),
        (f"{link.kind} (domain {link.domain})", link.bandwidth.value, "byte/s", link.bandwidth.source),
        ("PCIe", profile.pcie.value, "byte/s", profile.pcie.source),
        ("network", profile.nic.value, "byte/s", profile.nic.source),
        ("host memory", node.host_memory.value, "byte", node.host_memory.source),
        ("host bandwidth", node.host_bandwidth.value, "byte/s", node.host_bandwidth.source),
        ("local storage", node.local_storage.value, "byte/s", node.local_storage.source),
        ("shared storage", node.shared_storage.value, "byte/s", node.shared_storage.source),
        ("TDP", profile.tdp.value, "W", profile.tdp.source),
    ]
    return facts + (
        [("price", profile.price.value, "usd/h", f"{profile.price.date}: {profile.price.source}")]
        if profile.price
        else []
    )


def _curves_source(profile: Profile) -> str:
    curves = profile.curves or {}
    if borrowed := curves.get("borrow"):
        return f"kernel times of {borrowed['from']}, intervals x{borrowed.get('widen', 1)}: {borrowed.get('reason', '')}"
    if tables := curves.get("tables"):
        return f"measured: {len(tables)} tables of kernel times ({next(iter(tables.values())).get('source', '')}, ...)"
    return "no measured kernels: peaks times the efficiencies below"


def _calibrated_on(told: Provenance) -> str:
    """`calibrated from h100_sxm on 6 runs (a, b), 8 x H100, vllm 0.11.0, nvlink 450 GB/s ..., 2026-11-21`."""
    versions = [f"{name} {version}" for name, version in told.versions.items()]
    what = ", ".join([told.device, *versions, told.interconnect, told.date])
    return f"calibrated from {told.base} on {len(told.runs)} run{'s' * (len(told.runs) != 1)} ({', '.join(told.runs)}): {what}"


def sheet(profile: Profile) -> tuple[Any, ...]:
    """Title, aliases, where kernel times come from, and the datasheet with sources."""
    each = row(profile)
    head = labelled(
        {
            "name": each["name"],
            "aliases": ", ".join(each["aliases"]) or "none",
            "node": f"{profile.node.gpus} GPUs, {profile.node.cpu_cores} CPU cores",
            "curves": _curves_source(profile),
            **({"runs": _calibrated_on(profile.calibration)} if profile.calibration else {}),
        }
    )
    table = new_table(console().width)
    table.add_column("datasheet", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("source", ratio=1)
    for label, value, dimension, source in _facts(profile):
        table.add_row(label, units.format(value, dimension), source)
    return Text(profile.title, style="bold"), head, Text(), table, Text()


def coefficients(profile: Profile, width: int = WIDTH) -> Table:
    """Efficiencies and latencies with interval and source."""
    table = new_table(min(width, console().width))
    table.add_column("coefficient", no_wrap=True, max_width=30, overflow="ellipsis")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("P10-P90", justify="right", no_wrap=True)
    table.add_column("source", ratio=1)
    for name, c in sorted(profile.coefficients.items()):
        table.add_row(name, units.format(c.value, c.dimension), _interval(c), c.source)
    return table


def _interval(c: Coefficient) -> str:
    return f"{units.format(c.low, c.dimension)}-{units.format(c.high, c.dimension)}"
