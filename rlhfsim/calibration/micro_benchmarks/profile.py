"""A session of micro-benchmarks as a new profile: it extends the nearest one and names what was measured.

First rates, shares and kernel tables; then, with those in place, the engine's own time is what its steps
take beyond the kernels (`overheads`). Pure: `profile_writer.write_text` writes it, and never overwrites.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rlhfsim import units
from rlhfsim.calibration.micro_benchmarks.changes import ProfileEntry, Seen, changes, split
from rlhfsim.calibration.micro_benchmarks.fit import is_grid, kernel_table
from rlhfsim.calibration.micro_benchmarks.overheads import overheads
from rlhfsim.calibration.profile_writer import MAX_SOURCE, written, yaml_text
from rlhfsim.frozen import frozen
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.measured import Measured, MissingProbe, Session
from rlhfsim.specs.hardware.profile_files import aliases, profile_names
from rlhfsim.specs.hardware.profiles import load_profile, profile_from_text

CPU, UNKNOWN_GPU = "cpu_core", "l40s"
"""Profiles beneath those of machines that no shipped profile is about."""
SAME_MEMORY = 0.1
"""A GPU is that of a profile if their memories differ by less than this share."""
TABLES = {"gemm": "gemm/bf16", "attention": "prefill"}
"""Measured grid -> kernel table; on a CPU the executor computes in FP32 what plans call BF16."""
DIGITS = 4
HEADER = """\
# Written by rlhfsim profile measure. `low` and `high` are the 10th and 90th percentile of the repeats, \
widened by
# 15 % for what one session cannot know. What is not named here keeps the value of the profile that this \
one extends.
"""


@frozen
class MeasuredProfile:
    """The new profile and what made it."""

    text: str
    base: str
    known: bool
    """A shipped profile is about this very device."""
    changes: tuple[ProfileEntry, ...]
    missing: tuple[MissingProbe, ...]
    """Probes without a result, and numbers that were refused."""
    notes: tuple[str, ...]


def measured_profile(session: Session, name: str = "local") -> MeasuredProfile:
    """The profile of a session, checked as a file is."""
    beneath, known = base_of(session)
    seen = Seen(session=session, base=load_profile(beneath), known=known)
    entries, refused = split(changes(seen))
    curves = _curves(seen, entries)
    first = profile_from_text(_text(seen, name, beneath, entries, curves))
    engine, notes = overheads(seen, first)
    entries += engine
    text = _text(seen, name, beneath, entries, curves)
    profile_from_text(text)
    return MeasuredProfile(
        text=text,
        base=beneath,
        known=known,
        changes=tuple(entries),
        missing=(*session.missing, *refused),
        notes=(*notes, *_sanity(seen, first)),
    )


def base_of(session: Session) -> tuple[str, bool]:
    """The shipped profile beneath, and whether it is about this very device, by name and memory."""
    machine = session.machine
    if machine.kind == "cpu":
        return CPU, False
    title = machine.title.lower().replace(" ", "-").replace("_", "-")
    names = {name.replace("_", "-"): name for name in profile_names()} | aliases()
    hits = sorted((known for known in names if known in title), key=len, reverse=True)
    for hit in hits:
        profile = load_profile(names[hit])
        if abs(profile.memory.value / machine.gpu_memory - 1) < SAME_MEMORY:
            return profile.name, True
    return UNKNOWN_GPU, False


def _curves(seen: Seen, entries: Sequence[ProfileEntry]) -> dict[str, Any] | None:
    """Kernel tables of this machine, against its own roofs; a known GPU keeps its denser shipped ones."""
    if seen.known and seen.base.curves is not None:
        return None
    rates = {c.key: c.value for c in entries}
    profile = replace(
        seen.base,
        hbm=replace(seen.base.hbm, value=rates.get("hbm", seen.base.hbm.value)),
        peak={
            p: replace(peak, value=rates.get(f"peak.{p}", peak.value)) for p, peak in seen.base.peak.items()
        },
    )
    grids = {table: seen.points(name) for name, table in TABLES.items() if is_grid(seen.points(name))}
    tables = {
        table: kernel_table(
            table, profile, points, _source(seen.session, sum(p.n for p in points), points[0].how)
        )
        for table, points in grids.items()
    }
    if not tables:
        return None
    return {
        "package": "rlhfsim profile measure",
        "fitted_on": "all shapes",
        "loss": "100 ln(t / roofline at these peaks) per node, two base-36 digits",
        "peaks": {
            "bf16": profile.peak["bf16"].value,
            "hbm": profile.hbm.value,
            "link": profile.scale_up.bandwidth.value,
        },
        "tables": tables,
    }


def _sanity(seen: Seen, first: Profile) -> list[str]:
    """The fastest product compared with the peak."""
    points = seen.points("gemm")
    if not points:
        return []
    top = max(points, key=_flops)
    peak = first.peak["bf16"].value
    shape, rate = " x ".join(f"{x:g}" for x in top.at), units.format(_flops(top), "flop/s")
    if _flops(top) > (1 - 10 ** (1 - DIGITS)) * peak:  # the file rounds
        return [
            f"fastest product {rate} ({shape}): {first.peak['bf16'].source.rpartition('; ')[2]}, so it is "
            "the peak"
        ]
    return [
        f"fastest product {rate} ({shape}), {100 * _flops(top) / peak:.0f} % of the peak of "
        f"{units.format(peak, 'flop/s')}"
    ]


def _flops(p: Measured) -> float:
    m, n, k = p.at
    return 2 * m * n * k / p.value


# --- text -----------------------------------------------------------------------------------------


def _text(
    seen: Seen, name: str, beneath: str, entries: Sequence[ProfileEntry], curves: dict[str, Any] | None
) -> str:
    machine = seen.session.machine
    data: dict[str, Any] = {"name": name, "title": f"{machine.title} (measured)"[:80], "extends": beneath}
    if not seen.known:
        data |= _node(seen)
    for change in entries:
        at = data
        *path, last = change.key.split(".")
        for key in path:
            at = at.setdefault(key, {})
        at[last] = _entry(change, seen.session)
    if "node" in data and "host_memory" not in data["node"]:
        data["node"] = _plain(seen.base.node) | data["node"]
    if curves is not None:
        data.pop("curves", None)  # the key is written last
    text = HEADER + yaml_text(data)
    return text if curves is None else f"{text}curves: {json.dumps(curves)}\n"


def _node(seen: Seen) -> dict[str, Any]:
    """The parts of the profile beneath that are replaced whole, to be filled with what was measured."""
    machine, base = seen.session.machine, seen.base
    units_of = machine.gpus or machine.cores
    node = _plain(base.node) | {"gpus": units_of, "cpu_cores": machine.cores}
    parts = {
        "peak": {p: _plain(peak) for p, peak in base.peak.items()},
        "scale_up": _plain(base.scale_up),
        "node": node,
    }
    return parts if machine.kind == "cpu" else parts | {"price": None, "curves": None}


def _plain(part: Any) -> dict[str, Any]:
    return {key: value for key, value in asdict(part).items() if value is not None}


def _entry(change: ProfileEntry, session: Session) -> dict[str, Any]:
    source = _source(session, change.n, change.how) if change.moved else change.how
    numbers = {"value": change.value, "low": change.low, "high": change.high}
    known = {key: written(x, change.unit, DIGITS) for key, x in numbers.items() if x is not None}
    return known | {"source": source[:MAX_SOURCE]}


def _source(session: Session, n: int, how: str) -> str:
    machine = session.machine
    return f"measured {machine.date} by rlhfsim profile measure: n={n}, {machine.words}; {how}"
