"""What TRL's workers do with gradients and scoring passes, as accelerate and transformers set them up."""

from __future__ import annotations

from typing import Any

import pytest

from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.memory.role_bytes import RoleBytes, role_memory, software_of
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.presets import preset
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import RolePlacement
from rlhfsim.specs.placement.software import Software
from tests.frameworks.test_accepted import workload

PSI = preset("qwen2.5-7b").num_params
RUN = (
    "accelerate launch grpo.py --model_name_or_path qwen2.5-7b --num_processes 8 --use_vllm True "
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 8 --beta 0.04 --vllm_mode colocate "
)
FSDP2 = "--fsdp_config.fsdp_version 2 --fsdp_config.fsdp_reshard_after_forward True "


def _run(text: str, **values: Any):
    configuration, settings = read_configuration(text, values, framework="trl")
    run = configuration.run(settings)
    return run, {finding.what: finding.stops for finding in configuration.findings(settings, run)}


def _held(role: str, software: Software | None, layout: Layout) -> RoleBytes:
    model = preset("qwen2.5-7b")
    memory = role_memory(
        Models(actor=model, reference=model),
        role,
        workload("grpo", prompts=64, samples=8, mini_batches=1),
        backend="fsdp2",
        profile=load_profile("h100_sxm"),
        software=software_of(software, "trl", "fsdp2", packing=False),
    )
    return memory.of(RolePlacement(pool="all", layout=layout))


@pytest.mark.parametrize("version", ["1", "2"])
def test_gradients_are_summed_whole_until_the_last_micro_batch(version: str) -> None:
    run, found = _run(RUN + FSDP2.replace("version 2", f"version {version}"))
    software = software_of(run.software, "trl", "fsdp2", packing=False)
    assert (software.sums_whole, software.reduce_bytes) == (True, 2.0)
    layout = Layout(dp=8, zero=3, micro_batch=4)
    each = "--accelerator_config.gradient_accumulation_kwargs.sync_each_batch True"
    other, silent = _run(RUN + FSDP2.replace("version 2", f"version {version}") + each)
    added = (
        _held("actor", software, layout).train.buffers - _held("actor", other.software, layout).train.buffers
    )
    assert (2 - 4 / 8) * PSI * 0.8 < added < (2 - 4 / 8) * PSI
    assert any("whole gradients in BF16, 15.2 GB" in what for what in found)
    assert not any("whole gradients" in what for what in silent)


@pytest.mark.parametrize(("version", "one_group"), [("1.16", True), ("0.25", False)])
def test_a_reference_under_fsdp2_is_gathered_as_one_group(version: str, one_group: bool) -> None:
    run, _ = _run(RUN + FSDP2, trl_version=version)
    layout = Layout(dp=8, zero=3, micro_batch=4)
    gathered = _held("reference", run.software, layout).score.gathered
    actor = _held("actor", run.software, layout).score.gathered
    if one_group:
        assert gathered == pytest.approx(4 * PSI, rel=1e-3)
    else:
        assert gathered == pytest.approx(actor, rel=0.05)
    assert actor < PSI, "its layers are groups"


@pytest.mark.parametrize(
    ("keys", "overlaps", "told"),
    [
        ("--deepspeed_config.zero_stage 2", False, True),
        ("--zero_optimization.stage 2 --zero_optimization.overlap_comm True", True, False),
        ("--deepspeed_config.zero_stage 3", False, False),
        ("--distributed_type MULTI_GPU", False, False),
    ],
)
def test_reductions_overlap_where_deepspeeds_file_says_so(keys: str, overlaps: bool, told: bool) -> None:
    run, found = _run(RUN + keys)
    assert software_of(run.software, "trl", run.backend).overlaps_reduction == overlaps
    assert any("reduces all gradients" in what for what in found) == told


@pytest.mark.parametrize(
    ("keys", "width"),
    [
        ("--distributed_type MULTI_GPU", 4.0),
        ("--distributed_type MULTI_GPU --dtype bfloat16", 2.0),
        ("--distributed_type MULTI_GPU --torch_dtype auto", 2.0),
        ("--distributed_type MULTI_GPU --dtype float32", 4.0),
        ("--deepspeed_config.zero_stage 2", 0.0),
        (FSDP2, 0.0),
    ],
)
def test_weights_train_in_the_type_in_which_they_are_loaded_without_zero(keys: str, width: float) -> None:
    run, _ = _run(RUN + keys)
    software = software_of(run.software, "trl", run.backend)
    assert [software.plain(run.layout, trained=trained) for trained in (True, False)] == [width, width]


@pytest.mark.parametrize("width", [2.0, 4.0])
def test_ddp_holds_weights_gradients_buckets_and_moments_and_the_reference_in_the_same_type(
    width: float,
) -> None:
    software = Software(stack="eager", fused=False, plain_bytes=width, plain_scored=True)
    layout, model = Layout(dp=8, zero=0, micro_batch=4), preset("qwen2.5-7b")
    casts = 2 * PSI if width > 2 else 0.0
    held = {}
    for role in ("actor", "reference"):
        memory = role_memory(
            Models(actor=model, reference=model),
            role,
            workload("grpo", prompts=64, samples=8, mini_batches=1),
            backend="deepspeed",
            profile=load_profile("h100_sxm"),
            software=software,
        )
        held[role] = memory.of(RolePlacement(pool="all", layout=layout))
    actor, reference = held["actor"], held["reference"]
    assert actor.states.total == pytest.approx(
        5 * width * PSI, rel=1e-3
    )  # w, 2 w of gradients, 2 w of moments
    assert actor.kept.total == pytest.approx(4 * width * PSI, rel=1e-3)  # without gradients
    assert reference.states.total == pytest.approx(width * PSI, rel=1e-3)
    assert actor.train.gathered == pytest.approx(casts, rel=1e-3)
    assert reference.score.gathered == pytest.approx(casts, rel=1e-3)


def test_a_reference_that_deepspeed_leaves_whole_is_in_bf16_beside_a_policy_under_zero() -> None:
    software = software_of(None, "trl", "deepspeed")
    assert software.plain(Layout(dp=8, zero=0), trained=False) == 0
    assert software.plain(Layout(dp=1, zero=0), trained=False) == 4
    assert software.plain(Layout(dp=8, zero=2), trained=True) == 0
