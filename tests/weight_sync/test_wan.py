"""Weight syncs to a second region: TCP's rate by hand, what crosses, and where plans may not be."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import rlhfsim
from rlhfsim.cli.design import design as design_command
from rlhfsim.cli.sync import sync as sync_command
from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.devices import device_of
from rlhfsim.kernels.links import network
from rlhfsim.kernels.wan import MSS_BYTES, ramp, wan_rate, window
from rlhfsim.plan import read_plan
from rlhfsim.present.regions import link_words, reached
from rlhfsim.present.reproduce import design_arguments
from rlhfsim.search.request import Request
from rlhfsim.search.space import partitions
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.hardware.wan import WanLink
from rlhfsim.specs.model.presets import preset
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.specs.scenario import load_scenario
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.weight_sync.endpoints import PoolPair, Route, route
from rlhfsim.weight_sync.weight_sync import VARIANTS
from rlhfsim.what_if.plan_files import cluster_of
from rlhfsim.what_if.unasked import sent_changes
from rlhfsim.what_if.verdict import refusal

LINK = WanLink(rtt=0.06, bandwidth=1.25e9, loss=1e-3, streams=16)
MODEL = preset("qwen2.5-32b")


def device(link: WanLink | None = LINK) -> Device:
    return device_of(replace(node_group("h100", 32), wan=link))


def ends(link: WanLink | None) -> Route:
    return route(
        MODEL,
        Layout(tp=8, dp=2, zero=1),
        RolloutLayout(tp=4, dp=4),
        PoolPair(device(None), device(link), same=False),
        "megatron",
    )


def test_one_connection_keeps_what_mathis_says_in_flight() -> None:
    """1.22 / sqrt(0.001) = 38.6 segments; CUBIC's 1.054 (0.06 / 0.001)^0.75 = 22.7 are fewer."""
    assert window(LINK, 1.22) == pytest.approx(38.58, rel=1e-3)
    rate = wan_rate(LINK, device())
    assert rate.value == pytest.approx(0.999 * 16 * 38.58 * 1448 / 0.06, rel=1e-3)
    assert (rate.resource, rate.rests_on) == ("wan", "wan_loss_constant")
    assert rate.spread == pytest.approx((0.87 / 1.22, 1.31 / 1.22))


def test_cubic_keeps_more_in_flight_where_losses_are_rare() -> None:
    """1.054 (0.06 / 1e-5)^0.75 = 718 segments, where Mathis says 386."""
    assert window(replace(LINK, loss=1e-5), 1.22) == pytest.approx(718, rel=2e-3)
    assert math.isinf(window(replace(LINK, loss=0.0), 1.22))


def test_enough_connections_fill_the_link_and_no_more() -> None:
    full = wan_rate(replace(LINK, streams=2000), device())
    assert full.value == pytest.approx(0.999 * 0.9 * 1.25e9)
    assert full.rests_on == "wan_efficiency"
    assert wan_rate(replace(LINK, loss=0.0), device()).value == pytest.approx(0.9 * 1.25e9)


def test_the_number_of_connections_that_is_named_fills_the_link() -> None:
    words = reached(LINK, device())
    named = int(words.split("; ")[1].split(" ")[0].replace(",", ""))
    assert wan_rate(replace(LINK, streams=named), device()).rests_on == "wan_efficiency"
    assert wan_rate(replace(LINK, streams=named - 2), device()).rests_on == "wan_loss_constant"
    assert words.startswith("16 TCP connections between the regions reach 119 Mbit/s (39 segments")
    assert link_words(LINK) == "10 Gbit/s, 60 ms, 0.1 % lost"


def test_a_measured_goodput_is_taken_as_it_is() -> None:
    link = WanLink(rtt=0.1, goodput=73.75e6)
    assert wan_rate(link, device()).value == 73.75e6
    assert link_words(link) == "590 Mbit/s reached, 100 ms"
    assert reached(link, device()) == "a transfer between the regions reaches 590 Mbit/s, as given"


