"""Oversampling: the first groups to finish end the rollout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.devices import device_of
from rlhfsim.rollout.continuous_batching import StepTable, tabulate
from rlhfsim.rollout.engine_step import on
from rlhfsim.rollout.generation import Generation, generate
from rlhfsim.rollout.oversampling import aborted
from rlhfsim.rollout.schedule import Requests, first_to_finish, schedule
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.placement.placement import Schedule
from rlhfsim.specs.workload.lengths import AnyLengths, Fixed, LogNormal
from rlhfsim.specs.workload.sampling import DynamicSampling
from tests.step.test_dynamic_sampling import ALL, APART, priced, seconds

TAIL = LogNormal(mean=800, sigma=1.0, max=16000)


def flat() -> StepTable:
    """A decode step takes 1 s whatever runs."""
    n, c = np.array([1.0, 64.0]), np.array([1.0, 1e6])
    return tabulate(n, c, on("hbm", np.ones((2, 2))))


def asked(prompts: int, wanted: int | None, lengths: AnyLengths = TAIL, samples: int = 1) -> Requests:
    return Requests(
        prompts=prompts,
        samples=samples,
        prompt_lengths=Fixed(value=100),
        response_lengths=lengths,
        wanted=wanted,
    )


@pytest.mark.parametrize(("slots", "end"), [(4, 30), (1, 100)])
def test_the_rollout_ends_with_the_last_group_that_is_wanted(slots: int, end: float) -> None:
    # one replica, lengths 10, 20, 30, 40; three are wanted; one slot runs them one after the other
    lengths = np.array([10.0, 20.0, 30.0, 40.0])
    plan = schedule(lengths, asked(4, 3), 1, slots, 1e9)
    cut = aborted(plan, flat(), 3)
    by_end = {4: [10, 20, 30], 1: None}[slots]
    if by_end is None:  # in the order of the deal: the first three of the permutation
        dealt = np.random.default_rng(0).permutation(lengths)
        by_end = list(np.cumsum(dealt)[:3])
        end = by_end[-1]
    assert cut.finish.tolist() == pytest.approx(by_end)
    assert cut.plan.timeline.steps.sum() == pytest.approx(end)
    generated = 10 + 20 + 30 + 30 if slots == 4 else end
    assert cut.plan.tokens == pytest.approx(generated)
    assert cut.trained_tokens == pytest.approx(60 if slots == 4 else end)


def test_groups_wait_for_their_last_sample() -> None:
    lengths = np.arange(1.0, 9.0)
    groups = np.random.default_rng(0).permutation(lengths).reshape(4, 2)
    cut = aborted(schedule(lengths, asked(4, 2, samples=2), 1, 99, 1e9), flat(), 2)
    assert cut.finish.tolist() == pytest.approx(sorted(groups.max(axis=1))[:2])
    trained = groups[np.argsort(groups.max(axis=1), kind="stable")[:2]]
    assert cut.trained_tokens == trained.sum()
    assert sorted(first_to_finish(asked(4, 2, samples=2), tuple(lengths))) == sorted(trained.ravel())


def generation(prompts: int, wanted: int | None, lengths: AnyLengths = TAIL) -> Generation:
    layout = RolloutLayout(tp=1, dp=4)
    device = device_of(parse_cluster(8, "h100").node_group)
    return generate(device, resolve_model("qwen2.5-1.5b"), layout, asked(prompts, wanted, lengths))


def test_wanting_all_is_waiting_for_all() -> None:
    every, wanted = generation(256, None), generation(256, 256)
    assert wanted.seconds == pytest.approx(every.seconds)
    assert wanted.discarded_tokens == pytest.approx(0, abs=1e-6)
    assert wanted.decode_tokens == pytest.approx(every.decode_tokens)


def test_the_tail_is_cut_where_there_is_one() -> None:
    assert generation(320, 256).seconds < 0.7 * generation(256, None).seconds
    assert generation(320, 256, Fixed(value=800)).seconds >= generation(256, None, Fixed(value=800)).seconds


def test_a_step_says_what_it_throws_away_and_trains_on_shorter_responses() -> None:
    long = replace(ALL, response_len=TAIL)
    plain, more = priced(long), priced(replace(long, oversampling=0.25))
    p = more.prediction
    assert 0.1 < p.discarded_tokens / p.generated_tokens < 0.5
    assert seconds(more, "actor.generate") < seconds(plain, "actor.generate")
    assert seconds(more, "actor.train") < seconds(plain, "actor.train")
    assert seconds(more, "rules.score") == seconds(plain, "rules.score")


def test_nothing_is_aborted_where_samples_go_on_into_the_next_batch() -> None:
    stale = replace(APART, schedule=Schedule(staleness=2))
    plain, more = (priced(w, stale).prediction for w in (ALL, replace(ALL, oversampling=0.5)))
    assert more.step_s == plain.step_s
    assert more.discarded_tokens == 0


def test_oversampling_says_what_it_does_not_go_with() -> None:
    with pytest.raises(RlhfsimError, match="oversampling"):
        replace(ALL, oversampling=0.5, dynamic_sampling=DynamicSampling(kept=0.5))
