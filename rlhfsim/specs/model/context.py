"""Whether prompt and response fit the context that a model was made for."""

from __future__ import annotations

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.workload import Workload

MOST = 4.0
"""Times its context up to which RoPE scaling is published for checkpoints as they are: YaRN with factor 4 in
the model cards of Qwen2.5 and Qwen3 (32,768 to 131,072 tokens)."""


def longest(workload: Workload) -> float:
    """Tokens of the longest prompt and response together."""
    return workload.prompt_len.maximum + workload.response_len.maximum


def stretched(workload: Workload) -> tuple[ModelSpec, float] | None:
    """The model that is stretched furthest, and by what factor; None where all fit their contexts."""
    models = models_of(workload)
    every = (model for role in models.roles.values() for model in role.each)
    factors = [(m, longest(workload) / m.max_position) for m in every if m.max_position]
    furthest = max(factors, key=lambda pair: pair[1], default=None)
    return None if furthest is None or furthest[1] <= 1 else furthest


def check_context(workload: Workload) -> None:
    """Refuse sequences that no scaling of positions reaches.

    Raises:
        RlhfsimError: beyond `MOST` times the context, or beyond a learned position table.
    """
    beyond = stretched(workload)
    if beyond is None or (beyond[1] <= MOST and not beyond[0].learned_positions):
        return
    (model, _), tokens = beyond, longest(workload)
    why = "its positions are learned" if model.learned_positions else f"more than {MOST:g} times as many"
    raise RlhfsimError(
        "context-too-long",
        f"prompt and response reach {tokens:,.0f} tokens, {model.name} was made for {model.max_position:,}: "
        f"{why}",
        help="take a model with a longer context (rlhfsim models), or a smaller max in --prompt-len or "
        "--response-len",
    )
