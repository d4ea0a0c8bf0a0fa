"""What `rlhfsim design` shows below its first screen where an option or `--detail` asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlhfsim.choice import BreakEven
from rlhfsim.plan import AskedRun
from rlhfsim.present import findings
from rlhfsim.present.answers import recalibrated
from rlhfsim.present.known import known
from rlhfsim.present.terminal import first_screen as first
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal.choices import front_table, whynot_text
from rlhfsim.present.terminal.console import Part, indented, labelled, plain_grid, styled
from rlhfsim.present.terminal.first_screen import wants
from rlhfsim.present.terminal.memory import memory_chart
from rlhfsim.present.terminal.page import parts
from rlhfsim.present.terminal.ranking import considered, ranking
from rlhfsim.present.verdict import layout_words
from rlhfsim.search.explain import best_name
from rlhfsim.search.pareto import Point
from rlhfsim.search.requirements import Verdict
from rlhfsim.units import format
from rlhfsim.what_if.bottleneck import Bottleneck
from rlhfsim.what_if.design import Design
from rlhfsim.what_if.missed_targets import Meeting
from rlhfsim.what_if.recalibrated import Recalibrated
from rlhfsim.what_if.risk.odds import Odds
from rlhfsim.what_if.why_not import WhyNot


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What is asked next to the plan."""

    steps: int | None = None
    """Steps of the whole run."""
    odds: Odds | None = None
    """Targets with their probabilities; None where none was set and no run is asked about."""
    run: AskedRun | None = None
    """The same as the written plan carries it."""
    meeting: tuple[Meeting, ...] = ()
    """Where a target is missed: changes that would meet all."""
    late: bool = False
    """Whether time was up before every change was tried."""
    side: tuple[float, float] | None = None
    """Probabilities that the chosen plan and that of the other side fit and meet all targets; None without
    the other side."""
    bottleneck: Bottleneck | None = None
    """What binds most of the step of the chosen plan."""
    front: tuple[Point, ...] | None = None
    """None where it is not asked for."""
    recalibrated: Recalibrated | None = None
    """None where no profile was calibrated."""

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Every target against the chosen plan."""
        return self.odds.verdicts if self.odds else ()


NamedPart = tuple[str, list[Part]]
"""A title and what stands below it."""


def asked(answer: Design, extras: Extras, width: int) -> Iterator[NamedPart]:
    """What an option of its own asked for."""
    for other in answer.whynots:
        yield f"why not {other.choice}", [indented(line) for line in _whynot(other, answer)]
    if extras.front is not None:
        yield "plans between which you may choose", [front_table(extras.front)]
    best = answer.best or answer.chosen
    if extras.recalibrated is not None and best is not None:
        yield "what calibration changed", list(parts(recalibrated.page(extras.recalibrated, best), width))
    if answer.gains:
        yield "what the choices left out would bring", [_gains(answer)]


def details(answer: Design, detail: frozenset[str], width: int) -> Iterator[NamedPart]:
    """What `--detail` names."""
    plan = answer.chosen
    assert plan is not None
    if wants(detail, "time"):
        why = [indented(styled(reason)) for reason in answer.reasons]
        yield (
            "time",
            [first.phases(plan, width, starts=True), indented(styled(layout_words(plan), style="dim"))],
        )
        yield "why", [*why]
    if wants(detail, "memory"):
        yield "memory", [memory_chart(plan, width)]
    if wants(detail, "proof"):
        break_evens = [_break_even_text(b, answer) for b in answer.break_evens or ()] or [_unflipped(answer)]
        yield "proof", [ranking(answer, width), considered(answer)]
        yield "what would change the choice", [indented(styled(text)) for text in break_evens]
    if wants(detail, "sure"):
        yield "how sure", [labelled(known(plan)), view.sureness(plan, width)]


def _whynot(other: WhyNot, answer: Design) -> Iterator[Part]:
    """Compared with the best plan, proven as well."""
    assert answer.best is not None
    assert answer.chosen is not None
    name = best_name(answer.request.objective) if answer.simpler else "the chosen plan"
    if answer.simpler and other.plan is not None and other.plan.input_hash == answer.chosen.input_hash:
        yield styled("that is the chosen plan")
    yield from whynot_text(other, answer.best, name, answer.request.workload)


def _unflipped(answer: Design) -> str:
    """What was tried in vain."""
    if answer.break_evens is None:
        return findings.NOT_LOOKED_FOR
    cluster, work = answer.request.cluster, answer.request.workload
    tried = ["responses and prompts by 8 either way" if work.generates else "pairs by 8 either way"]
    tried += ["samples by 8"] if work.generates and work.samples > 1 else []
    tried += ["network by 8 either way"] if cluster.gpus > cluster.node_group.gpus_per_node else []
    tried += ["GPU memory by 2 either way"]
    tried += ["GPUs by 4 either way"] if len(cluster.node_groups) == 1 else []
    return f"nothing that was tried makes another plan the best: {', '.join(tried)}"


def _break_even_text(break_even: BreakEven, answer: Design) -> str:
    """`network bandwidth per GPU: at 19.5 GB/s (now 50 GB/s) hybrid takes 195 s, the chosen kind 199 s`."""
    if break_even.value is None or break_even.now is None:
        point = f"{break_even.change}: at {break_even.factor:.2g} times as much"
    else:
        value, now = (format(x, break_even.unit) for x in (break_even.value, break_even.now))
        point = f"{break_even.change}: at {value} (now {now})"
    chosen = findings.chosen_then(break_even.chosen_step_s, lambda s: format(s, "s"), simpler=answer.simpler)
    return f"{point} {break_even.winner} takes {format(break_even.step_s, 's')}, {chosen}"


def _gains(answer: Design) -> Part:
    rows = []
    for gain in answer.gains:
        step = "nothing fits"
        if gain.seconds is not None:
            step = f"{format(gain.seconds, 's')} ({-100 * (gain.saved or 0.0):+.0f} %)"
        rows.append((f"  {gain.option}", step, gain.meaning + (": other work" if gain.other_work else "")))
    return plain_grid(rows)
