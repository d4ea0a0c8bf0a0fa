"""What is passed on to the trainer: experts that the rollout chose (router replay, R3, arXiv 2510.11370), and
a teacher's largest logits; bytes of a step.

    tokens x layers x experts of a token x bytes of a number

An engine returns a number for every layer, dense ones too. On the host every rank of the trainer holds those
of its data-parallel share, as they came and padded: all ranks of one share the same (THUDM/slime issue 2384).

Not known here: the object store of the node on which the controller runs, and copies inside an engine.
"""

from __future__ import annotations

from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.workload.lengths import stats
from rlhfsim.specs.workload.workload import Workload

WIDTHS = {"SGLang": 4.0}
"""Bytes of a number as an engine returns it: slime reads SGLang's as int32."""
USUAL_WIDTH = 2.0
"""vLLM's are int16 (its `routed_experts`, as ROCm/ATOM pull request 2274 describes them)."""
COPIES = 2.0
"""On a rank: as they came, and padded and cut (slime, `prepare_routed_experts_for_routing_replay`)."""
LOGIT = 12.0
"""Bytes of one of the teacher's logits: FP32, and an index of int64 (64 of NeMo-RL's are 0.8 kB)."""
INDEX = 8.0
"""Bytes of a number on the GPU, where PyTorch indexes by int64."""


def token_bytes(model: ModelSpec, engine: str, width: float | None = None) -> float:
    """Bytes that one token adds; 0 for a dense model."""
    each = width or WIDTHS.get(engine, USUAL_WIDTH)
    return each * model.num_layers * model.moe.top_k if model.moe else 0.0


def teacher_bytes(workload: Workload) -> float:
    """Bytes of the teacher's largest logits at all tokens of a step, with their indexes."""
    return _tokens(workload) * workload.teacher_top * LOGIT if workload.distils else 0.0


def _tokens(workload: Workload) -> float:
    each = stats(workload.prompt_len).mean + stats(workload.response_len).mean
    return workload.num_sequences * each


def step_bytes(model: ModelSpec, workload: Workload, engine: str) -> float:
    """Bytes of all that a step trains on; 0 without router replay."""
    return _tokens(workload) * token_bytes(model, engine) if workload.router_replay else 0.0
