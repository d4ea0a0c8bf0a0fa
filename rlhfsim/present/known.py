"""What is known near a plan, in sentences: the nearest run, borrowed kernel times, how it samples."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.plan import NearestRun, Plan
from rlhfsim.present.basis import profile_of, title_of
from rlhfsim.present.words import percent, signed
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.step.measured import mixer_of

MOST = 4
"""Differences that are named."""


def nearest_text(run: NearestRun) -> str:
    """`nearest: NeMo-RL 0.5, grpo of qwen3-32b on 32 H100 SXM 80GB, our error there +4 %`."""
    where, error = _where(run), _error(run)
    differs = f" (not the same: {', '.join(run.differs[:MOST])})" if run.differs else ""
    if run.near:
        return f"nearest: {where}, {error}{differs}"
    return f"nothing near this was measured; nearest: {where}, {error}{differs}"


def nearest_short(run: NearestRun) -> str:
    """The same in a line, without the differences."""
    near = "nearest" if run.near else "nothing near; nearest"
    return f"{near}: {_where(run)}, {_error(run)}"


def _where(run: NearestRun) -> str:
    return f"{run.framework}, {run.algorithm} of {run.model} on {run.gpus} x {title_of(run.gpu)}"


def _error(run: NearestRun) -> str:
    return f"our error there {signed(run.error)}"


def borrowed_text(profile: Profile) -> str | None:
    """Whose kernel times a GPU is priced with; None where they are its own."""
    curves = profile.curves or {}
    if borrowed := curves.get("borrow"):
        wide = f"intervals x{borrowed.get('widen', 1)}"
        whose = f"kernel times of {borrowed['from']}, {wide} ({borrowed['reason']})"
        return f"{profile.title} was never timed: {whose}"
    if curves.get("tables") or profile.vendor == "cpu" or profile.calibration is not None:
        return None
    return f"{profile.title} was never timed: kernels are priced from its datasheet and priors"


def known(plan: Plan) -> dict[str, str]:
    """Label -> sentence, for the first lines of an answer."""
    rows = {} if plan.nearest is None else {"measured": nearest_text(plan.nearest)}
    profiles = filter(None, (profile_of(h.profile) for h in plan.hardware))
    borrowed = [*dict.fromkeys(filter(None, map(borrowed_text, profiles)))]
    if (mixer := mixer_of(plan.workload.model)) != "attention":
        name = "indexer_efficiency" if mixer == "sparse attention" else "scan_efficiency, state_efficiency"
        borrowed.append(f"{mixer} layers were never timed: an estimate with a wide interval ({name})")
    return {**rows, **({"kernels": "; ".join(borrowed)} if borrowed else {})}


# --- sampling ----------------------------------------------------------------------------------------

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
