"""How tokens reach the experts of a rollout: typed, left open, chosen and written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhfsim.cli.planned import fixed_fields
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.settings import FrameworkSettings
from rlhfsim.interchange.dispatching import in_megatron, in_sglang, in_vllm
from rlhfsim.interchange.table import FixedKey, Key, bare
from rlhfsim.search.dispatchers import training_dispatcher
from rlhfsim.search.request import Request
from rlhfsim.search.rollout_layouts import rollout_layouts
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.presets import preset
from rlhfsim.specs.placement.layout import RolloutLayout
from rlhfsim.specs.workload.workload import Workload

MODEL = preset("deepseek-v3")
FIXED = {"tp": 8, "ep": 16}


def request(framework: str | None = "verl", fabric: str | None = None, **fix: int | str) -> Request:
    cluster = parse_cluster(32)
    if fabric:
        cluster = replace(cluster, node_groups=tuple(replace(g, fabric=fabric) for g in cluster.node_groups))
    work = Workload(algorithm="grpo", model="deepseek-v3")
    return Request(
        cluster=cluster,
        workload=work,
        backend="megatron",
        framework=framework,
        fix={"rollout": {**FIXED, **fix}},
    )


def dispatchers(asked: Request) -> set[str | None]:
    layouts = rollout_layouts(asked, MODEL, 32, asked.cluster.node_group)
    assert {(x.attention_dp, x.ep) for x in layouts} == {(2, 16)}
    return {x.dispatcher for x in layouts}


def test_what_is_typed_is_the_dispatcher_of_every_layout() -> None:
    typed = fixed_fields("rollout", "tp=8,ep=16,dispatcher=deepep-ll", "--rollout")
    assert typed == {**FIXED, "dispatcher": "deepep-ll"}
    assert dispatchers(request("any", dispatcher="alltoall")) == {"alltoall"}


def test_the_search_takes_the_fastest_that_the_framework_runs_and_leaves_it_open_without_one() -> None:
    assert dispatchers(request()) == {"deepep-ll"}
    assert dispatchers(request(fabric="efa")) == {"allgather"}
    assert dispatchers(request("any")) == {None}
    assert training_dispatcher(request(), MODEL, 16) == "deepep"
    assert training_dispatcher(request("skyrl"), MODEL, 16) == "alltoall"
    assert training_dispatcher(request("any"), MODEL, 16) is None
    assert training_dispatcher(request(), MODEL, 1) is None


def test_a_dispatcher_needs_experts_on_every_gpu_of_a_replica() -> None:
    with pytest.raises(RlhfsimError, match="ep 8 on 16"):
        RolloutLayout(tp=8, attention_dp=2, ep=8, dispatcher="deepep-ll")
    assert RolloutLayout(tp=8, attention_dp=2, ep=16).open_dispatcher
    assert not RolloutLayout(tp=8, attention_dp=2, ep=16, dispatcher="allgather").open_dispatcher
    assert "EP16 deepep-ll" in RolloutLayout(tp=8, attention_dp=2, ep=16, dispatcher="deepep-ll").label


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (in_megatron("actor", "+megatron.", flag=True), ("alltoall", "allgather", "deepep")),
        (in_megatron("actor", "++megatron."), ("alltoall", "allgather", "deepep", "hybridep")),
        (in_megatron("actor", "--", flag=True), ("alltoall", "allgather", "deepep")),
        ((in_vllm("+engine.all2all_backend"),), ("allgather", "deepep", "deepep-ll")),
        (in_sglang("--sglang-"), ("allgather", "deepep", "deepep-ll")),
    ],
)
def test_what_the_rows_write_reads_back(rows: tuple[Key | FixedKey, ...], names: tuple[str, ...]) -> None:
    for name in names:
        first = rows[0]
        assert isinstance(first, Key)
        written = {bare(first.key): first.codec.write(name)}
        for row in rows[1:]:
            assert isinstance(row, FixedKey)
            if row.when.endswith(f"dispatcher={name}"):
                written[bare(row.key)] = row.value
        settings = FrameworkSettings(written, "written")
        assert first.codec.read(settings, (bare(first.key),), None) == name
    assert first.codec.read(FrameworkSettings({}, "written"), (bare(first.key),), None) is None
