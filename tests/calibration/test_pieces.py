"""Prices of pieces are kept while nothing that they read moves, and never for longer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planted_plans import GPU, beliefs, plan, truth

from lab.planted import planted_run
from rlhfsim.calibration.predict import RunPricer, pricer_of
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.step import calls

PROFILE = load_profile(GPU)
PLAN = plan(apart=True, gpus=4)


def case() -> RunPricer:
    return pricer_of(planted_run(PLAN, PROFILE, {}, np.random.default_rng(0), name="r"), PROFILE)


def test_seconds_are_those_of_a_run_priced_for_the_first_time_to_the_last_bit() -> None:
    known, kept = beliefs((PLAN,), PROFILE), case()
    world = truth(known, np.random.default_rng(3))
    names = sorted(known)
    for i in range(0, len(names), 3):
        for moved in (names[i : i + 3], names[i : i + 6], names[i : i + 3]):
            values = {name: world[name] for name in moved}
            assert kept.seconds(values) == case().seconds(values), moved
    assert kept.seconds() == case().seconds()


def test_what_a_moved_coefficient_does_not_touch_is_not_priced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, priced = [], case()
    before = priced.seconds()
    for name in ("generations", "forward", "TrainedModel", "sync"):
        inner = getattr(calls, name)
        monkeypatch.setattr(calls, name, lambda *a, n=name, f=inner, **k: (counted.append(n), f(*a, **k))[1])
    slower = priced.seconds({"rollout_step_overhead": 1.5 * PROFILE["rollout_step_overhead"]})
    assert counted == ["generations"]
    assert slower["actor.generate"] > before["actor.generate"]
    counted.clear()
    assert (
        priced.seconds({"overlap_dp": 0.5 * PROFILE["overlap_dp"]})["actor.generate"]
        == before["actor.generate"]
    )
    assert set(counted) == {"forward", "TrainedModel"}
    assert priced.seconds() == before
    assert "rollout_step_overhead" in priced.read()


@pytest.mark.parametrize("framework", [None, "verl", "slime"])
def test_generation_reads_its_coefficients_whoever_generates_and_no_dense_plan_those_of_experts(
    framework: str | None,
) -> None:
    """slime's engine has kernels of its own, and engines of one node a device without a network."""
    run = planted_run(replace(PLAN, framework=framework), PROFILE, {}, np.random.default_rng(0), name="r")
    read = pricer_of(run, PROFILE).read()
    assert {"decode_layer_overhead", "prefill_efficiency", "sampling_passes"} <= read
    assert not read & {"grouped_gemm_efficiency", "nic_latency", "nvlink_latency", "deepep_latency"}
