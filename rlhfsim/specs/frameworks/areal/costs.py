"""Software costs of AReaL: the pooled ones. No published run of it prints phases with lengths."""

from __future__ import annotations

from rlhfsim.specs.frameworks.costs import Costs

COSTS = Costs()
