"""Speculative decoding: what drafts tokens, how many, and how many of them the policy accepts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.loading import checked


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
