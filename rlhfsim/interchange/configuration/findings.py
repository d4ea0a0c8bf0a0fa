"""What is worth noting in a configuration, whatever its plan costs: rules that several frameworks share.

Each takes the framework's own keys; what is particular to one is in `findings` of its folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhfsim import units
from rlhfsim.finding import Finding
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.placement.software import Software

GROUPED = ("grpo", "dr-grpo", "rloo")
"""Algorithms whose baseline is the mean of a group."""


def refused(what: str, *keys: str, remedy: str = "") -> Finding:
    """What a framework refuses at its start, or stops at."""
    return Finding(what=what, keys=keys, remedy=remedy, stops=True)


def said_as(s: FrameworkSettings, keys: Sequence[str]) -> str:
    """The name that is used of several; the first where none is."""
    return next((key for key in keys if s.find(key) is not None), keys[0])


def group_of_one(
    s: FrameworkSettings, run: RunDescription, *keys: str, stops: bool = False
) -> Iterator[Finding]:
    """One response a prompt where its group is the baseline; `keys`: names of the responses a prompt."""
    if run.algorithm in GROUPED and run.samples == 1:
        key = said_as(s, keys)
        yield Finding(
            what=f"{run.algorithm.upper()} with one response a prompt: the mean of a group of one is itself, "
            "so nothing is learned",
            keys=(key,),
            remedy=f"{key}=8",
            stops=stops,
        )


def short_budget(
    s: FrameworkSettings, run: RunDescription, *keys: str, then: str, stops: bool = False
) -> Iterator[Finding]:
    """Token budgets that one sample at its limit exceeds; `then`: what the framework does."""
    longest = (run.max_prompt or 0) + (run.max_response or 0)
    if run.layout.pack_tokens is None:
        return
    for key in keys:
        budget = s.find(key)
        if isinstance(budget, int) and 0 < budget * run.layout.cp < longest:
            ranks = f" x {run.layout.cp} ranks of a sequence" if run.layout.cp > 1 else ""
            limits = f"prompt {run.max_prompt:,}, " if run.max_prompt else ""
            yield Finding(
                what=f"a sample of up to {longest:,} tokens ({limits}response {run.max_response:,}) exceeds "
                f"the budget of {budget:,} tokens{ranks}: {then}",
                keys=(key,),
                remedy=f"{key}={-(-longest // run.layout.cp)}",
                stops=stops,
            )


def uneven_batch(run: RunDescription, *keys: str, then: str, updates: bool = True) -> Iterator[Finding]:
    """Samples of a step, or of an update, that the data-parallel ranks do not share alike.

    `keys`: those of prompts and of responses a prompt; `updates`: whether updates matter.
    """
    samples, ranks = run.prompts * run.samples, run.layout.dp
    each = samples // max(1, run.mini_batches)
    if samples % ranks:
        what = (
            f"{run.prompts:,} prompts x {run.samples} responses do not split over {ranks} data-parallel ranks"
        )
    elif updates and each % ranks:
        what = f"an update of {each:,} samples does not split over {ranks} data-parallel ranks"
    else:
        return
    yield refused(f"{what}: {then}", *keys, remedy="a batch that the ranks divide")


def uneven_updates(batch: int, update: int, *keys: str, then: str) -> Iterator[Finding]:
    """A batch that is no whole number of updates; both as the framework counts them."""
    if update < 1 or update > batch or batch % update:
        yield refused(
            f"updates of {update:,} out of a batch of {batch:,}: {then}",
            *keys,
            remedy=f"{keys[0]}={max(n for n in range(1, max(1, min(update, batch)) + 1) if batch % n == 0)}",
        )


def whole_gradients(
    run: RunDescription, software: Software | None, *keys: str, who: str, remedy: str
) -> Iterator[Finding]:
    """Gradients that no GPU gives away before the last micro-batch of an update; `who` has it so."""
    if software is None or not software.sums_whole or run.gpus == 1 or run.lora_rank:
        return
    fp32 = not software.flat_parameters and software.reduce_bytes != 2
    width, name = (4, "FP32") if fp32 else (2, "BF16")
    size = units.format(width * resolve_model(run.model).num_params, "byte")
    yield Finding(
        what=f"every GPU keeps the whole gradients in {name}, {size}, from the first micro-batch of an "
        f"update to the last: {who}",
        keys=keys,
        remedy=remedy,
    )


def reduced_in_turn(
    run: RunDescription, software: Software | None, *keys: str, remedy: str
) -> Iterator[Finding]:
    """Gradients that are reduced while nothing computes."""
    zero, alone = run.layout.zero, run.layout.dp * run.layout.cp == 1
    if (
        alone
        or software is None
        or software.overlaps_reduction
        or zero not in BACKENDS[run.backend].whole_stages
    ):
        return
    when = "micro-batch" if zero == 2 else "update"
    yield Finding(
        what=f"ZeRO-{zero} reduces all gradients of every {when} while nothing computes",
        keys=keys,
        remedy=remedy,
    )


def without_engine(keys: tuple[str, ...], remedy: str) -> Finding:
    """Generation by the training modules."""
    return Finding(
        what="without vLLM the training modules generate, one batch at a time until its longest response "
        "ends; here a rollout by vLLM is priced",
        keys=keys,
        remedy=remedy,
    )
