"""Design, run and calibrate RLHF systems: what fits, how fast it runs, what it costs.

import rlhfsim
cluster = rlhfsim.parse_cluster(64, "h100-sxm")
answer = rlhfsim.design(rlhfsim.Request(cluster=cluster, workload=rlhfsim.Workload(model="70b")))
print(answer.chosen.architecture, answer.chosen.prediction.step_s)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhfsim.api import design as design
    from rlhfsim.api import estimate as estimate
    from rlhfsim.api import estimate_file as estimate_file
    from rlhfsim.api import simulate_file as simulate_file
    from rlhfsim.api import whatif as whatif
    from rlhfsim.errors import RlhfsimError as RlhfsimError
    from rlhfsim.plan import Plan as Plan
    from rlhfsim.plan import read_plan as read_plan
    from rlhfsim.plan import write_plan as write_plan
    from rlhfsim.search.request import Request as Request
    from rlhfsim.simulation.summary import Simulation as Simulation
    from rlhfsim.simulation.summary import SimulationOptions as SimulationOptions
    from rlhfsim.specs.hardware.profiles import parse_cluster as parse_cluster
    from rlhfsim.specs.placement.placement import Placement as Placement
    from rlhfsim.specs.workload.workload import Workload as Workload
    from rlhfsim.trace import Trace as Trace
    from rlhfsim.trace import read_trace as read_trace
    from rlhfsim.trace import write_trace as write_trace
    from rlhfsim.what_if.scenarios.result import WhatIf as WhatIf
    from rlhfsim.what_if.scenarios.result import read_whatif as read_whatif

_HOMES = {
    "Placement": "specs.placement.placement",
    "Plan": "plan",
    "Request": "search.request",
    "RlhfsimError": "errors",
    "Simulation": "simulation.summary",
    "SimulationOptions": "simulation.summary",
    "Trace": "trace",
    "Workload": "specs.workload.workload",
    "design": "api",
    "estimate": "api",
    "estimate_file": "api",
    "parse_cluster": "specs.hardware.profiles",
    "read_plan": "plan",
    "read_trace": "trace",
    "read_whatif": "what_if.scenarios.result",
    "simulate_file": "api",
    "WhatIf": "what_if.scenarios.result",
    "whatif": "api",
    "write_plan": "plan",
    "write_trace": "trace",
}
__all__ = list(_HOMES)  # names resolved lazily below


def __getattr__(name: str) -> Any:
    """Names of the API, imported when they are first used: `import rlhfsim` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhfsim' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"rlhfsim.{_HOMES[name]}"), name)
