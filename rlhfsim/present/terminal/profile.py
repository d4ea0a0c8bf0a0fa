"""What `rlhfsim profile measure` shows: progress, one table, what is missing, what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhfsim import units
from rlhfsim.calibration.micro_benchmarks.changes import ProfileEntry
from rlhfsim.calibration.micro_benchmarks.profile import MeasuredProfile
from rlhfsim.present.tables import table as columns
from rlhfsim.present.terminal.console import Display, Part, drawn, styled
from rlhfsim.specs.hardware.measured import Measured, MissingProbe, Session

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


class ProbeProgress:
    """One line a probe."""

    def __init__(self, screen: Display) -> None:
        self.screen = screen

    def started(self, probe: Any, number: int, total: int) -> None:
        """Which probe runs."""
        self.screen.print(f"[{number}/{total}] {probe.name}: {probe.title} ...", end="")

    def ended(
        self, probe: Any, found: Sequence[Measured], missing: MissingProbe | None, seconds: float
    ) -> None:
        """What became of it; the reason of a failure stands below the table."""
        said = f" {seconds:.1f} s" + ("" if missing is None else ", not measured")
        self.screen.print(styled(said, style="dim" if missing is None else "yellow"))


def result(session: Session, made: MeasuredProfile, out: Path, *, default: bool) -> Iterator[Part]:
    """The table and what follows."""
    yield ""
    yield f"{session.machine.words}; the profile extends {made.base}"
    yield ""
    yield table(made.changes)
    yield ""
    for note in made.notes:
        yield f"check: {note}"
    if made.missing:
        yield styled("not measured, prior kept:", style="bold")
        for missing in made.missing:
            yield f"  {missing.probe}: {missing.reason}"
    yield "interval: P10 to P90 of the repeats, widened by 15 %; meaning of each name: docs/hardware.md"
    yield ""
    yield styled(f"wrote {out}", style="bold")
    name = out.stem if default else str(out)
    gpus = session.machine.gpus or session.machine.cores
    yield f"next: rlhfsim design --gpu {name} --gpus {gpus} --model path/to/config.json"


def table(changes: Sequence[ProfileEntry]) -> Part:
    """What, value, interval, prior, repeats; values restated or of every engine are left to the file."""
    return drawn(
        columns(
            "",
            _distinct(changes),
            ("what", lambda c: WORDS.get(c.key, c.key.removeprefix("coefficients."))),
            (">value", lambda c: _text(c.value, c)),
            (">interval", _interval),
            (">prior", lambda c: "" if c.prior is None else _text(c.prior, c)),
            (">n", lambda c: str(c.n) if c.n else ""),
        )
    )


def _interval(c: ProfileEntry) -> str:
    return "" if c.low is None or c.high is None else f"{_text(c.low, c)} - {_text(c.high, c)}"


def _distinct(changes: Sequence[ProfileEntry]) -> Iterator[ProfileEntry]:
    """An engine's own coefficient stands for the common one of the same value."""
    own = {c.key for c in changes}
    return (c for c in changes if c.moved and f"{c.key}_vllm" not in own)


def _text(value: float, c: ProfileEntry) -> str:
    return f"{value:.3g}" if c.unit == "1" else units.format(value, c.unit)
