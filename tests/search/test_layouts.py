"""The enumerated layouts: legal, complete on small cases, and filling their pool."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from rlhfsim.cli.constraints import limit_of
from rlhfsim.errors import RlhfsimError
from rlhfsim.search.cache import SearchCache
from rlhfsim.search.degrees import splits_layers
from rlhfsim.search.layout_shapes import ModelCut, Shapes, columns_of_shapes
from rlhfsim.search.layouts import role_layouts
from rlhfsim.search.options import PriceKey, broken_limit, role_variants
from rlhfsim.search.request import Request
from rlhfsim.search.role_fields import OPTIMIZER_SHARES
from rlhfsim.search.rollout_layouts import rollout_layouts
from rlhfsim.search.scope import ALONE
from rlhfsim.specs.frameworks.runs import ANY, framework
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.backends import BACKENDS, Backend, violation
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.layout_columns import FIELDS, columns_of
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if.design import design
from rlhfsim.what_if.engine import Question, answer

MODEL = resolve_model("8b")


def request(backend: Backend = "deepspeed", **changes: object) -> Request:
    given: dict[str, object] = {"cluster": parse_cluster(16, "h100"), "workload": Workload(model="8b")}
    return Request(backend=backend, **(given | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("role", ["actor", "reference"])
def test_every_layout_fills_the_pool_and_runs_on_the_backend(backend: Backend, role: str) -> None:
    asked = replace(request(backend), framework=ANY)
    space = role_layouts(asked, role, MODEL, 16, 8)
    assert list(space.layouts)
    for layout in space.layouts:
        assert layout.gpus == 16
        assert violation(backend, layout) is None
        assert splits_layers(MODEL, layout.pp)


def test_deepspeed_offers_zero_alone_autotp_a_pipeline_or_both() -> None:
    space = role_layouts(request(), "actor", MODEL, 16, 8)
    shapes = {(s.tp, s.pp, s.zero) for s in space.layouts}
    assert {(1, 1, 1), (1, 1, 2), (1, 1, 3), (2, 1, 1), (2, 1, 2), (8, 1, 2), (1, 4, 1)} <= shapes
    assert (4, 2, 1) in shapes
    assert not any(zero > 1 for _, pp, zero in shapes if pp > 1)
    assert (2, 1, 3) not in shapes


def test_a_fixed_field_is_the_only_one_tried() -> None:
    fixed = request("megatron", fix={"actor": {"tp": 4, "pp": 2, "cp": 1, "recompute": "full"}})
    space = role_layouts(fixed, "actor", MODEL, 16, 8)
    assert {(s.tp, s.pp, s.dp, s.recompute) for s in space.layouts} == {(4, 2, 2, "full")}


def test_forbidding_offload_and_recompute_leaves_neither() -> None:
    space = role_layouts(request(forbid=frozenset({"offload", "recompute"})), "actor", MODEL, 16, 8)
    assert {(s.offload_optimizer, s.recompute) for s in space.layouts} == {("none", "none")}


def test_a_share_of_the_optimizer_goes_to_the_host_where_the_framework_runs_it() -> None:
    def shares(asked: Request) -> set[float]:
        space = role_layouts(asked, "actor", MODEL, 16, 8)
        return {s.offload_fraction for s in space.layouts}

    assert shares(request("megatron", framework="verl")) == {*OPTIMIZER_SHARES, 1.0}
    assert shares(request("megatron", framework="verl", forbid=frozenset({"partial-offload"}))) == {1.0}
    assert shares(request()) == {1.0}
    half = Layout(dp=2, zero=3, offload_optimizer="cpu", offload_fraction=0.5)
    lacks = framework("rlhfsim").lacks_layout("deepspeed", half, Workload(), "actor")
    assert lacks is not None
    assert lacks.code == "partial-optimizer-offload-not-run"
    assert violation("deepspeed", replace(half, zero=2)) is not None


def test_copies_of_shards_stay_inside_nodes_and_leave_the_network_to_gradients() -> None:
    def shards(asked: Request, gpus: int) -> set[int | None]:
        space = role_layouts(asked, "actor", MODEL, gpus, 8)
        return {s.shards for s in space.layouts}

    assert shards(request("fsdp2"), 16) == {None, 8}
    assert shards(request("fsdp2"), 8) == {None}
    assert shards(request("fsdp2", forbid=frozenset({"hsdp"})), 16) == {None}
    assert shards(request("fsdp2", framework="nemo-rl"), 16) == {None}
    assert shards(request("fsdp2", fix={"actor": {"shards": 4}}), 16) == {4}
    assert shards(request("fsdp2", fix={"actor": {"shards": 3}}), 16) == set()
    assert shards(request("megatron", framework="verl", fix={"actor": {"shards": 4}}), 16) == set()
    assert violation("megatron", Layout(dp=16, shards=8)) is not None


def test_a_share_of_the_optimizer_on_the_host_can_be_asked_for() -> None:
    limit = limit_of("actor.offload_fraction=0.5", "--fix")
    asked = request("megatron", framework="verl", limits=(limit,))
    space = role_layouts(asked, "actor", MODEL, 8, 8)
    options = [r for x in space.layouts for r in role_variants(asked, "actor", x)]
    kept = {r.layout.offload_fraction for r in options if not broken_limit(asked, "actor", r)}
    assert kept == {0.5}


def test_half_of_the_optimizer_on_the_host_beats_all_and_none_of_it() -> None:
    batch = Workload(
        model="32b",
        algorithm="grpo",
        prompts=96,  # 48 samples an update: three ranks divide them
        samples=8,
        mini_batches=16,
        kl=False,
        reward=Reward(rules=Rules()),
    )
    asked = Request(cluster=parse_cluster(12, "h100"), workload=batch, framework="verl", backend="megatron")
    found, without = (
        answer(Question(request=replace(asked, forbid=frozenset(forbidden)), scope=ALONE)).best
        for forbidden in ((), ("partial-offload",))
    )
    assert found is not None
    assert without is not None
    assert found.placement.actor.layout.offload_fraction == 0.5
    assert found.seconds < 0.9 * without.seconds  # 254 s against 296 s


def test_more_ranks_than_sequences_is_refused_with_the_reason() -> None:
    small = request(workload=Workload(model="8b", prompts=8))
    space = role_layouts(small, "actor", MODEL, 16, 8)
    assert all(x.dp * x.micro_batch <= 8 for x in space.layouts)
    assert any("too few sequences" in reason and n for reason, n in space.dropped.items())


def test_rollout_tp_divides_heads_and_stays_in_a_node() -> None:
    model = resolve_model("qwen2.5-7b")  # 28 heads
    layouts = rollout_layouts(request(), model, 16, parse_cluster(16, "h100").node_group)
    assert {x.tp for x in layouts} == {1, 2, 4}
    assert all(x.gpus == 16 for x in layouts)


def test_61_layers_get_uneven_pipelines_in_powers_of_two() -> None:
    model = resolve_model("deepseek-v3")
    wide = request("megatron", workload=Workload(model="deepseek-v3"), cluster=parse_cluster(64, "h100"))
    space = role_layouts(wide, "actor", model, 64, 8)
    assert {x.pp for x in space.layouts} == {1, 2, 4, 8, 16}
    group = wide.cluster.node_group
    assert {x.pp for x in rollout_layouts(replace(wide, framework=ANY), model, 64, group)} == {1, 2, 4, 8}
    verl = replace(wide, framework="verl")
    assert {x.pp for x in rollout_layouts(verl, model, 64, group)} == {1}  # verl's engines have no pipeline


def test_a_replica_of_our_own_stays_inside_a_node() -> None:
    model = resolve_model("70b")
    for gpus, each, widest in ((64, 8, 8), (12, 8, 4), (12, 6, 2), (8, 4, 4)):
        group = parse_cluster(gpus, "h100", gpus_per_node=each).node_group
        asked = request(cluster=parse_cluster(gpus, "h100", gpus_per_node=each))
        found = rollout_layouts(asked, model, gpus, group)
        assert max(x.replica_gpus for x in found) == widest


def replicas(model: str, gpus: int, framework: str | None = ANY, gpu: str = "h100") -> set[tuple[int, ...]]:
    """TP, PP, attention DP and EP of the replicas that compete."""
    cluster = parse_cluster(gpus, gpu)
    asked = request("megatron", cluster=cluster, framework=framework, workload=Workload(model=model))
    layouts = rollout_layouts(asked, resolve_model(model), gpus, cluster.node_group)
    assert all(x.gpus == gpus for x in layouts)
    return {(x.tp, x.pp, x.attention_dp, x.ep) for x in layouts}


def test_a_model_that_a_node_holds_keeps_its_replicas_small() -> None:
    assert {(tp, adp) for tp, _, adp, _ in replicas("70b", 64)} == {(1, 1), (2, 1), (4, 1), (8, 1)}
    assert max(tp for tp, *_ in replicas("qwen3-30b-a3b", 64)) == 8
    assert {adp for *_, adp, _ in replicas("qwen3-30b-a3b", 64)} == {1}


def test_a_dense_model_larger_than_a_node_runs_on_several() -> None:
    found = replicas("405b", 64)
    assert {(16, 1, 1, 1), (32, 1, 1, 1), (8, 2, 1, 1), (8, 8, 1, 1)} <= found
    assert all(tp == 8 for tp, pp, *_ in found if pp > 1)  # TP inside a node, PP across
    assert (16, 1, 1, 1) not in replicas("405b", 64, gpu="b200")  # a node of them holds it


def test_a_large_moe_has_attention_data_parallelism_with_its_experts_over_all() -> None:
    found = replicas("deepseek-v3", 128)
    assert {(16, 1, 1, 1), (32, 1, 1, 32), (1, 1, 32, 32), (8, 1, 4, 32), (1, 1, 64, 64)} <= found
    assert all(ep == tp * adp and tp * adp % 8 == 0 for tp, _, adp, ep in found if adp > 1)
    assert {adp for *_, adp, _ in replicas("deepseek-v3", 128, "nemo-rl")} == {1}  # its table has none
    assert {pp for _, pp, *_ in replicas("deepseek-v3", 128, "verl")} == {1}


def test_fsdp2_offloads_weights_with_the_optimizer_under_stage_3() -> None:
    cluster = parse_cluster(2, "h800")
    request = Request(cluster=cluster, workload=Workload(algorithm="grpo"), backend="fsdp2", framework="verl")
    model = resolve_model("14b")
    found = role_layouts(request, "actor", model, 2, 2)
    away = [x for x in found.layouts if x.offload_optimizer == "cpu"]
    assert away
    assert all(x.offload_params == "cpu" and x.zero == 3 for x in away)


def test_a_framework_that_always_shards_has_layouts_on_one_gpu() -> None:
    def stages(framework: str, gpus: int, tp: int) -> set[int]:
        request = Request(
            cluster=parse_cluster(gpus, "h100"), workload=Workload(), backend="fsdp2", framework=framework
        )
        found = role_layouts(request, "actor", resolve_model("3b"), gpus, gpus)
        return {x.zero for x in found.layouts if x.tp == tp and x.offload_params == "none"}

    assert stages("verl", 1, 1) == {2, 3}
    assert stages("nemo-rl", 1, 1) == {3}
    assert stages("nemo-rl", 2, 2) == {3}


@pytest.mark.parametrize(("framework_", "base"), [("openrlhf", "nf4"), ("rlhfsim", None)])
def test_a_base_in_4_bit_competes_where_it_is_allowed_and_run(framework_: str, base: str | None) -> None:
    batch = Workload(model="14b", algorithm="grpo", prompts=64, samples=8, reward=Reward(rules=Rules()))
    asked = Request(
        cluster=parse_cluster(1, "h100"), workload=batch, framework=framework_, allow=frozenset({"qlora"})
    )
    best = design(asked, explain=False, rivals=False, simplest_s=None).best
    assert best is not None
    assert (best.workload.lora and best.workload.lora.base) == base
    other = design(replace(asked, allow=frozenset()), explain=False, rivals=False, simplest_s=None).best
    assert other is None or other.workload.lora is None


def test_like_roles_share_their_layouts_unless_a_wish_or_a_refusal_names_one() -> None:
    plain, wished = request(), replace(request(), fix={"critic": {"tp": 2}})
    for asked, shared in ((plain, True), (wished, False)):
        models = models_of(asked.workload)
        tables = SearchCache().of(asked, models)
        actor, critic = (
            tables.space(asked, models, PriceKey(hardware=0, gpus=16, role=s)) for s in ("actor", "critic")
        )
        own = role_layouts(asked, "critic", models.of("critic"), 16, 8)
        assert (actor is critic) is shared
        assert critic == own


def test_layouts_are_counted_without_being_made_and_their_shapes_are_shared() -> None:
    asked, known = request("megatron"), dict[ModelCut, Shapes]()
    spaces = [role_layouts(asked, "actor", MODEL, gpus, 8, known) for gpus in (64, 128)]
    for space in spaces:
        homes = Counter((x.offload_optimizer, x.offload_params, x.zero) for x in space.layouts)
        assert homes
        assert space.homes == homes
    plain = role_layouts(asked, "actor", MODEL, 128, 8)
    assert list(plain.layouts) == list(spaces[1].layouts)
    assert {id(b.shapes) for b in spaces[0].blocks} & {id(b.shapes) for b in spaces[1].blocks}


@pytest.mark.parametrize("backend", ["megatron", "deepspeed", "fsdp2"])
def test_columns_of_shapes_are_those_of_their_layouts(backend: str) -> None:
    space = role_layouts(request(backend), "actor", MODEL, 32, 8)
    whole, made = columns_of_shapes(list(space.shapes)), columns_of(space.layouts)
    assert len(whole) == len(made) > 40
    assert set(whole.gpus.tolist()) == {32}
    for name in FIELDS:
        assert getattr(whole, name).tolist() == getattr(made, name).tolist(), name


def test_layouts_that_a_cache_shares_have_the_dispatcher_of_their_own_gpus() -> None:
    cache, found = SearchCache(), {}
    for gpu in ("h100", "a100"):
        work = Workload(model="qwen3-30b-a3b", algorithm="grpo")
        asked = request("megatron", cluster=parse_cluster(16, gpu), workload=work, framework="nemo-rl")
        models = models_of(work)
        space = cache.of(asked, models).space(asked, models, PriceKey(hardware=0, gpus=16, role="actor"))
        found[gpu] = {x.dispatcher for x in space.layouts if x.ep > 1}
    assert found["h100"] & {"deepep", "hybridep"}
    assert found["a100"] == {"alltoall"}


def test_a_layout_of_several_teachers_is_one_that_each_can_have() -> None:
    dense, experts = resolve_model("qwen3-8b"), resolve_model("qwen3-30b-a3b")
    asked = replace(request("megatron"), framework=ANY)

    def layouts(model: ModelSpec) -> set[tuple[int, int, int]]:
        space = role_layouts(asked, "reference", model, 16, 8)
        return {(x.tp, x.pp, x.ep) for x in space.layouts}

    both = layouts(replace(dense, others=(experts,)))
    assert both == layouts(replace(experts, others=(dense,)))
    assert both == layouts(dense) & {(tp, pp, 1) for tp, pp, _ in layouts(experts)}
    assert layouts(experts) - both
    three, four = (
        replace(dense, attention=replace(dense.attention, num_heads=n, num_kv_heads=n)) for n in (3, 4)
    )
    assert not splits_layers(replace(dense, others=(replace(dense, num_layers=35),)), 3)
    with pytest.raises(RlhfsimError, match="does not divide the 3 heads"):
        replace(four, others=(three,)).check_tp(2)
