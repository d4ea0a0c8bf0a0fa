"""Software costs of verl: those of its weight transfer; the others are the pooled ones.

Its published rows print too few phases with mean lengths to tell the others apart.
"""

from __future__ import annotations

from rlhfsim.frameworks.costs import Costs
from rlhfsim.specs.quantities import Coefficient

COSTS = Costs(
    shared={
        "sync_far_latency": Coefficient(
            value=1.4e-3,
            low=0.5e-3,
            high=2.5e-3,
            source="45,000 tensors of DeepSeek-V3 over the bridge, one by one, in 80 s on 256 and 120 s on "
            "128 GPUs (verl-project/verl issue 5311)",
            dimension="s",
        ),
        "sync_staging_time": Coefficient(
            value=0.17,
            low=0.04,
            high=0.3,
            source="per GB: 72B in 28.8 and 32B in 14.2 s without offload (two rows of "
            "verl@docs/advance/delta_weight_sync.md, commit 1dda039b9c, never scored)",
            dimension="s",
        ),
    }
)
