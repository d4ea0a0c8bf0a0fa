"""Software costs of rlhfsim's own executor: the pooled ones.

No run on GPUs has been measured; on CPUs the profile of the machine carries its own numbers.
"""

from __future__ import annotations

from rlhfsim.specs.frameworks.costs import Costs

COSTS = Costs(biased=False)
