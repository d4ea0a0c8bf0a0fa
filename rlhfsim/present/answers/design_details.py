"""What `rlhfsim design` answers below its first screen where an option or `--detail` asks for it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from rlhfsim.choice import BreakEven
from rlhfsim.plan import AskedRun
from rlhfsim.present import findings
from rlhfsim.present.answers.choices import front_table, whynot
from rlhfsim.present.answers.plan_blocks import memory, phases, sureness, wants
from rlhfsim.present.answers.ranking import both, considered, ranking
from rlhfsim.present.answers.tree import Block, Column, FactList, Note, Page, PageSection, section, table_of
from rlhfsim.present.known import known
from rlhfsim.present.tables import COARSE, SECONDS, kind_of
from rlhfsim.present.verdict import layout_words
from rlhfsim.present.words import signed
from rlhfsim.search.explain import best_name
from rlhfsim.search.pareto import FrontPoint
from rlhfsim.search.requirements import Verdict
from rlhfsim.what_if.bottleneck import Bottleneck
from rlhfsim.what_if.design import Design
from rlhfsim.what_if.gains import Gain
from rlhfsim.what_if.missed_targets import Meeting
from rlhfsim.what_if.risk.odds import Odds
from rlhfsim.what_if.why_not import WhyNot


class Extras(NamedTuple):
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
    front: tuple[FrontPoint, ...] | None = None
    """None where it is not asked for."""
    calibration: Page | None = None
    """What calibration changed; None where no profile was calibrated."""

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Every target against the chosen plan."""
        return self.odds.verdicts if self.odds else ()


def asked(answer: Design, extras: Extras) -> Iterator[PageSection]:
    """What an option of its own asked for."""
    for other in answer.whynots:
        name = f"why not {other.choice}"
        yield section(name, name, *_whynot(other, answer), inset=True)
    if extras.front is not None:
        yield section("pareto", "plans between which you may choose", front_table(extras.front))
    if (changed := extras.calibration) is not None:
        told = Note(changed.subtitle), Note(changed.verdict)
        yield section("calibration", "what calibration changed", *told)
        yield from changed.sections
    if answer.gains:
        found = table_of(
            "What the choices left out would bring",
            answer.gains,
            Column("option"),
            Column("step", _gained, key=""),
            Column("what", lambda gain: gain.meaning + ": other work" * gain.other_work),
            look="plain",
        )
        yield section("gains", "what the choices left out would bring", found)


def details(answer: Design, detail: Collection[str]) -> Iterator[PageSection]:
    """What `--detail` names."""
    plan = answer.chosen
    assert plan is not None
    if wants(detail, "time"):
        yield section("time", "time", phases(plan, starts=True))
        yield section("layouts", "", Note(layout_words(plan), "aside"), inset=True)
        yield section("why", "why", *map(Note, answer.reasons), inset=True)
    if wants(detail, "memory"):
        yield section("memory", "memory", *memory(plan))
    if wants(detail, "proof"):
        yield section("proof", "proof", ranking(answer), considered(answer))
        flips = [_break_even_text(b, answer) for b in answer.break_evens or ()] or [_unflipped(answer)]
        yield section("break-evens", "what would change the choice", *map(Note, flips), inset=True)
    if wants(detail, "sure"):
        yield section("sure", "how sure", FactList(known(plan)), sureness(plan))


def _whynot(other: WhyNot, answer: Design) -> Iterator[Block]:
    """Compared with the best plan, proven as well."""
    chosen, best = both(answer)
    name = best_name(answer.request.objective) if answer.simpler else "the chosen plan"
    if answer.simpler and other.plan is not None and other.plan.input_hash == chosen.input_hash:
        yield Note("that is the chosen plan")
    yield from whynot(other, best, name, answer.request.workload)


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
        point = f"{break_even.change}: at {COARSE.shown(break_even.factor)} times as much"
    else:
        value, now = map(kind_of(break_even.unit).shown, (break_even.value, break_even.now))
        point = f"{break_even.change}: at {value} (now {now})"
    chosen = findings.chosen_then(break_even.chosen_step_s, SECONDS.shown, simpler=answer.simpler)
    return f"{point} {break_even.winner} takes {SECONDS.shown(break_even.step_s)}, {chosen}"


def _gained(gain: Gain) -> str:
    if gain.seconds is None:
        return "nothing fits"
    return f"{SECONDS.shown(gain.seconds)} ({signed(-(gain.saved or 0.0))})"
