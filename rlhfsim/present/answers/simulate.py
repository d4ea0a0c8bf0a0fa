"""A simulated run as people read it: step times, phases, pools, shared links, samples, goodput."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhfsim import units
from rlhfsim.present import plan_words
from rlhfsim.present.answers import tree
from rlhfsim.present.answers.plan_blocks import header, notes, phases, rejection
from rlhfsim.present.answers.tree import Block, Column, FactList, Note, Page, TypedTable, table_of
from rlhfsim.present.chrome_trace import chrome_path
from rlhfsim.present.tables import (
    BAR,
    BYTES,
    COUNT,
    FINE_SHARE,
    NAME,
    NODES,
    RIGHT,
    SHARE,
    SHORT_SECONDS,
    Bar,
    Spark,
    Stretch,
    Word,
    fields,
    fixed_to,
)
from rlhfsim.present.words import decimals, percent, plural, short_seconds, signed, size
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


def page(
    answer: Simulation, told: Sequence[str] = (), remedy: str | None = None, trace: Path | None = None
) -> Page:
    """Everything that is said of a run; `trace`: where it lies."""
    shown = _run(answer, trace) if answer.rejected_by is None else rejection(answer.rejected_by, remedy)
    above = *notes(told), *header(answer.plan)
    return tree.answer("rlhfsim.simulation/1", *above, *shown, data=_data(answer, told, remedy, trace))


def _run(answer: Simulation, trace: Path | None) -> Iterator[Block]:
    yield FactList(summary(answer))
    if not answer.alike:
        yield _steps(answer)
        if lives_on_stock(answer):
            yield Note(STOCK, "aside")
    yield phases(answer.plan, starts=True)
    if note := phase_note(answer):
        yield Note(note, "aside")
    yield _pools(answer)
    if answer.contention:
        yield _contention(answer)
    if trace is not None:
        shown = f"open {chrome_path(trace)} at https://ui.perfetto.dev"
        yield FactList({"trace": str(trace), "to see it": shown}, apart=True)


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
        return plan_words.memory_text(answer.plan)
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
        old += f"; {FINE_SHARE.shown(answer.rejected)} of the tokens is thrown away as too old{again}"
    if answer.plan.placement.schedule.lend:
        old += f"; the trainer's GPUs generate in {FINE_SHARE.shown(answer.lent)} of the time"
    if answer.queue is None:
        return old
    return (
        f"{old}; {COUNT.shown(answer.queue.mean)} more in the queue when the trainer takes a batch, "
        f"{COUNT.shown(answer.queue.maximum)} at most"
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
    formula = FINE_SHARE.shown(g.first_order)
    return (
        f"{FINE_SHARE.shown(g.simulated)} of the time is progress, with a checkpoint every "
        f"{short_seconds(g.interval_s)} ({best}) and a failure every {short_seconds(g.mtbf_s)}; first-order "
        f"formula {formula}; a step then takes {short_seconds(answer.mean / g.simulated)}"
    )


# --- steps ------------------------------------------------------------------------------------------


def _steps(answer: Simulation) -> TypedTable:
    """Step times of every replication as a line, with mean and range."""
    seconds = fixed_to(decimals(answer.mean))
    rows: list[tuple[Any, ...]] = [
        (str(answer.seed + i), answer.means[i], min(steps), max(steps), Spark(steps))
        for i, steps in enumerate(answer.runs[:MAX_LINES])
    ]
    left = len(answer.runs) - len(rows)
    if left > 0:
        more = Word(f"{COUNT.shown(left)} more replications, see --json", "aside")
        rows.append(("", "", "", "", more))
    return table_of(
        "Steps",
        rows,
        Column("seed", 0, RIGHT),
        Column("mean s", 1, seconds.where("")),
        Column("shortest", 2, seconds.where("")),
        Column("longest", 3, seconds.where("")),
        Column("step by step, shortest to longest", 4, BAR),
    )


def lives_on_stock(answer: Simulation) -> bool:
    """Whether asynchronous steps ran faster than the rollout can keep up."""
    pairs = zip(answer.means, answer.runs, strict=True)
    return any(mean > 1.001 * sum(run) / len(run) for mean, run in pairs)


MAX_LINES = 8
"""Replications that are shown one by one."""


# --- pools and links --------------------------------------------------------------------------------


def _pools(answer: Simulation) -> TypedTable:
    """How busy the GPUs of each pool are, and how full they get."""
    note = "busy: share of the measured time in which the pool's GPUs work"
    if any(pool.peak_bytes is not None for pool in answer.pools):
        note += "; peak: bytes on its fullest GPU, when and in what"
    return table_of(
        "Pools",
        answer.pools,
        Column("pool", "name", NAME),
        Column("GPUs", "gpus", NODES),
        Column("busy", kind=SHARE),
        Column("100 %", lambda pool: Bar([Stretch(pool.busy, "busy")], 1.0), BAR, key=""),
        Column("peak", "peak_bytes", BYTES.where("")),
        Column("full", lambda pool: None if pool.peak_bytes is None else pool.peak_share, SHARE.where("")),
        Column("first at", "peak_s", SHORT_SECONDS.where("")),
        Column("in", "peak_in", NAME),
        *tree.hidden("capacity_bytes"),
        name="pools",
        notes=(note,),
    )


def _contention(answer: Simulation) -> TypedTable:
    """Links that two calls wanted at once, and what that cost."""
    mean = answer.mean
    return table_of(
        "Shared links",
        answer.contention.items(),
        Column("shared link", lambda item: link_text(item[0]), NAME),
        Column("s per step", 1, fixed_to(decimals(mean)), key="seconds"),
        Column(short_seconds(mean), lambda item: Bar([Stretch(item[1], "lost")], mean), BAR),
        Column(None, 0, key="link"),
        name="contention",
        notes=("time that calls lost because another used the link too; the step waits for part of it",),
    )


def link_text(link: str) -> str:
    """`nic:train` -> `network cards of train`."""
    kind, _, where = link.partition(":")
    return LINKS[kind].format(where) if kind in LINKS else link


# --- JSON -------------------------------------------------------------------------------------------


def _data(answer: Simulation, told: Sequence[str], remedy: str | None, trace: Path | None) -> dict[str, Any]:
    """What JSON says next to pools and links; schema in docs/plan.md."""
    verdict = {
        "fits": answer.rejected_by is None,
        "rejected_by": answer.rejected_by,
        "remedy": remedy,
        "notes": list(told),
        "plan": answer.plan.to_dict(),
    }
    if answer.rejected_by is not None:
        return verdict
    return {
        **verdict,
        "run": {
            "steps": len(answer.runs[0]),
            **fields(answer, "warmup", "seed", "randomness"),
            "replications": len(answer.runs),
        },
        "step": {
            "mean_s": answer.mean,
            **{f"p{level}_s": answer.percentile(level) for level in (10, 50, 90)},
            "estimate_s": answer.estimate.prediction.step_s,
        },
        "step_seconds": [list(run) for run in answer.runs],
        "contention": [],
        "staleness": {"mean": answer.staleness[0], "max": answer.staleness[1]} if answer.staleness else None,
        "queue": fields(answer.queue, "mean", max="maximum") if answer.queue else None,
        "goodput": asdict(answer.goodput) if answer.goodput else None,
        "trace": str(trace) if trace else None,
        "chrome_trace": str(chrome_path(trace)) if trace else None,
    }
