"""The report of the closed loop: what was run, coefficients before and after, predicted against measured.

Only runs that calibrate are fitted; errors are told of the others. An error is |predicted / measured - 1| of
medians over the counted steps, with the measured lengths; phases shorter than `SHORT` of their step are left
out.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles, stdev
from typing import Any

from closed_loop_runs import ITERATIONS, PROFILE, REPEATED, REPEATS, SURROUNDINGS, Role, Run, schedule
from closed_loop_text import READING, TEXT

from rlhfsim.calibration.evidence import SHORT
from rlhfsim.calibration.fit import Calibration, calibrate
from rlhfsim.calibration.observation import Observation, read_run
from rlhfsim.calibration.predict import STEP, pricer_of
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.quantities import Coefficient

SCHEMA = "rlhfsim.closed_loop/1"
PHASE_TARGET, STEP_TARGET, SECOND_TARGET, SPREADS = 0.12, 0.08, 0.20, 1.5
"""Median phase error, step error, step error of the second model, repeat spreads that a step error may
have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One phase, or the step, of one run."""

    run: str
    config: str
    role: Role
    phase: str
    measured: float
    """Median seconds."""
    p90: float
    n: int
    cold: float | None
    """Seconds predicted with the shipped profile; None: the cost model has no such phase."""
    calibrated: float | None
    share: float
    """Share of the measured step."""

    @property
    def counts(self) -> bool:
        """Whether it is long enough, and predicted at all."""
        return bool(self.cold and self.calibrated) and self.share >= SHORT


def error(predicted: float | None, measured: float) -> float:
    """|predicted / measured - 1|; infinite where nothing was predicted."""
    return math.inf if predicted is None else abs(predicted / measured - 1)


def p90(values: Sequence[float]) -> float:
    """90th percentile between the order statistics."""
    if len(values) < 2:
        return values[0]
    return quantiles(values, n=10, method="inclusive")[-1]


def rows_of(
    run: Run, seen: Observation, cold: Mapping[str, float], calibrated: Mapping[str, float]
) -> list[Row]:
    """The step and every timed phase of a run, in the order of the run."""
    step = median(seen.step_s)
    times = {STEP: seen.step_s, **seen.phases}
    return [
        Row(
            run=run.name,
            config=run.config.name,
            role=run.role,
            phase=phase,
            measured=median(found),
            p90=p90(found),
            n=len(found),
            cold=cold.get(phase),
            calibrated=calibrated.get(phase),
            share=median(found) / step,
        )
        for phase, found in times.items()
        if found
    ]


# --- figures ----------------------------------------------------------------------------------------


def errors(rows: Sequence[Row], role: Role, *, step: bool, cold: bool = False) -> list[float]:
    """Errors of the steps, or of all phases, of the runs of one role."""
    chosen = [r for r in rows if r.role == role and (r.phase == STEP) == step and r.counts]
    return [error(r.cold if cold else r.calibrated, r.measured) for r in chosen]


def spread(rows: Sequence[Row]) -> float:
    """Standard deviation of ln seconds of a step between repeats of one configuration, pooled."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.phase == STEP and row.config in REPEATED:
            found.setdefault(row.config, []).append(math.log(row.measured))
    squares = [stdev(logs) ** 2 for logs in found.values() if len(logs) > 1]
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One figure of the issue and what was reached."""

    what: str
    limit: float
    cold: float
    reached: float
    worst: float
    n: int

    @property
    def met(self) -> bool:
        """Whether the median is within the limit."""
        return self.reached <= self.limit


def targets(rows: Sequence[Row]) -> list[Target]:
    """The three figures; medians over phases or runs."""
    wanted: tuple[tuple[str, float, Role, bool], ...] = (
        ("phases of the same model", PHASE_TARGET, "predict", False),
        ("step of the same model", max(STEP_TARGET, SPREADS * spread(rows)), "predict", True),
        ("step of the second model", SECOND_TARGET, "second model", True),
        ("phases of the second model (no target)", math.inf, "second model", False),
    )
    found = []
    for what, limit, role, step in wanted:
        after, before = (errors(rows, role, step=step, cold=cold) for cold in (False, True))
        if not after:
            continue
        found.append(
            Target(
                what=what,
                limit=limit,
                cold=median(before),
                reached=median(after),
                worst=max(after),
                n=len(after),
            )
        )
    return found


# --- text -------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def percent(value: float) -> str:
    """`7.3 %`."""
    return "-" if math.isinf(value) else f"{100 * value:.1f} %"


def seconds(value: float | None) -> str:
    """Three digits."""
    return "none" if value is None else f"{value:.3g}"


def target_table(rows: Sequence[Row]) -> str:
    """What was asked and reached."""
    return table(
        ("median error of", "target", "cold", "calibrated", "worst", "n", "met"),
        [
            (
                t.what,
                percent(t.limit),
                percent(t.cold),
                percent(t.reached),
                percent(t.worst),
                str(t.n),
                "-" if math.isinf(t.limit) else "yes" if t.met else "no",
            )
            for t in targets(rows)
        ],
    )


def config_table(runs: Sequence[Run], around: Mapping[str, Mapping[str, float]]) -> str:
    """Every run with its role and its surroundings."""
    lines = []
    for run in runs:
        c, near = run.config, around.get(run.name, {})
        lines.append(
            (
                run.name,
                run.role,
                c.algorithm,
                c.architecture,
                c.path,
                str(c.dp),
                str(c.zero),
                str(c.micro_batch),
                f"{c.prompts} x {c.samples}",
                f"{c.prompt_len} + {c.response_len}",
                f"{near.get('others', math.nan):.2f}",
            )
        )
    head = (
        "run",
        "role",
        "algorithm",
        "architecture",
        "weight path",
        "ranks",
        "ZeRO",
        "micro-batch",
        "prompts x samples",
        "tokens",
        "others",
    )
    return table(head, lines)


def coefficient_table(found: Calibration) -> str:
    """Before and after, with intervals."""
    lines = [
        (f"`{c.name}`", quantity(c.before), quantity(c.after), str(c.n), str(c.runs))
        for c in sorted(found.coefficients, key=lambda c: c.name)
    ]
    return table(("coefficient", "before (P10 to P90)", "after (P10 to P90)", "data", "runs"), lines)


def quantity(c: Coefficient) -> str:
    """Value and interval in SI units."""
    return f"{c.value:.3g} ({c.low:.3g} to {c.high:.3g})"


def step_table(rows: Sequence[Row]) -> str:
    """Measured and predicted step of every run."""
    return table(
        ("run", "role", "measured", "p90", "n", "cold", "calibrated", "error cold", "error calibrated"),
        [
            (
                r.run,
                r.role,
                seconds(r.measured),
                seconds(r.p90),
                str(r.n),
                seconds(r.cold),
                seconds(r.calibrated),
                percent(error(r.cold, r.measured)),
                percent(error(r.calibrated, r.measured)),
            )
            for r in rows
            if r.phase == STEP
        ],
    )


def phase_table(rows: Sequence[Row], role: Role) -> str:
    """Errors by phase over the runs of a role."""
    names = dict.fromkeys(r.phase for r in rows if r.role == role and r.counts and r.phase != STEP)
    lines = []
    for name in names:
        chosen = [r for r in rows if r.role == role and r.phase == name and r.counts]
        before = [error(r.cold, r.measured) for r in chosen]
        after = [error(r.calibrated, r.measured) for r in chosen]
        bias = math.exp(median(math.log(r.calibrated / r.measured) for r in chosen if r.calibrated))
        share = median(r.share for r in chosen)
        lines.append(
            (
                name,
                str(len(chosen)),
                percent(share),
                percent(median(before)),
                percent(median(after)),
                percent(p90(after)),
                f"{bias:.2f}",
            )
        )
    head = (
        "phase",
        "runs",
        "share of the step",
        "cold, median",
        "calibrated, median",
        "calibrated, p90",
        "predicted / measured",
    )
    return table(head, lines)


def unpriced(rows: Sequence[Row]) -> str:
    """Phases of the runs that the cost model does not have, with their share of the step."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.cold is None and row.share >= SHORT:
            found.setdefault(row.phase, []).append(row.share)
    told = [
        f"`{name}` ({percent(median(shares))} of the step, {len(shares)} runs)"
        for name, shares in found.items()
    ]
    return ", ".join(told) or "none"


