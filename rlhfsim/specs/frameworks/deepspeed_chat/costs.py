"""Software costs of DeepSpeed-Chat: fused kernels of its own decode, the rest is pooled."""

from __future__ import annotations

from rlhfsim.specs.frameworks.costs import Costs
from rlhfsim.specs.quantities import Coefficient

COSTS = Costs(
    shared={
        "eager_decode_layer_time": Coefficient(
            value=0.34e-3,
            low=0.1e-3,
            high=0.59e-3,
            source="prior: the hybrid engine puts DeepSpeed-Inference's fused layers in place of the model's "
            "(deepspeed/runtime/hybrid_engine.py), about ten launches: the geometric mean of "
            "eager_layer_overhead and of 41 ms a token over 70 layers, of BLOOM-176B on 8 GPUs, which may "
            "be what is slow (bigscience-workshop/Megatron-DeepSpeed pull request 308)",
            dimension="s",
        )
    }
)
