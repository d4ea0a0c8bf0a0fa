"""Speculative decoding: what drafts tokens, how many, and how many of them the policy accepts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.loading import checked

Acceptance = Annotated[float, Field(ge=0, le=1)]
"""Probability that a drafted token is accepted where all before it were (a)."""
TRAINS = ("mtp", "eagle")
"""Methods whose draft a framework trains along with the policy."""


@checked
@frozen
class Speculation:
    """Tokens that are drafted and verified together in one step of the engine; the distribution stays."""

    method: Literal["ngram", "mtp", "eagle", "draft"]
    """Matches in the text so far; a layer of the policy that looks further; an EAGLE-3 head; a model."""
    draft_tokens: Annotated[int, Field(ge=1, le=32)]
    """Drafted for each sequence in a step (k)."""
    acceptance: Acceptance
    """Yours to say."""
    model: str | None = None
    """Name of the draft model, with method `draft` only."""
    low: Acceptance | None = None
    """P10 of the acceptance; default: the acceptance itself."""
    high: Acceptance | None = None
    """P90 of the acceptance."""
    drift: Annotated[float, Field(ge=-1, le=1)] = 0.0
    """Change of the acceptance in each step that the policy is trained and its draft is not."""
    age: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Such steps until the one that is priced."""
    trained: bool = False
    """The draft (MTP layer or EAGLE-3 head) is trained with the policy and sent with it: no drift."""

    def __post_init__(self) -> None:
        """Check that a draft model is named where one drafts, and that what is trained can be."""
        if self.trained and self.method not in TRAINS:
            raise RlhfsimError(
                "draft-not-trained",
                f"no framework trains what {self.method} drafts with, in the run of its policy",
                help="leave out trained, or use method: mtp or eagle",
            )
        if not self.ends[0] <= self.acceptance <= self.ends[1]:
            raise RlhfsimError(
                "interval-without-value",
                f"the range of the acceptance does not hold its value of {self.acceptance:g}",
                help="give low <= acceptance <= high",
            )
        if (self.method == "draft") != (self.model is not None):
            raise RlhfsimError(
                "draft-model",
                f"speculation by {self.method} {'needs' if self.method == 'draft' else 'has no'} model",
                help="name the draft model with method: draft, and only there",
            )

    @property
    def ends(self) -> tuple[float, float]:
        """P10 and P90 of the acceptance of a fresh draft."""
        low, high = (self.acceptance if end is None else end for end in (self.low, self.high))
        return low, high

    def now(self, fresh: float) -> float:
        """Acceptance at the age of the draft, from that of a fresh one."""
        return fresh if self.trained else min(1.0, max(0.0, fresh + self.drift * self.age))

    @property
    def tokens_per_step(self) -> float:
        """E[tokens of a sequence in a step] = 1 + a + ... + a^k (Leviathan et al. 2023, arXiv 2211.17192)."""
        return self._tokens(self.acceptance)

    def _tokens(self, fresh: float) -> float:
        a = self.now(fresh)
        return float(sum(a**i for i in range(self.draft_tokens + 1)))

    @property
    def spread(self) -> tuple[float, float]:
        """P10 and P90 of the seconds of a token over those at the acceptance itself."""
        low, high = map(self._tokens, self.ends)
        return self.tokens_per_step / high, self.tokens_per_step / low
