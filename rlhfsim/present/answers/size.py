"""What `rlhfsim size` answers: the fewest or cheapest GPUs that meet targets, and what was tried."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from rlhfsim.present import plan_words
from rlhfsim.present.answers import odds as odds_view
from rlhfsim.present.answers.choices import plan_dict
from rlhfsim.present.answers.plan_blocks import targets
from rlhfsim.present.answers.roles import roles
from rlhfsim.present.answers.tree import (
    GPUS,
    STEP_TIME,
    Column,
    Listing,
    Page,
    PageSection,
    TypedTable,
    answer,
    hidden,
    pairs,
    section,
    table_of,
)
from rlhfsim.present.tables import COUNT, DASH, NUMBER, PROBABILITY, SECONDS, each, kind_of
from rlhfsim.present.words import layout_labels, percent
from rlhfsim.search.explain import kind
from rlhfsim.search.requirements import Requirement
from rlhfsim.verdict import verdict as sentences
from rlhfsim.what_if.sizing import Sizing, Trial

SCHEMA = "rlhfsim.size/1"
RENT = kind_of("usd/h")
MEANINGS = {
    "meets": "meets the targets",
    "misses": "found, but misses a target",
    "too slow": "too slow: no plan of it meets the targets",
    "does not fit": "no plan fits",
    "skipped": "skipped: its arithmetic alone takes too long",
    "no better": "no cheaper than a size before",
}


def size_page(found: Sizing, targets: Sequence[Requirement], confidence: float) -> Page:
    """The answer, what was tried, and the plan."""
    wanted = f"{', '.join(t.text for t in targets)} with a probability of {percent(confidence)}"
    best, plan = found.best, found.best.plan if found.best else None
    largest = max((t.gpus for t in found.trials), default=0)
    title = f"no size meets the targets: {wanted}, with up to {COUNT.shown(largest)} GPUs"
    return Page(
        schema=SCHEMA,
        title=f"{COUNT.shown(best.gpus)} x {best.gpu} for {wanted}" if best else title,
        verdict=sentences(plan) if plan else "",
        mark="good" if best else "bad",
        sections=tuple(_sections(found)),
        data=_data(found, targets, confidence),
    )


def _sections(found: Sizing) -> Iterator[PageSection]:
    best, plan = found.best, found.best.plan if found.best else None
    if plan is not None:
        yield section("targets", "targets", targets(plan)._replace(look="ruled"))
    tried = _trials(found.trials, style=lambda trial: "bold green" if trial is best else "")
    yield section("tried", "what was tried", tried, Listing(tuple(_notes(found))))
    if plan is not None:
        rows = plan_words.verdict(plan) | odds_view.told(plan)
        about = Listing((plan_words.task(plan), plan_words.batch(plan)))
        yield section(
            "plan", "the plan", about, pairs("", rows.items()), roles(plan, decoded=False, look="ruled")
        )


def _trials(trials: Sequence[Trial], *more: Column, **named: Any) -> TypedTable:
    return table_of(
        "what was tried",
        trials,
        Column("GPU", "gpu"),
        GPUS,
        STEP_TIME,
        Column("more than", _beyond, SECONDS, spare=1),
        Column("USD/step", "plan.prediction.usd_per_step", NUMBER),
        Column("plan", lambda t: t.plan and kind(t.plan), DASH),
        *hidden("outcome", "floor_s"),
        Column(None, lambda t: t.limit_s if math.isfinite(t.limit_s) else None, key="limit_s"),
        Column(None, lambda t: odds_view.odds_dict(t.odds), key="odds"),
        *(
            more
            or (
                Column(
                    "likely",
                    lambda t: t.odds.together if t.odds and any(v.drawn for v in t.odds.verdicts) else None,
                    PROBABILITY,
                ),
                Column("", lambda t: MEANINGS[t.outcome]),
            )
        ),
        **{"name": "tried", **named},
    )


def _beyond(trial: Trial) -> float | None:
    """Seconds that a step of a size without a plan takes at least."""
    least = trial.floor_s if trial.outcome == "skipped" else trial.limit_s
    return None if trial.plan or trial.outcome == "does not fit" or math.isinf(least) else least


def _notes(found: Sizing) -> Iterator[str]:
    if found.best is None:
        yield "give more with --max-gpus, other GPUs with --gpu, or a weaker target"
        return
    if found.larger is not None:
        gpus = COUNT.shown(found.larger.gpus)
        now, before = (
            f"{SECONDS.shown(seconds)} and {NUMBER.shown(usd)} USD"
            for _, seconds, usd in (found.larger.values, found.best.values)
        )
        yield f"{gpus} x {found.larger.gpu} are faster and cheaper: {now} a step, in place of {before}"
    yield "a larger cluster is not always faster, so every size is searched for itself"
    for even in found.break_even:
        price, now = map(RENT.shown, (even.usd_per_hour, even.now))
        yield f"{COUNT.shown(even.gpus)} x {even.gpu} cost as little per step at {price} per GPU (now {now})"


def front_page(trials: Sequence[Trial]) -> Page:
    """Sizes between which only taste decides."""
    layouts = [Column(name, partial(_layout, i)) for i, name in enumerate(("actor", "rollout"))]
    return answer(
        SCHEMA,
        _trials(trials, *layouts, name="") if trials else None,
        verdict="sizes that no other one beats in GPUs, time and money:"
        if trials
        else "nothing fits on any of these sizes",
        mark="plain" if trials else "bad",
        data={"pareto": _records(*trials)},
    )


def _layout(which: int, trial: Trial) -> str:
    assert trial.plan is not None
    return layout_labels(trial.plan)[which]


def _data(found: Sizing, targets: Sequence[Requirement], confidence: float) -> dict[str, Any]:
    """What JSON says; schema in docs/plan.md."""
    best = found.best
    return {
        "best": _records(best)[0] if best else None,
        "requirements": odds_view.reached(best.odds if best else None)
        or [{"text": t.text, "actual": None, "met": False, "probability": None} for t in targets],
        "confidence": confidence,
        "larger": _trials([found.larger]).records[0] if found.larger else None,
        "per_gpu": _records(*found.per_gpu),
        "break_even": each(found.break_even, "gpu", "gpus", usd_per_gpu_hour="usd_per_hour", now="now"),
    }


def _records(*trials: Trial) -> list[dict[str, Any]]:
    """Trials with their plans."""
    plans = ({"plan": plan_dict(t.plan)} if t.plan else {} for t in trials)
    return [record | plan for record, plan in zip(_trials(trials).records, plans, strict=True)]
