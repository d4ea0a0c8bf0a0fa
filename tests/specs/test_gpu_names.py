"""A GPU is read as the machine that its name says, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.scoreboard.rows import rows_of
from rlhfsim.errors import RlhfsimError
from rlhfsim.present import words
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.validation.cases.training import nodes_of, shipped_profile
from rlhfsim.validation.kinds.memory import _profile
from rlhfsim.validation.rows import Row


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("DGX-A100", "a100_sxm"),
        ("DGX A100", "a100_sxm"),
        ("HGX-H100", "h100_sxm"),
        ("DGX-H100", "h100_sxm"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100_sxm_40gb"),
        ("H100-96GB-HBM2e-500W", "h100_96gb"),
        ("H100 96GB", "h100_96gb"),
        ("H100 96GB 500W", "h100_96gb"),
        ("H100 PCIe 80GB", "h100_pcie"),
        ("H100-80G", "h100_sxm"),
        ("A100-40G", "a100_sxm_40gb"),
        ("H200-141G", "h200_sxm"),
        ("NVIDIA H20", "h20_sxm"),
        ("NVIDIA L40S", "l40s"),
        ("B200-SXM-180GB", "b200_sxm"),
        ("GB200 NVL72", "gb200_nvl72"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA L20", "l20"),
        ("AMD Instinct MI300X", "mi300x"),
        ("V100-32G", "v100_sxm"),
    ],
)
def test_a_name_means_its_machine(name: str, profile: str) -> None:
    assert load_profile(name).name == profile


@pytest.mark.parametrize(
    "name",
    [
        "H100-64GB",
        "H100 NVL",
        "A100 80GB PCIe",
        "V100-16GB",
        "GH200",
        "H20-141GB",
        "RTX A5000-24GB",
        "RTX3090",
        "H100-96GB-700W",
        "A100-80GB (330W cap)",
        "DGX",
        "T4",
        "A10",
        "8xMI300X_2xEPYC-TURIN",
    ],
)
def test_another_machine_is_refused(name: str) -> None:
    with pytest.raises(RlhfsimError) as error:
        load_profile(name)
    assert error.value.code == "unknown-hardware-profile"


@pytest.mark.parametrize(
    ("gpu", "profile"),
    [("H100-96GB-HBM2e-500W", "h100_96gb"), ("DGX-A100", "a100_sxm"), ("GB200", "gb200_nvl72")],
)
def test_a_training_row_runs_on_the_machine_that_it_names(gpu: str, profile: str) -> None:
    from rlhfsim.validation.cases.training import layout_of

    row = next(r for r in rows_of("training") if r.text("micro_batch") and r.text("recompute"))
    row = row.filled({"gpu_type": gpu})
    assert nodes_of(row, layout_of(row), shipped_profile).profile.name == profile


def test_a_memory_row_holds_the_memory_of_its_machine() -> None:
    row = Row(table="memory", file="f", line=1, values={"gpu_type": "H100-96GB-HBM2e-500W"})
    assert _profile(row).name == "h100_96gb"


@pytest.mark.parametrize("gpu", ["l40s", "rtx_4090", "a10g", "l4", "mi300x", "h100_pcie"])
def test_nvlink_is_not_named_on_a_card_without_it(gpu: str) -> None:
    from rlhfsim.present.answers.plan_blocks import _coefficient_words

    profile = load_profile(gpu)
    profile = replace(profile) if profile.scale_up.kind != "nvlink" else profile
    shown = [words.bound_by("nvlink"), words.RESOURCES["nvlink"].word]
    if profile.scale_up.kind != "nvlink":
        shown.append(_coefficient_words("nvlink_efficiency", profile))
    assert not any("nvlink" in text.lower() for text in shown)
