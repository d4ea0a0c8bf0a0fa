"""SkyRL: what marks its configuration, and what it refuses at start.

skyrl/train/utils/utils.py (`validate_batch_sizes`, `validate_cfg`; 0.4.0).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlhfsim.finding import Finding
from rlhfsim.interchange.configuration.configuration import Configuration
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.findings import group_of_one, refused, uneven_batch, uneven_updates
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.skyrl import given_keys
from rlhfsim.interchange.skyrl.keys import MARKS, MTP, TABLE


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """What is noteworthy in the configuration."""
    if given_keys.trains_given(s):
        yield from given_keys.findings(s, run)
        return
    prompts, samples = TABLE.batch.values()
    size, micro_batch = TABLE.key("prompts_of_update"), TABLE.key("actor.micro_batch")
    yield from group_of_one(s, run, samples)
    update = s.whole(size, default=256)
    yield from uneven_updates(run.prompts, update, size, prompts, then="SkyRL refuses it")
    yield from uneven_batch(run, prompts, samples, then="SkyRL refuses it")
    each, micro = update * run.samples // run.layout.dp, run.layout.micro_batch
    if run.layout.pack_tokens is None and micro and each % micro:
        yield refused(
            f"an update of {each:,} samples a rank is no multiple of micro-batches of {micro}: SkyRL "
            "refuses it",
            micro_batch,
            size,
            remedy=f"{micro_batch}={math.gcd(each, micro)}",
        )
    if s.flag(MTP):
        yield from _drafts(run)
    if run.rollout.engine == "sglang":
        engine = TABLE.key("rollout.engine")
        yield refused(
            "SkyRL has no SGLang any more: it took the backend out on 26 February 2026 (ac8cbfbf4)",
            engine,
            remedy=f"{engine}=vllm, or a release from before that day",
        )
    engines = run.rollout.tp * run.rollout.pp * run.rollout.attention_dp * run.rollout.dp
    if run.rollout_gpus is None and engines != run.gpus:
        yield refused(
            f"engines of {engines} GPUs altogether share {run.gpus} GPUs with training: SkyRL refuses it",
            TABLE.key("rollout.dp"),
            remedy=f"{TABLE.key('rollout.dp')}={run.gpus * run.rollout.dp // engines}",
        )


def _drafts(run: RunDescription) -> Iterator[Finding]:
    """What `_validate_draft_weight_sync_cfg` refuses of a rollout that drafts by the policy's MTP layer."""
    if run.backend != "megatron":
        backend = TABLE.key("backend")
        yield refused(
            "the policy's MTP layer drafts, which FSDP does not train: SkyRL refuses it",
            backend,
            MTP,
            remedy=f"{backend}=megatron",
        )
    if run.rollout.precision == "fp8":
        yield refused(
            "the policy's MTP layer drafts, which cannot be sent in FP8: SkyRL refuses it",
            TABLE.key("rollout.precision"),
            MTP,
            remedy=f"{MTP}=false",
        )


CONFIGURATION = Configuration(
    name="skyrl",
    title="SkyRL",
    describe=lambda s: (given_keys.TABLE if given_keys.trains_given(s) else TABLE).describe(s),
    findings=findings,
    entries=(r"\bskyrl\.train\.(?:entrypoints\.[\w.]+|main_sft\b)", r"\bexamples\.train\w*\.[\w.]*main\w*"),
    started=(r"\bpython3? (\S*/)?\w*entrypoint\.py",),
    shown=("skyrl.train.entrypoints.main_base", "skyrl.train.main_sft"),
    keys=MARKS,
)
