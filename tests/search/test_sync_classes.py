"""Layouts that are alike for the weight sync: the same seconds on every path."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from rlhfsim import parse_cluster
from rlhfsim.kernels.devices import device_on
from rlhfsim.search.options import sync_layout
from rlhfsim.search.role_rows import ALONE
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.specs.placement.weight_paths import SEARCHED, WEIGHT_PATHS, WeightPath
from rlhfsim.weight_sync.endpoints import PoolPair
from rlhfsim.weight_sync.weight_sync import sync

DEVICE = device_on(parse_cluster(64, "h100"), 0, "megatron")
BASE = Layout(tp=2, pp=2, dp=8, cp=1, ep=4, zero=1)
ALIKE = (
    Layout(tp=2, pp=2, dp=4, cp=2, ep=4, zero=1),
    Layout(tp=2, pp=2, dp=8, ep=4, zero=1, vp=2),
    Layout(tp=2, pp=2, dp=8, ep=4, zero=2, recompute="none", micro_batch=4),
    Layout(tp=2, pp=2, dp=8, ep=4, zero=1, offload_optimizer="cpu", offload_params="cpu"),
)
OTHERS = (
    Layout(tp=4, pp=2, dp=4, ep=4, zero=1),
    Layout(tp=2, pp=4, dp=4, ep=4, zero=1),
    Layout(tp=2, pp=2, dp=16, ep=4, zero=1),
    Layout(tp=2, pp=2, dp=8, ep=8, zero=1),
    Layout(tp=2, pp=2, dp=8, ep=4, etp=2, zero=1),
    Layout(tp=2, pp=2, dp=8, ep=4, zero=3),
)


@pytest.fixture(scope="module")
def model() -> ModelSpec:
    return resolve_model("qwen3-30b-a3b")


def seconds(
    path: WeightPath, model: ModelSpec, train: Layout, rollout: RolloutLayout, *, joined: bool
) -> tuple[bool, float]:
    """Whether a path joins two layouts, and in how many seconds."""
    found = sync(path, model, train, rollout, PoolPair(DEVICE, DEVICE, joined), "megatron")
    return found.available, found.cost.seconds


def priced(model: ModelSpec, train: Layout) -> list[tuple[bool, float]]:
    """The same of each path to one rollout; in one pool and apart."""
    return [
        seconds(path, model, train, RolloutLayout(tp=4, dp=8), joined=joined)
        for path, joined in product(WEIGHT_PATHS, (True, False))
    ]


def alike(one: Layout, other: Layout) -> bool:
    return sync_layout(RolePlacement(pool=ALONE, layout=one)) == sync_layout(
        RolePlacement(pool=ALONE, layout=other)
    )


@pytest.mark.parametrize("layout", ALIKE, ids=lambda x: x.label)
def test_layouts_of_one_class_take_the_same_on_every_path(model: ModelSpec, layout: Layout) -> None:
    assert alike(layout, BASE)
    assert priced(model, layout) == priced(model, BASE)


@pytest.mark.parametrize("layout", OTHERS, ids=lambda x: x.label)
def test_what_a_class_holds_changes_some_path(model: ModelSpec, layout: Layout) -> None:
    assert not alike(layout, BASE)
    assert priced(model, layout) != priced(model, BASE)


def times_of(path: WeightPath, model: ModelSpec, train: Layout, rollout: RolloutLayout) -> list[object]:
    return [seconds(path, model, train, rollout, joined=joined) for joined in (True, False)]


@pytest.mark.parametrize("path", SEARCHED)
@pytest.mark.parametrize("shape", [{}, {"pp": 4, "ep": 4}, {"tp": 4, "ep": 8, "etp": 1}], ids=str)
def test_a_path_counts_the_gpus_of_the_ends_that_it_names_alone(
    model: ModelSpec, path: WeightPath, shape: dict[str, int]
) -> None:
    few, many = (Layout(dp=dp, zero=1, **shape) for dp in (16, 64))
    one, more = (RolloutLayout(tp=2, dp=dp) for dp in (16, 64))
    counts = WEIGHT_PATHS[path].counts
    times = times_of(path, model, few, one)
    if "train" not in counts:
        assert times_of(path, model, many, one) == times
    if "rollout" not in counts:
        assert times_of(path, model, few, more) == times


def test_an_end_is_counted_only_where_it_changes_something(model: ModelSpec) -> None:
    train, rollout = Layout(tp=2, pp=2, dp=2, ep=2, zero=1), RolloutLayout(tp=2, dp=4)
    grown = replace(train, dp=64), replace(rollout, dp=64)
    for path, rules in WEIGHT_PATHS.items():
        times = times_of(path, model, train, rollout)
        if "train" in rules.counts:
            assert times_of(path, model, grown[0], rollout) != times
        if "rollout" in rules.counts:
            assert times_of(path, model, train, grown[1]) != times
