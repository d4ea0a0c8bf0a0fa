"""Fits how far off predictions are beside what coefficients say, and writes the measured runs that questions are near.

    python -m lab.fits.discrepancy

Reads `lab.scoreboard`'s predictions (after `lab.fits.leave_one_out`), and rewrites `*_discrepancy` of
hardware_profiles/common.yaml, rlhfsim/step/groups.csv and rlhfsim/step/measured_runs.csv. The laws:
`lab.scoreboard.discrepancy` and `lab.scoreboard.group_law`. Values: over all publishers. P10 and P90: of the values
without one publisher at a time. Nothing is drawn: the same rows give the same files, but for the date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from datetime import date
from importlib import resources as packaged
from pathlib import Path

import numpy as np

from lab.fits.error_files import laws_text, runs_text
from lab.scoreboard.board import collect
from lab.scoreboard.discrepancy import runs_of, unseen
from lab.scoreboard.group_law import with_ends
from lab.scoreboard.intervals import estimated
from rlhfsim import resources
from rlhfsim.step import groups
from rlhfsim.step.measured import COEFFICIENTS, FILE, REACH
from rlhfsim.validation.outcome import Outcome

KINDS = ("training", "memory", "rlhf")


Fits = dict[str, tuple[float, float, float, str]]
"""Coefficient -> value, low, high and what it was fitted on."""


def laws(outcomes: Iterable[Outcome]) -> tuple[Fits, dict[str, groups.GroupLaw]]:
    """Coefficients, and the laws of groups by kind."""
    outcomes = list(outcomes)
    found: Fits = {}
    grouped: dict[str, groups.GroupLaw] = {}
    for kind, name in COEFFICIENTS.items():
        rows = unseen(outcomes, kind)
        if rows.publishers < 2:
            continue
        value, law = estimated(kind, rows)
        without = [estimated(kind, rows.without(p)) for p in sorted(set(rows.publisher))]
        low, high = np.percentile([base for base, _ in without], (10, 90))
        if law is not None:
            grouped[kind] = with_ends(law, [other for _, other in without if other is not None])
        what = f"{len(rows.publisher)} rows of {rows.publishers} publishers"
        found[name] = (value, min(value, float(low)), max(value, float(high)), what)
    away = unseen(outcomes, "memory.training_peak").distance
    if away.size:
        middle, reach, most = np.percentile(away, (50, 90, 100))
        what = f"{away.size} peaks, distances to the nearest of another publisher: P90, median and largest"
        found[REACH] = (float(reach), float(middle), float(most), what)
    return found, grouped


def written(text: str, found: Mapping[str, tuple[float, float, float, str]]) -> str:
    """common.yaml with these numbers in place of the old ones."""
    for name, (value, low, high, what) in found.items():
        old = re.search(rf'^  {name}: {{.*source: "(.*?)"}}$', text, re.MULTILINE)
        assert old, f"the file has no {name}"
        meaning = old[1].split(" | ")[-1].removeprefix("prior: ")
        fit = f"errors of publishers left out, {what} (lab.fits.discrepancy, {date.today().isoformat()})"
        line = (
            f'  {name}: {{value: {value:.3g}, low: {low:.3g}, high: {high:.3g}, source: "{fit} | {meaning}"}}'
        )
        text = text[: old.start()] + line + text[old.end() :]
    return text


def main() -> None:
    """Fit and write."""
    outcomes, _ = collect(KINDS, discrepancy=False)
    found, grouped = laws(outcomes)
    for name, (value, low, high, what) in found.items():
        sys.stdout.write(f"{name}: {value:.3f} ({low:.3f} to {high:.3f}), {what}\n")
    path = resources.shipped("hardware_profiles") / "common.yaml"
    path.write_text(written(path.read_text(encoding="utf-8"), found), encoding="utf-8")
    folder = Path(str(packaged.files("rlhfsim.step")))
    (folder / FILE).write_text(runs_text(runs_of(outcomes)), encoding="utf-8")
    (folder / groups.FILE).write_text(laws_text(grouped), encoding="utf-8")


if __name__ == "__main__":
    main()
