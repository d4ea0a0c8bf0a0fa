"""The files of `rlhfsim.step` that hold what fits found: laws of groups, and measured runs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping

from rlhfsim.step.groups import GroupLaw
from rlhfsim.step.measured import MeasuredRun

SOURCE = "errors of publishers left out (lab.fits.discrepancy)"
GROUP_COLUMNS = (
    "kind",
    "level",
    "group",
    "rows",
    "publishers",
    *(f"{name}{end}" for name in ("centre", "width") for end in ("", "_low", "_high")),
    "doubt",
    "source",
)
RUN_COLUMNS = (
    "kind",
    "framework",
    "release",
    "backend",
    "gpu",
    "model",
    "params",
    "moe",
    "length",
    "gpus",
    "algorithm",
    "precision",
    "error",
    "source",
)


def laws_text(known: Mapping[str, GroupLaw]) -> str:
    """The file of these laws."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(GROUP_COLUMNS)
    for kind, law in known.items():
        for (level, group), e in law.effects.items():
            cells = (*_shown(e.centre), *_shown(e.width), f"{law.doubt:.3f}")
            writer.writerow((kind, level, group, e.rows, e.publishers, *cells, SOURCE))
    return buffer.getvalue()


def _shown(numbers: Iterable[float]) -> list[str]:
    return [f"{x + 0.0:.3f}" for x in numbers]


def runs_text(runs: Iterable[MeasuredRun]) -> str:
    """The file of these runs."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(RUN_COLUMNS)
    for run in runs:
        c = run.conditions
        cells = {
            **{n: getattr(c, n) for n in RUN_COLUMNS if hasattr(c, n)},
            "params": f"{c.params:.4g}",
            "length": f"{c.length:.4g}",
            "moe": int(c.moe),
            "release": run.release,
            "error": f"{run.error:.3f}",
            "source": run.source,
        }
        writer.writerow([cells[n] for n in RUN_COLUMNS])
    return buffer.getvalue()
