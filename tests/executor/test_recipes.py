"""Which loss an algorithm gets, and what is refused before a run starts."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from executor.algorithms.recipes import RECIPES, actor_loss, check, critic_loss, kl_terms
from executor.settings import Algorithm, Sampling, Settings
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.workload import workload as workloads
from rlhfsim.specs.workload.workload import Workload

GRPO = Workload(algorithm="grpo", prompts=8, samples=4)


def test_every_algorithm_of_a_workload_has_a_recipe() -> None:
    assert set(RECIPES) == set(get_args(workloads.Algorithm))


def test_losses_follow_from_the_algorithm() -> None:
    settings = Algorithm(beta=0.3, value_clip=0.4)
    assert actor_loss(Workload(algorithm="dpo"), settings, max_tokens=8).settings == {"beta": 0.3}
    kto = actor_loss(Workload(algorithm="kto"), settings, max_tokens=8, kl_baseline=0.7)
    assert kto.settings == {"beta": 0.3, "kl_baseline": 0.7}
    assert critic_loss(settings).settings == {"value_clip": 0.4}
    assert actor_loss(GRPO, settings, max_tokens=8).settings["aggregation"] == "token"
    assert actor_loss(Workload(algorithm="sft"), settings, max_tokens=8).settings["aggregation"] == "token"
    assert actor_loss(Workload(algorithm="reward_model"), settings, max_tokens=8).settings == {}
    taught = actor_loss(Workload(algorithm="distillation"), settings, max_tokens=8)
    assert (taught.name, taught.settings["estimator"]) == ("distillation", "k2")
    dr = actor_loss(Workload(algorithm="dr-grpo", samples=4), settings, max_tokens=8).settings
    assert (dr["aggregation"], dr["max_tokens"]) == ("constant", 8)
    asked = actor_loss(GRPO, Algorithm(aggregation="sequence"), max_tokens=8)
    assert asked.settings["aggregation"] == "sequence"


def test_variants_of_grpo_differ_in_loss_and_clip() -> None:
    def loss(algorithm: str, **changes: Any) -> tuple[Any, ...]:
        workload = Workload(algorithm=algorithm, samples=4)  # type: ignore[arg-type]
        found = actor_loss(workload, Algorithm(**changes), max_tokens=8).settings
        return tuple(found[name] for name in ("policy_loss", "clip_low", "clip_high", "aggregation"))

    assert loss("grpo") == ("ppo", 0.2, 0.2, "token")
    assert loss("dapo") == ("ppo", 0.2, 0.28, "token")
    assert loss("gspo") == loss("grpo", policy_loss="gspo") == ("gspo", 3e-4, 4e-4, "sequence")
    assert loss("cispo") == ("cispo", 1.0, 4.0, "token")
    assert loss("dr-grpo", policy_loss="cispo", clip_high=2.0) == ("cispo", 1.0, 2.0, "constant")


def test_kl_stands_where_the_algorithm_has_it_unless_the_settings_say_so() -> None:
    assert kl_terms("ppo", Algorithm()) == ("reward", "k1")
    assert kl_terms("grpo", Algorithm()) == ("loss", "k3")
    assert kl_terms("ppo", Algorithm(kl_in="loss", kl_estimator="k2")) == ("loss", "k2")


@pytest.mark.parametrize(
    ("workload", "settings", "staleness", "code"),
    [
        (Workload(algorithm="grpo", samples=1), Settings(), 0, "group-too-small"),
        (GRPO, Settings(algorithm=Algorithm(correction="none")), 1, "stale-without-correction"),
        (GRPO, Settings(sampling=Sampling(top_p=0.9)), 0, "top-p-with-correction"),
        (GRPO, Settings(algorithm=Algorithm(kl_estimator="k1")), 0, "k1-in-loss"),
        *(
            (GRPO, Settings(algorithm=Algorithm(entropy_control="kl_cov", **more)), 0, "entropy-control-loss")
            for more in ({"policy_loss": "gspo"}, {"policy_loss": "cispo"}, {"dual_clip": 3.0})
        ),
        (GRPO, Settings(algorithm=Algorithm(overlong_tokens=1025)), 0, "overlong-exceeds-response"),
        (Workload(algorithm="dpo", prompts=3, mini_batches=2), Settings(), 0, "split-pair"),
        (Workload(algorithm="reward_model", prompts=3, mini_batches=2), Settings(), 0, "split-pair"),
    ],
)
def test_what_would_train_wrongly_is_refused(
    workload: Workload, settings: Settings, staleness: float, code: str
) -> None:
    with pytest.raises(RlhfsimError) as caught:
        check(workload, settings, staleness=staleness)
    assert caught.value.code == code
    assert caught.value.help


@pytest.mark.parametrize(
    ("workload", "settings", "staleness"),
    [
        (GRPO, Settings(), 2.0),
        (GRPO, Settings(sampling=Sampling(top_p=0.9), algorithm=Algorithm(correction="none")), 0.0),
        (Workload(algorithm="ppo"), Settings(algorithm=Algorithm(kl_estimator="k1")), 0.0),
        (Workload(algorithm="dpo", prompts=4, mini_batches=2), Settings(), 0.0),
    ],
)
def test_sound_settings_pass(workload: Workload, settings: Settings, staleness: float) -> None:
    check(workload, settings, staleness=staleness)


@pytest.mark.parametrize("options", [{"old_logprobs": "rollout"}])
def test_the_samplers_log_probs_as_old_ones_are_a_correction(options: dict[str, Any]) -> None:
    workload = Workload(algorithm="grpo", samples=4, **options)
    check(workload, Settings(algorithm=Algorithm(correction="none")), staleness=1)
    assert actor_loss(workload, Algorithm(), max_tokens=8).settings["old_logprobs"] == "rollout"


def test_kto_without_its_baseline_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="baseline"):
        actor_loss(Workload(algorithm="kto"), Algorithm(), max_tokens=8)
