"""Fits how far off predictions are beside what coefficients say, and writes the measured runs that questions are near.

    python -m lab.fits.discrepancy

Reads `rlhfsim validate`'s predictions (after `lab.fits.leave_one_out`), and rewrites `*_discrepancy` of
hardware_profiles/common.yaml and rlhfsim/step/measured_runs.csv. The law: `rlhfsim.validation.discrepancy`. Values: over all
publishers. P10 and P90: of the values without one publisher at a time.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from datetime import date
from importlib import resources as packaged
from pathlib import Path

import numpy as np

from rlhfsim import resources
from rlhfsim.step.measured import COEFFICIENTS, FILE, REACH, runs_text
from rlhfsim.validation import scoreboard, tables
from rlhfsim.validation.discrepancy import base_of, runs_of, unseen
from rlhfsim.validation.outcome import Outcome

KINDS = ("training", "memory", "rlhf")


def laws(outcomes: Iterable[Outcome]) -> dict[str, tuple[float, float, float, str]]:
    """Coefficient -> value, low, high and what it was fitted on."""
    outcomes = list(outcomes)
    found = {}
    for kind, name in COEFFICIENTS.items():
        rows = unseen(outcomes, kind)
        if rows.publishers < 2:
            continue
        low, high = np.percentile([base_of(rows.without(p)) for p in set(rows.publisher)], (10, 90))
        value = base_of(rows)
        what = f"{len(rows.publisher)} rows of {rows.publishers} publishers"
        found[name] = (value, min(value, float(low)), max(value, float(high)), what)
    away = unseen(outcomes, "memory.training_peak").distance
    if away.size:
        middle, reach, most = np.percentile(away, (50, 90, 100))
        what = f"{away.size} peaks, distances to the nearest of another publisher: P90, median and largest"
        found[REACH] = (float(reach), float(middle), float(most), what)
    return found


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
    outcomes, _ = scoreboard.collect(tables.select(KINDS), discrepancy=False)
    found = laws(outcomes)
    for name, (value, low, high, what) in found.items():
        sys.stdout.write(f"{name}: {value:.3f} ({low:.3f} to {high:.3f}), {what}\n")
    path = resources.shipped("hardware_profiles") / "common.yaml"
    path.write_text(written(path.read_text(encoding="utf-8"), found), encoding="utf-8")
    runs = Path(str(packaged.files("rlhfsim.step") / FILE))
    runs.write_text(runs_text(runs_of(outcomes)), encoding="utf-8")


if __name__ == "__main__":
    main()
