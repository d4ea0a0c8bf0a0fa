"""Host memory that checkpoints take while the executor writes them as the next steps run.

A rank copies what it saves (weights, FP32 masters, moments, wherever they lie) and rank 0 gathers the copy
for users; the copies stay until they are on disk. They are made only where they leave the run its memory
(`CHECKPOINT_COPIES`), else the files are written in the foreground: no plan fails by them.

Not known here: how long a write takes, so that the copies of a slow disk may stay for several steps.
"""

from __future__ import annotations

from rlhfsim.memory.residency import role_in_plan
from rlhfsim.memory.states import BF16
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.engine_numbers import CHECKPOINT_COPIES
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.specs.workload.roles import TRAINED
from rlhfsim.specs.workload.workload import Workload


def copied_bytes(
    models: Models, placement: Placement, workload: Workload, profile: Profile, gpus_per_node: int
) -> float:
    """Bytes of the copies on the fullest node: those of its ranks, and each role's copy for users."""
    total = 0.0
    for role, placed in placement.trainers.items():
        if role not in TRAINED:
            continue
        held = role_in_plan(models, placement, workload, profile, role, "first").states
        each = held.weights + held.optimizer + held.host
        ranks = min(gpus_per_node, placement.pool(placed.pool).gpus)
        total += ranks * each + BF16 * models.of(role).num_params
    return total


def beside(copies: float, held: float, capacity: float) -> bool:
    """Whether copies of so many bytes are made on a node that holds so much of its host memory."""
    return copies <= CHECKPOINT_COPIES * max(0.0, capacity - held)
