"""Software costs of OpenRLHF: the pooled ones. No published run prints phases with lengths."""

from __future__ import annotations

from rlhfsim.specs.frameworks.costs import Costs

COSTS = Costs()
