"""The calls of one step of every algorithm, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.dataflow import dataflow
from rlhfsim.specs.workload.workload import Reward, Rules, Workload

GEN = ("actor.generate",)
RULES, BOTH = Reward(rules=Rules()), Reward(model="same", rules=Rules())
SERIAL = Reward(model="same", rules=Rules(), overlapped=False)


def calls(workload: Workload) -> dict[str, tuple[str, ...]]:
    return {call.name: call.needs for call in dataflow(workload)}


def test_ppo_has_four_roles_and_trains_two() -> None:
    scored = ("reward.score", "reference.logprob", "critic.value", "actor.logprob")
    assert calls(Workload(algorithm="ppo")) == {
        "actor.generate": (),
        "reward.score": GEN,
        "reference.logprob": GEN,
        "critic.value": GEN,
        "actor.logprob": GEN,
        "critic.train": scored,
        "actor.train": scored,
        "actor.sync": ("actor.train",),
    }


def test_ppo_without_kl_has_no_reference() -> None:
    found = calls(Workload(algorithm="ppo", kl=False))
    assert "reference.logprob" not in found
    assert found["actor.train"] == ("reward.score", "critic.value", "actor.logprob")


@pytest.mark.parametrize("algorithm", ["grpo", "dr-grpo", "rloo", "reinforce++"])
def test_algorithms_without_a_critic(algorithm: str) -> None:
    scored = ("reward.score", "reference.logprob", "actor.logprob")
    found = calls(Workload(algorithm=algorithm, samples=8))  # type: ignore[arg-type]
    assert found == {
        "actor.generate": (),
        "reward.score": GEN,
        "reference.logprob": GEN,
        "actor.logprob": GEN,
        "actor.train": scored,
        "actor.sync": ("actor.train",),
    }


@pytest.mark.parametrize("changes", [{}, {"kl": False}, {"old_logprobs": "rollout"}])
def test_a_student_learns_from_its_teacher_alone(changes: dict[str, Any]) -> None:
    assert calls(Workload(algorithm="distillation", reference="70b", **changes)) == {
        "actor.generate": (),
        "reference.logprob": GEN,
        "actor.train": ("reference.logprob",),
        "actor.sync": ("actor.train",),
    }


def test_old_log_probs_of_the_rollout_engine_save_a_forward() -> None:
    found = calls(Workload(algorithm="grpo", old_logprobs="rollout"))
    assert "actor.logprob" not in found


@pytest.mark.parametrize("algorithm", ["sft", "reward_model"])
def test_what_comes_before_rl_only_trains(algorithm: str) -> None:
    assert calls(Workload(algorithm=algorithm)) == {"actor.train": ()}  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
@pytest.mark.parametrize("kl", [True, False])
def test_preference_training_has_no_rollout_reward_or_sync(algorithm: str, kl: bool) -> None:
    found = calls(Workload(algorithm=algorithm, kl=kl))  # type: ignore[arg-type]
    assert found == {"reference.logprob": (), "actor.train": ("reference.logprob",)}


def test_rules_alone_replace_the_reward_model() -> None:
    found = calls(Workload(algorithm="grpo", reward=RULES, kl=False, old_logprobs="rollout"))
    assert found == {
        "actor.generate": (),
        "rules.score": GEN,
        "actor.train": ("rules.score",),
        "actor.sync": ("actor.train",),
    }


def test_overlapped_rules_run_beside_the_models() -> None:
    found = calls(Workload(algorithm="ppo", reward=BOTH))
    assert found["rules.score"] == found["reward.score"] == found["reference.logprob"] == GEN
    assert "rules.score" in found["actor.train"]


def test_rules_that_do_not_overlap_come_first() -> None:
    found = calls(Workload(algorithm="ppo", reward=SERIAL))
    for name in ("reward.score", "reference.logprob", "critic.value", "actor.logprob"):
        assert found[name] == ("rules.score",)
    assert found["rules.score"] == GEN


def test_training_waits_for_generation_where_nothing_is_scored_by_a_model() -> None:
    found = dataflow(Workload(algorithm="rloo", reward=RULES, kl=False, old_logprobs="rollout"))
    assert [call.name for call in found] == ["actor.generate", "rules.score", "actor.train", "actor.sync"]


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "dr-grpo", "rloo", "reinforce++", "dpo", "kto"])
@pytest.mark.parametrize("reward", [Reward(model="same"), RULES, BOTH, SERIAL])
@pytest.mark.parametrize("old", ["recompute", "rollout"])
@pytest.mark.parametrize("kl", [True, False])
def test_every_call_needs_only_calls_before_it(algorithm: str, reward: Reward, old: str, kl: bool) -> None:
    done: set[str] = set()
    for call in dataflow(Workload(algorithm=algorithm, reward=reward, old_logprobs=old, kl=kl)):  # type: ignore[arg-type]
        assert set(call.needs) <= done
        assert call.name not in done
        done.add(call.name)
    assert "actor.train" in done


def test_several_teachers_are_one_role_of_distillation_alone() -> None:
    taught = Workload(algorithm="distillation", reference="qwen3-4b, qwen3-8b")
    assert calls(taught) == calls(replace(taught, reference="qwen3-4b"))
    role = models_of(taught).of("reference")
    assert [model.name for model in role.each] == ["qwen3-4b", "qwen3-8b"]
    assert all(model.others == () for model in role.each)
    with pytest.raises(RlhfsimError, match="grpo has one reference, 2 are named"):
        replace(taught, algorithm="grpo")
