from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from scipy.optimize import linear_sum_assignment

from rlhfsim.kernels.device import Device
from rlhfsim.kernels.devices import device_of
from rlhfsim.kernels.links import gather_rate, network
from rlhfsim.specs.frameworks.costs import with_software
from rlhfsim.specs.hardware.hardware import Bandwidth, NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.units import GB, GIB
from rlhfsim.weight_sync import paths, reshard
from rlhfsim.weight_sync.endpoints import PoolPair, Route, route, weights_of
from rlhfsim.weight_sync.weight_sync import SyncCost, every_path, sync

H100 = load_profile("h100_sxm")
DENSE, MOE = resolve_model("llama-3.1-70b"), resolve_model("qwen3-30b-a3b")


def every(
    *layouts: Any, source: Device, target: Device, backend: Backend, same_pool: bool, lora: Lora | None = None
) -> tuple[SyncCost, ...]:
    return every_path(route(*layouts, PoolPair(source, target, same_pool), backend, lora))


def device(gpus: int = 16, profile=H100) -> Device:  # type: ignore[no-untyped-def]
    return device_of(NodeGroup(profile=profile, gpus=gpus, gpus_per_node=8))


def ends(
    train: Layout, rollout: RolloutLayout, *, model=DENSE, same_pool: bool = False, on: Device | None = None
) -> Route:  # type: ignore[no-untyped-def]
    on = on or device()
    return route(model, train, rollout, PoolPair(on, on, same_pool), "megatron")


def priced(
    path: str,
    train: Layout,
    rollout: RolloutLayout,
    *,
    model=DENSE,
    same_pool: bool = False,
    lora: Lora | None = None,
    rdma: bool = True,
) -> SyncCost:  # type: ignore[no-untyped-def]
    return sync(path, model, train, rollout, PoolPair(device(), device(), same_pool, rdma), "megatron", lora)  # type: ignore[arg-type]


TRAIN, ROLLOUT = Layout(tp=8, dp=2), RolloutLayout(tp=8)


# --- what moves


def test_names_of_a_dense_model_are_counted_as_in_its_checkpoint() -> None:
    # llama-3.1-70b: 80 layers of q k v o, gate up down, two norms; embedding, head, final norm
    assert weights_of(DENSE).tensors == 80 * 9 + 3


def test_names_of_a_mixture_of_experts_are_counted_as_in_its_checkpoint() -> None:
    # Qwen3-30B-A3B, a layer: q k v o and two head norms, two norms, router, 128 x 3 experts
    assert weights_of(MOE).tensors == 48 * (6 + 2 + 1 + 128 * 3) + 3 == 18867


def test_shards_of_both_ends_add_up_to_the_model() -> None:
    found = ends(Layout(tp=4, dp=4, ep=8), RolloutLayout(tp=4, dp=4), model=MOE)
    assert found.rollout_shard * 4 == pytest.approx(found.stored)
    dense, experts = found.train_share
    assert (dense, experts) == (1 / 4, 1 / 8)


def test_zero_3_cuts_the_weights_over_every_training_gpu() -> None:
    assert ends(Layout(dp=16, zero=3), ROLLOUT).train_shard == pytest.approx(DENSE.num_params * 2 / 16)


# --- S1: HybridFlow Table 2 exactly


