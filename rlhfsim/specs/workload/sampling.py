"""Dynamic sampling: groups that teach nothing are thrown away, and more prompts are generated for them."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

import numpy as np
from pydantic import Field

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.loading import checked

NEGLIGIBLE = 1e-9
"""Probability of one more generation batch below which it is left out."""


@checked
@frozen
class DynamicSampling:
    """Only groups whose rewards differ are kept; batches of prompts are generated until the step is full.

    DAPO (arXiv 2503.14476, section 3.2); verl's `filter_groups`, NeMo-RL's `use_dynamic_sampling`.
    """

    kept: Annotated[float, Field(ge=0.01, le=1)]
    """Share of the groups whose rewards are not all equal."""
    gen_prompts: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Prompts of one generation batch; None: those of the step."""
    max_gen_batches: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Most generation batches of a step; a run that needs more stops."""

    def prompts_of(self, prompts: int) -> int:
        """Prompts of one generation batch for a step of `prompts`."""
        return self.gen_prompts or prompts

    def check(self, prompts: int) -> None:
        """Refuse a limit that the mean step does not keep.

        Raises:
            RlhfsimError: the generation batches allowed hold fewer kept groups than the step needs.
        """
        most, each = self.max_gen_batches, self.prompts_of(prompts)
        if most is not None and most * each * self.kept < prompts:
            raise RlhfsimError(
                "too-few-generation-batches",
                f"{most} generation batches of {each:,} prompts, {self.kept:.3g} of them kept, do not fill a "
                f"step of {prompts:,} prompts",
                help="raise max_gen_batches or gen_prompts",
            )

    def expected_batches(self, prompts: int) -> float:
        """E[generation batches] until `prompts` groups are kept."""
        return _expected_batches(prompts, self.prompts_of(prompts), self.kept)

    def drawn_batches(self, prompts: int, rng: np.random.Generator) -> int:
        """Generation batches of one step, drawn."""
        kept, batches = 0, 0
        while kept < prompts and batches != self.max_gen_batches:
            kept += int(rng.binomial(self.prompts_of(prompts), self.kept))
            batches += 1
        return batches


@lru_cache(maxsize=256)
def _expected_batches(prompts: int, each: int, kept: float) -> float:
    """E[M] = sum over m >= 0 of P( Binomial(m g, kept) < P )      P prompts, g a generation batch

    A step needs more than m batches where those kept fewer groups than it has prompts.
    """
    expected, m = 0.0, 0
    while (short := _fewer(m * each, kept, prompts)) > NEGLIGIBLE:
        expected, m = expected + short, m + 1
    return expected


def _fewer(count: int, share: float, wanted: int) -> float:
    """P( Binomial(count, share) < wanted ), from the ratios of neighbouring probabilities."""
    if count < wanted:
        return 1.0
    if share == 1.0:
        return 0.0
    k = np.arange(1, wanted)
    logs = np.cumsum(np.log((count - k + 1) / k) + np.log(share / (1 - share)))
    none = count * np.log1p(-share)
    return min(1.0, float(np.exp(none) + np.exp(none + logs).sum()))
