"""What the user's own parts of the algorithm take: on the driver before training, or in training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.present.verdict import assumed
from rlhfsim.simulation.run import simulate
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.placement import Schedule
from rlhfsim.specs.workload.workload import OwnParts
from rlhfsim.step.calls import CallSetting
from rlhfsim.what_if.bottleneck import bottleneck
from tests.step.test_dynamic_sampling import ALL, APART, priced, seconds

OWN = OwnParts(filter=0.05, logger=0.002)
DRIVEN_S = 512 * (0.05 + 0.002)
"""Of 64 prompts with 8 samples."""


def test_parts_on_the_driver_stand_between_scoring_and_training_one_sample_after_the_other() -> None:
    plain, own = priced(ALL), priced(replace(ALL, custom=OWN))
    phases = {p.name: p for p in own.prediction.phases}
    assert own.prediction.step_s == pytest.approx(plain.prediction.step_s + DRIVEN_S, rel=0.02)
    assert phases["custom.filter"].seconds == pytest.approx(512 * 0.05)
    assert phases["actor.logprob"].start_s < phases["custom.filter"].start_s < phases["actor.train"].start_s
    assert phases["custom.filter"].critical
    assert "custom.advantages" not in phases
    work = own.workload
    setting = CallSetting(
        models=models_of(work), placement=APART, workload=work, cluster=parse_cluster(16, "h100")
    )
    assert simulate(setting, 1e6).step_seconds[0] == pytest.approx(own.prediction.step_s, rel=0.02)


def test_an_own_loss_takes_its_time_on_each_rank_in_each_pass() -> None:
    before = seconds(priced(ALL), "actor.train")
    once = seconds(priced(replace(ALL, custom=OwnParts(loss=0.1))), "actor.train")
    assert once - before == pytest.approx(512 / 8 * 0.1)
    twice = replace(ALL, epochs=2)
    more = seconds(priced(replace(twice, custom=OwnParts(loss=0.1))), "actor.train")
    assert more - seconds(priced(twice), "actor.train") == pytest.approx(2 * 512 / 8 * 0.1)


def test_a_learner_behind_generation_is_held_up_by_own_parts_only_where_it_is_the_slower_one() -> None:
    stale = replace(APART, schedule=Schedule(staleness=1))
    plain = priced(ALL, stale).prediction.step_s
    assert priced(replace(ALL, custom=OwnParts(filter=1e-5)), stale).prediction.step_s == pytest.approx(
        plain, rel=0.01
    )
    assert priced(replace(ALL, custom=OwnParts(filter=0.5)), stale).prediction.step_s > plain + 100


def test_the_first_screen_says_what_binds_and_what_was_declared() -> None:
    plan = priced(replace(ALL, custom=OwnParts(filter=0.5)))
    most = bottleneck(plan, parse_cluster(16, "h100"))
    assert most is not None
    assert (most.resource, most.phase) == ("custom", "custom.filter")
    assert "own parts of the algorithm take 500 ms (filter) a sample" in list(assumed(plan))


def test_own_parts_see_the_whole_batch_also_where_samples_are_streamed() -> None:
    streamed = replace(APART, schedule=Schedule(streaming=True))
    plan = priced(replace(ALL, custom=OwnParts(filter=0.5)), streamed)
    [filtered] = [p for p in plan.prediction.phases if p.name == "custom.filter"]
    assert filtered.seconds == pytest.approx(256)
    assert plan.prediction.step_s > priced(ALL, streamed).prediction.step_s + 250
