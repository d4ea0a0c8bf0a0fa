"""Trainers of given pairs, labels or responses: what a configuration says alike in every framework."""

from __future__ import annotations

from typing import Any

from rlhfsim.plan import Plan
from rlhfsim.specs.workload.workload import REFERRED, Algorithm


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
