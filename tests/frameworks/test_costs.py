"""Software costs: whose numbers price a plan, and that every way to price it takes the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import rlhfsim
from rlhfsim import api
from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels import devices
from rlhfsim.kernels.devices import device_of, device_on
from rlhfsim.plan import Plan, read_plan, write_plan
from rlhfsim.search.cache import process_cache
from rlhfsim.search.request import Request
from rlhfsim.specs.frameworks import costs
from rlhfsim.specs.frameworks.costs import Costs, costs_of, names, pooled, with_software
from rlhfsim.specs.hardware.profiles import load_profile, node_group, parse_cluster
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.estimate import estimate

SLOW = Coefficient(value=30.0, low=20.0, high=40.0, source="a test", dimension="s")


@pytest.fixture
def slow_verl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A verl whose controller takes half a minute; what was priced with it is forgotten."""
    slow = Costs(shared={"controller_time": SLOW})
    _forget()
    monkeypatch.setattr(costs, "costs_of", lambda name: slow if name == "verl" else costs_of(name))
    yield
    _forget()


def _forget() -> None:
    devices._device.cache_clear()
    process_cache.cache_clear()


@pytest.mark.parametrize("name", names())
def test_every_number_stands_in_for_a_pooled_one_with_its_unit_and_an_interval(name: str) -> None:
    for backend in (None, *BACKENDS):
        for coefficient, own in costs_of(name).of(backend).items():
            assert own.dimension == pooled()[coefficient].dimension
            if own.source.startswith("definition: "):  # what the software does or does not do
                assert own.low == own.value == own.high
                continue
            assert own.low < own.high
            assert own.source
            with_software(load_profile("h100"), name, backend)  # ranges are checked


def test_a_framework_takes_the_place_of_the_pooled_numbers_only(slow_verl: None) -> None:
    profile = load_profile("h100-sxm")
    own = Coefficient(value=2.0, low=1.0, high=3.0, source="calibrated", dimension="s")
    calibrated = replace(profile, coefficients={**profile.coefficients, "controller_time": own})
    assert with_software(profile, "verl")["controller_time"] == SLOW.value
    assert with_software(calibrated, "verl")["controller_time"] == own.value
    assert with_software(profile, None) is profile
    assert with_software(profile, "trl") == profile


def test_a_device_has_the_software_of_its_cluster(slow_verl: None) -> None:
    pool = node_group("h20", 8)
    cluster = replace(parse_cluster(8, pool.profile), framework="verl")
    assert device_on(cluster, 0, "fsdp2")["controller_time"] == SLOW.value
    assert device_of(pool)["controller_time"] == pooled()["controller_time"].value


def _request(framework: str | None) -> Request:
    return Request(
        cluster=parse_cluster(8, "h100-sxm"),
        workload=Workload(model="qwen3-8b", algorithm="grpo", prompts=64, samples=4),
        backend="fsdp2",
        framework=framework,
    )


def test_the_plan_names_the_framework_and_is_priced_alike_from_its_file(
    slow_verl: None, tmp_path: Path
) -> None:
    plan = rlhfsim.design(_request("verl"), explain=False, rivals=False).chosen
    ours = rlhfsim.design(_request(None), explain=False, rivals=False).chosen
    assert plan is not None
    assert ours is not None
    assert (plan.framework, ours.framework) == ("verl", "rlhfsim")
    assert plan.prediction.step_s > ours.prediction.step_s + 20
    write_plan(tmp_path / "plan.json", plan)
    again = api.estimate_file(tmp_path / "plan.json")
    assert again.framework == "verl"
    assert again.prediction.step_s == pytest.approx(plan.prediction.step_s, rel=1e-6)
    cluster = api.cluster_of(read_plan(tmp_path / "plan.json"))
    assert estimate(plan.placement, plan.workload, cluster).prediction.step_s == again.prediction.step_s


def test_a_scenario_names_its_framework(slow_verl: None) -> None:
    assert api.estimate_file("verl").framework == "verl"
    assert api.estimate_file("verl").prediction.step_s > SLOW.value


def test_any_framework_is_priced_with_the_pooled_numbers(slow_verl: None) -> None:
    verl = _request("verl")
    assert verl.cluster.framework == "verl"
    assert replace(verl, framework="any").cluster.framework is None


def test_an_older_plan_names_no_framework(tmp_path: Path) -> None:
    plan = rlhfsim.design(_request("any"), explain=False, rivals=False).chosen
    assert isinstance(plan, Plan)
    written = plan.to_dict()
    assert "framework" not in written
    (tmp_path / "plan.json").write_text(json.dumps(written))
    assert read_plan(tmp_path / "plan.json").framework is None


def test_a_framework_that_is_not_known_is_refused() -> None:
    with pytest.raises(RlhfsimError, match="unknown framework 'verll'"):
        costs_of("verll")
