"""The models that draft tokens for others, by the method of speculation."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.speculation import Speculation

EAGLE_VOCAB = 32_000
"""Draft vocabulary of EAGLE-3 heads; `draft_vocab_size` of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B."""


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


def training_work(model: ModelSpec, speculation: Speculation | None) -> float:
    """Products of training the draft over those of training the policy; 0 where nobody trains it.

    An MTP layer learns in one pass and leaves the policy's LM head alone (2 of its 3 products); an EAGLE-3
    head with an LM head of its own takes a pass for each drafted token (arXiv 2503.01840).
    """
    if speculation is None or not speculation.trained:
        return 0.0
    draft, mtp = draft_of(model, speculation), speculation.method == "mtp"
    assert draft is not None
    joins = (2.0 if mtp else 3.0) * model.hidden**2
    one = 3 * (draft.num_matmul_params_active + joins)
    passes = one - draft.params_lm_head if mtp else one * speculation.draft_tokens
    return passes / (3 * model.num_matmul_params_active)


def own_params(model: ModelSpec, speculation: Speculation) -> float:
    """Elements of a head without its layer: what joins hidden states (2 h^2, EAGLE-3 3 h^2), and its LM head.

    Embedding tables, and the LM head of MTP, are those of the policy.
    """
    if speculation.method == "mtp":
        return 2.0 * model.hidden**2
    return 3.0 * model.hidden**2 + min(model.vocab, EAGLE_VOCAB) * model.hidden
