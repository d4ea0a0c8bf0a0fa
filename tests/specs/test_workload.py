"""What a step computes: counts, roles, and the words that are refused."""

from __future__ import annotations

import pytest

from executor.settings import Settings
from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.loading import convert, parse_yaml
from rlhfsim.specs.unknown_keys import remedy
from rlhfsim.specs.workload.sampling import DynamicSampling
from rlhfsim.specs.workload.workload import Reward, Rules, Workload


def read(text: str) -> Workload:
    return convert(Workload, parse_yaml(text, "w.yaml"))


def test_sequences_are_prompts_times_samples_and_pairs_count_twice() -> None:
    assert Workload(algorithm="grpo", prompts=128, samples=8).num_sequences == 1024
    assert Workload(algorithm="dpo", prompts=128).num_sequences == 256
    assert Workload(algorithm="kto", prompts=128).num_sequences == 128
    assert Workload(algorithm="reward_model", prompts=128).num_sequences == 256


@pytest.mark.parametrize(
    ("algorithm", "generates", "critic", "reward"),
    [
        ("ppo", True, True, True),
        ("grpo", True, False, True),
        ("rloo", True, False, True),
        ("dr-grpo", True, False, True),
        ("reinforce++", True, False, True),
        ("dpo", False, False, False),
        ("kto", False, False, False),
        ("sft", False, False, False),
        ("reward_model", False, False, False),
    ],
)
def test_roles_follow_from_the_algorithm(algorithm: str, generates: bool, critic: bool, reward: bool) -> None:
    workload = read(f"{{algorithm: {algorithm}}}")
    assert (workload.generates, workload.has_critic, workload.has_reward_model) == (generates, critic, reward)
    assert workload.has_reference == (algorithm not in ("sft", "reward_model"))


def test_without_kl_an_online_algorithm_has_no_reference_but_preference_training_keeps_it() -> None:
    assert not Workload(algorithm="grpo", kl=False).has_reference
    assert Workload(algorithm="dpo", kl=False).has_reference
    assert not Workload(algorithm="ppo", reference="none").has_reference


def test_preference_training_without_a_reference_is_refused() -> None:
    with pytest.raises(RlhfsimError, match="needs a reference"):
        Workload(algorithm="dpo", reference="none")


def test_mini_batches_that_do_not_divide_the_batch_are_refused() -> None:
    with pytest.raises(RlhfsimError) as error:
        Workload(prompts=100, mini_batches=3)
    assert error.value.code == "uneven-mini-batches"
    assert "100 sequences" in error.value.message


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("algorithm: grpo\npromts: 4\n", "unknown-key", 2),
        ("algorithm: sarsa\n", "bad-value", 1),
        ("prompts: 0\n", "bad-value", 1),
        ("prompts: 1.5\n", "bad-value", 1),
        ("samples: -1\n", "bad-value", 1),
        ("lora: {rank: 0}\n", "bad-value", 1),
        ("prompts: 8\nresponse_len:\n  kind: lognormal\n  mean: 100\n", "missing-key", 2),
        ("response_len: {kind: zipf, value: 3}\n", "bad-value", 1),
        ("reward: {rules: {seconds_per_sample: 5 GB}}\n", "unknown-unit", 1),
    ],
)
def test_a_wrong_workload_names_its_line(text: str, code: str, line: int) -> None:
    with pytest.raises(RlhfsimError) as error:
        read(text)
    assert error.value.code == code
    assert error.value.place is not None
    assert error.value.place.line == line


def test_a_typo_in_a_key_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(RlhfsimError) as error:
        read("promts: 4\n")
    assert "prompts" in str(error.value.help)


@pytest.mark.parametrize(
    ("trail", "words"),
    [
        (("data", "columns"), "did you mean label_column"),
        (("data", "xyzzy"), "known in data: answer_column, chat_template"),
        (("rewards", 0, "xyzzy"), "known in rewards.0: judge, kind"),
        (("xyzzy",), "remove it; known: algorithm, bucket_bytes"),
    ],
)
def test_an_unknown_key_is_answered_with_those_of_its_section(
    trail: tuple[str | int, ...], words: str
) -> None:
    assert words in remedy(Settings, trail)


def test_what_is_generated_at_a_time_is_bounded_as_a_batch_is() -> None:
    """2^31 prompts of a generation batch, as a log said, would need 128 GiB to draw their lengths."""
    sampling = DynamicSampling(kept=0.5, gen_prompts=2**31)
    rules = Reward(model=None, rules=Rules())
    with pytest.raises(RlhfsimError, match="2,147,483,648 prompts of 8 samples are generated at a time"):
        Workload(model="8b", algorithm="grpo", samples=8, reward=rules, dynamic_sampling=sampling)


def test_a_seed_is_not_negative() -> None:
    with pytest.raises(RlhfsimError, match="seed"):
        convert(Workload, parse_yaml("{model: 8b, seed: -1}", "w.yaml"))
