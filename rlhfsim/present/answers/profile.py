"""What `rlhfsim profile measure` answers: the new profile, what is missing, what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rlhfsim.calibration.micro_benchmarks.changes import ProfileEntry
from rlhfsim.calibration.micro_benchmarks.profile import MeasuredProfile
from rlhfsim.present.answers.tree import Code, Column, Listing, Page, answer, table_of
from rlhfsim.present.tables import COUNT, QUANTITIES, QUANTITY
from rlhfsim.specs.hardware.measured import Session

WORDS = {
    "node.host_memory": "host memory",
    "node.host_bandwidth": "host memory, all cores",
    "node.local_storage": "local storage",
    "node.shared_storage": "shared storage",
    "peak.bf16": "peak, bf16",
    "peak.fp32": "peak, fp32",
    "scale_up.bandwidth": "scale-up fabric",
}
"""Keys of a profile in words; coefficients keep their names, which docs/hardware.md explains."""


def page(session: Session, made: MeasuredProfile, out: Path, *, default: bool) -> Page:
    """The new profile and what follows; values restated or of every engine are left to the file and JSON."""
    name, gpus = out.stem if default else str(out), session.machine.gpus or session.machine.cores
    table = table_of(
        "",
        _distinct(made.changes),
        Column("what", lambda c: WORDS.get(c.key, c.key.removeprefix("coefficients."))),
        Column("value", lambda c: (c.value, c.unit), QUANTITY.where("")),
        Column("P10-P90", lambda c: None if c.low is None else (c.low, c.high, c.unit), QUANTITIES.where("")),
        Column("prior", lambda c: None if c.prior is None else (c.prior, c.unit), QUANTITY.where("")),
        Column("n", lambda c: c.n or None, COUNT.where("")),
        notes=("P10-P90: of the repeats, widened by 15 %; meaning of each name: docs/hardware.md",),
    )
    unknown = (f"not measured, prior kept: {missing.probe}: {missing.reason}" for missing in made.missing)
    return answer(
        "rlhfsim.profile-measure/1",
        table,
        Listing((*(f"check: {note}" for note in made.notes), *unknown), mark="warn"),
        Code("next", f"rlhfsim design --gpu {name} --gpus {gpus} --model path/to/config.json"),
        title=f"{session.machine.words}; the profile extends {made.base}",
        verdict=f"wrote {out}",
        data={
            "file": str(out),
            "machine": asdict(session.machine),
            "extends": made.base,
            "profile": list(map(asdict, made.changes)),
            "measured": list(map(asdict, session.measured)),
            "not_measured": list(map(asdict, made.missing)),
            "notes": made.notes,
        },
    )


def _distinct(changes: Sequence[ProfileEntry]) -> Iterator[ProfileEntry]:
    """An engine's own coefficient replaces the common one of the same value."""
    own = {c.key for c in changes}
    return (c for c in changes if c.moved and f"{c.key}_vllm" not in own)
