"""slime's command line: what marks it, and what slime refuses at start or does otherwise than it suggests.

slime/utils/arguments.py (624b824); micro-batches: slime/utils/seqlen_balancing.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.finding import Finding
from rlhfsim.interchange.configuration.configuration import Configuration
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.engines import TURNS
from rlhfsim.interchange.configuration.findings import (
    group_of_one,
    refused,
    short_budget,
    uneven_batch,
    uneven_updates,
)
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.slime import given_keys
from rlhfsim.interchange.slime.keys import CONTEXT, GENERATE, MARKS, REFERENCE, STEPS, TABLE


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """What is noteworthy in the flags."""
    if given_keys.trains_given(s):
        yield from given_keys.findings(s, run)
        return
    key = TABLE.key
    yield from group_of_one(s, run, key("workload.samples"))
    yield from short_budget(
        s, run, key("actor.pack_tokens"), then="it becomes a micro-batch of its own, as large as it is"
    )
    if s.find(GENERATE) is not None and s.find(CONTEXT) is None and s.find(TURNS) is None:
        yield Finding(
            what="turns add up: --rollout-max-response-len cuts each answer of the engine, nothing a "
            "sample of several turns; it is a micro-batch alone, of 205,000 tokens in slime's issue 1951",
            keys=(GENERATE, CONTEXT),
            remedy=f"{CONTEXT}=TOKENS, if the function keeps to it; to price N turns: --set {TURNS}=N",
        )
    yield from uneven_batch(
        run,
        key("workload.prompts"),
        key("workload.samples"),
        updates=False,
        then="the ranks do not get as many samples",
    )
    size = key("samples_of_update")
    update, steps = s.find(size), s.find(STEPS)
    whole = run.prompts * run.samples
    if isinstance(update, int) and isinstance(steps, int) and update != whole // max(1, steps):
        yield refused(
            f"updates of {update:,} samples, and {steps} of a rollout of {whole:,}: slime refuses both "
            "together",
            size,
            STEPS,
            remedy=f"{size}={whole // max(1, steps)}",
        )
    elif isinstance(update, int):
        yield from uneven_updates(whole, update, size, then="slime refuses it, or drops what is left")
    per_engine = s.find(key("rollout.replica_gpus"))
    if isinstance(per_engine, int) and per_engine > run.gpus_per_node and per_engine % run.gpus_per_node:
        yield refused(
            f"an engine of {per_engine} GPUs is no whole number of nodes of {run.gpus_per_node}",
            key("rollout.replica_gpus"),
        )
    if run.kl and s.find(REFERENCE) is None and s.find("rank") is None:
        yield Finding(
            what="a KL term needs a reference: slime stops where --ref-load is not a checkpoint",
            keys=(REFERENCE,),
            remedy="--ref-load FOLDER",
        )


CONFIGURATION = Configuration(
    name="slime",
    title="slime",
    describe=lambda s: (given_keys.TABLE if given_keys.trains_given(s) else TABLE).describe(s),
    findings=findings,
    entries=(r"(?i)slime\S*/train(_async)?\.py",),
    started=(r"\bpython3? (-u )?(\S*/)?train(_async)?\.py",),
    shown=("train.py of slime",),
    keys=MARKS,
)
