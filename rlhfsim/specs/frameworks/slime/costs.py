"""Software costs of slime: its process groups, the others are the pooled ones. No published run of it prints
phases with lengths."""

from __future__ import annotations

from rlhfsim.specs.frameworks.costs import Costs
from rlhfsim.specs.quantities import Coefficient

COSTS = Costs(
    shared={
        "group_restart_time": Coefficient(
            value=2.8,
            low=0.8,
            high=12.4,
            source="two rounds a step, around training and around the weight update: sleep() of the actor "
            "destroys all groups, wake_up() and update_weights() create them again (slime 02debfd, "
            "utils/reloadable_process_group.py); a round takes 1.4 s for Qwen3-30B-A3B on 8 H20, 0.8 s for "
            "4B on 4 A6000 (5.41 and 4.77 s saved without one, less two fixed waits of 2 s, which slime has "
            "not: redai-studio/Relax issue 230, pull request 153); high: 20 groups over 8 H200, 6.3 s to "
            "destroy and 6.1 s to create (inclusionAI/asystem-amem issue 11)",
            dimension="s",
        )
    }
)
