"""A simulated run as people read it: step times, phases, pools, shared links, samples, goodput."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rlhfsim import units
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal.bars import FULL, Axis, Bar, Piece
from rlhfsim.present.terminal.words import decimals, fixed, labelled, new_table, percent, size
from rlhfsim.simulation.summary import PoolRun, Simulation

LEVELS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
ASCII_LEVELS = "_.-=+*%#"
"""Heights of a sparkline where the output has no blocks."""
LINKS = {
    "nic": "network cards of {}",
    "nvlink": "NVLink of {}",
    "pcie": "PCIe of {}",
    "host": "host memory of {}",
    "disk": "disks of {}",
    "storage": "the shared file system",
    "spine": "the fabric between nodes",
}
"""First word of a link's name -> words."""
STOCK = (
    "mean s is the pace that the rollout can keep up; the steps shown were faster, for they also used samples"
    " made before them: more --iterations bring the two together"
)
WAIT = ".wait"
"""End of the name of what the trainer waits for samples."""
ALIKE = 1e-6
"""Relative spread below which steps are alike."""


def report(answer: Simulation, width: int) -> Iterator[RenderableType]:
    """Everything that is shown of a run, top to bottom."""
    yield view.header(answer.plan)
    yield labelled(summary(answer))
    if not answer.alike:
        yield ""
        yield steps_table(answer, width)
        if lives_on_stock(answer):
            yield Text(STOCK, style="dim")
    yield ""
    yield view.phase_table(answer.plan, width)
    if note := phase_note(answer):
        yield Text(note, style="dim")
    yield ""
    yield pool_table(answer, width)
    if answer.contention:
        yield ""
        yield contention_table(answer, width)


def phase_note(answer: Simulation) -> str:
    """Which step the phases are of."""
    words = "" if answer.alike else "phases of the first measured step"
    if any(p.name.endswith(WAIT) for p in answer.plan.prediction.phases):
        words += f"{'; ' * bool(words)}{WAIT[1:]}: the trainer waits for samples"
    return words


# --- figures ----------------------------------------------------------------------------------------


def summary(answer: Simulation) -> dict[str, str]:
    """Run, step time, memory; staleness, queue and goodput where they mean something."""
    rows = {"run": run_text(answer), "step": step_text(answer), "memory": memory_text(answer)}
    if not answer.contention and len(answer.plan.placement.pools) > 1:
        rows["links"] = "no call waited for a link that another one used"
    if answer.staleness is not None:
        rows["samples"] = samples_text(answer)
    if answer.goodput is not None:
        rows["goodput"] = goodput_text(answer)
    return rows


def run_text(answer: Simulation) -> str:
    """`20 steps after 2 of warm-up, 5 replications with seeds 0 to 4; response lengths drawn`."""
    warm = f" after {answer.warmup} of warm-up" if answer.warmup else ""
    many = len(answer.runs)
    seeds = (
        f"{many} replications with seeds {answer.seed} to {answer.seed + many - 1}"
        if many > 1
        else f"seed {answer.seed}"
    )
    return f"{_count(len(answer.runs[0]), 'step')}{warm}, {seeds}; {answer.randomness}"


def step_text(answer: Simulation) -> str:
    """Mean and spread, and how far that is from the closed form."""
    spread = "every step alike"
    if not answer.alike:
        spread = ", ".join(f"P{p} {_s(answer.percentile(p))}" for p in (10, 50, 90))
    before = answer.estimate.prediction.step_s
    change = answer.mean / before - 1
    told = "as estimated" if abs(change) < 5e-4 else f"{_signed(change)} against the estimate of {_s(before)}"
    return f"{_s(answer.mean)} mean; {spread}; {told}"


def memory_text(answer: Simulation) -> str:
    """The fullest pool over the run, or the plan's own peak where the run did not record memory."""
    known = [p for p in answer.pools if p.peak_bytes is not None]
    if not known:
        return view.memory_text(answer.plan)
    pool = max(known, key=lambda p: p.peak_share)
    assert pool.peak_bytes is not None
    where = f" in pool {pool.name}" if len(answer.pools) > 1 else ""
    risk = percent(answer.plan.prediction.probability_out_of_memory)
    return f"peak {size(pool.peak_bytes)} of {size(pool.capacity_bytes)} per GPU{where}{_when(pool)}; risk of running out {risk}"


def _when(pool: PoolRun) -> str:
    """` in actor.train, first at 12 s`."""
    what = f" in {pool.peak_in}" if pool.peak_in else ""
    return f"{what}, first at {_s(pool.peak_s or 0.0)}"


def samples_text(answer: Simulation) -> str:
    """`0.8 versions old on average, 2 at most; 310 more in the queue when the trainer takes a batch, ...`."""
    assert answer.staleness is not None
    mean, worst = answer.staleness
    old = f"{units.significant(mean, 2)} versions old on average, {units.significant(worst, 2)} at most"
    if answer.queue is None:
        return old
    return f"{old}; {answer.queue.mean:,.0f} more in the queue when the trainer takes a batch, {answer.queue.maximum:,.0f} at most"


