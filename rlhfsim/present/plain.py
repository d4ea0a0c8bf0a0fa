"""What `--json` prints of simulate and report, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhfsim.present.answers.tree import Figure, Page
from rlhfsim.present.answers.written import tile_texts
from rlhfsim.present.chrome_trace import chrome_path
from rlhfsim.simulation.summary import Simulation


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
