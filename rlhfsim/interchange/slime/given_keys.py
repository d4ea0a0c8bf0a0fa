"""slime on given responses, `--loss-type sft_loss`: its flags of training, read and never written.

A rollout only reads samples (slime/rollout/sft_rollout.py), no old log-probs are asked for, and the loss has
the kernel of the policy's (`sft_loss_function` of slime/backends/megatron_utils/loss.py, 624b824).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlhfsim.finding import Finding
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.findings import uneven_batch, uneven_updates
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.fields import Fields
from rlhfsim.interchange.given_data import fields_of
from rlhfsim.interchange.slime.keys import POLICY, REFERENCE, STEPS, SUMS, chunked_head, virtual_stages
from rlhfsim.interchange.slime.keys import TABLE as GENERATES
from rlhfsim.interchange.table import Table, bare
from rlhfsim.specs.workload.workload import Algorithm

ALGORITHM: Algorithm = "sft"
LOSS, ALONE = "loss_type", "debug_train_only"
SHARED = ("actor.nodes", "actor.each", "workload.prompts", "workload.samples", "samples_of_update")
"""Fields that its flags say as those of a trainer that generates do."""
VOID = (REFERENCE, bare(SUMS), "disable_compute_advantages_and_returns", "loss_mask_type")
"""What only a trainer that generates uses, what says that this one does not, on which tokens it trains, and
sums of gradients as they are priced."""
VOID_GROUPS = ("rollout_", "sglang_", "eps_", "kl_", "n_samples_per_")
"""Beginnings of such flags."""


def trains_given(s: FrameworkSettings) -> bool:
    """Whether the flags are those of training on given responses."""
    return bool(s.find(LOSS) == "sft_loss")


def _rest(s: FrameworkSettings, read: Fields) -> dict[str, Any]:
    model, steps = s.model(POLICY), s.count(STEPS)
    samples = read["samples_of_update"]
    if steps:
        samples = max(1, read["workload.prompts"] * read["workload.samples"] // steps)
    void = (*VOID, *(GENERATES.key(field) for field in ("shared", "workload.algorithm")))
    s.overruled(LOSS, ALONE, *void, *(key for key in s.values if key.startswith(VOID_GROUPS)))
    return {
        **fields_of(ALGORITHM, model=model, samples=samples, limit=None),
        "workload.packing": True,
        "backend": "megatron",
        "actor.zero": 1,
        "actor.vp": virtual_stages(s, read["actor.pp"], model),
        "software": chunked_head(s),
    }


TABLE = Table(
    lambda: {
        "where it runs and batch": tuple(row for row in GENERATES.keys if row.field in SHARED),
        "training": GENERATES.sections["training"],
    },
    _rest,
    follows={"shared": lambda s, read: True},
)


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """Batches that do not split, and engines that nothing needs."""
    batch, size = TABLE.key("workload.prompts"), TABLE.key("samples_of_update")
    whole = (s.count(batch) or 0) * (s.count(TABLE.key("workload.samples")) or 1)
    yield from uneven_updates(whole, run.prompts, size, then="slime refuses it, or drops what is left")
    yield from uneven_batch(run, size, batch, then="the ranks do not get as many samples")
    if not s.flag(ALONE):
        yield Finding(
            what="without --debug-train-only slime starts its engines and holds GPUs for them, which is not "
            "counted",
            keys=(ALONE,),
            remedy="--debug-train-only",
        )
