"""What a model's context holds, and the batch that an algorithm has where none is given."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from rlhfsim.errors import RlhfsimError
from rlhfsim.specs.model.context import check_context, stretched
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Workload, usual_batch, with_usual_kl


def of(model: str, response: float) -> Workload:
    return Workload(model=model, prompt_len=Fixed(value=1024), response_len=Fixed(value=response))


def test_sequences_within_the_context_are_not_stretched() -> None:
    assert stretched(of("llama-2-7b", 3072)) is None
    check_context(of("llama-2-7b", 3072))


def test_scaling_of_positions_reaches_four_times_as_far() -> None:
    beyond = stretched(of("llama-2-7b", 15360))
    assert beyond is not None
    assert (beyond[0].name, beyond[1]) == ("llama-2-7b", 4.0)
    check_context(of("llama-2-7b", 15360))
    with pytest.raises(RlhfsimError, match="reach 16,385 tokens, llama-2-7b was made for 4,096"):
        check_context(of("llama-2-7b", 15361))


def test_a_learned_position_table_cannot_be_stretched() -> None:
    with pytest.raises(RlhfsimError, match="its positions are learned"):
        check_context(of("opt-1.3b", 1025))


def test_the_shortest_context_of_all_models_counts() -> None:
    mixed = Workload(model="llama-3.1-8b", critic="llama-2-7b", response_len=Fixed(value=7168))
    beyond = stretched(mixed)
    assert beyond is not None
    assert (beyond[0].name, beyond[1]) == ("llama-2-7b", 2.0)


def test_algorithms_that_compare_samples_have_groups_of_them() -> None:
    assert usual_batch("grpo") == usual_batch("rloo") == {"prompts": 128, "samples": 8}
    assert with_usual_kl({"algorithm": "dapo", "samples": 16}) == {
        "algorithm": "dapo",
        "samples": 16,
        "kl": False,
    }
    assert with_usual_kl({"algorithm": "grpo", "prompts": 64}) == {"algorithm": "grpo", "prompts": 64}
    for given in ({"algorithm": "grpo"}, {"algorithm": "grpo", "prompts": 128, "samples": 8}):
        assert Workload(**given) == TypeAdapter(Workload).validate_python(given)  # type: ignore[arg-type]
        assert Workload(**given).num_sequences == 1024  # type: ignore[arg-type]
    assert Workload(algorithm="rloo", prompts=64).num_sequences == 512
    assert usual_batch("ppo") == usual_batch("dpo") == {"prompts": 1024, "samples": 1}
    assert (Workload().prompts, Workload().samples) == (1024, 1)
    assert with_usual_kl([1]) == [1]
