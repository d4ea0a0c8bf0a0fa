"""The first screen of a plan: verdict, layouts by role, time by phase; `MOST` lines at 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rlhfsim import units
from rlhfsim.plan import Plan, PredictedPhase
from rlhfsim.present.basis import profile_under
from rlhfsim.present.memory import states
from rlhfsim.present.tables import grid
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal.bars import Axis
from rlhfsim.present.terminal.console import NARROW, Part, resource_text, stacked, styled, tight
from rlhfsim.present.verdict import assumed, cautions, layout_words, learning
from rlhfsim.present.words import RESOURCES, decimals, fixed, is_move, percent, size
from rlhfsim.trace import WAIT

MOST = 34
"""Lines of an answer that was asked for no detail, on 100 columns."""

TINY = 0.002
"""Share of the step below which a phase has no line of its own."""


def wants(detail: frozenset[str], name: str) -> bool:
    """Whether a part of the answer is asked for."""
    return bool({name, "all"} & detail)


# --- verdict ----------------------------------------------------------------------------------------


def verdict(plan: Plan) -> dict[str, str]:
    """Label -> sentence: time, money, way, learning, memory, and what is taken for granted."""
    p = plan.prediction
    spread = f"P10-P90 {units.significant(p.low_s)}-{units.significant(p.high_s)}"
    if p.centre != 1:
        spread = f"P50 {units.significant(p.step_s * p.centre)}, {spread}"
    rows = {
        "step": f"{units.format(p.step_s, 's')} ({spread}), {speed(plan)}",
        "cost": view.cost_text(plan),
        "plan": view.way(plan),
        "learning": learning(plan),
        "memory": memory(plan),
    }
    if taken := list(assumed(plan)):
        rows["assumed"] = "; ".join(taken)
    if told := list(cautions(plan)):
        rows["caution"] = "; ".join(told)
    return rows


def speed(plan: Plan) -> str:
    """`227 tok/s/GPU`."""
    return f"{units.significant(plan.prediction.tokens_per_s_per_gpu)} tok/s/GPU"


def memory(plan: Plan) -> str:
    """The fullest GPU and the fullest host, each of how much, and the risk."""
    p = plan.prediction
    over = "BEYOND CAPACITY, " if p.peak_memory_bytes > p.capacity_bytes else ""
    limit = host_capacity(plan)
    offered = f" of {size(limit)}" if limit else ""
    return (
        f"{over}{size(p.peak_memory_bytes)} of {size(p.capacity_bytes)} per GPU, host "
        f"{size(p.host_peak_bytes)}{offered} per node; risk of running out "
        f"{percent(p.probability_out_of_memory)}"
    )


def host_capacity(plan: Plan) -> float | None:
    """Host memory of the smallest node under the plan; None where no profile is found."""
    profiles = [profile_under(plan, pool.name) for pool in plan.placement.pools]
    return min((p.node.host_memory.value for p in profiles if p), default=None)


# --- roles and phases -------------------------------------------------------------------------------


def roles(plan: Plan, width: int, *, decoded: bool = True) -> Part:
    """Who sits where and, where `decoded`, what the words of its layout mean."""
    data = view.placement_rows(plan, width)
    return stacked(tight(data, width), *[styled(layout_words(plan), style="dim")] * decoded)


def phases(plan: Plan, width: int, *, decoded: bool = True, tiny: float = 0.0, starts: bool = False) -> Part:
    """Seconds of every phase, what binds it, how near it is to its hardware's limit, memory, and a bar; where
    `decoded`, what the columns say; with `starts` also when it begins."""
    p = plan.prediction
    end = max((f.start_s + f.seconds for f in p.phases), default=0.0)
    digits, wide = decimals(end), width >= NARROW
    starts = starts and wide
    pools = len(plan.placement.pools) > 1
    shown, small = view.split(p.phases, end, tiny=tiny)
    rows: list[list[Part]] = [
        [
            f.name,
            *[f.pool] * pools,
            *[f"{f.start_s:,.{digits}f}"] * starts,
            fixed(f.seconds, digits),
            *[f"{f.low_s:,.{digits}f}-{f.high_s:,.{digits}f}"] * wide,
            resource_text(f.bound_by),
            "" if (share := limit_share(f, p.phases)) is None else percent(share),
            _full(plan, f),
            view.time_bar(f, end),
        ]
        for f in shown
    ]
    if small:
        name = f"{len(small)} short {'moves' if all(is_move(f.name) for f in small) else 'phases'}"
        spent = fixed(sum(f.seconds for f in small), digits)
        rows.append([name, *[""] * (pools + starts), spent, *[""] * wide, "", "", "", ""])
    axis = Axis(label=units.format(end, "s"), at=end, scale=end)
    titles = [
        "phase",
        *["pool"] * pools,
        *[">start s"] * starts,
        ">takes s",
        *[">P10-P90"] * wide,
        "bound by",
        ">of peak",
        ">memory",
    ]
    data = grid([*titles, axis], rows, fit={"pool": view.POOL})
    return stacked(tight(data, width), *[styled(_meanings(plan), style="dim")] * decoded)


def limit_share(phase: PredictedPhase, phases: Sequence[PredictedPhase]) -> float | None:
    """Speed of a call as a share of that at the peak rates of its GPUs; None where none is known.

    The part of a call that the step waits for is a phase of its own (`actor.generate.wait`) and counts too.
    At most 1: a measured rate may pass a cautious datasheet by a few percent (`MAX_EFFICIENCY`).
    """
    waited = (f.seconds for f in phases if f.name == f"{phase.name}.{WAIT}")
    taken = phase.work_s or sum(waited, phase.seconds)
    return None if phase.limit_s is None or taken <= 0 else min(1.0, phase.limit_s / taken)


def _full(plan: Plan, phase: PredictedPhase) -> str:
    """Share of the fullest GPU that is taken in a phase."""
    pool = phase.pool.split("+", 1)[0]
    held = [state.bytes for state in states(plan, pool) if state.phase == phase.name]
    profile = profile_under(plan, pool)
    capacity = profile.usable_memory.value if profile else plan.prediction.capacity_bytes
    return percent(max(held) / capacity) if held else ""


DECODED = {
    "hbm": "GPU memory bandwidth",
    "nvlink": "fabric inside a node",
    "pcie": "link to the host",
    "host": "CPU and its memory",
    "bubble": "pipeline stages wait",
    "tail": "GPUs wait for the longest responses",
    "overhead": "launches and framework",
}
"""Resource whose word does not say what it is -> its meaning, as short as a first screen asks."""


def _meanings(plan: Plan) -> str:
    """What the columns say, once."""
    named = [f for f in plan.prediction.phases if not is_move(f.name)]
    used = dict.fromkeys(f.bound_by for f in named)
    said = [f"{RESOURCES[r].word}: {DECODED[r]}" for r in used if r in DECODED]
    if any(f.limit_s is not None for f in named):
        said.append("of peak: speed, as a share of that at the GPUs' peak rates")
    if any(not f.critical for f in plan.prediction.phases):
        said.append("light: not waited for")
    return "; ".join(said)