@pytest.mark.parametrize(
    ("tp", "pp", "tp_gen", "pp_gen"), [(8, 1, 2, 1), (4, 2, 2, 1), (8, 2, 4, 2), (8, 1, 8, 1)]
)
def test_reshard_moves_the_volume_of_hybridflow_table_2(tp: int, pp: int, tp_gen: int, pp_gen: int) -> None:
    layout = Layout(tp=tp, pp=pp, dp=2)
    rollout = RolloutLayout(tp=tp_gen, pp=pp_gen, dp=layout.gpus // (tp_gen * pp_gen))
    found = reshard.reshard(ends(layout, rollout, same_pool=True))
    size = DENSE.num_params * 2
    expected = (tp * pp - tp_gen * pp_gen) / (tp_gen * pp_gen * tp * pp) * size
    assert found.bytes_moved / layout.gpus == pytest.approx(expected)
    assert found.rollout_bytes == pytest.approx(expected)


def test_pipeline_stages_to_tensor_ranks_move_seven_eighths_of_the_weights_of_every_replica() -> None:
    # tp1 pp8 dp8 -> tp8 dp8: a GPU holds 1/8 of the layers, needs 1/8 of every layer: 1/64 is both
    found = reshard.reshard(
        ends(Layout(pp=8, dp=8), RolloutLayout(tp=8, dp=8), on=device(64), same_pool=True)
    )
    size = DENSE.num_params * 2
    assert found.bytes_moved == pytest.approx(64 * (1 / 8 - 1 / 64) * size)
    assert found.bytes_moved == pytest.approx(0.99e12, rel=0.01)
    # each domain holds one stage: all of it crosses the network, a NIC a GPU
    assert found.cost.seconds > (1 / 8 - 1 / 64) * size / network(device(64)).value


@pytest.mark.parametrize(
    ("train", "tp_gen"),
    [
        (Layout(tp=2, pp=4, dp=4), 8),
        (Layout(tp=8, dp=4), 2),
        (Layout(tp=4, pp=2, dp=4), 4),
        (Layout(dp=32), 8),
        (Layout(dp=32, zero=3), 8),
        (Layout(dp=32, zero=3), 1),
        (Layout(pp=2, dp=16), 2),
    ],
)
def test_received_bytes_are_those_of_the_best_order_of_rollout_ranks(train: Layout, tp_gen: int) -> None:
    """Every rank by hand: intervals of layers and of width, rollout ranks assigned inside each domain."""
    rollout = RolloutLayout(tp=tp_gen, dp=32 // tp_gen)
    found = reshard.received(ends(train, rollout, on=device(32), same_pool=True))
    stages, slices = (1, 32) if train.zero == 3 else (train.pp, train.tp)
    kept = 0.0
    for domain in range(4):
        ranks = range(8 * domain, 8 * domain + 8)
        shared = [
            [
                max(
                    0.0,
                    min((r % slices + 1) / slices, (g % tp_gen + 1) / tp_gen)
                    - max(r % slices / slices, g % tp_gen / tp_gen),
                )
                / stages
                for g in range(8)
            ]
            for r in ranks
        ]
        rows, columns = linear_sum_assignment(shared, maximize=True)
        kept += sum(shared[i][j] for i, j in zip(rows, columns, strict=True))
    needed = 1 / tp_gen - kept / 32
    assert found.total == pytest.approx(needed * DENSE.num_params * 2, rel=1e-6, abs=1)


def test_experts_that_training_cuts_by_number_and_the_rollout_by_width_do_not_nest() -> None:
    layout = Layout(dp=16, ep=16)
    wide = RolloutLayout(tp=16)
    by_width, by_number = (
        reshard.received(ends(layout, r, model=MOE, same_pool=True)).total
        for r in (wide, replace(wide, ep=16))
    )
    experts = weights_of(MOE).experts * 2
    assert by_width - by_number == pytest.approx((1 / 16 - 1 / 256) * experts)


def test_vanilla_and_deepspeed_chat_move_the_volumes_of_table_2() -> None:
    case = ends(TRAIN, RolloutLayout(tp=2, dp=8), same_pool=True)
    size = DENSE.num_params * 2
    assert reshard.reshard_vanilla(case).bytes_moved / 16 == pytest.approx(7 / 8 * size)
    assert reshard.reshard_deepspeed_chat(case).bytes_moved / 16 == pytest.approx(15 / 16 * size)


def test_zero_redundancy_is_fastest_and_deepspeed_chat_slowest() -> None:
    case = ends(TRAIN, RolloutLayout(tp=2, dp=8), same_pool=True)
    forms = (reshard.reshard, reshard.reshard_vanilla, reshard.reshard_deepspeed_chat)
    zero_redundancy, vanilla, chat = (form(case).cost.seconds for form in forms)
    assert zero_redundancy < vanilla < chat


# --- S3: by hand


def test_a_broadcast_of_a_dense_model_is_bound_by_one_nic() -> None:
    found = priced("broadcast", TRAIN, ROLLOUT)
    wire = DENSE.num_params * 2 / (50 * GB * H100["nic_efficiency"])
    assert found.cost.by_resource()["network"] == pytest.approx(wire)
    calls = DENSE.num_params * 2 / max(GIB, DENSE.vocab * DENSE.hidden * 2) * H100["sync_rpc_latency"]
    assert found.cost.seconds == pytest.approx(wire + calls + H100["sync_start_latency"], rel=0.01)


def test_a_call_per_parameter_costs_its_latency_for_each() -> None:
    bucketed, single = (
        priced("broadcast", TRAIN, ROLLOUT).cost.seconds,
        paths.broadcast_per_parameter(ends(TRAIN, ROLLOUT)).cost.seconds,
    )
    assert single - bucketed > 723 * H100["sync_rpc_latency"] * 0.8


def test_tensor_names_decide_where_experts_are_many() -> None:
    train, rollout = Layout(tp=1, dp=16, ep=8), RolloutLayout(tp=8, dp=2)
    assert paths.broadcast_per_parameter(ends(train, rollout, model=MOE)).cost.bound_by == "overhead"


def test_pools_in_one_nvlink_domain_do_not_cross_the_network() -> None:
    model = resolve_model("llama-3.1-8b")
    found = sync(
        "broadcast",
        model,
        Layout(tp=4),
        RolloutLayout(tp=4),
        PoolPair(device(8), device(8), same=False),
        "megatron",
    )
    assert "network" not in found.cost.by_resource()


def test_stages_of_other_nodes_cross_the_network_before_every_gpu_has_the_model() -> None:
    on, to = device(64), RolloutLayout(tp=8, dp=8)
    beside = ends(Layout(tp=8, dp=8), to, on=on, same_pool=True)
    apart = ends(Layout(pp=8, dp=8), to, on=on, same_pool=True)
    # the model in eight stages, a node each: seven eighths of it over each GPU's NIC
    far = 7 / 8 * DENSE.num_params * 2 / (network(on).value * on["sync_network_efficiency"])
    assert paths.ipc(beside).cost.seconds < 2 < far < paths.ipc(apart).cost.seconds


def test_trainer_and_engine_on_one_gpu_take_turns() -> None:
    case = ends(TRAIN, RolloutLayout(tp=8, dp=2), same_pool=True)
    names = case.weights.tensors * (device()["sync_gather_latency"] + device()["sync_load_latency"])
    assert paths.ipc(case).cost.by_resource()["overhead"] > names


def test_names_of_a_broadcast_hide_behind_its_bytes() -> None:
    case = ends(TRAIN, ROLLOUT)
    apart, together = (paths.broadcast(case, overlapped=o).cost.seconds for o in (False, True))
    assert together < apart


def test_ranks_that_join_on_the_root_node_bring_their_nics() -> None:
    case = ends(TRAIN, ROLLOUT)
    narrow, wide = paths.broadcast(case).cost.seconds, paths.broadcast(case, nics=8).cost.seconds
    assert wide < narrow / 3


# --- S5


def test_p2p_moves_each_shard_once_per_rollout_gpu() -> None:
    found = paths.p2p(ends(TRAIN, RolloutLayout(tp=8, dp=2)), whole=True)
    assert found.bytes_moved == pytest.approx(2 * DENSE.num_params * 2)
    shard = DENSE.num_params * 2 / 8
    assert found.cost.by_resource()["network"] == pytest.approx(shard / network(device()).value)


def test_few_senders_slow_p2p() -> None:
    few = paths.p2p(ends(Layout(tp=4, dp=1), RolloutLayout(tp=4, dp=4)), whole=True)
    many = paths.p2p(ends(Layout(tp=4, dp=4), RolloutLayout(tp=4, dp=4)), whole=True)
    assert few.cost.seconds > many.cost.seconds


# --- limits and monotonicity


def test_equal_layouts_in_one_pool_need_no_sync() -> None:
    found = priced("none", Layout(tp=8, dp=2), RolloutLayout(tp=8, dp=2), same_pool=True)
    assert found.available
    assert found.cost.seconds == found.bytes_moved == found.bytes_per_s == 0


def test_one_gpu_gathers_nothing_in_place() -> None:
    model = resolve_model("qwen3-0.6b")
    found = reshard.reshard(ends(Layout(), RolloutLayout(), model=model, same_pool=True))
    assert found.bytes_moved == 0


@pytest.mark.parametrize("field", ["nic", "pcie", "hbm"])
def test_more_bandwidth_never_makes_a_path_slower(field: str) -> None:
    rate = getattr(H100, field)
    faster = replace(H100, **{field: Bandwidth(value=rate.value * 2, source="test")})
    for same in (False, True):
        slow, fast = (
            every(
                DENSE,
                TRAIN,
                RolloutLayout(tp=8, dp=2),
                source=device(profile=p),
                target=device(profile=p),
                backend="megatron",
                same_pool=same,
            )
            for p in (H100, faster)
        )
        for a, b in zip(slow, fast, strict=True):
            assert b.cost.seconds <= a.cost.seconds * (1 + 1e-9), a.name


def test_a_bigger_model_is_never_faster() -> None:
    models = [resolve_model(n) for n in ("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b")]
    layouts = (Layout(tp=8, dp=2), RolloutLayout(tp=8, dp=2))
    rows = [
        every(m, *layouts, source=device(), target=device(), backend="megatron", same_pool=True)
        for m in models
    ]
    for small, big in pairwise(rows):
        for a, b in zip(small, big, strict=True):
            assert a.cost.seconds <= b.cost.seconds * (1 + 1e-9), a.name


def test_every_interval_holds_its_value() -> None:
    for cost in every(
        MOE,
        Layout(tp=4, pp=2, dp=2, ep=4),
        RolloutLayout(tp=8, dp=2),
        source=device(),
        target=device(),
        backend="megatron",
        same_pool=False,
    ):
        low, high = cost.cost.interval
        assert 0 <= low <= cost.cost.seconds <= high, cost.name


# --- who may use what


def test_paths_in_place_need_the_same_pool_and_networks_need_two() -> None:
    for path in ("none", "reshard", "ipc"):
        assert not priced(path, TRAIN, ROLLOUT, same_pool=False).available
    for path in ("broadcast", "p2p"):
        assert not priced(path, TRAIN, RolloutLayout(tp=8, dp=2), same_pool=True).available


def test_p2p_needs_rdma() -> None:
    assert priced("p2p", TRAIN, ROLLOUT).available
    assert "RDMA" in (priced("p2p", TRAIN, ROLLOUT, rdma=False).why_not or "")


def test_adapters_need_an_adapter_policy_and_move_little() -> None:
    assert not priced("lora", TRAIN, ROLLOUT).available
    found = priced("lora", TRAIN, ROLLOUT, lora=Lora(rank=16))
    assert found.available
    assert found.bytes_moved < found.model_bytes / 100


def test_local_disks_of_other_nodes_cannot_be_read() -> None:
    by_name = {
        c.name: c
        for c in every(
            DENSE, TRAIN, ROLLOUT, source=device(), target=device(), backend="megatron", same_pool=False
        )
    }
    assert not by_name["disk-local"].available
    assert by_name["disk-shared"].available


def test_quantising_halves_the_wire_and_needs_fp8_hardware() -> None:
    def named(gpu: str) -> dict[str, SyncCost]:
        on = device(profile=load_profile(gpu))
        return {
            c.name: c
            for c in every(DENSE, TRAIN, ROLLOUT, source=on, target=on, backend="megatron", same_pool=False)
        }

    h100 = named("h100_sxm")
    assert h100["quantised"].bytes_moved == pytest.approx(h100["broadcast"].bytes_moved / 2)
    assert h100["quantised"].available
    assert not named("a100_sxm")["quantised"].available


def test_an_engine_that_quantises_what_arrives_is_sent_bf16() -> None:
    small = RolloutLayout(tp=8, dp=2, precision="fp8")

    def by(framework: str) -> paths.Priced:
        return paths.broadcast(ends(TRAIN, small, on=device(profile=with_software(H100, framework))))

    nemo, verl, slime = map(by, ("nemo-rl", "verl", "slime"))
    assert nemo.bytes_moved == verl.bytes_moved == DENSE.num_params * 2
    assert slime.bytes_moved == pytest.approx(DENSE.num_params, rel=0.05)
    # 141 GB over one NIC, nothing else of a dense model is as slow
    on = device()
    assert nemo.cost.seconds == pytest.approx(DENSE.num_params * 2 / network(on).value, rel=0.1)
    assert nemo.cost.seconds > 1.5 * slime.cost.seconds
    bf16 = paths.broadcast(ends(TRAIN, ROLLOUT, on=device(profile=with_software(H100, "nemo-rl"))))
    assert bf16.cost.seconds == pytest.approx(nemo.cost.seconds, rel=0.1)


@pytest.mark.parametrize(
    ("model", "share", "published"),
    [
        ("qwen3-30b-a3b", (0.045, 0.045), 8.24e9),  # vime pull request 392
        ("qwen3-30b-a3b", (0.008, 0.011), 1.8e9),  # verl pull request 6974
        ("qwen3-0.6b", (0.005, 0.01), 28e6),  # TRL pull request 5417: 20 to 35 MB, over 99 % unchanged
    ],
)
def test_published_bytes_of_a_delta_are_six_for_each_element_that_changed(
    model: str, share: tuple[float, float], published: float
) -> None:
    params = resolve_model(model).num_params
    low, high = (6 * params * x for x in share)
    assert 0.98 * low <= published <= 1.02 * high


def test_a_delta_moves_six_bytes_per_changed_element() -> None:
    found = paths.delta(ends(TRAIN, ROLLOUT))
    assert found.bytes_moved == pytest.approx(DENSE.num_params * H100["sync_delta_density"] * 6)


def test_host_memory_holds_the_model_once() -> None:
    assert priced("host", TRAIN, ROLLOUT).extra_host_bytes == pytest.approx(DENSE.num_params * 2)


def test_an_unavailable_path_is_priced_all_the_same() -> None:
    assert priced("ipc", TRAIN, ROLLOUT).cost.seconds > 0


# --- the worked figure of 140 GB in 10 s


def test_ten_seconds_for_140_gb_are_14_gb_per_second_and_only_disks_are_that_slow() -> None:
    found = {
        c.name: c
        for c in every(
            DENSE, TRAIN, ROLLOUT, source=device(), target=device(), backend="megatron", same_pool=False
        )
    }
    assert found["broadcast"].model_bytes == pytest.approx(141 * GB, rel=0.01)
    assert found["broadcast"].bytes_per_s > 14 * GB
    assert found["disk-local"].bytes_per_s == pytest.approx(14 * GB, rel=0.15)
    assert found["disk-shared"].bytes_per_s < 14 * GB


def test_the_gather_runs_at_the_rate_of_its_group() -> None:
    case = ends(TRAIN, ROLLOUT)
    assert case.gather_ranks == 8
    assert gather_rate(device(), 8).resource == "nvlink"
