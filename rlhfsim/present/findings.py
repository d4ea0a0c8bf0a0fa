"""Sentences from numbers: every title of a figure, and the verdicts. No drawing, no HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlhfsim.present.words import (
    CAUSES,
    bound_by,
    call,
    capital,
    component,
    listed,
    percent,
    seconds,
    signed,
    size,
)
from rlhfsim.units import significant

CLEAR = 0.01
"""Relative differences below this are none."""
MOST = 3
"""Points that a sentence names."""


def timeline(calls_s: Mapping[str, float], bound: Mapping[str, str], step_s: float) -> str:
    """`Generation takes 58 % of the step and is bound by NVLink`; seconds and resource by call."""
    top = max(calls_s, key=lambda c: calls_s[c])
    text = f"{capital(call(top))} takes {percent(calls_s[top] / step_s)} of the {seconds(step_s)} step"
    resource = bound.get(top)
    return f"{text} and is bound by {bound_by(resource)}" if resource else text


def overlap(busy_s: float, step_s: float) -> str:
    """How much work the step does not wait for."""
    hidden = busy_s - step_s
    return f"; {seconds(hidden)} of other work is hidden behind the step" if hidden > CLEAR * step_s else ""


def resources(by_s: Mapping[str, float]) -> str:
    """`Arithmetic takes 53 % of the step, launches and framework 28 %`; seconds by resource."""
    whole = sum(by_s.values()) or 1.0
    top = sorted(by_s, key=lambda r: -by_s[r])[:2]
    shown = [
        f"{bound_by(r)} {'takes ' if i == 0 else ''}{percent(by_s[r] / whole)}"
        + (" of the step" if i == 0 else "")
        for i, r in enumerate(top)
    ]
    return capital(", ".join(shown))


def memory(pool: str | None, peak: float, capacity: float, phase: str, largest: str) -> str:
    """The fullest moment of a pool; bytes, the phase, the largest component then."""
    whose = f"GPUs of pool {pool}" if pool else "GPUs"
    when = "before the step" if phase == "start" else f"during {call(phase)}"
    if peak > capacity:
        return f"{whose} would need {size(peak)} of {size(capacity)} {when}: it does not fit"
    return (
        f"{whose} are fullest {when}: {percent(peak / capacity)} of {size(capacity)}, mostly "
        f"{component(largest)}"
    )


def sizes(chosen: tuple[int, float, float], others: Sequence[tuple[int, float, float]], unit: str) -> str:
    """What another number of GPUs would bring; each is GPUs, seconds, and USD (or GPU-hours) of a step."""
    gpus, time, cost = chosen
    faster = [o for o in others if o[1] < time * (1 - CLEAR)]
    cheaper = [o for o in others if o[2] < cost * (1 - CLEAR)]
    both = [o for o in faster if o in cheaper]
    if both:
        best = min(both, key=lambda o: o[1])
        return f"{best[0]:,} GPUs would be faster and cheaper: {_moved(best, chosen, unit)}"
    parts = [(min(faster), "faster but dearer")] if faster else []
    parts += [(max(cheaper), "cheaper but slower")] if cheaper else []
    if not parts:
        return f"No other size that was tried beats {gpus:,} GPUs in time or {unit}"
    return "; ".join(f"{o[0]:,} GPUs would be {how} ({_moved(o, chosen, unit)})" for o, how in parts)


def _moved(one: tuple[object, float, float], base: tuple[object, float, float], unit: str) -> str:
    return f"{signed(one[1] / base[1] - 1)} time, {signed(one[2] / base[2] - 1)} {unit}"


def rival(label: str, more_s: float, step_s: float, terms: Mapping[str, float]) -> str:
    """Where a rival loses; `terms` are seconds that it takes more, by call."""
    top = max(terms, key=lambda c: terms[c])
    return (
        f"{capital(label)} would take {percent(more_s / step_s)} longer: {call(top)} alone "
        f"{seconds(terms[top])} more"
    )


NOT_LOOKED_FOR = (
    "not looked for: rlhfsim design does with --detail proof or --json, rlhfsim report without --no-sizes, "
    "where a best plan is proven in time"
)
"""Instead of break-evens."""


def break_evens(nearest: str | None, factor: float, winner: str) -> str:
    """The change that is nearest to turning the answer over."""
    if nearest is None:
        return "Nothing that was tried makes another kind of plan the best"
    return (
        f"The choice turns over first with {nearest}: at {significant(factor, 3)} times today's, {winner} "
        "wins"
    )


def chosen_then(step_s: float | None, written: Callable[[float], str], *, simpler: bool) -> str:
    """What happens to the kind of the best plan at a break-even; `simpler`: another one is chosen."""
    kind = "the kind that is fastest now" if simpler else "the chosen kind"
    return f"{kind} {written(step_s)}" if step_s else f"{kind} no longer fits"


def sensitivity(names: Sequence[str], shares: Sequence[float], half_s: float, step_s: float) -> str:
    """Which coefficients the doubt about the step comes from; shares of the variance."""
    text = f"{capital(names[0])} makes {percent(shares[0])} of the doubt about the step"
    return f"{text}, which is {percent(half_s / step_s)} either way"


def scatter(median: float, count: int, inside: int) -> str:
    """How published steps were predicted."""
    return (
        f"{count} published steps were predicted with a median error of {percent(median)}; {inside} of "
        f"{count} fell inside P10-P90"
    )


def against(ratio: float, inside: bool | None) -> str:
    """Measured over predicted."""
    direction = "longer" if ratio > 1 else "less"
    change = f"{percent(abs(ratio - 1))} {direction} than predicted"
    where = "" if inside is None else f", {'inside' if inside else 'outside'} the predicted P10 to P90"
    return ("as long as predicted" if abs(ratio - 1) < CLEAR else change) + where


def sides(predicted: Mapping[str, float], measured: Mapping[str, float]) -> str:
    """Which call takes longest on either side; seconds by call of one step."""
    expected, longest = (max(side, key=lambda c: side[c]) for side in (predicted, measured))
    took, foretold = seconds(measured[longest]), seconds(predicted[expected])
    if expected == longest:
        both = f"{took} measured, {foretold} predicted"
        return f"{capital(call(longest))} is the longest call on both sides: {both}"
    return f"{capital(call(longest))} takes longest ({took}); {call(expected)} was predicted to ({foretold})"


def phases(ratios: Mapping[str, float]) -> str:
    """Which phase is furthest from its prediction."""
    if not ratios:
        return "No phase is long enough to say something about the prediction"
    within = sum(1 for r in ratios.values() if 0.8 <= r <= 1.25)
    worst = max(ratios, key=lambda p: max(ratios[p], 1 / ratios[p]))
    return (
        f"{within} of {len(ratios)} phases lie within 25 % of the prediction; {call(worst)} is furthest "
        f"({significant(ratios[worst], 2)} times)"
    )


def gap(parts: Mapping[str, float], predicted: float, measured: float) -> str:
    """What most of the difference comes from; seconds by cause."""
    total = measured - predicted
    side = "longer" if total > 0 else "shorter"
    if abs(total) < CLEAR * predicted:
        return f"The mean step is as predicted within {percent(CLEAR)}"
    causes = sorted((p for p in parts if parts[p] * total > 0), key=lambda p: -abs(parts[p]))[:2]
    shown = listed([f"{CAUSES[c].phrase} ({parts[c]:+.2g} s)" for c in causes])
    return f"The mean step is {seconds(abs(total))} {side} than predicted, mostly from {shown}"


def steps(times: Sequence[float], reward: Sequence[float]) -> str:
    """How steady a run was and what it learnt."""
    spread = (max(times) - min(times)) / (sum(times) / len(times))
    text = f"Steps vary by {percent(spread)} from the fastest to the slowest"
    return (
        f"{text}; the mean reward goes from {significant(reward[0], 2)} to {significant(reward[-1], 2)}"
        if len(reward) > 1
        else text
    )


Point = tuple[str, float | None, float | None]
"""Name, seconds and money (USD or GPU-hours) of a point; None: nothing fits, or no price."""


def points(base: Point, others: Sequence[Point], unit: str) -> str:
    """Which points beat the base: the fastest and the cheapest of them."""
    name, time, cost = base
    known = [(n, t, c) for n, t, c in others if t is not None and c is not None]
    if time is None or cost is None or not known:
        return f"{len(known)} of {len(others)} points can be held against {name}"
    own = (name, time, cost)
    better = [p for p in known if p[1] < time * (1 - CLEAR) and p[2] < cost * (1 - CLEAR)]
    if better:
        best = min(better, key=lambda p: p[1] * p[2])
        return f"{capital(best[0])} is both faster and cheaper: {_moved(best, own, unit)}"
    fastest, cheapest = min(known, key=lambda p: p[1]), min(known, key=lambda p: p[2])
    parts = []
    if fastest[1] < time * (1 - CLEAR):
        parts.append(f'the fastest point is "{fastest[0]}" ({_moved(fastest, own, unit)})')
    if cheapest[2] < cost * (1 - CLEAR):
        parts.append(f'the cheapest is "{cheapest[0]}" ({_moved(cheapest, own, unit)})')
    return capital(", ".join(parts)) if parts else f"No point beats {name} in time or {unit}"


def other_work(base: str, points: Sequence[tuple[str, str, float, float | None]], unit: str) -> str:
    """Points that do other work than the base, each by name, what it is compared by, time and money."""
    by = {"sample": "per sample", "token": "per token", "work": ""}
    parts = [
        f"{name} {signed(time)} time"
        + ("" if cost is None else f", {signed(cost)} {unit}")
        + f" {by[how]}".rstrip()
        for name, how, time, cost in points[:MOST]
    ]
    more = f"; and {len(points) - MOST} more" if len(points) > MOST else ""
    return f"Other work than {base}, so no rival of it: {'; '.join(parts)}{more}"


def change(percent: float | None) -> str:
    """`+12.5 %`; None: nothing fits."""
    return "nothing fits" if percent is None else f"{percent:+.1f} %"


def tornado(what: str, path: str, low: float | None, high: float | None) -> str:
    """Which input moves most; changes in per cent, None where nothing fits."""
    moved = f"{change(low)} at its low value, {change(high)} at its high value"
    return f"{capital(what)} depends most on {path}: {moved}"
