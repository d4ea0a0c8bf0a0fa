"""Speculative decoding: what drafts tokens, how many, and how many of them the policy accepts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.loading import checked
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import resolve_model

EAGLE_VOCAB = 32_000
"""Draft vocabulary of EAGLE-3 heads; `draft_vocab_size` of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B."""


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Tokens that are drafted and verified together in one step of the engine; the distribution stays."""

    method: Literal["ngram", "mtp", "eagle", "draft"]
    """Matches in the text so far; a layer of the policy that looks further; an EAGLE-3 head; a model."""
    draft_tokens: Annotated[int, Field(ge=1, le=32)]
    """Drafted for each sequence in a step (k)."""
    acceptance: Annotated[float, Field(ge=0, le=1)]
    """Probability that a drafted token is accepted where all before it were (a); yours to say."""
    model: str | None = None
    """Name of the draft model, with method `draft` only."""

    def __post_init__(self) -> None:
        """Check that a draft model is named where one drafts."""
        if (self.method == "draft") != (self.model is not None):
            raise RlhfsimError(
                "draft-model",
                f"speculation by {self.method} {'needs' if self.method == 'draft' else 'has no'} model",
                help="name the draft model with method: draft, and only there",
            )

    @property
    def tokens_per_step(self) -> float:
        """E[tokens of a sequence in a step] = 1 + a + ... + a^k (Leviathan et al. 2023, arXiv 2211.17192)."""
        return float(sum(self.acceptance**i for i in range(self.draft_tokens + 1)))


@lru_cache(maxsize=256)
def draft_of(model: ModelSpec, speculation: Speculation) -> ModelSpec | None:
    """The shape of what drafts; None where nothing is computed.

    One layer of the policy with its LM head (MTP), a dense one with a head over `EAGLE_VOCAB` tokens
    (EAGLE-3), or a model of its own.
    """
    if speculation.method == "ngram":
        return None
    if speculation.model is not None:
        return resolve_model(speculation.model)
    attention = replace(model.attention, num_windowed_layers=0, sliding_window=None)
    kept = model.moe if speculation.method == "mtp" else None
    return replace(
        model,
        name=f"{model.name}-{speculation.method}",
        num_layers=1,
        attention=attention,
        recurrent=None,
        num_dense=None,
        vision=None,
        moe=None if kept is None else replace(kept, num_moe_layers=1, period=1),
        vocab=model.vocab if speculation.method == "mtp" else min(model.vocab, EAGLE_VOCAB),
    )


def own_params(model: ModelSpec, speculation: Speculation) -> float:
    """Elements of a head beside its layer: what joins hidden states (2 h^2, EAGLE-3 3 h^2), and its LM head.

    Embedding tables, and the LM head of MTP, are those of the policy.
    """
    if speculation.method == "mtp":
        return 2.0 * model.hidden**2
    return 3.0 * model.hidden**2 + min(model.vocab, EAGLE_VOCAB) * model.hidden
