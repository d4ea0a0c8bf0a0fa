"""Many pairs of layouts priced at once take what each takes alone, to the last digit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from rlhfsim.kernels.devices import device_of
from rlhfsim.kernels.links import (
    Stage,
    chosen,
    gather_rate,
    handled,
    moved,
    network,
    pipelined,
    scale_up,
    serial,
    slower,
)
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.hardware.wan import WanLink
from rlhfsim.specs.model.presets import preset
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.placement.layout_columns import columns_of, rollout_columns_of
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS, WeightPath
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.weight_sync import paths, storage
from rlhfsim.weight_sync.endpoints import PoolPair, Route, route
from rlhfsim.weight_sync.stages import Priced
from rlhfsim.weight_sync.weight_sync import VARIANTS, cost, seconds

H100, RACK = device_of(node_group("h100", 64)), device_of(node_group("gb200", 72))
AWAY = device_of(
    replace(node_group("h100", 64), wan=WanLink(rtt=0.06, bandwidth=1.25e9, loss=1e-3, streams=16))
)
POOLS = {
    "one pool": PoolPair(H100, H100, True),
    "two pools": PoolPair(H100, H100, False),
    "no RDMA": PoolPair(H100, H100, False, rdma=False),
    "a rack": PoolPair(RACK, RACK, False),
    "other GPUs": PoolPair(H100, RACK, False, rdma=False),
    "another region": PoolPair(H100, AWAY, False),
}
MODELS = ("llama-3.1-8b", "qwen3-30b-a3b")
OTHERS: tuple[Callable[[Route], Priced], ...] = (
    paths.p2p_staged,
    lambda ends: paths.ipc(ends, prequantised=True),
    lambda ends: paths.p2p(ends, whole=True, sliced=True),
    lambda ends: paths.broadcast(ends, nics=4, lanes=False, overlapped=False, loaded=False),
)
"""Forms that published measurements alone have."""
Pairs = list[tuple[Layout, RolloutLayout]]


def drawn(rng: random.Random) -> tuple[Layout, RolloutLayout]:
    tp, dp = rng.choice((1, 2, 4, 8)), rng.choice((1, 2, 4, 8, 16))
    cut, replicas = rng.choice((1, 2, 8, 16)), rng.choice((1, 2, 6))
    ep, served = (rng.choice([n for n in (1, 2, 4, 8) if n <= most]) for most in (tp * dp, cut * replicas))
    train = Layout(
        tp=tp, dp=dp, pp=rng.choice((1, 2, 4)), ep=ep, etp=rng.choice((1, tp)), zero=rng.choice((1, 3))
    )
    rollout = RolloutLayout(
        tp=cut,
        attention_dp=replicas,
        ep=served,
        pp=rng.choice((1, 1, 2)),
        dp=rng.choice((1, 2, 8)),
        precision=rng.choice(("bf16", "fp8", "mxfp4")),
        bf16_attention=rng.random() < 0.5,
        bf16_layers=rng.choice((0, 4)),
    )
    return train, rollout


def pairs(count: int, *equal: tuple[Layout, RolloutLayout]) -> Pairs:
    rng = random.Random(7)
    return [*equal, *(drawn(rng) for _ in range(count))]


def ends(model: str, pools: PoolPair, train: Layout, rollout: RolloutLayout) -> Route:
    return route(preset(model), train, rollout, pools, "megatron", Lora(rank=16) if pools.rdma else None)


EQUAL = Layout(tp=4, pp=2, dp=2, zero=1), RolloutLayout(tp=4, pp=2, dp=2)


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("model", MODELS)
def test_pairs_at_once_take_what_each_takes_and_are_refused_where_each_is(model: str, pools: str) -> None:
    some = pairs(150, EQUAL)
    routes = [ends(model, POOLS[pools], *pair) for pair in some]
    for path in WEIGHT_PATHS:
        costs = [cost(path, one) for one in routes]
        alone = [one.cost.seconds if one.available else inf for one in costs]
        assert seconds(path, routes[-1], some).tolist() == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize(("path", "pools"), [("none", "one pool"), ("p2p", "other GPUs")])
def test_one_path_may_join_some_pairs_and_not_others(path: WeightPath, pools: str) -> None:
    found = seconds(path, ends(MODELS[0], POOLS[pools], *EQUAL), pairs(150, EQUAL))
    assert set(np.isinf(found).tolist()) == {True, False}


def alike(some: Pairs) -> list[Pairs]:
    """Pairs that columns may hold: of one precision, and all cut over data-parallel ranks or none."""
    kinds = [(train.zero, rollout.precision) for train, rollout in some]
    plain = [(train, replace(rollout, bf16_attention=False, bf16_layers=0)) for train, rollout in some]
    return [[p for p, own in zip(plain, kinds, strict=True) if own == kind] for kind in sorted(set(kinds))]


def columns(model: str, pools: PoolPair, some: Pairs) -> Route:
    train, rollout = zip(*some, strict=True)
    one = ends(model, pools, *some[0])
    return replace(one, train=columns_of(train), rollout=rollout_columns_of(rollout))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pools", ["one pool", "two pools", "a rack"])
def test_every_form_of_a_path_prices_columns(model: str, pools: str) -> None:
    forms = [*(variant.price for variant in VARIANTS.values()), *OTHERS, storage.host_update]
    for some in alike(pairs(60, EQUAL)):
        routes = [ends(model, POOLS[pools], *pair) for pair in some]
        together = columns(model, POOLS[pools], some)
        for price in forms:
            alone, priced = [price(one) for one in routes], price(together)
            for name in ("bytes_moved", "train_bytes", "rollout_bytes", "host_bytes"):
                each = [getattr(one, name) for one in alone]
                assert spread(getattr(priced, name), len(some)) == pytest.approx(each, rel=1e-12)
            took = [one.cost.seconds for one in alone]
            assert spread(priced.cost.seconds, len(some)) == pytest.approx(took, rel=1e-12)


def spread(column: Any, count: int) -> list[float]:
    """Entries of a column, or a number for each."""
    return listed(np.broadcast_to(column, count))


# --- links -----------------------------------------------------------------------------------------------


def listed(column: Any) -> list[float]:
    """Entries of a column."""
    entries: list[float] = column.tolist()
    return entries


def stages(*columns: Sequence[float]) -> list[Stage]:
    links = network(H100), scale_up(H100), network(RACK)
    return [(moved(np.array(column), link),) for column, link in zip(columns, links, strict=True)]


def test_the_slowest_stage_of_a_pipeline_is_each_transfers_own() -> None:
    sizes = ([1e9, 0.0, 4e9, 2e10], [8e9, 8e11, 0.0, 0.0], [0.0, 3e9, 5e9, 2e10])
    for join in (lambda x: pipelined(x, 5), serial):
        alone = [listed(join(stages(*([n] for n in row))).seconds)[0] for row in zip(*sizes, strict=True)]
        assert listed(join(stages(*sizes)).seconds) == pytest.approx(alone, rel=1e-12)


def test_transfers_that_are_equally_slow_count_the_first_stage_alone() -> None:
    one = moved(np.array([1e9, 2e9]), network(H100))
    both = [(one,), (one,)]
    assert listed(pipelined(both, 4).seconds) == pytest.approx(listed(one.seconds * (2 / 4 + 3 / 4)))


def test_links_are_chosen_transfer_by_transfer() -> None:
    fast, slow = scale_up(H100), network(H100)
    assert chosen(np.array([True, False]), fast, slow).value.tolist() == [fast.value, slow.value]
    bundles = slow.scaled(np.array([1, 4, 16]))
    assert slower(fast, bundles).value.tolist() == [slow.value, 4 * slow.value, fast.value]
    ranks = (1, 8, 16, 64)
    each = [gather_rate(H100, n).value for n in ranks]
    assert gather_rate(H100, np.array(ranks)).value.tolist() == each


def test_counts_below_none_take_nothing_in_columns_too() -> None:
    found = handled(np.array([-1.0, 0.0, 3.0]), H100, "sync_load_latency").seconds
    assert listed(found) == pytest.approx([0, 0, 3 * H100["sync_load_latency"]])
