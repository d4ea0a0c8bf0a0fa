"""A simulated run as people read it: step times, phases, pools, shared links, samples, goodput."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim import units
from rlhfsim.present.tables import Fit, grid, table
from rlhfsim.present.terminal import first_screen as first
from rlhfsim.present.terminal import plan as view
from rlhfsim.present.terminal.bars import FULL, Axis, HorizontalBar, Sparkline, Stretch
from rlhfsim.present.terminal.console import Part, drawn, labelled, styled
from rlhfsim.present.words import decimals, fixed, percent, plural, short_seconds, signed, size
from rlhfsim.simulation.summary import PoolRun, Simulation

LINKS = {
    "nic": "network cards of {}",
    "nvlink": "fabric inside the nodes of {}",
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


def report(answer: Simulation, width: int) -> Iterator[Part]:
    """Everything that is shown of a run, top to bottom."""
    yield view.header(answer.plan)
    yield labelled(summary(answer))
    if not answer.alike:
        yield ""
        yield steps_table(answer, width)
        if lives_on_stock(answer):
            yield styled(STOCK, style="dim")
    yield ""
    yield first.phases(answer.plan, width, starts=True)
    if note := phase_note(answer):
        yield styled(note, style="dim")
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
    rows = {"simulated": run_text(answer), "step": step_text(answer)}
    rows |= {"run": asked_text(answer)} if answer.plan.run and answer.plan.run.steps else {}
    rows["memory"] = memory_text(answer)
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
    return f"{plural(len(answer.runs[0]), 'step')}{warm}, {seeds}; {answer.randomness}"


def asked_text(answer: Simulation) -> str:
    """`500 steps take 5.99 h at this pace`: the run that the plan was asked for; failures where simulated."""
    assert answer.plan.run is not None
    steps = answer.plan.run.steps or 0
    share = answer.goodput.simulated if answer.goodput else 1.0
    counted = " with failures and checkpoints" if answer.goodput else ""
    run_s = steps * answer.mean / share
    takes = "takes" if steps == 1 else "take"
    return f"{plural(steps, 'step')} {takes} {units.format(run_s, 's')} at this pace{counted}"


def step_text(answer: Simulation) -> str:
    """Mean and spread, and how far that is from the closed form."""
    spread = "every step alike"
    if not answer.alike:
        spread = ", ".join(f"P{p} {short_seconds(answer.percentile(p))}" for p in (10, 50, 90))
    before = answer.estimate.prediction.step_s
    change = answer.mean / before - 1
    change_text = (
        "as estimated"
        if abs(change) < 5e-4
        else f"{signed(change, 1)} against the estimate of {short_seconds(before)}"
    )
    return f"{short_seconds(answer.mean)} mean; {spread}; {change_text}"


def memory_text(answer: Simulation) -> str:
    """The fullest pool over the run, or the plan's own peak where the run did not record memory."""
    known = [p for p in answer.pools if p.peak_bytes is not None]
    if not known:
        return view.memory_text(answer.plan)
    pool = max(known, key=lambda p: p.peak_share)
    assert pool.peak_bytes is not None
    where = f" in pool {pool.name}" if len(answer.pools) > 1 else ""
    risk = percent(answer.plan.prediction.probability_out_of_memory)
    return (
        f"peak {size(pool.peak_bytes)} of {size(pool.capacity_bytes)} per GPU{where}{_when(pool)}; risk of "
        f"running out {risk}"
    )


def _when(pool: PoolRun) -> str:
    """` in actor.train, first at 12 s`."""
    what = f" in {pool.peak_in}" if pool.peak_in else ""
    return f"{what}, first at {short_seconds(pool.peak_s or 0.0)}"


def samples_text(answer: Simulation) -> str:
    """`0.8 versions old on average, 2 at most; 310 more in the queue when the trainer takes a batch, ...`."""
    assert answer.staleness is not None
    mean, worst = answer.staleness
    old = f"{units.significant(mean, 2)} versions old on average, {units.significant(worst, 2)} at most"
    if answer.plan.placement.schedule.late != "wait":
        again = " and is generated again" * (answer.plan.placement.schedule.late == "requeue")
        old += f"; {_percent(answer.rejected)} of the tokens is thrown away as too old{again}"
    if answer.plan.placement.schedule.lend:
        old += f"; the trainer's GPUs generate in {_percent(answer.lent)} of the time"
    if answer.queue is None:
        return old
    return (
        f"{old}; {answer.queue.mean:,.0f} more in the queue when the trainer takes a batch, "
        f"{answer.queue.maximum:,.0f} at most"
    )


