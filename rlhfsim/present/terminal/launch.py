"""A run as people follow it in a terminal: an iteration a line, and findings as they come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rlhfsim.present.terminal.console import Display, styled

COLUMNS = (
    ("reward", "reward/mean", 3),
    ("loss", "policy/loss", 4),
    ("kl", "kl/mean", 4),
    ("|dlogp|", "mismatch/mean_abs_dlogp", 6),
    ("length", "response/length_mean", 1),
    ("stale", "staleness/max", 0),
    ("tokens/s", "throughput/tokens_per_sec", 0),
    ("s", "time/step", 2),
)
"""Column of the progress lines: title, metric, decimals."""


class Warned(Protocol):
    """A finding of the executor's detectors."""

    @property
    def code(self) -> str:
        """Stable name."""

    @property
    def what(self) -> str:
        """What was measured against what."""

    @property
    def advice(self) -> str:
        """What to change."""


class Screen:
    """Prints what a run tells."""

    def __init__(self, console: Display) -> None:
        """`console` is stderr where stdout carries JSON."""
        self._console = console
        self._head = False

    def phase(self, text: str) -> None:
        """A line of its own."""
        self._console.print(styled(text, style="dim"), highlight=False)
        self._head = False

    def iteration(self, row: Mapping[str, float], total: int) -> None:
        """One line of figures."""
        if not self._head:
            titles = "".join(f"{title:>10}" for title, _, _ in COLUMNS)
            self._console.print(styled(f"{'iteration':>12}{titles}", style="bold"))
            self._head = True
        cells = "".join(_cell(row.get(name), digits) for _, name, digits in COLUMNS)
        self._console.print(f"{int(row['step']) + 1:>5} / {total:<4}{cells}", highlight=False)

    def finding(self, finding: Warned) -> None:
        """A warning with its advice."""
        self._console.print(styled(f"warning[{finding.code}]: {finding.what}", style="yellow"))
        self._console.print(styled(f"help: {finding.advice}"))


def _cell(value: float | None, digits: int) -> str:
    if value is None:
        return f"{'-':>10}"
    text = f"{value:.{digits}f}" if value == 0 or abs(value) >= 10.0**-digits else f"{value:.1e}"
    return f"{text:>10}"
