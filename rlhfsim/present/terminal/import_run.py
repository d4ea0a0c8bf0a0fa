"""What `rlhfsim import-run` shows: what was read as what, what was not, and what was assumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rlhfsim import units
from rlhfsim.frameworks.logs.imported import Imported
from rlhfsim.frameworks.logs.run_folder import provenance, step_seconds
from rlhfsim.plan import Plan
from rlhfsim.present.tables import REST, Fit, grid
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal.console import Part, console, drawn, labelled, styled
from rlhfsim.present.words import decimals, fixed


def report(run: Imported, plan: Plan, out: Path) -> list[Part]:
    """What was read as what, what was not, and what was assumed."""
    medians = _medians(run)
    parts: list[Part] = [
        view.header(plan),
        labelled(_summary(run, plan, out)),
        "",
        _timers(run, plan, medians),
    ]
    if run.unmapped_times:
        parts += ["", styled("times that have no counterpart here", style="bold")]
        parts += [styled(f"  {name}: {units.format(medians[name], 's')}") for name in run.unmapped_times]
    if run.settings.assumed:
        shown = ", ".join(f"{k} = {v}" for k, v in run.settings.assumed.items())
        parts += [
            "",
            styled("not in the configuration, the framework's defaults", style="bold"),
            styled(shown),
        ]
    parts += [styled(f"note: {note}", style="yellow") for note in run.notes]
    return [*parts, "", styled(f"next: rlhfsim compare {out}/plan.json {out}/", no_wrap=True)]


def _summary(run: Imported, plan: Plan, out: Path) -> dict[str, str]:
    """Steps, lengths, where it was written."""
    seconds = [s for s in (step_seconds(run, step) for step in run.steps) if s]
    middle = f"; median {units.format(median(seconds), 's')}" if seconds else ""
    predicted = units.format(plan.prediction.step_s, "s")
    return {
        "read": f"{len(run.steps):,} step{'s' * (len(run.steps) > 1)} of {run.framework.title}{middle} "
        f"(predicted without calibration: {predicted})",
        "lengths": f"prompt {run.lengths.prompt:,.0f}, response {run.lengths.response:,.0f} tokens on "
        "average",
        "written": f"{out}: plan.json, trace.json, metrics.jsonl, import.json",
    }


def _timers(run: Imported, plan: Plan, medians: Mapping[str, float]) -> Part:
    """Metric, our phases, median seconds."""
    planned = {phase.name for phase in plan.prediction.phases}
    digits = decimals(max([plan.prediction.step_s, *medians.values()]))
    rows = (
        (metric, fixed(medians[metric], digits), ", ".join([n for n in covers if n in planned] or covers))
        for metric, covers in run.mapped.items()
    )
    fit = {"metric": Fit("cut", max_width=48), "is read as": REST}
    return drawn(grid(("metric", ">median s", "is read as"), rows, fit=fit), console().width)


def _medians(run: Imported) -> dict[str, float]:
    names = (*run.mapped, *run.unmapped_times)
    values = {n: [s.values[n] for s in run.steps if n in s.values] for n in names}
    return {n: median(logged) if logged else 0.0 for n, logged in values.items()}


def as_data(run: Imported, plan: Plan, path: Path, out: Path) -> dict[str, Any]:
    """The same content; schema in docs/compare.md."""
    return {
        **provenance(run, path),
        "out": str(out),
        "step_s": [step_seconds(run, step) for step in run.steps],
        "predicted_step_s": plan.prediction.step_s,
        "medians_s": _medians(run),
    }
