"""What `--json` prints: the answers of simulate, calibrate, compare, diff and report as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhfsim.calibration.comparison.limits import phase_times
from rlhfsim.calibration.comparison.side_by_side import SideBySide
from rlhfsim.calibration.fit import Calibration
from rlhfsim.calibration.left_out import off
from rlhfsim.calibration.profile_writer import error_pair, provenance, workload_after
from rlhfsim.present.answers.tree import Figure, Page, Tile
from rlhfsim.present.answers.written import tile_texts
from rlhfsim.present.chrome_trace import chrome_path
from rlhfsim.simulation.summary import Simulation
from rlhfsim.specs.hardware.profiles import profile_hash
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.what_if.differences import Difference, Side
from rlhfsim.what_if.doctor.diagnosis import Diagnosis


def simulation(
    answer: Simulation, notes: Sequence[str], remedy: str | None, trace: Path | None
) -> dict[str, Any]:
    """A run of `rlhfsim simulate`; schema in docs/plan.md."""
    verdict = {
        "schema": "rlhfsim.simulation/1",
        "fits": answer.rejected_by is None,
        "rejected_by": answer.rejected_by,
        "remedy": remedy,
        "notes": list(notes),
        "plan": answer.plan.to_dict(),
    }
    if answer.rejected_by is not None:
        return verdict
    return {
        **verdict,
        "run": {
            "steps": len(answer.runs[0]),
            "warmup": answer.warmup,
            "seed": answer.seed,
            "replications": len(answer.runs),
            "randomness": answer.randomness,
        },
        "step": {
            "mean_s": answer.mean,
            **{f"p{level}_s": answer.percentile(level) for level in (10, 50, 90)},
            "estimate_s": answer.estimate.prediction.step_s,
        },
        "step_seconds": [list(run) for run in answer.runs],
        "pools": [asdict(pool) for pool in answer.pools],
        "contention": [{"link": link, "seconds": seconds} for link, seconds in answer.contention.items()],
        "staleness": {"mean": answer.staleness[0], "max": answer.staleness[1]} if answer.staleness else None,
        "queue": {"mean": answer.queue.mean, "max": answer.queue.maximum} if answer.queue else None,
        "goodput": asdict(answer.goodput) if answer.goodput else None,
        "trace": str(trace) if trace else None,
        "chrome_trace": str(chrome_path(trace)) if trace else None,
    }


def calibration(fitted: Calibration, out: Path | None) -> dict[str, Any]:
    """A fit of `rlhfsim calibrate`; schema in docs/calibration.md."""
    origin = provenance(fitted)
    of_run = ("name", "device", "date", "steps", "prompt_tokens", "response_tokens")
    return {
        "schema": "rlhfsim.calibrate/1",
        "profile": fitted.profile.name,
        "profile_hash": profile_hash(fitted.profile),
        "runs": [
            {"name": run.name, "plan_hash": run.plan.input_hash} | {key: getattr(run, key) for key in of_run}
            for run in fitted.observations
        ],
        "data": fitted.data,
        "coefficients": [
            {
                "name": c.name,
                "dimension": c.before.dimension,
                "before": _value(c.before),
                "after": _value(c.after),
                "n": c.n,
                "runs": c.runs,
            }
            for c in fitted.coefficients
        ],
        "biases": [asdict(b) | {"factor": _value(b.factor)} for b in fitted.biases],
        "workload": [
            {"name": of.name, "stated": of.stated, "measured": _value(of.measured)}
            for of in workload_after(fitted)
        ],
        "unidentified": [asdict(u) for u in fitted.unidentified],
        "phase_error": error_pair(fitted.errors, step=False),
        "step_error": error_pair(fitted.errors, step=True),
        "errors": [
            {
                **asdict(e),
                "before": off(e.before_s, e.measured_s),
                "after": off(e.after_s, e.measured_s),
                "by_factor": off(e.factor_s, e.measured_s),
            }
            for e in fitted.errors
        ],
        "mismatch": fitted.mismatch,
        "device": origin.device,
        "interconnect": origin.interconnect,
        "versions": dict(origin.versions),
        "outliers": list(fitted.outliers),
        "notes": list(fitted.notes),
        "out": None if out is None else str(out),
    }


def _value(c: Coefficient) -> dict[str, float]:
    return {"value": c.value, "low": c.low, "high": c.high}


def comparison(answer: SideBySide, out: Path | None, diagnosis: Diagnosis | None = None) -> dict[str, Any]:
    """A plan beside its run, of `rlhfsim compare`; schema in docs/compare.md."""
    compared, run = answer.found, answer.run
    return {
        "schema": "rlhfsim.compare/1",
        "plan_hash": answer.plan.input_hash,
        "run": run.name,
        "device": run.device,
        "date": run.date,
        "steps": run.steps,
        "step": asdict(compared.step),
        "step_seconds": list(run.step_s),
        "phases": [asdict(row) for row in compared.rows],
        "not_in_the_run": list(compared.missing),
        "not_in_the_plan": list(compared.unplanned),
        "gap": asdict(answer.gap) if answer.gap else None,
        "memory": [{**asdict(held), "ratio": held.ratio} for held in answer.memory],
        "amounts": [asdict(amount) for amount in compared.amounts],
        "notes": list(answer.notes),
        "chrome_trace": str(out) if out else None,
        **(_helped(answer, diagnosis) if diagnosis else {}),
    }


def _helped(answer: SideBySide, diagnosis: Diagnosis) -> dict[str, Any]:
    """Of an imported run: where its time went, and keys that would have helped."""
    return {
        "where": [
            {**asdict(t), "beyond_s": t.beyond_s}
            for t in phase_times(answer.plan, answer.run, answer.found.rows)
        ],
        "changes": [
            {"keys": dict(change.keys), "predicted_step_s": change.judged.step_s}
            for change in diagnosis.faster
        ],
    }


def difference(changed: Difference) -> dict[str, Any]:
    """What `rlhfsim diff` says; schema in docs/cli.md."""
    return {
        "schema": "rlhfsim.diff/1",
        "before": _side(changed.before),
        "after": _side(changed.after),
        "question": [asdict(c) for c in changed.question],
        "choice": [asdict(c) for c in changed.choice],
        "other_work": list(changed.other_work),
        "outcome": [
            {**asdict(m), "relative": m.relative, "intervals_overlap": m.overlaps} for m in changed.outcome
        ],
    }


def _side(side: Side) -> dict[str, Any]:
    return {"path": side.title, "plan_hash": side.plan.input_hash, "measured": side.measured}


def page(shown: Page, where: Path) -> dict[str, Any]:
    """The findings of `rlhfsim report`; schema in docs/report.md."""
    return {
        "schema": "rlhfsim.present.html/1",
        "out": str(where),
        "bytes": where.stat().st_size,
        "title": shown.title,
        "subtitle": shown.subtitle,
        "verdict": shown.verdict,
        "sure": list(shown.sure),
        "tiles": [
            dict(zip(("label", "value", "detail"), (t.label, *tile_texts(t)), strict=True))
            for t in shown.tiles
        ],
        "sections": [
            {
                "heading": s.heading,
                "figures": [
                    {"key": b.key, "finding": b.title, "alt": b.alt}
                    for b in s.blocks
                    if isinstance(b, Figure)
                ],
            }
            for s in shown.sections
        ],
    }


def _tile(tile: Tile) -> dict[str, str]:
    value, detail = tile_texts(tile)
    return {"label": tile.label, "value": value, "detail": detail}
