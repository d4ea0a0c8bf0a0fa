"""What users' frameworks compute with: gradient types, copies of the logits, attention, token budgets."""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.specs.frameworks.verl.heads import HEADS, head_of
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.heads import UNFUSED, Head
from rlhfsim.specs.placement.software import Software, default_software
from rlhfsim.validation.rows import Row

NEMO_GRADIENTS = 2.0
"""NeMo-RL's Megatron recipes set grad_reduce_in_fp32 false (examples/configs/grpo_math_1B.yaml)."""
VERL_ENTROPY_UNTIL = "2025-06"
"""verl 0.4 took the entropy out of the loss by default (entropy_coeff); its forks in the table are of 0.2."""
VERL_IN_PLACE_UNTIL = "2026-08"
"""verl 0.9 divides logits by the temperature into a copy; its forks in the table are older."""
PRIME_2025 = Head(
    train_bytes=18,
    score_bytes=18,
    source="prime-rl before its fused head: BF16 logits, FP32 logits, their shifted and scaled copy, saved "
    "log-softmax and its gradient, FP32 each (src/prime_rl/trainer/rl/loss.py, commit 008468c12f)",
)
NEMO_TIED = Head(
    train_bytes=10,
    score_bytes=10,
    whole=True,
    source="NeMo-RL of May 2025: the plan of tensor parallelism for Gemma-3 leaves out embeddings and head, "
    "whose weights are tied, so every rank holds the logits of the whole vocabulary "
    "(nemo_rl/models/dtensor/parallelize.py, _parallelize_gemma3)",
)
NEMO_TIED_UNTIL = "2025-07"
"""Later releases cut both (commit 7ea279abf)."""
VERL_DYNAMIC_TOKENS = 16384
"""verl's default ppo_max_token_len_per_gpu with dynamic batches (verl/trainer/config/ppo_trainer.yaml)."""


def software(row: Row, backend: Backend) -> Software:
    """Gradient types, logits and attention kernels of the row's framework."""
    framework = row.framework
    nemo = framework.startswith("NeMo-RL") and backend == "megatron"
    volta = row.words("gpu_type").startswith("V100")
    return replace(
        default_software(backend),
        gradient_bytes=NEMO_GRADIENTS if nemo else None,
        head=_head(row, backend),
        flash=not volta and "flash_attn" not in row.words("outcome"),
        flat_parameters=framework.startswith("verl") and row.text("train_backend") == "fsdp",
    )


def unpadded(row: Row) -> bool:
    """Whether verl removes padding: with sequence parallelism it must (verl/utils/config.py)."""
    stated = "without padding" in row.words("micro_train")
    return stated or token_budget(row) is not None or (row.integer("cp_sp") or 1) > 1


def token_budget(row: Row) -> int | None:
    """Tokens a GPU of a micro-batch, where a budget rules."""
    budget = row.number("max_tokens_per_gpu")
    dynamic = "dynamic" in row.words("micro_train")
    if budget is None and dynamic and "verl" in row.framework:
        return VERL_DYNAMIC_TOKENS
    return int(budget) if budget else None


def _head(row: Row, backend: Backend) -> Head:
    framework = row.framework
    early = (row.text("date") or NEMO_TIED_UNTIL) < NEMO_TIED_UNTIL
    if framework.startswith("NeMo-RL") and "gemma-3" in row.words("model") and early:
        return NEMO_TIED
    if framework.startswith("prime-rl"):
        return PRIME_2025
    if "verl" not in framework or backend != "fsdp2":
        return UNFUSED
    entropy = framework != "verl" or row.words("date") < VERL_ENTROPY_UNTIL
    scaled = HEADS["scaled_in_place" if row.words("date") < VERL_IN_PLACE_UNTIL else "unpadded"]
    return head_of(packing=unpadded(row), entropy=entropy, scaled=scaled)