def test_windows_grow_from_ten_segments_doubling_each_round_trip() -> None:
    link = WanLink(rtt=0.05, goodput=16 * 80 * MSS_BYTES / 0.05)
    assert ramp(link, device()).seconds == pytest.approx(0.05 * (1 + 3))
    slow = WanLink(rtt=0.05, goodput=1e4)
    assert ramp(slow, device()).seconds == pytest.approx(0.05)


@pytest.mark.parametrize("name", ["broadcast", "disk-shared", "delta", "delta-disk"])
def test_a_transfer_takes_its_bytes_over_the_link_and_then_some(name: str) -> None:
    far, near = (VARIANTS[name](ends(link)) for link in (LINK, None))
    size = MODEL.num_params * (0.02 * 6 if name.startswith("delta") else 2)
    least = size / wan_rate(LINK, device()).value
    assert far.available
    assert least < far.cost.seconds < 1.02 * least + near.cost.seconds
    assert far.cost.bound_by == "wan"


def test_calls_to_another_region_take_a_round_trip_each() -> None:
    tensors = ends(LINK).tensors
    more = VARIANTS["broadcast-per-parameter"](ends(LINK)).cost.by_resource()["wan"]
    wire = ends(LINK).sent / wan_rate(LINK, device()).value
    assert more == pytest.approx(wire + ramp(LINK, device()).seconds + 0.06 * tensors)


@pytest.mark.parametrize("name", ["p2p", "host", "disk-local"])
def test_paths_that_end_with_a_region_are_refused(name: str) -> None:
    assert (
        VARIANTS[name](ends(LINK)).why_not == "it needs RDMA or a disk of the node, which end with the region"
    )


def test_a_link_faster_than_the_nics_leaves_these_to_decide() -> None:
    fast = WanLink(rtt=1e-4, goodput=1e12)
    assert network(device(fast)).value < fast.goodput
    far, near = (VARIANTS["broadcast"](ends(link)).cost.seconds for link in (fast, None))
    assert near <= far < near + 0.1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "says neither bandwidth nor goodput"),
        ({"bandwidth": 1e9, "goodput": 1e9}, "says its rate twice"),
        ({"goodput": 1e9, "loss": 0.01}, "holds the loss already"),
    ],
)
def test_a_link_says_its_rate_once(given: dict[str, float], words: str) -> None:
    with pytest.raises(RlhfsimError, match=words):
        WanLink(rtt=0.06, **given)


# --- plans ------------------------------------------------------------------------------------------


WORK = Workload(
    algorithm="grpo",
    model="qwen2.5-7b",
    prompts=64,
    samples=8,
    reward=Reward(rules=Rules()),
    response_len=Fixed(value=1000),
)


def asked(link: WanLink | None = LINK, **more: Any) -> Request:
    cluster = rlhfsim.parse_cluster(8, "h100", rollout_gpus=8)
    return Request(cluster=cluster.behind(link) if link else cluster, workload=WORK, framework="any", **more)


def test_only_the_rollout_is_searched_in_the_second_region() -> None:
    found = list(partitions(asked(allow=frozenset({"async", "lend"})), models_of(WORK)))
    assert found
    assert {g for p in found for g, kind in zip(p.groups, p.hardware, strict=True) if kind} == {("rollout",)}
    assert not any(p.joined or p.schedule.lend for p in found)


def test_a_hybrid_engine_across_regions_is_refused_with_the_reason() -> None:
    refused = refusal(asked(architecture="hybrid"))
    assert refused is not None
    assert refused.help == "hybrid shares GPUs, and the rollout is in another region: ask for async"


