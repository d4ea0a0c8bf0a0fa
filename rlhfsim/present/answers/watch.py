"""What `rlhfsim watch` says of a running job, event by event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from rlhfsim import units
from rlhfsim.calibration.comparison.phases import PhaseComparison
from rlhfsim.calibration.watching.causes import MEASURES, Cause, Condition
from rlhfsim.calibration.watching.standing import Standing
from rlhfsim.calibration.watching.trend import Trend
from rlhfsim.present.answers.tree import Column, Page, TypedTable, answer, facts, table_of
from rlhfsim.present.figures.run import SECONDS_OF_PHASES
from rlhfsim.present.tables import COUNT, RATIO, TENTHS, fields
from rlhfsim.present.words import percent, plural, short_seconds, size
from rlhfsim.what_if.watch import Event, Judgement, Notice

SMALL = 0.005
"""Share of the step below which a phase is not shown."""


def page(event: Event) -> Page:
    """An event; docs/watch.md lists its keys in JSON."""
    if isinstance(event, Notice):
        said = f"{event.kind}: {event.text}"
        mark = "warn" if event.kind == "note" else "plain"
        return answer("", verdict=said, mark=mark, data={"event": event.kind, "text": event.text})
    if isinstance(event, Cause):
        said = f"warning[{event.code}]: {event.what}; {event.advice}"
        return answer("", verdict=said, mark="bad", data={"event": "warning", **asdict(event)})
    found = event.found
    steps = f"step {COUNT.shown(found.logged)} ({plural(found.steps, 'step')} since it began)"
    rows = {"run": f"{event.framework.title}, {steps}", "step": _step(found.step, event)}
    if found.memory is not None:
        rows["memory"] = _memory(found, event)
    elif found.oom_risk is not None:
        rows["memory"] = f"not logged; risk of running out {percent(found.oom_risk)} by {_source(event)}"
    if found.response is not None:
        rows["lengths"] = _lengths(found)
    return answer(
        "",
        _phases(found) if found.phases else None,
        tiles=facts(rows),
        data={
            "event": "judged",
            **fields(event, framework="framework.name", compared_with="baseline.said_by"),
            **asdict(found),
            "measures": {n: value for n, (_, of) in MEASURES.items() if (value := of(found)) is not None},
        },
    )


def _source(event: Judgement) -> str:
    return event.baseline.said_by if event.baseline else "nothing"


def _step(row: PhaseComparison, event: Judgement) -> str:
    if row.measured_s is None:
        return "no time is logged"
    measured = f"{short_seconds(row.measured_s)} (median of {row.steps})"
    if row.predicted_s is None or row.ratio is None or row.low_s is None or row.high_s is None:
        return f"{measured}; there is nothing to compare with"
    inside = row.low_s <= row.measured_s <= row.high_s
    where = "inside" if inside else "below" if row.measured_s < row.low_s else "above"
    between = f"{short_seconds(row.low_s)} to {short_seconds(row.high_s)}"
    return (
        f"{measured}, {short_seconds(row.predicted_s)} by {_source(event)}: {RATIO.shown(row.ratio)} times, "
        f"{where} P10 to P90 ({between})"
    )


def _memory(found: Standing, event: Judgement) -> str:
    trend, risk = found.memory, found.oom_risk
    assert trend is not None
    limit = f" of {size(trend.limit)} that fit" if trend.limit else ""
    text = f"{size(trend.now)}{limit}{_growth(trend, _signed)}"
    if trend.reached is not None:
        text += f"; full at step {_when(found.logged, trend)}"
    if risk is None:
        return text
    where = f"in {COUNT.shown(trend.ahead)} steps" if trend.each_step is not None else f"by {_source(event)}"
    return f"{text}; risk of running out {percent(risk)} {where}"


def _lengths(found: Standing) -> str:
    trend = found.response
    assert trend is not None
    text = f"mean {COUNT.shown(trend.now)} tokens{_growth(trend, TENTHS.shown)}"
    if found.longest is not None:
        text += f"; longest {COUNT.shown(found.longest)}"
    if trend.limit is not None:
        text += f", cut at {COUNT.shown(trend.limit)}"
    if found.clipped is not None:
        text += f"; {percent(found.clipped)} of them were cut"
    if trend.reached is not None:
        text += f"; the mean gets there at step {_when(found.logged, trend)}"
    return text


def _signed(value: float) -> str:
    return ("-" if value < 0 else "+") + size(abs(value))


def _growth(trend: Trend, text: Callable[[float], str]) -> str:
    """`, +1.2 (+1.0 to +1.4) a step`."""
    if trend.each_step is None or trend.low is None or trend.high is None:
        return ""
    if trend.steady:
        return ", steady"
    return f", {text(trend.each_step)} ({text(trend.low)} to {text(trend.high)}) a step"


def _when(logged: int, trend: Trend) -> str:
    assert trend.reached is not None
    low, middle, high = (COUNT.shown(logged + ahead) for ahead in trend.reached)
    return f"{middle} ({low} to {high})"


def _phases(found: Standing) -> TypedTable:
    step = max(found.step.measured_s or 0.0, found.step.predicted_s or 0.0)
    long = [p for p in found.phases if max(p.measured_s or 0.0, p.predicted_s or 0.0) >= SMALL * step]
    return table_of("Seconds by phase", long, *SECONDS_OF_PHASES, Column("ratio", kind=RATIO))


def failed(condition: Condition, value: float) -> str:
    """Why a watch ends with an error."""
    return f"failed: {condition.text}, it is {units.significant(value, 3)}"
