"""Layouts that are alike for the weight sync: the same seconds on every path."""

from __future__ import annotations

from itertools import product

import pytest

from rlhfsim import parse_cluster
from rlhfsim.kernels.devices import device_on
from rlhfsim.search.options import ALONE, sync_layout
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
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


def priced(model: ModelSpec, train: Layout) -> list[tuple[bool, float]]:
    """Whether each path joins it to a rollout, and in how many seconds; in one pool and apart."""
    found = (
        sync(
            path,
            model,
            train,
            RolloutLayout(tp=4, dp=8),
            source=DEVICE,
            target=DEVICE,
            backend="megatron",
            same_pool=joined,
        )
        for path, joined in product(WEIGHT_PATHS, (True, False))
    )
    return [(cost.available, cost.cost.seconds) for cost in found]


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
