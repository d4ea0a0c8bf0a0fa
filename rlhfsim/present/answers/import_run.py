"""What `rlhfsim import-run` answers: what was read as what, what was not, and what was assumed."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from rlhfsim.interchange.logs.imported import Imported
from rlhfsim.interchange.logs.run_folder import provenance, step_seconds
from rlhfsim.plan import Plan
from rlhfsim.present.answers.tree import Code, Column, Listing, Page, TypedTable, facts, section, table_of
from rlhfsim.present.plan_words import header_rows, task
from rlhfsim.present.tables import COUNT, FIGURE, LIST, REST, SECONDS, Fit
from rlhfsim.present.words import plural


def import_page(run: Imported, plan: Plan, path: Path, out: Path) -> Page:
    """Everything, top to bottom; JSON's schema in docs/compare.md."""
    names = (*run.mapped, *run.unmapped_times)
    values = {n: [s.values[n] for s in run.steps if n in s.values] for n in names}
    medians = {n: median(logged) if logged else 0.0 for n, logged in values.items()}
    unmapped = tuple(f"{name}: {SECONDS.shown(medians[name])}" for name in run.unmapped_times)
    assumed = tuple(f"{k} = {v}" for k, v in run.settings.assumed.items())
    told = {
        "times that have no counterpart here": unmapped,
        "not in the configuration, the framework's defaults": (LIST.shown(assumed),) if assumed else (),
        "notes": tuple(run.notes),
    }
    return Page(
        title=task(plan),
        tiles=facts({**header_rows(plan), **_summary(run, plan, out)}),
        sections=(
            section("timers", "", _timers(run, plan, medians)),
            *(section(title.split()[0], title, Listing(items)) for title, items in told.items() if items),
            section("next", "", Code("next", f"rlhfsim compare {out}/plan.json {out}/")),
        ),
        data={
            **provenance(run, path),
            "out": str(out),
            "step_s": [step_seconds(run, step) for step in run.steps],
            "predicted_step_s": plan.prediction.step_s,
            "medians_s": medians,
        },
    )


def _summary(run: Imported, plan: Plan, out: Path) -> dict[str, str]:
    """Steps, lengths, where it was written."""
    seconds = [s for s in (step_seconds(run, step) for step in run.steps) if s]
    middle = f"; median {SECONDS.shown(median(seconds))}" if seconds else ""
    predicted = SECONDS.shown(plan.prediction.step_s)
    prompt, response = map(COUNT.shown, (run.lengths.prompt, run.lengths.response))
    return {
        "read": f"{plural(len(run.steps), 'step')} of {run.framework.title}{middle} "
        f"(predicted without calibration: {predicted})",
        "lengths": f"prompt {prompt}, response {response} tokens on average",
        "written": f"{out}: plan.json, trace.json, metrics.jsonl, import.json",
    }


def _timers(run: Imported, plan: Plan, medians: dict[str, float]) -> TypedTable:
    """Metric, our phases, median seconds."""
    planned = {phase.name for phase in plan.prediction.phases}
    return table_of(
        "Times",
        run.mapped.items(),
        Column("metric", 0, fit=Fit("cut", max_width=48)),
        Column("median s", lambda row: medians[row[0]], FIGURE),
        Column("is read as", lambda row: [n for n in row[1] if n in planned] or row[1], LIST, fit=REST),
    )
