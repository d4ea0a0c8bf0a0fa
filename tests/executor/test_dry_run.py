"""`rlhfsim launch --dry-run --assume-cluster`: what it checks, and what it refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from executor import dry_run, refusals
from executor.resolve import Job, engine_specs, model_config
from executor.resume import trainer_configs
from executor.settings import Settings
from rlhfsim.api import cluster_of, design
from rlhfsim.cli.launch import described_cluster
from rlhfsim.cli.main import cli
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan, write_plan
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.model.presets import published_config
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.workload.lengths import Fixed
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.what_if.memory_peaks import memory_peaks

README = {"gpus": 64, "model": "70b"}
"""`rlhfsim design --gpus 64 --model 70b`."""


@cache
def plan(gpus: int = 8, model: str = "8b", *, simple: bool = True) -> Plan:
    """PPO on H100s."""
    request = Request(cluster=parse_cluster(gpus=gpus), workload=Workload(model=model))
    chosen = design(request, explain=False, rivals=False, simplest_s=math.inf if simple else None).chosen
    assert chosen is not None
    return chosen


def launch(given: Plan, folder: Path, *options: str) -> Result:
    """The command on a written plan."""
    file = folder / "plan.json"
    write_plan(file, given)
    return CliRunner().invoke(cli, ["launch", str(file), "--dry-run", *options])


def job(given: Plan) -> Job:
    """As the dry run resolves it."""
    prompt = int(given.workload.prompt_len.maximum)
    return Job(plan=given, settings=Settings(), model="8b", gpu=True, max_prompt=prompt)


def test_the_readmes_plan_launches_on_the_cluster_it_was_made_for(tmp_path: Path) -> None:
    result = launch(plan(**README), tmp_path, "--assume-cluster", "8x8xh100", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    checked = report["checked"]
    assert report["cluster"] == checked["cluster"] == "8 nodes of 8 h100_sxm"
    assert checked["placement"].startswith("8 of 8 bundles")
    assert "64 ranks" in checked["actor"]
    assert "64 transfer groups" in checked["weights"]
    assert "read and groups formed by DeepSpeed" in checked["DeepSpeed"]
    assert "accepted by vLLM" in checked["vLLM"]
    assert all(0 < peak["bytes"] <= peak["capacity"] for peak in report["peaks"])
    assert 0 < report["host_bytes"] <= report["host_capacity"]


def test_a_plan_that_another_framework_is_to_run_names_its_export(tmp_path: Path) -> None:
    asked = Request(
        cluster=parse_cluster(8), workload=Workload(model="8b"), framework="nemo-rl", backend="megatron"
    )
    chosen = design(asked, explain=False, rivals=False).chosen
    assert chosen is not None
    result = launch(chosen, tmp_path, "--assume-cluster", "1x8xh100")
    assert isinstance(result.exception, RlhfsimError)
    assert "which the executor does not run" in result.exception.message
    assert "rlhfsim export --to nemo-rl, or design --framework rlhfsim" in (result.exception.help or "")


def test_without_the_libraries_it_says_what_was_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "find_spec", lambda name: None)
    result = launch(plan(), tmp_path, "--assume-cluster", "1x8xh100")
    assert result.exit_code == 0, result.output
    assert result.output.count("not checked: not installed") == 2
    assert "this plan launches on 1 node of 8 h100_sxm" in result.output


@pytest.mark.parametrize(
    ("cluster", "code"),
    [
        ("1x4xh100", "cluster-too-small"),
        ("1x8xa100", "another-kind-of-gpu"),
        ("8h100", "bad-option"),
        ("0x8xh100", "bad-value"),
        ("1x8xh1000", "unknown-hardware-profile"),
    ],
)
def test_another_cluster_is_one_clear_error(cluster: str, code: str, tmp_path: Path) -> None:
    result = launch(plan(), tmp_path, "--assume-cluster", cluster)
    assert isinstance(result.exception, RlhfsimError | SystemExit)
    shown = str(result.exception) if isinstance(result.exception, RlhfsimError) else result.output
    assert f"error[{code}]" in shown


def test_two_kinds_are_compared_each_with_its_own() -> None:
    assert dry_run.described(described_cluster("4x8xh100+2x8xh20")) == (
        "4 nodes of 8 h100_sxm and 2 nodes of 8 h20_sxm"
    )
    dry_run.check_cluster(plan(), described_cluster("1x8xh20+1x8xh100"))
    with pytest.raises(RlhfsimError, match="another-kind-of-gpu"):
        dry_run.check_cluster(plan(), described_cluster("1x8xh20+2x4xh100"))


def test_a_described_cluster_needs_a_dry_run() -> None:
    result = CliRunner().invoke(cli, ["launch", "plan.json", "--assume-cluster", "8x8xh100"])
    assert "add --dry-run" in str(result.exception) + result.output


def test_a_plan_that_was_edited_since_it_was_priced_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "find_spec", lambda name: None)  # what libraries say does not matter here
    given = plan()
    assert "edited" not in launch(given, tmp_path, "--assume-cluster", "1x8xh100").output
    edited = replace(given, workload=replace(given.workload, prompts=2 * given.workload.prompts))
    result = launch(edited, tmp_path, "--assume-cluster", "1x8xh100", "--json")
    assert "note: this plan was edited" in result.stderr
    assert json.loads(result.stdout)["schema"] == "rlhfsim.launch/1"


def test_ranks_that_share_a_gpu_are_refused() -> None:
    given = plan()
    roles = tuple(replace(s, gpus=(0, *s.gpus[:-1])) if s.role == "reward" else s for s in given.gpu_map)
    with pytest.raises(RlhfsimError, match="ranks-without-gpus"):
        dry_run.check(replace(given, gpu_map=roles), Settings(), cluster_of(given), lambda *_: None)


def test_a_tensor_group_on_two_nodes_is_refused() -> None:
    given = plan(16, "14b")
    wide = replace(given.placement.actor, layout=Layout(tp=16, zero=0))
    edited = replace(given, placement=replace(given.placement, actor=wide))
    with pytest.raises(RlhfsimError, match="tensor-group-across-nodes"):
        dry_run.check(edited, Settings(), cluster_of(given), lambda *_: None)


def test_a_plan_that_does_not_fit_names_the_instant() -> None:
    given = plan()
    rollout = given.placement.rollout
    assert rollout is not None
    full = replace(rollout, layout=replace(rollout.layout, memory_utilization=1.0), sleep=0)
    with pytest.raises(RlhfsimError, match=r"per GPU at 0\.000 s, when start begins"):
        memory_peaks(replace(given.placement, rollout=full), given.workload, cluster_of(given))


def test_fsdp2_roles_say_what_they_are_given_in_the_run_folder_and_in_the_dry_run() -> None:
    asked = Request(cluster=parse_cluster(8, "h100"), workload=Workload(model="8b"), backend="fsdp2")
    given = design(asked, explain=False, rivals=False).chosen
    assert given is not None
    written = trainer_configs(job(given))
    assert not written["deepspeed"]
    actor = given.placement.actor.layout
    config = written["fsdp2"]["actor"]
    shards = (actor.shards or actor.dp) if actor.zero else 1
    assert config["mesh"] == {"replicate": actor.dp // shards, "shard": shards}
    assert config["mixed_precision"] == {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    assert (config["weights"], config["gradients"]) == ("fp32", "fp32")
    assert config["recompute"] == (actor.recompute == "full")
    assert bool(config["offload"]) == (actor.offload_params == "cpu")
    shown = dry_run.check(given, Settings(), cluster_of(given), lambda *_: None)["actor by FSDP2"]
    assert all(f"{name} {json.dumps(value)}" in shown for name, value in config.items())


def test_the_configuration_that_is_written_and_asked_about_is_the_one_that_runs() -> None:
    given = plan()
    exact = replace(given, workload=replace(given.workload, gradients="fp32"))
    written, specs = trainer_configs(job(exact))["deepspeed"]["actor"], engine_specs(job(exact))
    assert written["data_types"] == {"grad_accum_dtype": "fp32"}
    assert dry_run.deepspeed_requests(specs)["actor"]["config"] == written


# --- the libraries' own judgement ---------------------------------------------------------------------


def test_deepspeed_reads_what_it_is_given_and_refuses_what_it_does_not_know() -> None:
    specs = engine_specs(job(plan()))
    [good, *_] = dry_run.deepspeed_requests(specs).values()
    bad_stage = {**good, "config": {**good["config"], "zero_optimization": {"stage": 7}}}
    bad_name = {**good, "config": {**good["config"], "zero_optimization": {"stage": 1, "no_such_key": 1}}}
    answers = dry_run.ask("deepspeed", [good, bad_stage, bad_name])
    assert answers is not None
    assert "stage" in answers[1]["refusal"]
    assert "no_such_key" in answers[2]["refusal"]
    assert answers[0]["train_batch"] == good["config"]["train_micro_batch_size_per_gpu"] * good["dp"]
    assert sorted(answers[0]["groups"]) == ["data", "pipeline", "tensor"]


def test_deepspeed_that_understands_something_else_is_an_error() -> None:
    def other(name: Any, requests: Any) -> Any:
        groups = {"tensor": [[0]], "data": [[0]], "pipeline": [[0]]}
        return [{"zero": 0, "train_batch": 1, "groups": groups} for _ in requests]

    with pytest.raises(RlhfsimError, match="deepspeed-refuses"):
        dry_run.check(plan(), Settings(), cluster_of(plan()), other)


def test_vllm_refuses_heads_lengths_and_formats_that_it_does_not_run() -> None:
    longest = Workload(model="qwen2.5-7b", prompt_len=Fixed(value=1024), response_len=Fixed(value=31744))
    request = Request(cluster=parse_cluster(gpus=8), workload=longest)
    given = design(request, explain=False, rivals=False).chosen
    assert given is not None
    shapes = dry_run.model_shapes(given, Settings())
    profile = cluster_of(given).node_groups[0].profile
    good = dry_run.vllm_request(job(given), shapes, profile)
    wrong = [
        {**good, "arguments": {**good["arguments"], "tensor_parallel_size": 3}},
        {**good, "arguments": {**good["arguments"], "max_model_len": 32769}},
        {**good, "arguments": {**good["arguments"], "max_num_batched_tokens": 16, "max_num_seqs": 32}},
        {**good, "arguments": {**good["arguments"], "quantization": "fp8"}, "capability": (7, 0)},
    ]
    answers = dry_run.ask("vllm", [good, *wrong])
    assert answers is not None
    assert answers[0] is None, "prompt and response may fill every position of the model"
    assert "divisible by tensor parallel size (3)" in answers[1]
    assert "max_model_len (32769)" in answers[2]
    assert "max_num_batched_tokens (16)" in answers[3]
    assert "capability" in answers[4]


def test_a_pipeline_of_a_model_that_it_does_not_cut_is_refused_before_a_process_starts() -> None:
    staged = plan(simple=False)
    assert staged.placement.role("critic") is not None
    assert staged.placement.role("critic").layout.pp > 1
    for name in ("mixtral-8x7b", "mistral-7b-v0.1"):
        config = published_config(name)
        assert config is not None
        with pytest.raises(RlhfsimError, match="pipeline-model-not-run"):
            refusals.check_family(job(staged), config)


def test_sizes_of_a_model_folder_that_are_none_and_a_name_too_long_for_a_file_are_refused(
    tmp_path: Path,
) -> None:
    config = tmp_path / "config.json"
    for key, value in (("max_position_embeddings", "x"), ("num_hidden_layers", -1), ("hidden_size", [1])):
        config.write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": None, key: value}))
        with pytest.raises(RlhfsimError, match=key) as refused:
            model_config(str(tmp_path))
        assert refused.value.place is not None
        assert refused.value.place.file == str(config)
    with pytest.raises(RlhfsimError, match="no model folder") as refused:
        model_config("n" * 300)
    assert refused.value.code == "no-model"


def test_the_driver_is_imported_without_torch() -> None:
    """It holds no tensors: torch took 1.8 s of the 2.9 s of CPU time before anything started."""
    code = "import sys, executor.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_cuda_build_without_the_driver_judges_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels do not load on a head node without GPUs, and every plan would be refused."""
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(dry_run, "find_spec", lambda name: package)
    monkeypatch.setattr(dry_run, "DRIVER", str(tmp_path / "libcuda.so.1"))
    assert dry_run._loads("vllm")
    (tmp_path / "_C_stable_libtorch.abi3.so").touch()
    assert not dry_run._loads("vllm")
