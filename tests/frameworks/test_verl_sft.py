"""verl's trainers of given data: read with the defaults of their release, and written so that they read back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfsim.api import cluster_of, estimate
from rlhfsim.errors import RlhfsimError
from rlhfsim.finding import Finding
from rlhfsim.interchange.configuration.configuration import configuration_named
from rlhfsim.interchange.configuration.described import RunDescription
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.export import export, exporter
from rlhfsim.plan import Plan
from rlhfsim.specs.frameworks.verl.heads import HEADS
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.placement import ResourcePool
from rlhfsim.specs.workload.workload import Lora
from rlhfsim.what_if.doctor.case import Case
from rlhfsim.what_if.doctor.diagnosis import diagnose, unread_keys
from tests.frameworks.test_accepted import ROOT, answers, installed
from tests.frameworks.test_given_data import planned
from tests.frameworks.test_round_trip import differences
from tests.what_if.test_doctor_of_exports import doctored

START = "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer model.path=Qwen/Qwen3-8B "
BEFORE = "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=Qwen/Qwen3-8B "
RAY = "python3 -m verl.trainer.sft_trainer_ray trainer.n_gpus_per_node=8 trainer.nnodes=2 model.path=Qwen/Qwen3-8B"


def read(text: str) -> RunDescription:
    return read_with_findings(text)[0]


def read_with_findings(text: str) -> tuple[RunDescription, list[Finding]]:
    configuration, settings = read_configuration(text, {})
    assert configuration.name == "verl"
    run = configuration.run(settings)
    return run, list(configuration.findings(settings, run))


def test_what_is_not_said_is_as_in_verls_own_yaml() -> None:
    run = read(START)
    assert (run.algorithm, run.prompts, run.samples, run.mini_batches) == ("sft", 256, 1, 1)
    assert (run.max_response, run.layout.pack_tokens, run.layout.recompute) == (1024, 8192, "full")
    assert (run.backend, run.layout.zero, run.layout.dp, run.packing, run.kl) == ("fsdp2", 3, 8, True, False)
    assert run.software is not None
    assert run.software.flat_parameters  # strategy fsdp
    assert read(f"{START} engine.strategy=fsdp2").software is None


def test_a_configuration_without_a_command_is_told_by_its_keys() -> None:
    text = (
        "data:\n  max_token_len_per_gpu: 4096\nmodel:\n  path: Qwen/Qwen3-8B\nengine:\n  model_dtype: bf16\n"
    )
    configuration, settings = read_configuration(text, {"nproc_per_node": "8"})
    assert (configuration.name, configuration.run(settings).algorithm) == ("verl", "sft")


def test_micro_batches_count_samples_only_where_they_are_not_packs() -> None:
    assert read(f"{START} data.micro_batch_size_per_gpu=16").layout.pack_tokens == 8192
    layout = read(f"{START} data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=16").layout
    assert (layout.pack_tokens, layout.micro_batch) == (None, 16)


@pytest.mark.parametrize(
    ("size", "zero", "shards"), [(-1, 3, None), (4, 3, 4), (8, 3, None), (16, 3, None), (1, 0, None)]
)
def test_shards_are_copied_where_they_are_fewer_than_the_gpus(
    size: int, zero: int, shards: int | None
) -> None:
    """One is no shard: every GPU has all; it was read as one over all GPUs, and 16 of 8 was refused."""
    layout = read(f"{START} engine.fsdp_size={size}").layout
    assert (layout.zero, layout.shards) == (zero, shards)


def test_megatron_and_its_degrees() -> None:
    run = read(
        f"{START} engine=megatron optim=megatron engine.tensor_model_parallel_size=2 "
        "engine.pipeline_model_parallel_size=2 engine.override_transformer_config.recompute_granularity=full"
    )
    layout = run.layout
    assert (run.backend, layout.tp, layout.pp, layout.dp, layout.zero) == ("megatron", 2, 2, 2, 1)
    assert layout.recompute == "full"


def test_the_trainer_on_ray_has_the_nodes_of_other_trainers() -> None:
    run = read(RAY)
    assert (run.gpus, run.gpus_per_node) == (16, 8)


@pytest.mark.parametrize(
    ("said", "bytes_per_parameter"), [("", (None, None, None)), ("engine.model_dtype=bf16", (2.0, 2.0, 4.0))]
)
def test_masters_are_those_of_the_backend_unless_told(said: str, bytes_per_parameter: Any) -> None:
    software = read(f"{START} {said}").software
    assert software is not None
    kept = (software.weight_bytes, software.gradient_bytes, software.moment_bytes)
    assert kept == bytes_per_parameter


def test_the_trainer_before_pads_every_sample_to_the_longest() -> None:
    run = read(f"{BEFORE} data.max_length=2048")
    assert run.full
    assert (run.packing, run.max_tokens, run.layout.micro_batch) == (False, 2048, 4)
    assert run.software is not None
    assert run.software.head == HEADS["eager_padded"]
    assert not run.software.flat_parameters  # fsdp2 since 0.4
    across = read(f"{BEFORE} ulysses_sequence_parallel_size=2 use_remove_padding=True")
    assert not across.full
    assert (across.packing, across.layout.cp, across.layout.dp) == (True, 2, 4)
    assert across.software is not None
    assert across.software.head == HEADS["eager_unpadded"]


def test_releases_of_the_trainer_before_have_their_own_defaults() -> None:
    configuration, settings = read_configuration(BEFORE, {"verl_version": "0.3.0"})
    run = configuration.run(settings)
    assert run.layout.recompute == "none"
    assert run.software is not None
    assert run.software.flat_parameters


@pytest.mark.parametrize(
    ("said", "what", "stops"),
    [
        (f"{START} data.max_length=16384", "exceeds the budget of 8,192 tokens", True),
        (f"{START} data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=3", "no multiple", True),
        (f"{START} data.train_batch_size=100", "torchrun's trainer takes 96", False),
        (f"{START} engine=megatron", "optim=fsdp with engine=megatron", True),
        (f"{START} data.pad_mode=right", "FSDP's engine refuses", True),
        (
            f"{START} engine.ulysses_sequence_parallel_size=2 model.use_remove_padding=False",
            "sequence parallelism 2 with padded batches",
            True,
        ),
        (f"{START} engine.offload_policy=True", "is passed over", False),
        (f"{BEFORE} data.micro_batch_size=16", "data.micro_batch_size=16 is read by nothing", False),
        (
            f"{BEFORE} model.fsdp_config.cpu_offload=True model.fsdp_config.offload_params=True",
            "states on the host are FSDP1's",
            False,
        ),
        (f"{BEFORE} data.train_batch_size=100", "does not split over 8", True),
        (f"{BEFORE} ulysses_sequence_parallel_size=2", "padded batches", True),
    ],
)
def test_what_verl_would_refuse_is_found(said: str, what: str, stops: bool) -> None:
    found = [finding for finding in read_with_findings(said)[1] if what in finding.what]
    assert [finding.stops for finding in found] == [stops]
    remedied = read_with_findings(f"{said} {found[0].remedy}")[1]
    assert not [finding for finding in remedied if what in finding.what]


@pytest.mark.parametrize(
    ("start", "group"),
    [
        (START, "engine"),
        (
            "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 "
            "actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.actor.use_dynamic_bsz=True",
            "actor_rollout_ref.actor",
        ),
    ],
)
def test_fsdp1_keeps_what_is_trained_on_the_gpus(start: str, group: str) -> None:
    hosts = (
        f"{group}.offload_policy=True" if group == "engine" else f"{group}.fsdp_config.offload_policy=True"
    )
    for strategy, home in (("fsdp", "none"), ("fsdp2", "cpu")):
        run, found = read_with_findings(f"{start} {hosts} {group}.strategy={strategy}")
        assert (run.layout.offload_optimizer, run.layout.offload_params) == (home, home)
        assert any("is passed over" in finding.what for finding in found) == (home == "none")


def test_states_on_the_host_are_advised_where_nothing_else_fits() -> None:
    text = f"{START} engine.strategy=fsdp2 data.max_length=8192".replace("Qwen3-8B", "Qwen2.5-32B")
    configuration, settings = read_configuration(text, {})
    answer = diagnose(Case(configuration=configuration, settings=settings, gpu="h100_sxm"))
    assert not answer.judged.fits
    assert {"engine.offload_policy": True} in [change.keys for change in answer.fixes]


@pytest.mark.parametrize("said", ["engine=veomni", "engine=megatron engine.use_megatron_fsdp=True"])
def test_engines_that_shard_otherwise_are_refused_by_name(said: str) -> None:
    with pytest.raises(RlhfsimError, match="how it shards is not known") as refused:
        read(f"{START} {said}")
    assert refused.value.code == "engine-not-read"


def test_processes_from_an_argument_are_asked_for() -> None:
    text = START.replace("=8", "=$1").replace("Qwen/Qwen3-8B", "Qwen/Qwen3-8B data.train_batch_size=64")
    with pytest.raises(RlhfsimError, match=r"nproc_per_node") as refused:
        read(f"{text}")
    assert "--set nproc_per_node=VALUE" in str(refused.value.help)


# --- both ways ----------------------------------------------------------------------------------------------


NOT_USED = ("workload.kl", "workload.reward")
"""Of a workload: what training on given responses has nothing of."""
FSDP: tuple[dict[str, Any], ...] = (
    {"dp": 8},
    {"dp": 4, "cp": 2, "pack_tokens": 8192, "micro_batch": 1},
    {"dp": 8, "zero": 2, "recompute": "none"},
    {"dp": 8, "offload_optimizer": "cpu", "offload_params": "cpu"},
    {"dp": 8, "shards": 4},
)
MEGATRON: tuple[dict[str, Any], ...] = (
    {"dp": 8, "zero": 1},
    {"dp": 2, "tp": 2, "pp": 2, "vp": 2, "zero": 1, "recompute": "none"},
    {"dp": 4, "tp": 2, "zero": 1, "pack_tokens": 4096, "micro_batch": 1},
    {"dp": 8, "zero": 1, "offload_optimizer": "cpu", "recompute": "selective"},
)


def plans() -> Iterator[Plan]:
    yield from (priced(planned("verl", "sft", "fsdp2", **layout)) for layout in FSDP)
    yield from (priced(planned("verl", "sft", "megatron", **layout)) for layout in MEGATRON)
    plain = planned("verl", "sft", "fsdp2", dp=8)
    yield priced(replace(plain, workload=replace(plain.workload, lora=Lora(rank=16))))
    actor = replace(plain.placement.actor, residency="offloaded")
    yield priced(replace(plain, placement=replace(plain.placement, actor=actor)))


def priced(plan: Plan) -> Plan:
    """With what verl runs, which a plan of no framework is not priced by."""
    cluster = replace(cluster_of(plan), framework="verl")
    return estimate(plan.placement, plan.workload, cluster)


@pytest.mark.parametrize("number", range(11))
def test_an_export_reads_back_as_its_plan_with_its_step(number: int, tmp_path: Path) -> None:
    plan = list(plans())[number]
    case, found, code = doctored(plan, "verl", tmp_path / "run")
    assert not export(plan, "verl", frozenset()).written.unsaid
    assert found.step_s == pytest.approx(plan.prediction.step_s, rel=1e-9)
    assert code == 1 - found.fits
    assert [u.key for u in unread_keys(case, found) if u.kind in ("no such key", "may change")] == []
    specs = found.described.specs
    lines = [x for x in differences(plan, specs.workload, specs.placement) if not x.startswith(NOT_USED)]
    assert lines == []


@pytest.mark.parametrize("version", [exporter("verl").version, *exporter("verl").releases])
def test_every_key_is_one_of_the_release(version: str) -> None:
    lines = (ROOT / "tests/data/framework_keys/verl_sft.txt").read_text().splitlines()
    known = {key for key, *having in map(str.split, lines) if version in having}
    for plan in plans():
        values = export(plan, "verl", frozenset(), version=version).written.values
        assert {key for key in values if not key.startswith(("+", "--"))} - known == set()


@pytest.mark.parametrize("name", ["verl", "openrlhf"])
def test_nodes_of_torchrun_meet_at_an_address_that_a_job_sets_itself(name: str) -> None:
    backend: Backend = "fsdp2" if name == "verl" else "deepspeed"
    one = planned(name, "sft", backend)
    assert "MASTER" not in export(one, name, frozenset()).files["launch.sh"]
    role = replace(one.placement.actor, layout=replace(one.placement.actor.layout, dp=16))
    placed = replace(one.placement, pools=(ResourcePool(name="all", gpus=16),), actor=role)
    cluster = replace(parse_cluster(16, "h100", gpus_per_node=8), framework=name)
    plan = estimate(placed, one.workload, cluster)
    assert ': "${MASTER:?' in export(plan, name, frozenset()).files["launch.sh"]
    found = export(plan, name, frozenset(), manager="slurm")
    script = found.files["job.sbatch"]
    assert 'export MASTER="$head:29500"' in script
    assert "MASTER:?" not in script
    assert "ray" not in script
    assert "export MASTER" not in found.files["README.md"]
    task = yaml.safe_load(export(plan, name, frozenset(), manager="skypilot").files["sky.yaml"])
    assert "MASTER" not in task["envs"]
    assert "ray start" not in task["run"]
    assert 'export MASTER="$head:29500"' in task["run"]


@pytest.mark.slow
def test_verl_itself_accepts_every_export(tmp_path: Path) -> None:
    if not installed("verl"):
        pytest.skip("verl is not installed")
    some = list(plans())
    *accepted, spoiled = answers("verl", some, tmp_path, ("engine.nonsense=1",))
    assert accepted == [""] * len(some)
    assert spoiled


def test_both_entry_points_are_verls() -> None:
    assert configuration_named("verl").unread == {}


def test_the_page_beside_it_says_that_its_log_has_no_times() -> None:
    """sft_trainer.py of 0.9.1 prints loss, learning rate, tokens and MFU of a step; other trainers time it."""
    page = export(planned("verl", "sft", "fsdp2"), "verl", frozenset()).files["README.md"]
    assert "prints no time of a step" in page
    assert "import-run" not in page
    other = export(planned("openrlhf", "sft"), "openrlhf", frozenset()).files["README.md"]
    assert "import-run LOG --framework openrlhf" in other