def goodput_text(answer: Simulation) -> str:
    """Share of time that makes progress, what the formula says, and the interval that is best."""
    g = answer.goodput
    assert g is not None
    best = (
        "the best interval"
        if g.interval_s == g.best_interval_s
        else f"best is every {short_seconds(g.best_interval_s)}"
    )
    return (
        f"{_percent(g.simulated)} of the time is progress, with a checkpoint every "
        f"{short_seconds(g.interval_s)} ({best}) and a failure"
        f" every {short_seconds(g.mtbf_s)}; first-order formula {_percent(g.first_order)}; a step then "
        f"takes {short_seconds(answer.mean / g.simulated)}"
    )


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


# --- steps ------------------------------------------------------------------------------------------


def steps_table(answer: Simulation, width: int) -> Part:
    """Step times of every replication as a line, with mean and range."""
    digits = decimals(answer.mean)
    sparks = "step by step, shortest to longest"
    rows: list[tuple[object, ...]] = []
    for i, seconds in enumerate(answer.runs[:MAX_LINES]):
        times = (fixed(s, digits) for s in (answer.means[i], min(seconds), max(seconds)))
        rows.append((str(answer.seed + i), *times, Sparkline(seconds)))
    if (rest := len(answer.runs) - len(rows)) > 0:
        rows.append(("", "", "", "", styled(f"{rest:,} more replications, see --json", style="dim")))
    titles = (">seed", ">mean s", ">shortest", ">longest", sparks)
    return drawn(grid(titles, rows, fit={sparks: Fit(ratio=1)}), width)


def lives_on_stock(answer: Simulation) -> bool:
    """Whether asynchronous steps ran faster than the rollout can keep up."""
    pairs = zip(answer.means, answer.runs, strict=True)
    return any(mean > 1.001 * sum(run) / len(run) for mean, run in pairs)


MAX_LINES = 8
"""Replications that are shown one by one."""


# --- pools and links --------------------------------------------------------------------------------


def pool_table(answer: Simulation, width: int) -> Part:
    """How busy the GPUs of each pool are, and how full they get."""
    note = "busy: share of the measured time in which the pool's GPUs work"
    if any(pool.peak_bytes is not None for pool in answer.pools):
        note += "; peak: bytes on its fullest GPU, when and in what"

    def row(pool: PoolRun) -> tuple[object, ...]:
        held = ("", "", "", "")
        if pool.peak_bytes is not None and pool.peak_s is not None:
            held = (
                size(pool.peak_bytes),
                percent(pool.peak_share),
                short_seconds(pool.peak_s),
                pool.peak_in or "",
            )
        gpus = f"{pool.gpus:,}" if pool.gpus else "-"
        return pool.name, gpus, percent(pool.busy), _bar(pool.busy, 1.0, "green"), *held

    axis = Axis(label="100 %", at=1.0, scale=1.0)
    titles = ("pool", ">GPUs", ">busy", axis, ">peak", ">full", ">first at", "in")
    return drawn(grid(titles, map(row, answer.pools), notes=(note,)), width)


def contention_table(answer: Simulation, width: int) -> Part:
    """Links that two calls wanted at once, and what that cost."""
    digits, mean = decimals(answer.mean), answer.mean
    note = "time that calls lost because another used the link too; the step waits for part of it"
    return drawn(
        table(
            "",
            answer.contention.items(),
            ("shared link", lambda item: link_text(item[0])),
            (">s per step", lambda item: fixed(item[1], digits)),
            (Axis(label=short_seconds(mean), at=mean, scale=mean), lambda item: _bar(item[1], mean, "red")),
            notes=(note,),
        ),
        width,
    )


def _bar(amount: float, scale: float, style: str) -> HorizontalBar:
    return HorizontalBar(stretches=[Stretch(amount=amount, glyph=FULL, style=style)], scale=scale)


def link_text(link: str) -> str:
    """`nic:train` -> `network cards of train`."""
    kind, _, where = link.partition(":")
    return LINKS[kind].format(where) if kind in LINKS else link
