"""Software costs of verl: of its weight transfer, calls and adapters; the others are the pooled ones."""

from __future__ import annotations

from rlhfsim.specs.frameworks.costs import Costs
from rlhfsim.specs.quantities import Coefficient

_LOGS = "fitted on five MATH logs of eric-haibin-lin/verl-data, never scored (lab.fits.verl)"

COSTS = Costs(
    fitted_modes=frozenset({"eager lora", "packed lora", "lora"}),
    shared={
        "rl_layer_time": Coefficient(value=0.511e-3, low=0.0, high=2.57e-3, source=_LOGS, dimension="s"),
        "rl_call_time": Coefficient(value=0.0, low=0.0, high=0.774, source=_LOGS, dimension="s"),
        "adapter_layer_time": Coefficient(
            value=2.06e-3, low=1.65e-3, high=2.2e-3, source=_LOGS, dimension="s"
        ),
        "adapter_sequence_time": Coefficient(
            value=0.112e-3, low=0.0, high=0.17e-3, source=_LOGS, dimension="s"
        ),
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
        "sync_quantised_on_arrival": Coefficient(
            value=1.0,
            low=1.0,
            high=1.0,
            source="definition: load_quanted_weights in the vLLM worker (0.9.1, vllm_quant_utils.py); "
            "its SGLang rollout quantises before it sends",
        ),
    },
    by_backend={
        "fsdp2": {
            "adapter_gather_time": Coefficient(
                value=6.19e-3,
                low=4.57e-3,
                high=8.26e-3,
                source=_LOGS
                + "; its default strategy fsdp shards every adapter by itself, strategy fsdp2 does not",
                dimension="s",
            )
        }
    },
)