def machine() -> str:
    """This machine in words, without its name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
        name = next(
            line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")
        )
    except (OSError, StopIteration):
        name = platform.machine()
    return name


# --- files ------------------------------------------------------------------------------------------


def write(runs: Path, out: Path) -> None:
    """calibration.md, calibration.json and calibration.svg from finished runs."""
    made = [run for run in schedule() if (runs / run.name).is_dir()]
    seen = {run.name: read_run(runs / run.name) for run in made}
    profile = load_profile(PROFILE)
    found = calibrate([seen[r.name] for r in made if r.role == "calibrate"], profile, errors=False)
    values = {c.name: c.after.value for c in found.coefficients}
    rows: list[Row] = []
    for run in made:
        case = pricer_of(seen[run.name], profile)
        rows += rows_of(run, seen[run.name], case.seconds(), case.seconds(values))
    around = {run.name: json.loads((runs / run.name / SURROUNDINGS).read_text()) for run in made}
    out.mkdir(parents=True, exist_ok=True)
    (out / "calibration.json").write_text(
        json.dumps(record(made, rows, found, around, seen), indent=1) + "\n"
    )
    (out / "calibration.md").write_text(report(made, rows, found, around, seen))
    picture(rows, out / "calibration.svg")
    print(target_table(rows), flush=True)


def record(
    made: Sequence[Run],
    rows: Sequence[Row],
    found: Calibration,
    around: Mapping[str, Mapping[str, float]],
    seen: Mapping[str, Observation],
) -> dict[str, Any]:
    """The traces' summary and the figures of the report."""
    runs = [
        {
            "name": run.name,
            "role": run.role,
            **asdict(run.config),
            **around[run.name],
            "name_of_config": run.config.name,
            "prompt_tokens": seen[run.name].prompt_tokens,
            "response_tokens": seen[run.name].response_tokens,
            "left_out": list(seen[run.name].left_out),
            "phases": {
                r.phase: {
                    "median_s": r.measured,
                    "p90_s": r.p90,
                    "n": r.n,
                    "cold_s": r.cold,
                    "calibrated_s": r.calibrated,
                }
                for r in rows
                if r.run == run.name
            },
        }
        for run in made
    ]
    coefficients = {
        c.name: {"before": _triple(c.before), "after": _triple(c.after), "data": c.n, "runs": c.runs}
        for c in found.coefficients
    }
    reached = [
        {**asdict(t), "limit": None if math.isinf(t.limit) else t.limit, "met": t.met} for t in targets(rows)
    ]
    return {
        "schema": SCHEMA,
        "profile": PROFILE,
        "machine": machine(),
        "targets": reached,
        "repeat_spread": spread(rows),
        "coefficients": coefficients,
        "unidentified": {u.name: u.reason for u in found.unidentified},
        "runs": runs,
    }