def test_a_plan_keeps_its_link_and_its_step_waits_for_it(tmp_path: Path) -> None:
    near, file = rlhfsim.design(asked(None), explain=False).chosen, tmp_path / "plan.json"
    words = "--gpus 8 --rollout-gpus 8 --model qwen2.5-7b --algorithm grpo --prompts 64 --samples 8 --rules"
    words += " seconds_per_sample=5ms --response-len 1000 --framework any --rollout-wan"
    link = "rtt=60ms,bandwidth=10Gbit/s,loss=0.1%"
    answer = CliRunner().invoke(design_command, [*words.split(), link, "--out", str(file)])
    assert "in another region (10 Gbit/s, 60 ms, 0.1 % lost)" in " ".join(answer.output.split())
    assert "would fill the link" in " ".join(answer.output.split())
    plan = read_plan(file, as_priced=True)
    assert near is not None
    sync = next(p for p in plan.prediction.phases if p.name == "actor.sync")
    assert sync.bound_by == "wan"
    assert plan.prediction.step_s > near.prediction.step_s + 0.9 * sync.seconds
    assert sync.limit_s is not None
    assert 2 * 7.6e9 / 1.25e9 < sync.limit_s < sync.seconds
    assert design_arguments(plan)[design_arguments(plan).index("--rollout-wan") + 1] == (
        "rtt=0.06,bandwidth=1250000000,loss=0.001"
    )
    assert [h.wan for h in plan.hardware] == [None, LINK]
    assert cluster_of(plan).node_groups[1].wan == LINK


def test_changes_alone_are_advised_where_the_link_decides_even_behind_generation() -> None:
    request = asked(allow=frozenset({"async"}))
    plan = rlhfsim.design(request, explain=False).chosen
    assert plan is not None
    found = sent_changes(plan, request)
    assert found is not None
    assert found.saved > 0.5
    assert found.seconds < found.planned_s / 10


def test_the_trainer_may_not_be_behind_the_link() -> None:
    with pytest.raises(RlhfsimError, match="the first nodes train"):
        Cluster(node_groups=(replace(node_group("h100", 8), wan=LINK),))
    with pytest.raises(RlhfsimError, match="no GPUs there"):
        rlhfsim.parse_cluster(8, "h100").behind(LINK)


def test_a_scenario_with_a_trainer_in_the_second_region_is_refused(tmp_path: Path) -> None:
    far = "{gpu: h100, gpus: 2, wan: {bandwidth: 10 Gbit/s, rtt: 60 ms, loss: 0.01 %}}"
    text = f"""
title: far
cluster: {{node_groups: [{{gpu: h100, gpus: 2}}, {far}]}}
workload: {{algorithm: grpo, model: qwen2.5-1.5b, kl: false, reward: {{rules: {{}}}}}}
placement:
  backend: megatron
  pools: [{{name: train, gpus: 2}}, {{name: rollout, hardware: 1, gpus: 2}}]
  actor: {{pool: POOL, layout: {{dp: 2, zero: 1}}}}
  rollout: {{pool: rollout, layout: {{dp: 2}}}}
  weight_path: PATH
"""
    file = tmp_path / "far.yaml"
    file.write_text(text.replace("POOL", "train").replace("PATH", "broadcast"))
    assert load_scenario(file).cluster.node_groups[1].wan == WanLink(rtt=0.06, bandwidth=1.25e9, loss=1e-4)
    file.write_text(text.replace("POOL", "rollout").replace("PATH", "ipc"))
    with pytest.raises(RlhfsimError, match="actor is in pool 'rollout', in another region"):
        rlhfsim.estimate_file(file)


# --- as published -----------------------------------------------------------------------------------


def test_intellect_2_sent_62_gb_in_14_minutes() -> None:
    """INTELLECT-2 (arXiv 2505.07291): QwQ-32B from the trainer to relays at some 590 Mbit/s, 14 minutes on
    average. Their rate is given, so this checks bytes and what comes on top of them."""
    given = ["--model", "32b", "--from", "zero=3,dp=16", "--to", "tp=4,dp=4"]
    words = ["--backend", "fsdp2", "--wan", "rtt=100ms,goodput=590Mbit/s", "--json"]
    answer = CliRunner().invoke(sync_command, [*given, *words], catch_exceptions=False)
    paths = {path["name"]: path for path in json.loads(answer.output)["paths"]}
    assert paths["disk-shared"]["seconds"] == pytest.approx(14 * 60, rel=0.08)
