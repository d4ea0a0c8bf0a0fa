"""What verl's trainers of given data refuse, or do otherwise than their keys suggest.

verl/trainer/sft_trainer.py, verl/workers/engine/utils.py (`prepare_micro_batches`) and
verl/utils/seqlen_balancing.py of 0.9.1; verl/trainer/fsdp_sft_trainer.py of 0.7.0.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.finding import Finding
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.findings import refused
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.verl import given_keys, old_given_keys
from rlhfsim.interchange.verl.engines import flat_on_host
from rlhfsim.interchange.verl.given_keys import (
    BUDGET,
    KEYS,
    LONGEST,
    MICRO_BATCH,
    OPTIMIZER,
    PAD_MODE,
    REMOVES_PADDING,
)
from rlhfsim.interchange.verl.versions import TRAIN_BATCH, ULYSSES

NO_PADDING = "no_padding"


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """What is noteworthy in the configuration."""
    old = old_given_keys.is_old(s.values)
    yield from _micro_batches(s, run)
    if old:
        yield from _old(s, run)
        return
    yield from _budget(run)
    yield from _shares(s, run)
    yield from _engine(s, run)


def _budget(run: RunDescription) -> Iterator[Finding]:
    """Packs, also those of verl's own default, that are shorter than the longest sample."""
    budget, longest, ranks = run.layout.pack_tokens, run.max_response or 0, run.layout.cp
    if budget is not None and budget * ranks < longest:
        yield refused(
            f"a sample of up to {longest:,} tokens exceeds the budget of {budget:,} tokens"
            + (f" x {ranks} ranks of a sequence" if ranks > 1 else "")
            + ": verl stops at the first batch with one",
            BUDGET,
            LONGEST,
            remedy=f"{BUDGET}={-(-longest // ranks)}",
        )


def _shares(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """A batch that the ranks do not share alike: the rest of the division is left out."""
    batch = s.find(TRAIN_BATCH)
    if isinstance(batch, int) and batch % run.layout.dp:
        yield Finding(
            what=f"a batch of {batch:,} samples on {run.layout.dp} data-parallel ranks: torchrun's trainer "
            f"takes {run.prompts:,} of them, that on Ray refuses it",
            keys=(TRAIN_BATCH,),
            remedy=f"{TRAIN_BATCH}={run.prompts}",
        )


def _micro_batches(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """Micro-batches that do not divide the samples of a rank."""
    each, micro = run.prompts // run.layout.dp, run.layout.micro_batch
    if run.layout.pack_tokens is None and each % micro:
        yield refused(
            f"{each:,} samples of a rank are no multiple of micro-batches of {micro}: verl refuses it",
            MICRO_BATCH,
            TRAIN_BATCH,
            remedy=f"{MICRO_BATCH}={max(n for n in range(1, micro + 1) if each % n == 0)}",
        )


def _engine(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """Ranks of a sequence with padded samples, another padding, keys of another engine's optimizer."""
    fsdp = run.backend == "fsdp2"
    if fsdp:
        yield from flat_on_host(s, KEYS)
    if run.layout.cp > 1 and fsdp and not run.packing:
        yield refused(
            f"sequence parallelism {run.layout.cp} with padded batches: verl refuses it",
            f"{KEYS.fsdp}.{ULYSSES}",
            REMOVES_PADDING,
            remedy=f"{REMOVES_PADDING}=True",
        )
    if fsdp and s.find(PAD_MODE) not in (None, NO_PADDING):
        yield refused(
            f"samples that the data set pads ({s.find(PAD_MODE)}): FSDP's engine refuses them",
            PAD_MODE,
            remedy=f"{PAD_MODE}={NO_PADDING}",
        )
    wanted, chosen = given_keys.WORDS[run.backend], s.text(OPTIMIZER, default=given_keys.USUAL)
    if chosen != wanted:
        yield refused(
            f"{OPTIMIZER}={chosen} with {KEYS.fsdp}={wanted}: verl stops at a key of the optimizer that "
            "is not there",
            OPTIMIZER,
            KEYS.fsdp,
            remedy=f"{OPTIMIZER}={wanted}",
        )


def _old(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    ignored, micro = s.count(old_given_keys.IGNORED), run.layout.micro_batch
    if ignored and ignored != micro:
        yield Finding(
            what=f"{old_given_keys.IGNORED}={ignored} is read by nothing: micro-batches have {micro} samples",
            keys=(old_given_keys.IGNORED, MICRO_BATCH),
            remedy=f"{MICRO_BATCH}={ignored}",
        )
    asked, flat = old_given_keys.hosts(s)
    if asked and not flat:
        yield Finding(
            what="states on the host are FSDP1's: what FSDP2 makes of its object is not known, and all is "
            "priced on the GPUs",
            keys=(*old_given_keys.OFFLOADS, old_given_keys.STRATEGY),
            remedy=f"{old_given_keys.STRATEGY}=fsdp",
        )
    if run.prompts % run.layout.dp:
        yield refused(
            f"a batch of {run.prompts:,} samples does not split over {run.layout.dp} data-parallel "
            "ranks: verl refuses it",
            TRAIN_BATCH,
            remedy=f"{TRAIN_BATCH}={-(-run.prompts // run.layout.dp) * run.layout.dp}",
        )
    if run.layout.cp > 1 and not run.packing:
        yield refused(
            f"sequence parallelism {run.layout.cp} with padded batches: verl refuses it",
            ULYSSES,
            old_given_keys.UNPADS,
            remedy=f"{old_given_keys.UNPADS}=True",
        )
