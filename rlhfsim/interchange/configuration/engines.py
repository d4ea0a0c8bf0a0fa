"""What configurations say of drafts, dynamic sampling and environments, and what only a user can."""

from __future__ import annotations

from typing import Any, Literal

from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.specs.placement.speculation import Speculation
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Environment

METHODS: dict[str, Literal["ngram", "mtp", "eagle", "draft"]] = {
    "ngram": "ngram",
    "eagle": "eagle",
    "eagle3": "eagle",
    "draft_model": "draft",
    "mtp": "mtp",
    "deepseek_mtp": "mtp",
}
"""`method` of vLLM's SpeculativeConfig -> ours."""
SPECULATION = "speculation"
EXPECTED = ("acceptance", "low", "high", "drift", "age")
"""Fields of it that no configuration says."""
KEPT = "dynamic_sampling.kept"
TURNS, PER_TURN = "environment.turns", "environment.seconds_per_turn"
"""Keys by which a user says what no configuration does: tokens that are accepted, groups that are kept, turns
of a response and the seconds of one."""
USUAL = 0.6
"""Stands for the share of drafted tokens that is accepted; listed as assumed."""

MODULES_SHARE = 0.3
"""Share of a GPU for the KV cache where the training modules generate; priced as an engine that sleeps."""


def own_modules(zero: int) -> dict[str, Any]:
    """Rollout by the training modules: weights that ZeRO-3 cuts are gathered for it and given back."""
    return {"sleep": 2, "weight_path": "ipc"} if zero == 3 else {"weight_path": "none"}


def speculation(s: FrameworkSettings, prefix: str, *, trained: bool = False) -> Speculation | None:
    """vLLM's `speculative_config` under `prefix`; None where it drafts nothing that is priced."""
    method = METHODS.get(str(s.find(f"{prefix}.method")))
    if method is None:
        return None
    return Speculation(
        method=method,
        draft_tokens=s.whole(f"{prefix}.num_speculative_tokens", default=1),
        model=s.text(f"{prefix}.model") if method == "draft" else None,
        trained=trained,
        **expected(s),
    )


def expected(s: FrameworkSettings) -> dict[str, Any]:
    """What a user expects of the drafts."""
    found = {name: s.share(f"{SPECULATION}.{name}", default=0.0) for name in EXPECTED[1:]}
    accepted = s.share(f"{SPECULATION}.{EXPECTED[0]}", default=USUAL)
    return {EXPECTED[0]: accepted, **{name: value for name, value in found.items() if value}}


def environment(s: FrameworkSettings) -> Environment:
    """An environment that code of the user's own plays: its turns and their time are his to say."""
    usual = Environment()
    return Environment(
        turns=max(1, s.whole(TURNS, default=usual.turns)),
        seconds_per_turn=s.share(PER_TURN, default=usual.seconds_per_turn),
    )


def dynamic_sampling(
    s: FrameworkSettings, prompts: int, each: int, max_batches: int | None
) -> DynamicSampling:
    """Groups of equal rewards are thrown away; batches of `each` prompts fill a step of `prompts`.

    The share that is kept is not in a configuration: whoever generates more at a time expects one batch to
    fill the step; with equal batches, half is assumed to be kept.
    """
    expected = prompts / each if each > prompts else 0.5
    kept = s.share(KEPT, default=max(0.01, min(1.0, expected)))
    most = max_batches if max_batches and max_batches * each * kept >= prompts else None
    return DynamicSampling(kept=kept, gen_prompts=each if each != prompts else None, max_gen_batches=most)
