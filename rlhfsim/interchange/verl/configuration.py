"""verl: what marks its configuration, and what it refuses at start, or in its first step.

verl/utils/config.py (`validate_config`), verl/utils/seqlen_balancing.py (`rearrange_micro_batches`) and
verl/workers/rollout/vllm_rollout (verl-project/verl at 1dda039b9).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhfsim.finding import Finding
from rlhfsim.interchange.configuration.configuration import Configuration
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.findings import (
    group_of_one,
    refused,
    short_budget,
    uneven_batch,
    whole_gradients,
)
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.verl import engine_limits, given_findings, given_keys, old_given_keys
from rlhfsim.interchange.verl.engines import CRITIC_DYNAMIC, DYNAMIC, PREFIXES, ROLES, flat_on_host
from rlhfsim.interchange.verl.keys import HYBRID, MARKS, MINI_BATCH, MODE, SYNCED, TABLE
from rlhfsim.interchange.verl.software import SUMS_WHOLE
from rlhfsim.interchange.verl.versions import (
    ENGINES,
    MICRO_BATCHES,
    ROLL,
    ULYSSES,
    UNPADDED,
    VERSION,
    before,
    of_each_gpu,
    spelled,
)

BUDGETS = ("actor.train_tokens", "actor.score_tokens", "reference.score_tokens", "critic.train_tokens")
"""Fields of the tokens of a micro-batch."""
DEGREES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
SCORE_DYNAMIC = f"{ROLL}.log_prob_use_dynamic_bsz"


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """What is noteworthy in a configuration of verl."""
    if given_keys.trains_given(s):
        yield from given_findings.findings(s, run)
        return
    budgets = TABLE.keys_of(*BUDGETS)
    yield from short_budget(s, run, *budgets, then="verl stops at its first batch", stops=True)
    yield from _priced_otherwise(s, run)
    yield from _unsaid_micro_batches(s, run)
    yield from _other_micro_batches(s)
    yield from _other_groups(s, run)
    yield from _batches(s, run)
    if run.layout.cp > 1 and run.backend == "fsdp2" and not run.packing:
        yield refused(
            f"sequence parallelism {run.layout.cp} with padded batches: verl refuses it",
            f"{ROLES['actor']}.{ULYSSES}",
            UNPADDED,
            remedy=f"{UNPADDED}=True",
        )
    yield from engine_limits.findings(s, run)
    if run.backend == "fsdp2":
        yield from flat_on_host(s, PREFIXES["actor"])
    yield from whole_gradients(
        run,
        run.software,
        SUMS_WHOLE,
        who="verl 0.9.0 always, 0.9.1 on request",
        remedy=f"verl 0.9.1, and {SUMS_WHOLE}=False, or one micro-batch an update",
    )
    swap = s.find(f"{ROLL}.engine_kwargs.vllm.swap_space", f"{ROLL}.swap_space")
    if isinstance(swap, int | float) and swap > 0:
        yield Finding(
            what=f"vLLM pins {swap:g} GiB of host memory a GPU to swap, {swap * run.gpus_per_node:g} GiB "
            "a node, in addition to what is offloaded",
            keys=(f"{ROLL}.engine_kwargs.vllm.swap_space",),
            remedy="0 where nothing is swapped",
        )


def _priced_otherwise(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """Trainers and schedules that are priced as the nearest that is known."""
    mode, apart = s.find(MODE), run.rollout_gpus is not None
    if mode == "colocate_async":
        yield Finding(
            what="trainer_mode=colocate_async is priced as sync: what it generates ahead is not counted",
            keys=(MODE,),
        )
    if s.flag(HYBRID, default=not apart) and apart and not run.lend:
        yield Finding(
            what="with hybrid_engine=True the training GPUs hold an engine too, which is not counted",
            keys=(HYBRID,),
        )
    every = s.count(SYNCED) or run.mini_batches
    if apart and every != run.mini_batches:
        yield Finding(
            what=f"new weights are sent after {every} updates, and priced once a batch of {run.mini_batches}",
            keys=(SYNCED,),
        )
    trainer, critic, reference = (f"{ROLES[role]}.strategy" for role in ("actor", "critic", "reference"))
    for key in (critic, reference):
        other = s.find(key)
        if s.find(trainer) is not None and other not in (None, s.find(trainer)):
            yield Finding(what=f"{key}={other} is priced as the actor's {s.find(trainer)}", keys=(key,))


def _other_groups(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """Degrees of Megatron-Core that another role of the process has set up before."""
    there = {"actor": True, "reference": run.kl, "critic": run.algorithm == "ppo"}
    roles = [role for role in ROLES if there[role]] if run.backend == "megatron" else []
    runs = {
        f"{ROLES[role]}.megatron.{name}": getattr(run.layout, field)
        for role in roles
        for field, name in DEGREES.items()
    }
    other = {key: value for key, value in runs.items() if s.count(key) not in (None, value)}
    if other:
        said = ", ".join(f"{key}={s.count(key)} runs as {value}" for key, value in other.items())
        yield Finding(
            what=f"{said}: roles of a process share Megatron's groups, which another role sets up first",
            keys=tuple(other),
            remedy="the same degrees for every role",
        )


def _unsaid_micro_batches(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """Micro-batches without a default: verl has none where no token budget rules."""
    policy, rollout, reference, critic, _ = MICRO_BATCHES
    needed = [] if s.flag(DYNAMIC) else [policy, rollout]
    if needed and run.kl:
        needed.append(reference)
    if run.algorithm == "ppo" and not s.flag(CRITIC_DYNAMIC, default=not needed):
        needed.append(critic)
    unsaid = [f"{key}_per_gpu" for key in needed if not s.says(key, f"{key}_per_gpu")]
    if unsaid:
        yield refused(
            "verl has no micro-batch of its own and nothing says one, so that it refuses to start: "
            + ", ".join(unsaid),
            *tuple(unsaid),
            remedy=f"{DYNAMIC}=True, or the micro-batches",
        )


def _other_micro_batches(s: FrameworkSettings) -> Iterator[Finding]:
    """Log-probs on packs where training counts samples, or the other way round.

    Until 0.7 the worker takes each as said (fsdp_workers.py, compute_log_prob), since 0.8 it asserts that
    they are alike (workers/engine_workers.py, init_model: line 610 of 0.9.0).
    """
    packs = s.flag(DYNAMIC)
    if s.flag(SCORE_DYNAMIC, default=packs) != packs:
        stops = not before(s.find(VERSION), ENGINES)
        yield Finding(
            what=f"{SCORE_DYNAMIC} is {not packs}, {DYNAMIC} {packs}: "
            + ("verl stops at its start" if stops else "log-probs are priced as training has it"),
            keys=(SCORE_DYNAMIC, DYNAMIC),
            remedy=f"{SCORE_DYNAMIC}={packs}",
            stops=stops,
        )


def _batches(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """Batches that verl cannot cut, and groups of one."""
    prompts, samples = TABLE.batch.values()
    mini = s.find(MINI_BATCH)
    if isinstance(mini, int) and mini > run.prompts:
        yield Finding(
            what=f"mini-batches of {mini:,} prompts out of {run.prompts:,}: releases with validate_config "
            "refuse it, older ones take the whole batch",
            keys=(MINI_BATCH, prompts),
            remedy=f"{MINI_BATCH}={run.prompts}",
        )
    yield from uneven_batch(run, prompts, samples, then="verl refuses it", updates=False)
    yield from group_of_one(s, run, samples)


def _describe(s: FrameworkSettings) -> RunDescription:
    if not given_keys.trains_given(s):
        return TABLE.describe(of_each_gpu(s))
    table = old_given_keys.TABLE if old_given_keys.is_old(s.values) else given_keys.TABLE
    return table.describe(s)


def _version(values: Mapping[str, Any]) -> str | None:
    """The last recorded release with a trainer that is gone."""
    return old_given_keys.LAST if old_given_keys.is_old(values) else None


CONFIGURATION = Configuration(
    name="verl",
    title="verl",
    describe=_describe,
    spelled=spelled,
    findings=findings,
    entries=(
        r"\bverl\.(trainer|experimental|recipe)\.[\w.]*main",
        r"\brecipe\.\w+\.main\w*",
        r"\bverl\.trainer\.(?:fsdp_)?sft_trainer\w*",
    ),
    shown=("verl.trainer.main_ppo", given_keys.STARTS),
    keys=(*MARKS, *given_keys.MARKS, given_keys.PRETRAINED),
    version_of=_version,
)
