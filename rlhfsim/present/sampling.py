"""How a rollout samples, in a sentence: what is assumed, and what is thrown away."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.plan import Plan
from rlhfsim.present.words import percent


def sampling(plan: Plan) -> dict[str, str]:
    """Label -> sentence, for the first lines of an answer; nothing where every response is trained on."""
    parts = list(_parts(plan))
    return {"sampling": "; ".join(parts)} if parts else {}


def _parts(plan: Plan) -> Iterator[str]:
    work = plan.workload
    if (dynamic := work.dynamic_sampling) is not None:
        batches = f"generation batches of {work.gen_prompts:,} prompts: {work.gen_batches:.2g} in the mean"
        yield f"{percent(dynamic.kept)} of the groups are taken to be kept; {batches}"
    if work.oversampling:
        yield f"{work.gen_prompts:,} prompts are started, the first {work.prompts:,} to finish are trained on"
    if discarded := plan.prediction.discarded_tokens:
        share = percent(discarded / plan.prediction.generated_tokens)
        yield f"{share} of the response tokens are thrown away"
