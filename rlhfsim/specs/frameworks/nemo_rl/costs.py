"""Software costs of NeMo-RL, fitted on the phase table of its release 0.3 (`lab.fits.rlhf`)."""

from __future__ import annotations

from rlhfsim.specs.frameworks.costs import Costs
from rlhfsim.specs.quantities import Coefficient

_SIX_ROWS = "fitted on the six rows of rlhf_nemo_rl_v03.csv, never scored (lab.fits.rlhf)"

COSTS = Costs(
    fitted_modes=frozenset({"graphs", "packed", "ipc"}),
    shared={
        "rollout_step_overhead": Coefficient(
            value=3.00e-3, low=2.68e-3, high=5.26e-3, source=_SIX_ROWS, dimension="s"
        ),
        "rl_layer_time": Coefficient(
            value=1.33e-3, low=0.53e-3, high=7.38e-3, source=_SIX_ROWS, dimension="s"
        ),
        "rl_call_time": Coefficient(value=1.14, low=0.0855, high=1.14, source=_SIX_ROWS, dimension="s"),
        "controller_time": Coefficient(value=0.94, low=0.0, high=4.13, source=_SIX_ROWS, dimension="s"),
        "sync_quantised_on_arrival": Coefficient(
            value=1.0,
            low=1.0,
            high=1.0,
            source="definition: the worker's load_weights casts the BF16 weights that it is sent, 0.4 to 0.7 "
            "(NVIDIA-NeMo/RL@nemo_rl/models/generation/vllm/quantization/fp8.py, commit 5fb588932b)",
        ),
    },
)
