"""Keys that the doctor does not read: named, told apart by whether they may change the answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlhfsim.cli.main import cli
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.keys import Unread, key_table, nearest, unread
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.export import exporter, exporters

ROLL = "actor_rollout_ref.rollout"
BASE = (
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B actor_rollout_ref.actor.use_dynamic_bsz=True "
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 trainer.n_gpus_per_node=8 "
    "data.train_batch_size=256 algorithm.adv_estimator=grpo "
)
VERL = f"python3 -m verl.trainer.main_ppo {BASE}"


def left(source: str | list[Path], version: str | None = None, **given: str) -> dict[str, Unread]:
    configuration, settings = read_configuration(source, given)
    run = configuration.run(settings)
    list(configuration.findings(settings, run))
    return {u.key: u for u in unread(configuration.name, version, settings)}


@pytest.mark.parametrize("name", exporters())
def test_every_framework_has_a_table_up_to_the_release_that_is_written(name: str) -> None:
    table = key_table(name)
    assert table.releases[-1] == exporter(name).version
    assert len(table.keys) > 150
    assert table.place(None) == len(table.releases) - 1


def test_a_misspelt_key_is_named_with_the_nearest_of_its_group() -> None:
    found = left(VERL + f"{ROLL}.tensor_parallel_size=4 trainer.v1.foo_bar=1 trainer.project_nme=x")
    wrong = found[f"{ROLL}.tensor_parallel_size"]
    assert (wrong.kind, wrong.matters) == ("no such key", True)
    assert wrong.nearest == f"{ROLL}.tensor_model_parallel_size"
    assert found["trainer.v1.foo_bar"].kind == "no such key"
    assert found["trainer.project_nme"].nearest == "trainer.project_name"
    assert not found["trainer.project_nme"].matters


def test_a_key_without_its_group_is_nearest_to_one_that_is_read() -> None:
    table = key_table("verl")
    read = {f"{ROLL}.tensor_model_parallel_size"}
    assert nearest("tensor_parallel_size", table.keys, read) in read
    assert nearest("zzz.qqq", table.keys) is None


def test_a_key_that_is_not_read_may_change_the_answer_unless_it_is_of_no_effect_or_a_default() -> None:
    switch = "trainer.v1.separate_async.hybrid_rollout.enable_switch"
    found = left(
        VERL
        + f"{switch}=true {ROLL}.name=vllm trainer.save_freq=20 data.truncation=error {ROLL}.dtype=float16 "
        + f"+{ROLL}.engine_kwargs.vllm.block_size=32 actor_rollout_ref.actor.optim.lr=2e-6"
    )
    kinds = {key: u.kind for key, u in found.items()}
    assert kinds == {
        switch: "may change",
        f"{ROLL}.dtype": "may change",
        f"{ROLL}.engine_kwargs.vllm.block_size": "may change",
        "data.truncation": "default",
        "trainer.save_freq": "no effect",
        "actor_rollout_ref.actor.optim.lr": "no effect",
    }
    assert [u.matters for u in found.values()] == [True] * 3 + [False] * 3


def test_a_key_of_another_release_says_until_when_it_was_one() -> None:
    key = "critic.model.fsdp_config.param_offload"
    gone = "actor_rollout_ref.actor.fsdp_config.grad_offload"
    found = left(VERL + f"{gone}=True")[gone]
    assert (found.kind, found.until, found.since) == ("no such key", "0.2.0.post2", None)
    new = "actor_rollout_ref.actor.checkpoint.strict"
    early = left(VERL + f"{new}=True", "0.6.1")[new]
    assert (early.kind, early.until, early.since) == ("no such key", None, "0.8.0")
    assert left(VERL + f"{gone}=True", "0.2")[gone].kind == "may change"
    assert key_table("verl").at(key, key_table("verl").place("0.7.1")) is not None
    assert key_table("verl").at(key, key_table("verl").place("0.9.1")) is None
    place = key_table("verl").place
    assert [key_table("verl").releases[place(v)] for v in ("0.7", "0.7.9", "9.0", "0.1")] == [
        "0.7.1",
        "0.7.1",
        "0.9.1",
        "0.2.0.post2",
    ]


def test_variables_and_other_commands_of_a_script_are_no_keys(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "export NCCL_DEBUG=WARN\nproject_name='x'\nray start --head --num-gpus 8 --block &\n"
        f"ray job submit --address=http://h --runtime-env=e.yaml -- {VERL} trainer.fo=1 2>&1 | tee --append log\n"
    )
    assert set(left([script])) == {"trainer.fo"}


def test_yaml_json_overrides_and_set_are_read_alike(tmp_path: Path) -> None:
    tree = {"trainer": {"fo": 1}, "actor_rollout_ref": {"model": {"path": "Qwen/Qwen2.5-7B"}}}
    tree |= {"algorithm": {"adv_estimator": "grpo"}, "data": {"train_batch_size": 64}}
    (tmp_path / "tree.yaml").write_text(json.dumps(tree))
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    (tmp_path / "list.yaml").write_text("\n".join(f"- {word}" for word in (BASE + "trainer.fo=1").split()))
    for file in ("tree.yaml", "tree.json", "list.yaml"):
        assert set(left([tmp_path / file])) == {"trainer.fo"}, file
    assert set(left(VERL, **{"trainer.fo": "2"})) == {"trainer.fo"}


def test_a_printed_tree_of_all_defaults_has_nothing_that_matters(tmp_path: Path) -> None:
    table = key_table("verl")
    newest = {k: table.at(k, table.place(None)) for k in table.keys}
    plain = {k: key.defaults[0] for k, key in newest.items() if key and key.defaults[0] not in ("{}", "[]")}
    plain |= dict(word.split("=") for word in BASE.split())
    tree = {key: None if value in ("none", "???") else value for key, value in plain.items()}
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    found = left([tmp_path / "tree.json"])
    assert len(found) > 300
    assert [u for u in found.values() if u.matters] == []


def test_keywords_of_a_python_script_are_keys_of_its_configuration_alone() -> None:
    text = (
        "from trl import GRPOConfig, GRPOTrainer\nfrom peft import LoraConfig\n"
        "config = GRPOConfig(num_generations=8, vllm_max_foo=2, max_completion_length=256, torch_compile=True)\n"
        "peft = LoraConfig(r=8, my_own=1)\n"
        "GRPOTrainer(model='Qwen/Qwen2.5-7B', args=config)\n"
    )
    found = left(text, num_processes="8")
    assert found["vllm_max_foo"].kind == "no such key"
    assert found["torch_compile"].kind == "may change"
    assert "my_own" not in found


# --- the command ------------------------------------------------------------------------------------


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["doctor", *arguments, "--gpu", "h100"])


def test_a_misspelt_key_stands_next_to_the_verdict_and_strict_refuses_it() -> None:
    text = VERL + f"{ROLL}.tensor_parallel_size=4 {ROLL}.dtype=float16 trainer.save_freq=20"
    found = doctor(text)
    assert found.exit_code == 0
    head = " ".join(found.output.split("\n\n")[0].split())
    assert (
        f"no such key in verl 0.9.1: {ROLL}.tensor_parallel_size=4; the nearest is {ROLL}.tensor_model_"
        in head
    )
    assert "the answer does not count a key that is not read and may change it" in head
    told = " ".join(found.output.split("\nnot read")[1].split())
    assert f"1 key may change the answer: {ROLL}.dtype=float16" in told
    assert "1 other key of no effect" in told
    refused = doctor(text, "--strict")
    assert isinstance(refused.exception, RlhfsimError)
    assert refused.exception.code == "no-such-key"
    assert f"{ROLL}.tensor_parallel_size -> {ROLL}.tensor_model_parallel_size" in str(refused.exception)
    data = json.loads(doctor(text, "--json").output)
    assert {u["key"]: u["kind"] for u in data["unread"]}["trainer.save_freq"] == "no effect"
    assert data["release"] == "0.9.1"


def test_what_is_all_read_has_no_such_lines() -> None:
    found = doctor(VERL)
    assert "not read" not in found.output
    assert doctor(VERL, "--strict").exit_code == 0
