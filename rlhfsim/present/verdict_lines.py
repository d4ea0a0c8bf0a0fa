"""Lines of the first screen of `rlhfsim design` that say what to change: each where it is worth a line."""

from __future__ import annotations

from rlhfsim.plan import Plan
from rlhfsim.present.answers.ranking import both, sums_in_fp32
from rlhfsim.present.reproduce import as_option
from rlhfsim.present.words import RESOURCES, gpus, percent, signed
from rlhfsim.units import format
from rlhfsim.what_if.batch import DEARER, EvenBatch, FewerGpus
from rlhfsim.what_if.bottleneck import MORE, Bottleneck
from rlhfsim.what_if.design import Design, most_bf16_sums
from rlhfsim.what_if.drafting import PUBLISHED, stops_paying, would_draft
from rlhfsim.what_if.rivals import only_written
from rlhfsim.what_if.simplest import CLOSE
from rlhfsim.what_if.unasked import lent_trainer, sent_changes

SLOWEST = 0.3
"""Share of the step from which on what binds it is a line, where it is not the GPUs' own speed."""
CHANGED = {"fp8": "FP8 rollout", "rollout-logprobs": "log-probs of the rollout"}
"""Switch -> what it changes of learning, as short as a line asks."""
OF_THE_GPU = ("compute", "hbm")
"""Resources that come with the GPU: the table of phases names them."""


def idle(answer: Design) -> str:
    """How many GPUs stay idle, and why: the space has plans with and without them."""
    plan, best = both(answer)
    count = plan.idle_gpus
    of = f"{count:,} of {gpus(plan):,} GPUs stay{'s' * (count == 1)} idle, and paid for"
    if answer.request.objective == "memory":
        return f"{of}: no plan that uses more of them needs less memory"
    gained = plan.prediction.step_s / best.prediction.step_s - 1
    faster = (
        "is faster" if gained <= 0 or not answer.simpler else f"is faster by more than {100 * gained:.1f} %"
    )
    return f"{of}: layouts divide the others better, and no plan that uses more of them {faster}"


def even(batch: EvenBatch) -> str:
    """`one that divides over all GPUs makes 49 % more samples a second: --prompts 264, 1,558 s a step`."""
    more, step = percent(batch.gain - 1), format(batch.step_s, "s")
    return (
        f"one that divides over all GPUs makes {more} more samples a second: "
        f"--prompts {batch.prompts}, {step} a step"
    )


def knee(plan: Plan, fewer: FewerGpus) -> str:
    """`past the knee: above 512 a sample costs 25 % more for twice the GPUs; 512 take 108 s, money -49 %`."""
    step = plan.prediction.step_s
    money = fewer.step_s * fewer.gpus / (step * gpus(plan)) - 1
    return (
        f"{gpus(plan):,} are past the knee: above {fewer.gpus:,}, twice the GPUs cost over {DEARER - 1:.0%} "
        f"more a sample; {fewer.gpus:,} take {format(fewer.step_s, 's')}, {signed(money)} money"
    ).replace("%", " %", 1)


def choice(answer: Design) -> str | None:
    """What the chosen plan costs against the fastest, where that is more than the margin of the simplest."""
    plans = both(answer)
    mine, its = (p.prediction.step_s for p in plans)
    if answer.request.objective == "memory" or mine <= (1 + CLOSE) * its:
        return None
    why, sums = "a simpler plan", [most_bf16_sums(answer.request, p) for p in plans]
    unseen, fp32 = [only_written(answer.request, p) for p in plans], [*map(sums_in_fp32, plans)]
    if unseen[1] and not unseen[0]:
        why = f"nobody has run {', '.join(unseen[1])} with it yet"
    elif fp32[0] and not fp32[1]:
        why = "gradients are summed in FP32: in BF16 small ones get lost"
    elif sums[0] < sums[1]:
        why = f"gradients of {sums[0]:,} micro-batches, not {sums[1]:,}, are summed in BF16"
    elif answer.reasons and "most likely" in answer.reasons[0]:
        why = "the plan that most likely meets the targets"
    return f"{why}; --fastest: {format(its, 's')}, {signed(its / mine - 1)}"


def slowest(plan: Plan, found: Bottleneck) -> str | None:
    """`environment: 380 of 413 s, most in actor.generate; +64 workers: -42 s`."""
    step = plan.prediction.step_s
    if found.resource in OF_THE_GPU or found.seconds < SLOWEST * step:
        return None
    return (
        f"{RESOURCES[found.resource].phrase}: {format(found.seconds, 's')} of {format(step, 's')}, most in "
        f"{found.phase}{more_of(plan, found)}"
    )


def more_of(plan: Plan, found: Bottleneck) -> str:
    """`; +64 workers: -42 s`; empty where more cannot be bought."""
    if found.step_s is None:
        return ""
    unit = f"+{found.more:,} workers" if found.more else f"+{100 * MORE:.3g} % of it"
    saved = plan.prediction.step_s - found.step_s
    return f"; {unit}: {'-' + format(saved, 's') if saved > 0 else 'no faster'}"


def allowed(answer: Design) -> str | None:
    """`async -42 %: generation and training overlap; ...: --allow async`."""
    if (gain := answer.learning_gain) is None or gain.seconds is None:
        return None
    lag = f"{answer.request.max_staleness:g} step{'s' * (answer.request.max_staleness != 1)} old"
    old = f"samples up to {lag}"
    meaning = {"async": old, "lend": f"{old}, an engine asleep where training runs", **CHANGED}[gain.name]
    saved = signed(-(gain.saved or 0.0))
    return f"{gain.name}: {format(gain.seconds, 's')}, {saved}; {meaning}: {gain.option}"


def changes_only(plan: Plan, answer: Design) -> str | None:
    """`weights in 3.2 s, not 15 s (-12 % of the step), if few elements change: --weight-path delta`."""
    if (found := sent_changes(plan, answer.request)) is None:
        return None
    times = f"weights in {format(found.seconds, 's')}, not {format(found.planned_s, 's')}"
    return (
        f"{times} ({signed(-found.saved)} of the step), if only about 2 % of them change in one: "
        f"--weight-path {found.path}"
    )


def lending(plan: Plan, answer: Design) -> str | None:
    """`733 s (-28 %), if the trainer's GPUs generate while they wait: --allow async,lend`."""
    if (found := lent_trainer(plan, answer.request)) is None:
        return None
    more = found.seconds / plan.prediction.step_s - 1
    return (
        f"{format(found.seconds, 's')} ({signed(more)}), if the trainer's GPUs generate "
        f"while they wait for samples: --allow {','.join(sorted(answer.request.allow | {'lend'}))}"
    )


def drafts(plan: Plan, answer: Design) -> str | None:
    """`pays above 31 % accepted, 98 s without; in 680 steps at its drift`, or what a draft would save."""
    if (found := would_draft(plan, answer.request)) is not None:
        low, high = map(percent, PUBLISHED.ends)
        ends = (found.slow_s, found.fast_s)
        times = " to ".join(format(seconds, "s") for seconds in ends)
        saved = " to ".join(signed(seconds / plan.prediction.step_s - 1) for seconds in ends)
        return (
            f"{times} ({saved}), if an EAGLE-3 head drafts and {low} to {high} are accepted, as published: "
            f"--speculation {as_option(PUBLISHED)}"
        )
    if (stop := stops_paying(plan, answer.request)) is None:
        return None
    when = "" if stop.steps is None else f", in {stop.steps:,.0f} steps at its drift"
    return f"they pay above {percent(stop.acceptance)} accepted ({format(stop.plain_s, 's')} without){when}"
