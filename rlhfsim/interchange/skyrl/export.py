"""A plan as the command line of SkyRL (0.4.0: `skyrl/train/config/config.py`)."""

from __future__ import annotations

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.export import Exporter, Written, override, script, the_rollout
from rlhfsim.interchange.launch_script import needs_of
from rlhfsim.interchange.predictions import title_of
from rlhfsim.interchange.skyrl.keys import TABLE
from rlhfsim.interchange.skyrl.unsaid import unsaid, updates
from rlhfsim.interchange.training_keys import written_for
from rlhfsim.plan import Plan

STEP_BY_STEP = "examples.train.async.main_async"
CONTINUOUS = "examples.train.fully_async.main_fully_async"
NEEDS = needs_of("skyrl")


def write(plan: Plan) -> Written:
    """The plan in SkyRL's keys.

    Raises:
        RlhfsimError: roles that share GPUs as SkyRL cannot say, or a batch that it cannot cut.
    """
    rollout = the_rollout(plan, "SkyRL's main_base")
    drafted = rollout.layout.speculation
    if drafted is not None and drafted.method != "mtp":
        raise RlhfsimError(
            "speculation-not-exported",
            f"SkyRL drafts by the policy's own MTP layer, not by {drafted.method}",
            help="set method: mtp, or leave out speculation",
        )
    _check_sharing(plan)
    updates(plan)
    _check_micro_batches(plan)
    return written_for(plan, "skyrl", TABLE.write(plan), unsaid(plan, rollout))


def _check_sharing(plan: Plan) -> None:
    """Refuse pools that neither `colocate_all` nor `colocate_policy_ref` says.

    Raises:
        RlhfsimError: roles share GPUs in another way.
    """
    placement = plan.placement
    pools = {name: role.pool for name, role in placement.roles.items() if name != "reward"}
    if placement.rollout is None or placement.rollout.pool == placement.actor.pool:
        alone = [name for name, pool in pools.items() if pool != placement.actor.pool]
        if alone:
            raise _unshared(f"{' and '.join(alone)} on other GPUs than the rollout and the actor")
        return
    pairs = ((a, b) for a in pools for b in pools if a < b and pools[a] == pools[b])
    for a, b in pairs:
        if {a, b} != {"actor", "reference"}:
            raise _unshared(f"{a} and {b} share GPUs apart from the rollout's or the actor's")


def _unshared(what: str) -> RlhfsimError:
    return RlhfsimError(
        "sharing-not-expressible",
        f"{what}: SkyRL shares all, or actor with reference",
        help="design again with all roles on the same GPUs, or with the critic on its own",
    )


def _check_micro_batches(plan: Plan) -> None:
    layout, work = plan.placement.actor.layout, plan.workload
    each = work.num_sequences // work.mini_batches // layout.dp
    if layout.pack_tokens is None and (not each or each % layout.micro_batch):
        raise RlhfsimError(
            "batch-not-cut-by-micro-batches",
            f"SkyRL accumulates whole micro-batches: {each} samples of an optimizer step on each of "
            f"{layout.dp} ranks do not split into micro-batches of {layout.micro_batch}",
            help="design with --prompts, --samples and --mini-batches that the GPUs divide",
        )


def entry_point(plan: Plan) -> str:
    """The module that runs the schedule."""
    schedule = plan.placement.schedule
    if schedule.one_step_off:
        return STEP_BY_STEP
    return CONTINUOUS if schedule.continuous else "skyrl.train.entrypoints.main_base"


def files(plan: Plan, written: Written) -> dict[str, str]:
    """The launch script."""
    head = title_of(plan, "SkyRL 0.4.0")
    extra = "megatron" if plan.placement.backend == "megatron" else "fsdp"
    run = f"uv run --isolated --extra {extra} -m {entry_point(plan)}"
    return {"launch.sh": script(head, NEEDS, written, override, f'cd "${{SKYRL}}" && exec {run}')}


EXPORT = Exporter(
    version="0.4.0",
    write=write,
    files=files,
    left_open=TABLE.left_open,
    start="bash launch.sh",
    needs=NEEDS,
    install="pip install uv",
    ray='uv run --directory "${SKYRL}" --isolated --extra fsdp ray',
)
