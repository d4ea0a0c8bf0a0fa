"""How tokens reach their experts, typed on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from rlhfsim.api import cluster_of, estimate_file
from rlhfsim.cli.constraints import constraints
from rlhfsim.cli.estimate import estimate
from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.devices import device_of
from rlhfsim.plan import plan_text, read_plan
from rlhfsim.search.layouts import role_layouts
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.clusters import cluster_from
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.loading import Source
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.software import Software
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.units import format

FABRIC = ("--fabric", "efa")
ASKED = ("--gpus", "16", "--gpu", "b200", "--model", "qwen3-30b-a3b", "--algorithm", "grpo", "--no-kl")
ASKED += (
    "--rules",
    "workers=8",
    "--backend",
    "megatron",
    "--architecture",
    "hybrid",
    "--rollout",
    "tp=1,pp=1",
)
LAYOUT = "tp=1,pp=1,dp=16,ep=16,micro_batch=4,recompute=none"


def typed(fields: str, *arguments: str) -> dict[str, Any]:
    answer = CliRunner().invoke(
        estimate, (*ASKED, "--actor", f"{LAYOUT}{fields}", *arguments, "--json"), catch_exceptions=False
    )
    document: dict[str, Any] = json.loads(answer.output)
    return document


def train_seconds(document: dict[str, Any]) -> float:
    phases = document["plan"]["prediction"]["phases"]
    return next(p["seconds"] for p in phases if p["name"] == "actor.train")


def test_what_is_typed_is_priced_and_written(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    named = typed(",dispatcher=alltoall,ep_overlap=no", *FABRIC, "--out", str(file))
    layout = named["plan"]["placement"]["actor"]["layout"]
    assert (layout["dispatcher"], layout["ep_overlap"]) == ("alltoall", False)
    plan = read_plan(file)
    assert "EP16 alltoall" in plan.placement.actor.layout.label
    assert cluster_of(plan).node_group.fabric == plan.hardware[0].fabric == "efa"
    assert estimate_file(file).prediction.step_s == pytest.approx(plan.prediction.step_s)
    assert train_seconds(named) > train_seconds(typed(",dispatcher=alltoall,ep_overlap=yes", *FABRIC))
    assert train_seconds(named) > train_seconds(typed(",dispatcher=alltoall,ep_overlap=no"))


def test_an_unknown_dispatcher_is_said_with_its_range() -> None:
    def screen(fields: str) -> str:
        answer = CliRunner().invoke(estimate, (*ASKED, *FABRIC, "--actor", f"{LAYOUT}{fields}"))
        return " ".join(answer.output.split())

    train = next(p for p in typed("", *FABRIC)["plan"]["prediction"]["phases"] if p["name"] == "actor.train")
    assert train["high_s"] > 2 * train["low_s"]
    said = (
        f"training takes {format(train['low_s'], 's')} to {format(train['high_s'], 's')}: name the dispatcher"
    )
    assert said in screen("")
    assert "name the dispatcher" not in screen(",dispatcher=hybridep")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*ASKED, "--actor", f"{LAYOUT},dispatcher=nvshmem"), "dispatcher"),
        ((*ASKED, "--actor", f"{LAYOUT},ep_overlap=often"), "ep overlap"),
        ((*ASKED, "--fabric", "ethernet"), "fabric"),
        (("--gpus", "8", "--model", "8b", "--actor", "tp=8,dispatcher=deepep"), "has no experts"),
    ],
)
def test_a_dispatcher_or_a_fabric_that_cannot_be_is_refused(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises((RlhfsimError, click.UsageError)) as caught:
        CliRunner().invoke(estimate, arguments, catch_exceptions=False, standalone_mode=False)
    assert words in str(caught.value)


def test_other_roles_have_the_dispatcher_of_the_actor_and_limits_name_it() -> None:
    request = Request(
        cluster=parse_cluster(16),
        workload=Workload(algorithm="ppo", model="qwen3-30b-a3b"),
        backend="megatron",
        fix={"actor": {"dispatcher": "deepep"}, "critic": {"dispatcher": "alltoall"}},
    )
    models = models_of(request.workload)
    for role, dispatcher in (("actor", "deepep"), ("reference", "deepep"), ("critic", "alltoall")):
        space = role_layouts(request, role, models.of(role), 16, 8)
        assert {x.dispatcher for x in space.layouts} == {dispatcher}
    fixed, _ = constraints(["actor.dispatcher=deepep,actor.ep_overlap=yes"])
    assert fixed == {"actor": {"dispatcher": "deepep", "ep_overlap": True}}


def test_a_pool_in_a_file_says_its_fabric_and_a_profile_may() -> None:
    text = {"node_groups": [{"gpu": "h100", "gpus": 16, "fabric": "roce"}]}
    group = cluster_from(Source("cluster.yaml", "", text)).node_group
    assert device_of(group).fabric == "roce"
    own = replace(group, fabric=None, profile=replace(group.profile, fabric="infiniband"))
    assert device_of(own).fabric == "infiniband"
    assert device_of(replace(own, fabric="efa")).fabric == "efa"


def test_older_plans_say_of_dispatch_in_their_software_what_is_passed_over(tmp_path: Path) -> None:
    plan = estimate_file("xtuner-rlhf")
    plan = replace(plan, placement=replace(plan.placement, software=Software(graphs="full")))
    data = json.loads(plan_text(plan))
    data["placement"]["software"] |= {"token_once": True, "scheduled_ep": False}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data))
    assert read_plan(file).placement == plan.placement
