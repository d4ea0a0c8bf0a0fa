"""Every fit again without one publisher at a time, for the errors of `lab.scoreboard` that no fit has seen.

    python -m lab.fits.leave_one_out         rewrites lab/scoreboard/data/left_out.json
    python -m lab.fits.leave_one_out rlhf    only this fit

A fit takes the rows to fit on, so leaving a publisher out is calling it with the others' rows. The hash is
that of the rows and of the coefficients that ship: a new row, or a new fit, makes the file stale, and a test says so.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.fits import rlhf, training, verl, weight_sync
from lab.scoreboard.left_out import FILE
from lab.scoreboard.rows import DATA
from rlhfsim.specs.frameworks.costs import with_software
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.validation.outcome import publisher
from rlhfsim.validation.rows import Row

Fitted = Mapping[str, Coefficient]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fit whose rows can be left out."""

    name: str
    rows: Callable[[], list[Row]]
    """All that it reads."""
    fit: Callable[[Sequence[Row]], Fitted]
    """Coefficients by name, or by name@profile, from the rows given."""
    names: tuple[str, ...]
    """Its coefficients."""
    profiles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Coefficient -> profiles that hold it; one that is not named is in all."""
    software: tuple[str, Backend] | None = None
    """Framework and backend whose costs it writes; None: those of all, in the profiles."""
    together: Callable[[Row], str] = lambda row: publisher(row.source)
    """Rows with the same text leave together."""


FITS = (
    Fit(
        name="training",
        rows=training.fit_rows,
        fit=training.fit,
        names=tuple(free.name for free in training.FREE),
        profiles={free.name: free.profiles for free in training.FREE if free.profiles},
    ),
    Fit(name="rlhf", rows=rlhf.fit_rows, fit=rlhf.fit, names=rlhf.NAMES, software=("nemo-rl", "megatron")),
    Fit(name="verl", rows=verl.fit_rows, fit=verl.fit, names=verl.NAMES, software=("verl", "fsdp2")),
    Fit(
        name="weight_sync",
        rows=weight_sync.fit_rows,
        fit=weight_sync.coefficients,
        names=weight_sync.SHARED,
        together=weight_sync.page,
    ),
)


def stamp(fit: Fit) -> str:
    """Hash of what a fit rests on: its rows, and its coefficients as they ship."""
    rows = [sorted(row.values.items()) for row in fit.rows()]
    shipped = {
        name: [
            with_software(profile, *(fit.software or (None, None))).coefficients[name].value
            for profile in map(load_profile, fit.profiles.get(name, ("h100",)))
        ]
        for name in fit.names
    }
    text = json.dumps([rows, shipped], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def left_out(fit: Fit) -> dict[str, list[dict[str, Any]]]:
    """Publisher -> the coefficients without its rows."""
    rows = fit.rows()
    found = {}
    for name in sorted({publisher(row.source) for row in rows}):
        gone = {fit.together(row) for row in rows if publisher(row.source) == name}
        others = [row for row in rows if fit.together(row) not in gone]
        sys.stdout.write(f"{fit.name} without {name}: {len(others)} of {len(rows)} rows\n")
        sys.stdout.flush()
        found[name] = [_data(fit, key, c) for key, c in fit.fit(others).items()]
    return found


def _data(fit: Fit, key: str, c: Coefficient) -> dict[str, Any]:
    name, _, owner = key.partition("@")
    numbers = {k: float(f"{getattr(c, k):.6g}") for k in ("value", "low", "high")}
    profiles = fit.profiles.get(name, ())
    return {"name": name, "profiles": list(profiles), "framework": "" if profiles else owner, **numbers}


def main() -> None:
    """Refit and write."""
    path = DATA / FILE
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    wanted = sys.argv[1:] or [fit.name for fit in FITS]
    for fit in FITS:
        if fit.name in wanted:
            known[fit.name] = {"hash": stamp(fit), "left_out": left_out(fit)}
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
