"""A framework whose configuration cannot say what is asked for gives that as the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if.design import design
from rlhfsim.what_if.engine import Question
from rlhfsim.what_if.remedies import fitting
from rlhfsim.what_if.verdict import rules_broken

WORK = Workload(
    algorithm="grpo",
    model="qwen2.5-0.5b",
    prompts=32,
    samples=4,
    prompt_len=Fixed(value=200),
    response_len=Fixed(value=300),
    reward=Reward(rules=Rules()),
)


def request(framework: str, gpus: int = 8, **more: Any) -> Request:
    return Request(
        cluster=parse_cluster(gpus, "h100"), workload=WORK, backend="megatron", framework=framework, **more
    )


@pytest.mark.parametrize(
    ("framework", "words"),
    [
        ("nemo-rl", "optimizer states of a policy that shares GPUs with the rollout"),
        ("skyrl", "weights and optimizer states of a policy that shares GPUs with another role"),
        ("areal", "weights and optimizer states"),
    ],
)
def test_states_that_always_move_are_the_reason_without_offload(framework: str, words: str) -> None:
    [rule] = rules_broken(request(framework, forbid=frozenset({"offload"})))
    assert words in rule
    assert not list(rules_broken(request(framework)))


def test_frameworks_that_can_leave_them_give_none() -> None:
    for framework in ("verl", "slime", "any"):
        assert not list(rules_broken(request(framework, forbid=frozenset({"offload"}))))


def test_degrees_of_roles_that_one_key_cuts_cannot_differ() -> None:
    fix = {"actor": {"tp": 2}, "reference": {"tp": 4}}
    [rule] = rules_broken(request("slime", fix=fix))
    assert "one key of slime has tp for actor and reference: actor.tp=2, reference.tp=4" in rule
    assert not list(rules_broken(request("slime", fix={"actor": {"tp": 2, "pp": 2}, "reference": {"tp": 2}})))
    [rule] = rules_broken(request("verl", fix=fix))
    assert "one process of verl has tp for actor and reference" in rule
    assert not list(rules_broken(replace(request("verl", fix=fix), backend="fsdp2")))
    assert not list(rules_broken(request("skyrl", fix=fix)))


def test_the_reason_stands_where_nothing_fits() -> None:
    found = design(request("skyrl", gpus=1, forbid=frozenset({"offload"})), explain=False)
    assert found.chosen is None
    assert "SkyRL moves" in str(found.shortage)


def test_micro_batches_that_one_key_sizes_are_all_in_tokens_or_all_in_samples() -> None:
    fix: dict[str, dict[str, int | str]] = {"actor": {"pack_tokens": 8192}, "reference": {"micro_batch": 2}}
    asked = request("nemo-rl", fix=fix)
    [rule] = rules_broken(asked)
    assert "actor.pack_tokens=8192 is in tokens, reference.micro_batch=2 in samples" in rule
    assert not list(rules_broken(request("nemo-rl", fix=fix | {"reference": {"micro_batch": 1}})))
    assert not list(rules_broken(request("verl", fix=fix)))
    unfit = design(asked)
    assert unfit.rejected_by == rule
    assert unfit.nearest is None
    assert unfit.remedies[0].change.startswith("without --fix")


def test_no_search_looks_for_a_plan_that_one_key_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    fix: dict[str, dict[str, int | str]] = {"actor": {"tp": 2}, "reference": {"tp": 4}}
    monkeypatch.setattr("rlhfsim.what_if.remedies.good", lambda _: pytest.fail("searched"))
    assert fitting(Question(request=request("slime", fix=fix))) is None
