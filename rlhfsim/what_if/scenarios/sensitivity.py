"""What each input moves by itself (a tornado), and which points no other one beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlhfsim.search.pareto import undominated
from rlhfsim.what_if.scenarios.designs import Designs
from rlhfsim.what_if.scenarios.points import Cases, PointQuestion, standing, worded
from rlhfsim.what_if.scenarios.result import PointResult, TornadoBar
from rlhfsim.what_if.scenarios.whole_run import points
from rlhfsim.what_if.work import StepWork

TornadoInputs = Mapping[str, tuple[PointQuestion, PointQuestion]]
"""Path -> the questions with its low and its high value."""


def ends(cases: Cases) -> TornadoInputs:
    """The inputs of the tornado.

    Raises:
        RlhfsimError: an unknown path or a bad value.
    """
    text = cases.document.tornado
    inputs = {}
    for path, pair in (text.vary if text else {}).items():
        where = {path: cases.source.place(("tornado", "vary", path))}
        low, high = (cases.patched(f"{path} {worded(path, v)}", {path: v}, where) for v in pair)
        inputs[path] = low, high
    return inputs


def tornado(
    cases: Cases, inputs: TornadoInputs, base: PointResult, designs: Designs
) -> tuple[TornadoBar, ...]:
    """Every input at its low and its high value, the largest swing first."""
    bars = [_bar(path, (*pair, cases.base), base, designs) for path, pair in inputs.items()]
    return tuple(sorted(bars, key=lambda bar: -bar.swing))


def _bar(path: str, cases: Sequence[PointQuestion], base: PointResult, designs: Designs) -> TornadoBar:
    """`cases`: its low value, its high value, the base."""
    low, high = points(cases[:2], designs)
    labels = [worded(path, standing(case, path)) for case in cases]
    return TornadoBar(
        path=path,
        low_label=labels[0],
        high_label=labels[1],
        base_label=labels[2],
        low_s=low.seconds,
        base_s=base.seconds,
        high_s=high.seconds,
        low_usd=low.usd,
        base_usd=base.usd,
        high_usd=high.usd,
        other_work=other_work(high, base) or other_work(low, base),
    )


def other_work(point: PointResult, other: PointResult) -> tuple[str, ...]:
    """What of the work of two points differs; empty where one does not fit."""
    return point.work.unlike(other.work) if point.work and other.work else ()


def marked(points: Sequence[PointResult]) -> tuple[PointResult, ...]:
    """The points, the base first, with what is other work, and those that none of equal work beats.

    Beaten: in time and money at once. A point that competes with none is not marked.
    """
    front: set[int] = set()
    competing: list[tuple[StepWork, list[int]]] = []
    for i, point in enumerate(points):
        work = point.work
        if work is not None and point.seconds is not None and point.usd is not None:
            same = next((rivals for other, rivals in competing if work.same(other)), None)
            if same is None:
                competing.append((work, same := []))
            same.append(i)
    for _, rivals in competing:
        if len(rivals) > 1:
            values = [(points[i].seconds or 0.0, points[i].usd or 0.0) for i in rivals]
            front |= {rivals[k] for k in undominated(values)}
    unlike = [other_work(p, points[0]) for p in points]
    return tuple(
        replace(p, on_front=i in front, other_work=other)
        for i, (p, other) in enumerate(zip(points, unlike, strict=True))
    )