def goodput_text(answer: Simulation) -> str:
    """Share of time that makes progress, what the formula says, and the interval that is best."""
    g = answer.goodput
    assert g is not None
    best = (
        "the best interval" if g.interval_s == g.best_interval_s else f"best is every {_s(g.best_interval_s)}"
    )
    return (
        f"{_percent(g.simulated)} of the time is progress, with a checkpoint every {_s(g.interval_s)} ({best}) and a failure"
        f" every {_s(g.mtbf_s)}; first-order formula {_percent(g.first_order)}; a step then takes {_s(answer.mean / g.simulated)}"
    )


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _s(seconds: float) -> str:
    return units.format(seconds, "s") if seconds else "0 s"


def _signed(share: float) -> str:
    return f"{share:+.1%}".replace("%", " %")


# --- steps ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sparkline:
    """One character a value between the smallest and the largest; merged where they do not fit."""

    values: Sequence[float]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As many characters as values, fewer where there is no room."""
        return Measurement(1, min(len(self.values), options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment | Text]:
        """One line."""
        levels = LEVELS if options.encoding.lower().startswith("utf") else ASCII_LEVELS
        yield Text(spark(merged(self.values, options.max_width), levels), no_wrap=True)


def spark(values: Sequence[float], levels: str = LEVELS) -> str:
    """Heights in proportion between minimum and maximum; the middle height where all are alike."""
    low, high = min(values), max(values)
    if high - low <= ALIKE * abs(high):
        return levels[len(levels) // 2 - 1] * len(values)
    top = len(levels) - 1
    return "".join(levels[round(top * (v - low) / (high - low))] for v in values)


def merged(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values: means of neighbours."""
    each = -(-len(values) // width)
    groups = [values[i : i + each] for i in range(0, len(values), each)]
    return [sum(g) / len(g) for g in groups]


def steps_table(answer: Simulation, width: int) -> Table:
    """Step times of every replication as a line, with mean and range."""
    digits = decimals(answer.mean)
    shown = answer.runs[:MAX_LINES]
    table = new_table(width)
    table.add_column("seed", justify="right", no_wrap=True)
    for name in ("mean s", "shortest", "longest"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("step by step, shortest to longest", ratio=1, no_wrap=True)
    for i, seconds in enumerate(shown):
        cells = (answer.means[i], min(seconds), max(seconds))
        table.add_row(str(answer.seed + i), *(fixed(s, digits) for s in cells), Sparkline(seconds))
    if len(answer.runs) > len(shown):
        rest = len(answer.runs) - len(shown)
        table.add_row("", "", "", "", Text(f"{rest:,} more replications, see --json", style="dim"))
    return table


def lives_on_stock(answer: Simulation) -> bool:
    """Whether asynchronous steps ran faster than the rollout can keep up."""
    pairs = zip(answer.means, answer.runs, strict=True)
    return any(mean > 1.001 * sum(run) / len(run) for mean, run in pairs)


MAX_LINES = 8
"""Replications that are shown one by one."""


# --- pools and links --------------------------------------------------------------------------------


def pool_table(answer: Simulation, width: int) -> RenderableType:
    """How busy the GPUs of each pool are, and how full they get."""
    table = new_table(width)
    table.add_column("pool", no_wrap=True)
    for name in ("GPUs", "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(Axis(label="100 %", at=1.0, scale=1.0), ratio=1)
    for name in ("peak", "full", "first at"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("in", no_wrap=True)
    for pool in answer.pools:
        held = ("", "", "", "")
        if pool.peak_bytes is not None and pool.peak_s is not None:
            held = (size(pool.peak_bytes), percent(pool.peak_share), _s(pool.peak_s), pool.peak_in or "")
        busy = Bar(pieces=[Piece(amount=pool.busy, glyph=FULL, style="green")], scale=1.0)
        table.add_row(pool.name, f"{pool.gpus:,}" if pool.gpus else "-", percent(pool.busy), busy, *held)
    words = "busy: share of the measured time in which the pool's GPUs work"
    if any(pool.peak_bytes is not None for pool in answer.pools):
        words += "; peak: bytes on its fullest GPU, when and in what"
    return Group(table, Text(words, style="dim"))


def contention_table(answer: Simulation, width: int) -> RenderableType:
    """Links that two calls wanted at once, and what that cost."""
    digits = decimals(answer.mean)
    table = new_table(width)
    table.add_column("shared link", no_wrap=True)
    table.add_column("s per step", justify="right", no_wrap=True)
    table.add_column(Axis(label=_s(answer.mean), at=answer.mean, scale=answer.mean), ratio=1)
    for link, seconds in answer.contention.items():
        bar = Bar(pieces=[Piece(amount=seconds, glyph=FULL, style="red")], scale=answer.mean)
        table.add_row(link_text(link), fixed(seconds, digits), bar)
    return Group(
        table,
        Text(
            "time that calls lost because another used the link too; the step waits for part of it",
            style="dim",
        ),
    )


def link_text(link: str) -> str:
    """`nic:train` -> `network cards of train`."""
    kind, _, where = link.partition(":")
    return LINKS[kind].format(where) if kind in LINKS else link
