"""Trainers of given pairs, labels or responses: what a configuration says alike in every framework."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlhfsim.interchange.cluster_jobs import MASTER
from rlhfsim.interchange.export import Written
from rlhfsim.interchange.launch_script import TORCHRUN
from rlhfsim.plan import Plan
from rlhfsim.specs.workload.workload import REFERRED, Algorithm

LAUNCHER = "launcher"
"""Title of the section that becomes arguments of the launcher."""


def samples_of(plan: Plan) -> int:
    """Samples, or pairs, of one optimizer step."""
    work = plan.workload
    return work.prompts * work.samples // work.mini_batches


def samples_at_once(plan: Plan) -> int:
    """Samples, or pairs, of a micro-batch of the actor."""
    return max(1, plan.placement.actor.layout.micro_batch // plan.workload.together)


def fields_of(algorithm: Algorithm, *, model: str, samples: int, limit: int | None) -> dict[str, Any]:
    """Fields of a run whose every step is one update of `samples`, or pairs, of at most `limit` tokens."""
    return {
        "workload.algorithm": algorithm,
        "workload.model": model,
        "workload.prompts": samples,
        "workload.samples": 1,
        "kl": algorithm in REFERRED,
        "limit.response": limit,
        "weight_path": "none",
    }


def under_torchrun(written: Written, module: str) -> tuple[str, Written]:
    """The command that starts a module in one process a GPU, and what is left to hand to it."""
    started = next(section for section in written.sections if section.title == LAUNCHER)
    args = {setting.key: setting.value for setting in started.settings}
    meets = f' --rdzv_backend=c10d --rdzv_endpoint="${{{MASTER}}}"' if args["--nnodes"] != 1 else ""
    launcher = " ".join(f"{key}={value}" for key, value in args.items())
    rest = replace(written, sections=tuple(x for x in written.sections if x is not started))
    return f"{TORCHRUN}{launcher}{meets} -m {module}", rest
