"""How a rollout samples, in a sentence: what is assumed, and what is thrown away."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.plan import Plan
from rlhfsim.present.words import percent

DRAFTERS = {"ngram": "matching n-grams", "mtp": "an MTP layer", "eagle": "an EAGLE-3 head"}


def sampling(plan: Plan) -> dict[str, str]:
    """Label -> sentence, for the first lines of an answer; nothing where every response is trained on."""
    parts = list(_parts(plan))
    return {"sampling": "; ".join(parts)} if parts else {}


def _parts(plan: Plan) -> Iterator[str]:
    work = plan.workload
    if (dynamic := work.dynamic_sampling) is not None:
        batches = f"generation batches of {work.gen_prompts:,} prompts: {work.gen_batches:.2g} in the mean"
        yield f"{percent(dynamic.kept)} of the groups are taken to be kept; {batches}"
    role = plan.placement.rollout
    if role is not None and (drafted := role.layout.speculation) is not None:
        by = drafted.model or DRAFTERS[drafted.method]
        yield f"{drafted.draft_tokens} tokens are drafted a step by {by}"
        share = percent(drafted.now(drafted.acceptance))
        if drafted.trained:
            yield "the draft is trained with the policy"
        yield f"{share} of them are taken to be accepted, {drafted.tokens_per_step:.3g} tokens a step"
    elif work.speculation is not None:
        yield "speculative decoding does not pay here"
    if work.oversampling:
        yield f"{work.gen_prompts:,} prompts are started, the first {work.prompts:,} to finish are trained on"
    if discarded := plan.prediction.discarded_tokens:
        share = percent(discarded / plan.prediction.generated_tokens)
        yield f"{share} of the response tokens are thrown away"
