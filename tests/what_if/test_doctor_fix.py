"""`rlhfsim doctor --fix`: a changed script next to the old one, its difference, and its figures read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from rlhfsim.cli.main import cli
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.configuration import configuration_named
from rlhfsim.interchange.configuration.edited import edited_script, edited_yaml
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.what_if.doctor.case import Case, judged
from tests.what_if.test_doctor import ROLL, VERL

ENTRY = (r"\bverl\.trainer\.main",)
SCRIPT = f"""#!/bin/bash
# python3 -m verl.trainer.main_ppo {ROLL}.n=1
SHARE=0.5
python3 -m verl.trainer.main_ppo \\
    {ROLL}.gpu_memory_utilization=$SHARE \\
    "{ROLL}.n=8" \\
    trainer.nnodes=1 $@
"""
FLAGS = "python3 -m openrlhf.cli.train_ppo_ray --zero_stage 3 --enforce_eager \\\n  --vllm-num-engines=4 --packing_samples\n"


def test_values_are_replaced_where_they_stand_and_new_keys_follow_the_entry_point() -> None:
    changed = edited_script(SCRIPT, {f"{ROLL}.gpu_memory_utilization": 0.8, "+a.b": None}, ENTRY)
    want = SCRIPT.replace("utilization=$SHARE", "utilization=0.8")
    assert changed == want.replace("main_ppo \\\n", "main_ppo \\\n    +a.b=null \\\n")


def test_switches_are_set_and_left_out_under_the_signs_of_the_script() -> None:
    keys = {"--zero_stage": 2, "--enforce_eager": False, "--vllm_num_engines": 8, "--adam_offload": True}
    changed = edited_script(FLAGS, keys, (r"\bopenrlhf\.cli\.\w+",))
    words = "python3 -m openrlhf.cli.train_ppo_ray --adam_offload --zero_stage 2 --vllm-num-engines 8 --packing_samples"
    assert changed.replace("\\", "").split() == words.split()


def test_a_key_that_another_one_begins_with_is_not_that_key() -> None:
    text = "run.py trainer.n=1 trainer.nnodes=2 x.trainer.n=3"
    assert edited_script(text, {"trainer.n": 9}, (r"run\.py",)) == text.replace(
        " trainer.n=1", " trainer.n=9"
    )


def test_a_script_without_an_entry_point_takes_no_new_key() -> None:
    with pytest.raises(RlhfsimError, match="no entry point of the framework"):
        edited_script("bash other.sh\n", {"a.b": 1}, ENTRY)


def test_yaml_keeps_its_comments_and_takes_new_keys_under_their_group() -> None:
    text = "# mine\npolicy:\n  # why\n  tp: 2\n  cfg:\n    share: 0.5\ncluster: {nodes: 1}\n"
    changed = edited_yaml(text, {"policy.cfg.share": 0.8, "policy.cfg.eager": False, "grpo.seed": 1})
    found = yaml.safe_load(changed)
    assert found["policy"] == {"tp": 2, "cfg": {"share": 0.8, "eager": False}}
    assert (found["cluster"], found["grpo"]) == ({"nodes": 1}, {"seed": 1})
    assert "# why" in changed


def run(script: Path, *arguments: str) -> Result:
    command = ["doctor", str(script), "--framework", "verl", "--gpu", "h100", "--fix", *arguments]
    return CliRunner().invoke(cli, command)


def test_the_changed_script_is_what_was_advised_and_is_never_written_over(tmp_path: Path) -> None:
    values = VERL | {f"{ROLL}.enforce_eager": True}
    lines = " \\\n    ".join(f"{key}={value}" for key, value in values.items())
    script, new = tmp_path / "run.sh", tmp_path / "run.new.sh"
    script.write_text(f"python3 -m verl.trainer.main_ppo \\\n    {lines}\n")
    data = json.loads(run(script, "--json").output)
    assert data["fix"]["file"] == str(new)
    assert data["fix"]["diff"].startswith("--- run.sh\n+++ run.new.sh\n@@")
    for key, value in data["fix"]["keys"].items():
        assert f"{key}={value}" in new.read_text()
    _, settings = read_configuration([new], {})
    again = judged(
        Case(configuration=configuration_named("verl"), settings=settings, gpu="h100").under({}), None
    )
    assert again.fits
    assert again.step_s == pytest.approx(data["fix"]["step_s"])
    assert again.step_s < data["plan"]["prediction"]["step_s"]
    new.write_text("mine")
    with pytest.raises(RlhfsimError, match="a changed file is there already"):
        CliRunner().invoke(cli, ["doctor", str(script), "--gpu", "h100", "--fix"], catch_exceptions=False)
    assert new.read_text() == "mine"
