"""Software costs of NeMo-RL, fitted on the phase table of its release 0.3 (`lab.fits.rlhf`)."""

from __future__ import annotations

from rlhfsim.frameworks.costs import Costs
from rlhfsim.specs.quantities import Coefficient

_SIX_ROWS = "fitted on the six rows of rlhf_nemo_rl_v03.csv, never scored (lab.fits.rlhf: median, P10, P90)"

COSTS = Costs(
    shared={
        "rollout_step_overhead": Coefficient(
            value=3.37e-3, low=3.05e-3, high=5.69e-3, source=_SIX_ROWS, dimension="s"
        ),
        "rl_call_overhead": Coefficient(value=0.372, low=0.178, high=0.675, source=_SIX_ROWS),
        "controller_time": Coefficient(value=0.64, low=0.0, high=3.83, source=_SIX_ROWS, dimension="s"),
    }
)
