"""The break-evens of a scenario: from which value on a point is as good as another, or meets a target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

from rlhfsim import units
from rlhfsim.errors import Place, RlhfsimError, unknown_name
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.what_if.dotted_paths import dimension, keys, value_at
from rlhfsim.what_if.scenarios.crossings import Crossing, Curve, State, samples, state, stretches
from rlhfsim.what_if.scenarios.designs import Designs
from rlhfsim.what_if.scenarios.document import BreakEvenText, Of
from rlhfsim.what_if.scenarios.points import BASE, MAX_POINTS, Cases, PointQuestion, standing, worded
from rlhfsim.what_if.scenarios.result import PointBreakEven, PointResult, Tried
from rlhfsim.what_if.scenarios.sensitivity import other_work
from rlhfsim.what_if.scenarios.whole_run import points, steps_of

FIGURES: dict[Of, tuple[str, units.Dimension]] = {
    "step_time": ("plan.prediction.step_s", "s"),
    "time_of_run": ("run_s", "s"),
    "cost_per_step": ("plan.prediction.usd_per_step", "usd"),
    "cost_of_run": ("run_usd", "usd"),
}
"""What is compared -> its path in a point, and its unit."""
VERB = {"s": "takes", "usd": "costs"}
STATES: tuple[State, ...] = ("less", "same", "more", "nothing")
LONGER = ("less time than", "as long as", "longer than", "no time to compare with (neither fits)")
DEARER = ("less than", "as much as", "more than", "nothing to compare with (neither fits)")
WORDS = {"s": dict(zip(STATES, LONGER, strict=True)), "usd": dict(zip(STATES, DEARER, strict=True))}
DIGITS = 4
"""Digits of a crossing in words."""
MET: dict[State, str] = {"less": "met", "same": "met", "more": "missed", "nothing": "missed"}
SWITCHES = ("rollout-logprobs", "fp8", "async", "lora")
"""What may be allowed, that which changes learning least first."""
GPUS = ("h200", "b200")
"""Kinds of GPU that are tried in place of the first."""


class BreakEvenQuestion:
    """One break-even: two sides that can be asked at any value of an input."""

    def __init__(
        self, text: BreakEvenText, index: int, cases: Cases, points: Mapping[str, PointQuestion]
    ) -> None:
        """Every value of the range is turned into questions, so that a bad one is found before any search.

        Raises:
            RlhfsimError: an unknown point or path, ends that are no numbers or out of order, no run length.
        """
        self.text, self.cases = text, cases
        self.at = ("break_even", index)
        self.a = self._point(points, "point", text.point)
        self.b = None if text.against is None else self._point(points, "against", text.against)
        self.unit = FIGURES[text.of][1]
        self.target = None if text.target is None else self._target(text.target)
        ends = text.between or text.among or ()
        values = [self._number(value) for value in ends]
        self.whole = isinstance(standing(self.a, text.vary), int)
        if text.between is not None:
            if not values[0] < values[1]:
                raise RlhfsimError(
                    "empty-range",
                    "the ends of between are not in order",
                    place=self._place("between"),
                    help="the low end first",
                )
            self.xs = samples(*values, whole=self.whole)
        else:
            self.xs = sorted(set(values))
        self._check_known()
        self.requests = [case.request for x in self.xs for case in self._sides(x)]

    def _place(self, *keys: str) -> Place:
        return self.cases.source.place((*self.at, *keys))

    def _point(self, points: Mapping[str, PointQuestion], key: str, name: str) -> PointQuestion:
        if name not in points:
            known = [BASE, *islice(self.cases.names(), MAX_POINTS)]
            raise unknown_name("point", name[:60], known, place=self._place(key))
        return points[name]

    def _target(self, value: float | str) -> float:
        try:
            return units.parse(value, self.unit)
        except RlhfsimError as error:
            raise error.at(self._place("target")) from error

    def _number(self, value: object) -> float:
        """A value of the range in base units, as the base reads it."""
        path = self.text.vary
        place = self._place("between" if self.text.between else "among")
        number = standing(self.cases.patched(self.a.name, {path: value}, {path: place}, on=self.a), path)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise RlhfsimError(
                "no-number",
                f"{path} is no number: {str(value)[:40]}",
                place=place,
                help="vary a number, or give such values as points",
            )
        return float(number)

    def _check_known(self) -> None:
        """Money needs prices, a run its length.

        Raises:
            RlhfsimError: missing.
        """
        of = self.text.of
        for case in self._sides(self.xs[0]):
            pools = case.request.cluster.node_groups
            if of.endswith("_run") and steps_of(case) is None:
                raise RlhfsimError(
                    "missing-steps",
                    f"{of} needs the length of the run",
                    place=self._place("of"),
                    help="give base.run.steps, or a curve and a target",
                )
            if self.unit == "usd" and any(pool.profile.price is None for pool in pools):
                raise RlhfsimError(
                    "missing-price",
                    f"{of} needs a price of every GPU",
                    place=self._place("of"),
                    help="give price in base.cluster.node_groups",
                )

    # --- both sides at a value ----------------------------------------------------------------------

    def _sides(self, x: float) -> list[PointQuestion]:
        """The point, and what it is held against unless that is a target."""
        held = [] if self.b is None else [self.b]
        if self.text.vary_in == "both":
            held = [self._varied(case, x) for case in held]
        return [self._varied(self.a, x), *held]

    def _varied(self, case: PointQuestion, x: float) -> PointQuestion:
        path = self.text.vary
        return self.cases.patched(
            case.name, {path: int(x) if self.whole else x}, {path: self._place("vary")}, on=case
        )

    def tried(self, x: float, designs: Designs) -> Tried:
        """Both sides at a value."""
        a, b = [*map(self._value, points(self._sides(x), designs)), self.target][:2]
        return Tried(x=x, a=a, b=b)

    def _other_work(self, designs: Designs) -> tuple[str, ...]:
        """What of the work of both sides differs, at either end of the range."""
        ends = (points(self._sides(x), designs) for x in (self.xs[0], self.xs[-1]))
        return next((other for sides in ends if (other := other_work(sides[0], sides[-1]))), ())

    def _value(self, point: PointResult) -> float | None:
        value: float | None = value_at(point, keys(FIGURES[self.text.of][0]))
        return value

    # --- the answer ---------------------------------------------------------------------------------

    def answer(self, designs: Designs) -> PointBreakEven:
        """Crossings over the range, in numbers and in words."""
        curve = Curve(lambda x: self.tried(x, designs))
        for x in self.xs:
            curve.at(x)
        listed = self.text.among is not None
        crossings: list[Crossing] = (
            [] if listed else list(curve.crossings(self.text.tolerance, whole=self.whole))
        )
        xs = self._first_met(curve.ordered) if listed else tuple(c.x for c in crossings)
        other = self._other_work(designs)
        outcome = self._listed(curve.ordered) if listed else self._worded(curve.ordered, crossings)
        if self.target is not None and all(state(t) in ("more", "nothing") for t in curve.ordered):
            outcome += self._missed(curve.ordered, designs)
        return PointBreakEven(
            question=self.text.question or self._question(),
            path=self.text.vary,
            unit=dimension(self.text.vary),
            of=self.text.of,
            of_unit=self.unit,
            value=xs[0] if xs else None,
            crossings=xs,
            low=self.xs[0],
            high=self.xs[-1],
            outcome=f"{outcome}; not the same work" if other else outcome,
            other_work=other,
            curve=curve.ordered,
        )

    def _missed(self, tried: Sequence[Tried], designs: Designs) -> str:
        """`; nearest at 512: 7.56 d, 8 % over; met there with backend megatron: 5.9 d`."""
        fits = [(t.a, t.x) for t in tried if t.a is not None]
        if not fits or not self.target:
            return ""
        least, x = min(fits)
        over = units.significant(100 * (least / self.target - 1), 2)
        nearest = f"; nearest at {self._said(x)}: {units.format(least, self.unit)}, {over} % over"
        closer = (least, "")
        for words, case in _changes(self._varied(self.a, x), self.cases, self._place("vary")):
            value = self._value(*points([case], designs))
            if value is not None and value <= self.target:
                return f"{nearest}; met there with {words}: {units.format(value, self.unit)}"
            closer = min(closer, (least if value is None else value, words))
        best = f", nearest {closer[1]}: {units.format(closer[0], self.unit)}" if closer[1] else ""
        return f"{nearest}; no single change that was tried meets it{best}"

    def _first_met(self, tried: Sequence[Tried]) -> tuple[float, ...]:
        """Listed values, each one from which on a is no more than b."""
        good = [state(t) in ("less", "same") for t in tried]
        return tuple(t.x for t, now, before in zip(tried, good, [False, *good], strict=False) if now > before)

    def _question(self) -> str:
        against = self.text.against if self.b else "the target"
        return f"{self.text.of} of {self.text.point} against {against}, over {self.text.vary}"

    @property
    def _subject(self) -> str:
        return self.text.point if self.b else f"target {units.format(self.target or 0.0, self.unit)}"

    def _said(self, x: float) -> str:
        return worded(self.text.vary, float(f"{x:.{DIGITS}g}"))

    def _phrase(self, how: State) -> str:
        if self.b is None:
            return MET[how]
        return f"{VERB[self.unit]} {WORDS[self.unit][how]} {self.text.against}"

    def _briefly(self, how: State) -> str:
        """The same once verb and object were said."""
        words = MET[how] if self.b is None else WORDS[self.unit][how]
        return words.removesuffix(" than").removesuffix(" as")

    def _worded(self, tried: Sequence[Tried], crossings: Sequence[Crossing]) -> str:
        """`spot costs less than base below 2.1 USD/h, more above 2.1 USD/h`."""
        parts, subject = stretches(tried), self._subject
        if not crossings:
            how, group = parts[0]
            return f"no crossing: {subject} {self._phrase(how)} over the whole range{_margin(group)}"
        bounds = [None, *(c.x for c in crossings), None]
        phrases: list[str] = []
        for (low, high), (how, _) in zip(pairwise(bounds), parts, strict=False):
            phrases.append(f"{self._briefly(how) if phrases else self._phrase(how)} {self._range(low, high)}")
        many = f"{len(crossings)} crossings: " if len(crossings) > 1 else ""
        jump = "; at a jump, where another plan wins" if any(c.jump for c in crossings) else ""
        return f"{many}{subject} {', '.join(phrases)}{jump}"

    def _range(self, low: float | None, high: float | None) -> str:
        if low is None:
            return f"below {self._said(high or 0.0)}"
        return f"above {self._said(low)}" if high is None else f"from {self._said(low)} to {self._said(high)}"

    def _listed(self, tried: Sequence[Tried]) -> str:
        """`met at 96, 128; missed at 32, 64`."""
        by: dict[str, list[str]] = {}
        for t in tried:
            by.setdefault(self._phrase(state(t)), []).append(self._said(t.x))
        return f"{self._subject} " + "; ".join(f"{phrase} at {', '.join(at)}" for phrase, at in by.items())


def _changes(case: PointQuestion, cases: Cases, place: Place) -> Iterator[tuple[str, PointQuestion]]:
    """A change in words and the question under it: other software, then what changes learning, then GPUs."""
    tried: list[tuple[str, Mapping[str, Any]]] = []
    request = case.request
    for backend in BACKENDS:
        if backend != request.backend:
            tried.append((f"backend {backend}", {"request.backend": backend, "request.framework": None}))
    for name in SWITCHES:
        if name not in request.switches | request.forbid:
            allowed = [*sorted(request.allow), name]
            tried.append((f"{name} allowed", {"request.allow": allowed}))
    if len(request.cluster.node_groups) == 1:
        tried += [(gpu, {"cluster.node_groups.0.gpu": gpu}) for gpu in GPUS]
    for words, given in tried:
        try:
            yield words, cases.patched(case.name, given, dict.fromkeys(given, place), on=case)
        except RlhfsimError:  # a change that this base cannot have
            continue


def _margin(group: Sequence[Tried]) -> str:
    """`, by 12 % to 40 %`: how far apart the sides are."""
    shares = [abs(t.a / t.b - 1) for t in group if t.a is not None and t.b]
    if not shares or max(shares) < 5e-4:
        return ""
    low, high = (units.significant(100 * s, 2) for s in (min(shares), max(shares)))
    return f", by {low} %" if low == high else f", by {low} % to {high} %"
