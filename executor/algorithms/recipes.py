"""What each algorithm is made of: losses, where the KL term is, averages; and what cannot go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from executor.algorithms.custom import for_workers
from executor.algorithms.kl import Estimator
from executor.samples import LossName, LossSpec
from executor.settings import Algorithm, CustomPart, Settings
from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.frozen import frozen
from rlhfsim.specs.workload.workload import CLIP_RANGES, PolicyLoss, Workload

Advantages = Literal["gae", "returns", "group_normalised", "group_centred", "leave_one_out"]


@frozen
class Recipe:
    """One algorithm."""

    actor: LossName
    """Loss of the policy."""
    advantages: Advantages | None
    """What a sample was better by; None: it learns from given pairs or labels."""
    policy_loss: PolicyLoss = "ppo"
    """Kind of the policy's loss unless the settings say so, see losses.py."""
    kl_in: Literal["reward", "loss"] = "loss"
    """Where the KL term is unless the settings say so."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """How loss terms are averaged unless the settings say so, see losses.py."""

    @property
    def grouped(self) -> bool:
        """Whether it compares the samples of one prompt: it needs at least two."""
        return self.advantages not in (None, "gae", "returns")


RECIPES = {
    "ppo": Recipe(actor="policy", advantages="gae", kl_in="reward"),
    "grpo": Recipe(actor="policy", advantages="group_normalised"),
    "dr-grpo": Recipe(actor="policy", advantages="group_centred", aggregation="constant"),
    "dapo": Recipe(actor="policy", advantages="group_normalised"),
    "gspo": Recipe(actor="policy", advantages="group_normalised", policy_loss="gspo", aggregation="sequence"),
    "cispo": Recipe(actor="policy", advantages="group_normalised", policy_loss="cispo"),
    "rloo": Recipe(actor="policy", advantages="leave_one_out", kl_in="reward"),
    "reinforce++": Recipe(actor="policy", advantages="returns", kl_in="reward"),
    "dpo": Recipe(actor="dpo", advantages=None),
    "kto": Recipe(actor="kto", advantages=None),
    "sft": Recipe(actor="sft", advantages=None),
    "reward_model": Recipe(actor="reward_model", advantages=None),
    "distillation": Recipe(actor="distillation", advantages=None),
}
"""grpo averages over all tokens of the step (as DAPO, arXiv 2503.14476, and today's frameworks do); the
paper's mean of each response first is `aggregation: sequence`."""

CLIP_RANGE = (0.2, 0.2)
"""Where `CLIP_RANGES` says nothing: PPO, arXiv 1707.06347, section 6.1."""


def recipe(algorithm: str) -> Recipe:
    """The recipe of that name.

    Raises:
        RlhfsimError: there is none.
    """
    if algorithm not in RECIPES:
        raise unknown_name("algorithm", algorithm, RECIPES)
    return RECIPES[algorithm]


def kl_terms(algorithm: str, settings: Algorithm) -> tuple[Literal["reward", "loss"], Estimator]:
    """Where the KL term is, and its estimator.

    A reward is a constant for the gradient, which is right for k1 alone; in the loss k1 pulls nowhere.
    """
    place = settings.kl_in or recipe(algorithm).kl_in
    return place, settings.kl_estimator or ("k1" if place == "reward" else "k3")


def actor_loss(
    workload: Workload,
    settings: Algorithm,
    *,
    max_tokens: int,
    kl_baseline: float | None = None,
    custom: CustomPart | None = None,
) -> LossSpec:
    """Loss of the policy. `max_tokens`: most tokens of a response; `kl_baseline`: KTO, see preferences.py;
    `custom`: the user's surrogate."""
    chosen, constants = recipe(workload.algorithm), dict[str, Any]()
    averaged = {"aggregation": settings.aggregation or chosen.aggregation, "max_tokens": max_tokens}
    match chosen.actor:
        case "dpo":
            constants = {"beta": settings.beta}
        case "kto":
            assert kl_baseline is not None, "KTO needs the KL baseline of the step's data"
            constants = {"beta": settings.beta, "kl_baseline": kl_baseline}
        case "sft":
            constants = averaged
        case "distillation":
            constants = averaged | {"estimator": settings.kl_estimator or "k2"}
        case "policy":
            place, estimator = kl_terms(workload.algorithm, settings)
            kind = settings.policy_loss or chosen.policy_loss
            usual = kind == chosen.policy_loss
            low, high = CLIP_RANGES.get(workload.algorithm if usual else kind, CLIP_RANGE)
            if kind == "gspo" and not (usual or settings.aggregation):
                averaged["aggregation"] = "sequence"
            constants = averaged | {
                "policy_loss": kind if custom is None else for_workers(custom),
                "clip_low": settings.clip_low or low,
                "clip_high": settings.clip_high or high,
                "dual_clip": settings.dual_clip,
                "kl_coefficient": settings.kl_coefficient,
                "kl_estimator": estimator,
                "kl_in": place,
                "entropy_coefficient": settings.entropy_coefficient,
                "entropy_control": settings.entropy_control,
                "covariance_share": settings.covariance_share,
                "covariance_bounds": settings.covariance_bounds,
                "covariance_kl": settings.covariance_kl,
                "correction": settings.correction,
                "correction_cap": settings.correction_cap,
                "correction_level": settings.correction_level,
                "old_logprobs": workload.old_logprobs,
            }
    return LossSpec(name=chosen.actor, settings=constants)


def critic_loss(settings: Algorithm) -> LossSpec:
    """Loss of the value model."""
    return LossSpec(name="value", settings={"value_clip": settings.value_clip})


def check(workload: Workload, settings: Settings, *, staleness: float = 0) -> None:
    """Refuse what would train wrongly without saying so. `staleness`: versions that a sample may be behind.

    Raises:
        RlhfsimError: with the remedy, the first that is found.
    """
    recipe(workload.algorithm)
    for problem in _online_problems(workload, settings, staleness) if workload.generates else ():
        raise problem
    if workload.generates:
        return
    if unused := [n for n in ("loss", "advantages", "filter") if getattr(settings.custom, n)]:
        raise RlhfsimError(
            "custom-unused",
            f"{workload.algorithm} learns from the data alone: it has no use for custom.{unused[0]}",
            help="leave it out, or design a plan that generates (ppo, grpo, ...)",
        )
    if workload.paired and workload.num_sequences // workload.mini_batches % 2:
        raise RlhfsimError(
            "split-pair",
            f"{workload.mini_batches} mini-batches of {workload.num_sequences} sequences would split a pair",
            help="choose mini_batches that divides the number of pairs",
        )


def _online_problems(workload: Workload, settings: Settings, staleness: float) -> Iterator[RlhfsimError]:
    """Problems of algorithms that generate."""
    algorithm, chosen = settings.algorithm, recipe(workload.algorithm)
    corrected = algorithm.correction != "none" or workload.old_logprobs == "rollout"
    if chosen.grouped and workload.samples < 2:
        yield RlhfsimError(
            "group-too-small",
            f"{workload.algorithm} compares the samples of one prompt, but samples is {workload.samples}",
            help="set samples to 2 or more in the workload, or use ppo or reinforce++",
        )
    if staleness and not corrected:
        yield RlhfsimError(
            "stale-without-correction",
            f"rollouts may be {staleness:g} weight versions old, but correction is none",
            help="set algorithm.correction to truncated or masked, or old_logprobs: rollout in the workload",
        )
    if settings.sampling.top_p < 1.0 and corrected:
        yield RlhfsimError(
            "top-p-with-correction",
            f"top_p {settings.sampling.top_p} samples from another distribution than the log-probs that the "
            "correction compares",
            help="set sampling.top_p to 1, or algorithm.correction to none (with old_logprobs: recompute)",
        )
    kind = algorithm.policy_loss or chosen.policy_loss
    own = settings.custom.loss is not None
    if algorithm.entropy_control != "none" and (own or kind != "ppo" or algorithm.dual_clip is not None):
        other = "custom.loss" if own else f"policy_loss {kind}" if kind != "ppo" else "dual_clip"
        yield RlhfsimError(
            "entropy-control-loss",
            f"algorithm.entropy_control {algorithm.entropy_control} changes the loss of PPO, not {other}",
            help="set algorithm.policy_loss to ppo without dual_clip, or use algorithm.entropy_coefficient",
        )
    longest = settings.sampling.max_tokens or int(workload.response_len.maximum)
    if (algorithm.overlong_tokens or 0) > longest:
        yield RlhfsimError(
            "overlong-exceeds-response",
            f"algorithm.overlong_tokens {algorithm.overlong_tokens} is more than a response of {longest}",
            help="lower it, or raise sampling.max_tokens",
        )
    if kl_terms(workload.algorithm, algorithm) == ("loss", "k1") and workload.has_reference:
        yield RlhfsimError(
            "k1-in-loss",
            "the gradient of KL estimator k1 is zero on average, as a loss it only adds noise",
            help="set algorithm.kl_estimator to k2 or k3, or algorithm.kl_in to reward",
        )
