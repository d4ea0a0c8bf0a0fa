"""Software costs of verl: the pooled ones.

Its published rows print too few phases with mean lengths to tell it from the others.
"""

from __future__ import annotations

from rlhfsim.frameworks.costs import Costs

COSTS = Costs()
