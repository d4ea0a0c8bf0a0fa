"""Whether this node can run a plan: needs from the plan, facts from the node, the model's files."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

from executor import ranks, refusals
from executor.limits import WEIGHT_BYTES, TimeLimits
from executor.machine.checks import Check, Needs, checks, judged, not_checked
from executor.machine.facts import read
from executor.resolve import model_folder, served_by
from executor.settings import Settings
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS


@frozen
class MachineQuestion:
    """What every node is asked."""

    needs: Needs
    out: Path
    model: str | None
    """Folder of the policy; None: not given."""


@frozen
class NodeChecks:
    """What one node answers."""

    node: str
    checks: tuple[Check, ...]


def question(plan: Plan | None, settings: Settings, out: Path) -> MachineQuestion:
    """What a run of `plan` needs of each node; without a plan what every run needs."""
    if plan is None:
        return MachineQuestion(needs=Needs(), out=out, model=settings.model)
    kinds = [hardware.profile for hardware in plan.hardware]
    on_gpus = not all(load_profile(kind).vendor == "cpu" for kind in kinds)
    sharing = Counter(place for group in ranks.group_specs(plan, served_by(plan)) for place in group.places)
    trained = plan.placement.trainers.values()
    needs = Needs(
        gpus=max(map(len, ranks.bundles(plan).values())) if on_gpus else None,
        gpu_kind=kinds[0] if len(kinds) == 1 else None,
        processes_per_gpu=max(sharing.values()) + plan.workload.generates,
        host_bytes=plan.prediction.host_peak_bytes,
        disk_bytes=TimeLimits(plan, settings.limits).state_bytes * (settings.checkpoints.keep + 1),
        host_adam=any(role.layout.offload_optimizer == "cpu" for role in trained),
    )
    transports = WEIGHT_PATHS[plan.placement.weight_path].transports
    if plan.workload.generates and transports.get(plan.topology) == "host":
        actor = next(model for model in plan.models if model.role == "actor")
        needs = replace(needs, shared_bytes=needs.shared_bytes + WEIGHT_BYTES * actor.params)
    return MachineQuestion(needs=needs, out=out, model=model_folder(plan, settings))


def here(asked: MachineQuestion, visible: str | None) -> NodeChecks:
    """This node; `visible`: the GPUs that a run may use, as in CUDA_VISIBLE_DEVICES, None: all."""
    facts = read(asked.out, visible)
    return NodeChecks(node=facts.host, checks=(*checks(facts, asked.needs), _model(asked.model)))


def this_machine(asked: MachineQuestion) -> NodeChecks:
    """This node as a launch without `--address` would use it."""
    return here(asked, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _model(folder: str | None) -> Check:
    if folder is None:
        return not_checked("model", "no model is given")
    try:
        refusals.check_model(folder)
    except RlhfsimError as error:
        return judged("model", False, error.message, error.help or "")
    return judged("model", True, f"config, weights and tokenizer in {folder}", "")