def _triple(c: Coefficient) -> dict[str, float]:
    return {"value": c.value, "low": c.low, "high": c.high}


def report(
    made: Sequence[Run],
    rows: Sequence[Row],
    found: Calibration,
    around: Mapping[str, Mapping[str, float]],
    seen: Mapping[str, Observation],
) -> str:
    """calibration.md."""
    counted = {name: o.steps for name, o in seen.items()}
    whole = [near["seconds"] for near in around.values()]
    versions = next(iter(seen.values())).versions
    used = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "vllm", "deepspeed", "ray") if name in versions
    )
    return TEXT.format(
        machine=machine(),
        used=used,
        runs=len(made),
        configs=len({r.config.name for r in made}),
        iterations=ITERATIONS,
        least=min(counted.values()),
        start=median(whole),
        targets=target_table(rows),
        spread=percent(spread(rows)),
        repeats=REPEATS,
        spreads=SPREADS,
        repeated=" and ".join(f"`{name}`" for name in REPEATED),
        steps=step_table(rows),
        phases=phase_table(rows, "predict"),
        second=phase_table(rows, "second model"),
        unpriced=unpriced(rows),
        configurations=config_table(made, around),
        absent=", ".join(r.name for r in schedule() if r not in made) or "none",
        coefficients=coefficient_table(found),
        short=percent(SHORT),
        data=found.data,
        short_target=percent(STEP_TARGET),
        unidentified=", ".join(f"`{u.name}`" for u in found.unidentified) or "none",
        outliers="; ".join(found.outliers) or "none",
        reading=READING,
    )


# --- picture ----------------------------------------------------------------------------------------

COLOURS: dict[Role, str] = {
    "calibrate": "#999999",
    "predict": "#2166ac",
    "repeat": "#67a9cf",
    "second model": "#b2500c",
}


def picture(rows: Sequence[Row], path: Path) -> None:
    """SVG: predicted over measured seconds; before left, after right; steps large, phases small."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "calibration"  # equal runs, equal file
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 4.6), sharex=True, sharey=True, layout="constrained")
    for panel, title in zip(axes, ("cold", "calibrated"), strict=True):
        for role, colour in COLOURS.items():
            chosen = [r for r in rows if r.role == role and r.counts]
            for step in (False, True):
                some = [r for r in chosen if (r.phase == STEP) == step]
                predicted = [r.cold if title == "cold" else r.calibrated for r in some]
                panel.scatter(
                    [r.measured for r in some],
                    predicted,
                    s=42 if step else 9,
                    c=colour,
                    alpha=0.9 if step else 0.5,
                    linewidths=0,
                    label=f"{role}, step" if step else None,
                )
        ends = [0.02, 20]
        panel.plot(ends, ends, color="#444", linewidth=0.8)
        panel.fill_between(
            ends, [e * 0.8 for e in ends], [e * 1.2 for e in ends], color="#444", alpha=0.08, linewidth=0
        )
        panel.set(
            xscale="log", yscale="log", xlabel="measured, s", title=f"{title} (small: phases; band: 20 %)"
        )
    axes[0].set_ylabel("predicted, s")
    axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
