from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from rlhfsim.cli.params import parse_pairs
from rlhfsim.cli.sync import layout_option, rollout_layout_option, sync
from rlhfsim.errors import RlhfsimError
from rlhfsim.kernels.devices import device_of
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.weight_sync.endpoints import PoolPair
from rlhfsim.weight_sync.weight_sync import sync as weight_sync

ASK = ["--model", "70b", "--from", "tp=8,dp=2", "--to", "tp=8"]


def run(*more: str) -> str:
    result = CliRunner().invoke(sync, [*ASK, *more], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def data(*more: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*more, "--json"))
    return found


def test_tables_stay_within_a_hundred_columns() -> None:
    assert max(map(len, run().splitlines())) <= 100


def test_json_names_every_path_with_an_interval() -> None:
    found = data()
    assert found["schema"] == "rlhfsim.sync/1"
    names = [p["name"] for p in found["paths"]]
    assert len(names) == len(set(names)) == 16
    for wanted in ("none", "reshard", "ipc", "broadcast", "p2p", "disk-local", "disk-shared", "lora", "host"):
        assert wanted in names
    assert all(p["low"] <= p["seconds"] <= p["high"] for p in found["paths"])


def test_tables_and_json_say_the_same() -> None:
    text = " ".join(run().split())
    for path in data()["paths"]:
        assert path["title"].split(",")[0] in text


def test_each_unavailable_path_says_why() -> None:
    assert all(p["available"] == (p["why_not"] is None) for p in data()["paths"])
    assert "not here: training and" in run()


def test_a_shared_pool_turns_networks_off_and_handles_on() -> None:
    result = CliRunner().invoke(
        sync, ["--model", "70b", "--from", "tp=8,dp=2", "--to", "tp=4,dp=4", "--same-pool", "--json"]
    )
    paths = {p["name"]: p["available"] for p in json.loads(result.output)["paths"]}
    assert paths["ipc"]
    assert not paths["broadcast"]


def test_adapters_become_available_with_lora() -> None:
    lora = next(p for p in data("--lora", "16")["paths"] if p["name"] == "lora")
    assert lora["available"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp", "is not name=value"),
        ("tp=2,tp=4", "is given twice"),
        ("tp=8,,dp=2", "is not name=value"),
        ("tp=", "is not name=value"),
    ],
)
def test_bad_pairs_name_the_option(text: str, said: str) -> None:
    with pytest.raises(RlhfsimError, match=said) as caught:
        parse_pairs(text, "--from")
    assert caught.value.message.startswith("--from")


def test_pairs_may_have_spaces() -> None:
    assert parse_pairs(" tp = 8 , dp=2", "--from") == {"tp": "8", "dp": "2"}


def test_an_unknown_name_in_a_layout_is_refused_with_the_nearest() -> None:
    with pytest.raises(RlhfsimError, match="unknown key 'ppp'") as caught:
        layout_option("tp=8,ppp=2", "--from")
    assert "pp" in (caught.value.help or "")


def test_a_degree_that_is_no_number_is_refused() -> None:
    with pytest.raises(RlhfsimError, match="valid integer"):
        rollout_layout_option("tp=eight", "--to")


def test_fsdp_shards_fully_unless_told_otherwise() -> None:
    assert layout_option("dp=8", "--from", "fsdp2").zero == 3
    assert layout_option("tp=8", "--from").zero == 1


def test_a_layout_the_backend_cannot_run_is_refused() -> None:
    with pytest.raises(RlhfsimError, match="no pipeline parallelism"):
        layout_option("pp=2,dp=4", "--from", "fsdp2")


def test_pools_of_two_sizes_cannot_be_one() -> None:
    with pytest.raises(RlhfsimError, match="16 GPUs and rollout 8"):
        CliRunner().invoke(sync, [*ASK, "--same-pool"], catch_exceptions=False)


def test_two_pools_of_a_rack_share_its_scale_up_domain() -> None:
    def broadcast(gpu: str) -> float:
        ends = ("--from", "dp=4,zero=1", "--to", "dp=4", "--backend", "deepspeed", "--gpus-per-node", "4")
        answer = CliRunner().invoke(sync, ["--model", "qwen2.5-1.5b", "--gpu", gpu, *ends, "--json"])
        assert answer.exit_code == 0, answer.output
        paths = json.loads(answer.output)["paths"]
        return float(next(p["seconds"] for p in paths if p["path"] == "broadcast"))

    # 3.1 GB between nodes of four GPUs: by NVLink in a rack of 72, by the NICs where a domain is a node
    assert broadcast("gb200") < 0.75 * broadcast("b200")


def test_the_framework_of_a_plan_has_costs_of_its_own() -> None:
    ends = ["--from", "dp=32", "--to", "tp=8,dp=4"]
    ask = ["--model", "8b", "--backend", "fsdp2", *ends, "--same-pool", "--json"]

    def ipc_s(*more: str) -> float:
        paths = json.loads(CliRunner().invoke(sync, [*ask, *more]).output)["paths"]
        return float(next(p["seconds"] for p in paths if p["name"] == "ipc"))

    group = NodeGroup(profile=load_profile("h100-sxm"), gpus=32, gpus_per_node=8)
    device = device_of(group, framework="verl", backend="fsdp2")
    layouts = Layout(dp=32, zero=3), RolloutLayout(tp=8, dp=4)
    known = weight_sync("ipc", resolve_model("8b"), *layouts, PoolPair(device, device, same=True), "fsdp2")
    assert ipc_s("--framework", "verl") == known.cost.seconds != ipc_s()
