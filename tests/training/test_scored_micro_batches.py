"""A micro-batch of passes without gradients: their time, their memory, and where they come from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.api import cluster_of, estimate
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.micro_batch import batch_lengths
from rlhfsim.specs.workload.workload import Workload
from tests.frameworks.drawn import estimated


def with_scoring(size: int | None) -> Plan:
    plan = estimated()
    actor = plan.placement.actor
    placement = replace(
        plan.placement, actor=replace(actor, layout=replace(actor.layout, score_micro_batch=size))
    )
    return estimate(placement, plan.workload, cluster_of(plan))


def seconds(plan: Plan, phase: str) -> float:
    return next(x.seconds for x in plan.prediction.phases if x.name == phase)


def logits(plan: Plan, phase: str) -> float:
    return sum(
        x.bytes
        for x in plan.prediction.ledger
        if (x.phase, x.component) == (phase, "logits") and x.role == "actor"
    )


def test_larger_ones_make_log_probs_of_the_policy_faster_and_hold_more_logits() -> None:
    small, same, large = with_scoring(1), with_scoring(None), with_scoring(8)
    assert seconds(large, "actor.logprob") < seconds(same, "actor.logprob") < seconds(small, "actor.logprob")
    assert logits(large, "actor.logprob") == pytest.approx(4 * logits(same, "actor.logprob"))
    for phase in ("actor.train", "reference.logprob"):
        assert seconds(large, phase) == seconds(same, phase) == seconds(small, phase)


def test_the_size_of_training_said_again_changes_nothing() -> None:
    assert with_scoring(2).prediction == with_scoring(None).prediction


def test_they_hold_no_more_than_a_rank_has() -> None:
    work = Workload(prompts=4, samples=8, prompt_len=Fixed(value=500), response_len=Fixed(value=500))
    lengths = batch_lengths(work)
    assert lengths.tokens(Layout(dp=8, zero=3, score_micro_batch=64), scoring=True) == 4 * 1000
    assert lengths.tokens(Layout(dp=8, zero=3, score_micro_batch=64)) == 1000


def test_packs_have_a_size_of_their_own() -> None:
    with pytest.raises(RlhfsimError, match="score_micro_batch 4: a micro-batch is sequences"):
        Layout(pack_tokens=4096, score_micro_batch=4)
