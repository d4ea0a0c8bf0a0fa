"""Configurations in every form in which people keep them: which framework, and what they say."""

from __future__ import annotations

import random
import shlex
from pathlib import Path

import pytest

from lab.fuzz.seeds import exported
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.forms import of_files, of_text
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.configuration.shell import commands_of, split
from rlhfsim.specs.model.presets import resolve_model


def words_of(text: str, name: str) -> list[str]:
    """Words of all commands of a script, in order."""
    return [word for command in commands_of(text, name) for word in command]


VERL = """#!/bin/bash
set -x
MODEL_PATH=Qwen/Qwen2.5-7B-Instruct
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
budget=$(((max_prompt_length + max_response_length) / 2))
DATE=$(date +%s)
common=(data.max_response_length=${max_response_length} # tokens
  "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$budget")
common+=(actor_rollout_ref.actor.use_dynamic_bsz=True)
python3 -m verl.trainer.main_ppo \\
    "${common[@]}" algorithm.adv_estimator=grpo \\
    actor_rollout_ref.model.path="$MODEL_PATH" actor_rollout_ref.rollout.n=8 \\
    trainer.experiment_name=run-$DATE trainer.nnodes=${NNODES:-2} "$@"
"""
RAY = """ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json='{
     "working_dir": "/openrlhf"
   }' -- python3 -m openrlhf.cli.train_ppo_ray \\
   --actor_num_nodes 1 --actor_num_gpus_per_node 4 --vllm_num_engines 2 --vllm_tensor_parallel_size 2 \\
   --pretrain meta-llama/Llama-3.1-8B --zero_stage 3 --packing_samples "$@"
"""
RAY_YAML = """entrypoint: python3 -m verl.trainer.main_ppo trainer.nnodes=4 actor_rollout_ref.model.path=$MODEL
runtime_env:
  env_vars: {MODEL: Qwen/Qwen3-8B}
"""
NEMO = "uv run examples/run_grpo.py --config examples/configs/grpo_math_8B_megatron.yaml cluster.num_nodes=2"
TRL = """accelerate launch --config_file zero3.yaml grpo.py --use_vllm --model_name_or_path Qwen/Qwen2.5-7B
"""


@pytest.mark.parametrize(
    ("text", "framework", "values"),
    [
        (
            VERL,
            "verl",
            {
                "data.max_response_length": 8192,
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 5120,
                "actor_rollout_ref.actor.use_dynamic_bsz": True,
                "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B-Instruct",
                "trainer.nnodes": 2,
            },
        ),
        (RAY, "openrlhf", {"actor_num_gpus_per_node": 4, "packing_samples": True, "zero_stage": 3}),
        (RAY_YAML, "verl", {"trainer.nnodes": 4, "actor_rollout_ref.model.path": "Qwen/Qwen3-8B"}),
        (
            NEMO,
            "nemo-rl",
            {
                "cluster.num_nodes": 2,
                "policy.model_name": "meta-llama/Llama-3.1-8B-Instruct",
                "policy.megatron_cfg.enabled": True,
                "policy.megatron_cfg.pipeline_model_parallel_size": 2,
            },
        ),
        (TRL + "--max_completion_length 512", "trl", {"num_processes": 8, "deepspeed_config.zero_stage": 3}),
        ("- algorithm.adv_estimator=grpo\n- trainer.nnodes=3\n", "verl", {"trainer.nnodes": 3}),
        ('{"grpo": {"num_prompts_per_step": 64}}', "nemo-rl", {"grpo.num_prompts_per_step": 64}),
    ],
    ids=["script", "ray job submit", "ray job file", "base by name", "accelerate", "overrides", "json"],
)
def test_a_pasted_text_names_its_framework_and_keeps_its_values(
    text: str, framework: str, values: dict[str, object]
) -> None:
    configuration, settings = read_configuration(text, {})
    assert configuration.name == framework
    assert {key: settings.find(key) for key in values} == values


def test_a_script_reads_the_configurations_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("num_generations: 4\nbeta: 0.1\n")
    (tmp_path / "accelerate.yaml").write_text("num_processes: 16\n")
    script = "trl grpo --config grpo.yaml --accelerate_config accelerate.yaml --num_generations 8\n"
    (tmp_path / "launch.sh").write_text(script)
    for path in (tmp_path, tmp_path / "launch.sh"):
        configuration, settings = read_configuration([path], {})
        assert configuration.name == "trl"
        assert [settings.find(k) for k in ("num_generations", "beta", "num_processes")] == [8, 0.1, 16]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("# image verlai/verl:app-verl0.5-vllm0.9\npython -m verl.trainer.main_ppo", "0.5"),
        ("pip install verl==0.4.1\npython -m verl.trainer.main_ppo", "0.4.1"),
        ("python -m verl.trainer.main_ppo", None),
    ],
)
def test_a_version_beside_the_name_is_read(text: str, version: str | None) -> None:
    _, settings = read_configuration(text, {})
    assert settings.find("verl_version") == version
    _, given = read_configuration(text, {"verl_version": "0.7.1"})
    assert given.find("verl_version") == "0.7.1"


def test_what_no_framework_wrote_is_refused_with_what_was_looked_for() -> None:
    with pytest.raises(RlhfsimError, match="no framework's marks") as caught:
        read_configuration("hello --world 1", {})
    assert "verl.trainer.main_ppo" in str(caught.value)


def test_everything_that_is_not_said_is_asked_for_at_once_and_a_variable_by_its_name() -> None:
    configuration, settings = read_configuration("trl grpo --model_name_or_path $MODEL --beta 0.1", {})
    with pytest.raises(RlhfsimError) as caught:
        configuration.run(settings)
    assert caught.value.code == "not-enough-said"
    assert "num_processes, model_name_or_path (${MODEL} is not set)" in str(caught.value)
    given = {"num_processes": "8", "MODEL": "Qwen/Qwen2.5-7B"}
    configuration, settings = read_configuration("trl grpo --model_name_or_path $MODEL --beta 0.1", given)
    assert configuration.run(settings).model == "Qwen/Qwen2.5-7B"


def test_a_model_path_under_an_unknown_folder_keeps_its_name() -> None:
    _, settings = read_configuration("trl grpo --model_name_or_path $HOME/models/Qwen2.5-7B", {})
    assert settings.text("model_name_or_path").endswith("models/Qwen2.5-7B")


def test_a_model_that_cannot_be_described_says_why_also_as_a_folder() -> None:
    with pytest.raises(RlhfsimError, match="compressed or sparse attention"):
        resolve_model("${HDFS}/model/DeepSeek-V4-Flash")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("a=1\nb=$((a*2+1))\nrun --x ${b} $unknown", ["a=1", "b=3", "run", "--x", "3", "${unknown}"]),
        ('args="--x 1 --y 2"\nrun $args', ["args=--x 1 --y 2", "run", "--x", "1", "--y", "2"]),
        ("run x=$(nproc) `hostname`", ["run", "x=$?", "$?"]),
        ("run --a 1 \\\n  --b 'two\nlines'", ["run", "--a", "1", "--b", "two\nlines"]),
        ("x=${X:-${Y:-4}}", ["x=4"]),
        ('y=${Y:-"${HOME}/v"}\nx=${X:-${y}/m}', ["y=${HOME}/v", "x=${HOME}/v/m"]),
    ],
)
def test_words_of_a_script_hold_what_the_script_itself_sets(script: str, words: list[str]) -> None:
    assert words_of(script, "s") == words


def test_the_last_flag_of_a_statement_takes_no_word_of_the_next() -> None:
    text = "read -r -d '' commands <<EOF\nopenrlhf.cli.train_ppo_ray \\\n  --ckpt.save_hf\nEOF\n"
    assert of_text(text + "deepspeed --module $commands\n").values["ckpt.save_hf"] is True


def test_an_array_goes_on_behind_a_sum() -> None:
    assert words_of("A=8\nX=(\n--a $((A / 2))\n--b\n)\nrun ${X[@]}", "s") == ["A=8", "run", "--a", "4", "--b"]


@pytest.mark.parametrize(
    ("condition", "read"),
    [
        ('[ "$engine" = "fsdp" ]', "a"),
        ("[[ $engine == megatron ]]", "b"),
        ('[ "$engine" != fsdp ]', "b"),
        ("[ $nodes -gt 1 ]", "a"),
        ("[ $nodes -le 1 ]", "b"),
        ('[ "$1" = fsdp ]', "ab"),
        ("[[ $engine == f* ]]", "ab"),
        ("grep -q x file", "ab"),
    ],
)
def test_a_branch_that_the_script_does_not_take_is_not_read(condition: str, read: str) -> None:
    script = f"engine=${{ENGINE:-fsdp}}\nnodes=2\nif {condition}; then\n  run a\nelse\n  run b\nfi\nrun c\n"
    assert [word for word in words_of(script, "s") if word in "abc"] == [*read, "c"]


def test_branches_in_branches_and_those_after_one_that_was_taken_are_not_read() -> None:
    inner = "if [ $y = 2 ]; then run d; fi\n  if [ $y = 3 ]\n  then\n run e\n fi\n"
    script = (
        "x=1\ny=3\nif [ $x = 0 ]; then\n  y=2\n  args+=(f)\n"
        f"elif [ $x = 1 ]; then\n  {inner}elif [ $z = 1 ]; then\n  run g\nelse\n  run h; fi\nrun c $y"
    )
    assert [words[1:] for words in commands_of(script, "s") if words[0] == "run"] == [["e"], ["c", "3"]]


def test_an_if_that_never_ends_hides_nothing() -> None:
    assert words_of("x=1\nif [ $x = 0 ]; then\nrun a\nrun b", "s")[-4:] == ["run", "a", "run", "b"]


def test_an_array_in_a_variable_is_several_words() -> None:
    script = 'A=(\na.b=1\na.c=2\n)\nB="${A[@]}"\nrun ${B} "${C[@]}"'
    assert words_of(script, "s") == ["B=a.b=1 a.c=2", "run", "a.b=1", "a.c=2"]


def test_words_are_those_of_shlex_which_reads_each_character() -> None:
    rng, drawn = random.Random(0), """ab$\\'"# \t\r\n=\x0b()\u2003"""
    for _ in range(3000):
        text = "".join(rng.choice(drawn) for _ in range(rng.randint(0, 14)))
        try:
            wanted = shlex.split(text, comments=True)
        except ValueError:
            with pytest.raises(ValueError, match="No "):
                split(text)
        else:
            assert split(text) == wanted


def test_a_script_that_hands_its_arguments_to_another_lies_over_it(tmp_path: Path) -> None:
    other, own = tmp_path / "examples/gsm8k/run.sh", tmp_path / "examples/algorithms/gspo/run.sh"
    for script in (other, own):
        script.parent.mkdir(parents=True)
    other.write_text('uv run -m skyrl.train.entrypoints.main_base trainer.epochs=20 trainer.seed=1 "$@"\n')
    own.write_text('# bash other.sh\nbash examples/gsm8k/run.sh \\\n  trainer.epochs=3 "$@"\n')
    configuration, settings = read_configuration([own], {})
    assert configuration.name == "skyrl"
    assert (settings.find("trainer.epochs"), settings.find("trainer.seed")) == (3, 1)
    own.write_text('bash "$HERE/run.sh"\n')
    assert of_files([own]).values == {}, "itself is not read again"


def test_a_shell_script_that_writes_a_python_script_is_no_python_script(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "cat > model.py << EOF\nimport transformers\nc = Mxfp4Config(dequantize=True)\nEOF\n"
        "python3 -m verl.trainer.main_ppo data.train_batch_size=64\n"
    )
    assert of_files([script]).values["data.train_batch_size"] == 64


def test_a_quote_that_never_closes_names_its_line() -> None:
    with pytest.raises(RlhfsimError, match="malformed-script") as caught:
        words_of("a=1\nrun 'x\n", "s.sh")
    assert "s.sh:2" in str(caught.value)


SCRIPT = """
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

MODEL, SIZE = "Qwen/Qwen2.5-7B-Instruct", 4
model_id = "Qwen/Qwen2.5-7B-Instruct"
shared = dict(beta=0.04, use_vllm=True)


def main(args):
    config = GRPOConfig(
        output_dir=f"out/{model_id}", per_device_train_batch_size=2 * 4, num_generations=args.group,
        gradient_accumulation_steps=4, max_completion_length=1024, vllm_mode=args.mode, **shared, **args.rest,
    )
    peft = LoraConfig(r=32, lora_alpha=64)
    GRPOTrainer(model=model_id, args=config, peft_config=peft).train()
"""


def test_a_python_script_is_read_without_being_run_and_says_what_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + "raise SystemExit\n")
    (tmp_path / "run.sh").write_text(
        "accelerate launch --num_processes 8 --config_file zero3.yaml train.py\n"
    )
    for source in ([tmp_path / "run.sh"], [tmp_path / "train.py"], SCRIPT):
        given = {"num_processes": "8", "num_generations": "8"}
        configuration, settings = read_configuration(source, given)
        run = configuration.run(settings)
        assert configuration.name == "trl"
        assert (run.model, run.lora_rank, run.kl, run.max_response) == (
            "Qwen/Qwen2.5-7B-Instruct",
            32,
            True,
            1024,
        )
        assert (run.layout.micro_batch, run.weight_path) == (8, "ipc")
        assert list(settings.unknown()) == ["vllm_mode is ${args.mode}", "arguments in **args.rest"]
    configuration, settings = read_configuration(SCRIPT, {})
    with pytest.raises(RlhfsimError, match=r"num_processes, num_generations \(\$\{args.group\} is not set"):
        configuration.run(settings)
    with pytest.raises(RlhfsimError, match="as Python"):
        read_configuration(SCRIPT + "def (", {})


def test_ppo_of_trl_is_read_from_its_script() -> None:
    script = (
        "from trl import PPOConfig\nPPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=8, "
    )
    script += "sft_model_path='Qwen/Qwen2.5-1.5B', reward_model_path='Qwen/Qwen2.5-1.5B', num_ppo_epochs=2)\n"
    configuration, settings = read_configuration(script, {"num_processes": "8", "zero_stage": "3"})
    run = configuration.run(settings)
    assert (run.algorithm, run.prompts, run.epochs, run.max_response) == ("ppo", 256, 2, 53)
    assert run.roles["reference"].layout.micro_batch == 64
    assert (run.weight_path, run.sleep) == ("ipc", 2)


def test_liger_s_loss_holds_the_logits_of_one_response() -> None:
    """Until 1.14, before all losses went through tiles."""
    said = "trl grpo --model_name_or_path Qwen/Qwen2.5-7B --num_processes 8 --max_completion_length 2048"
    runs = [
        configuration.run(settings).software
        for configuration, settings in (
            read_configuration(said + more, {"trl_version": "1.10.0"})
            for more in ("", " --use_liger_kernel true")
        )
    ]
    assert [run.head.tokens if run and run.head else None for run in runs] == [None, 2048]


def test_a_default_that_a_script_sets_is_its_value_and_an_unset_number_is_asked_for() -> None:
    script = ': "${NUM_GPUS:=4}"\npython -m skyrl.train.entrypoints.main_base trainer.strategy=fsdp2 '
    script += "trainer.placement.policy_num_gpus_per_node=$NUM_GPUS generator.inference_engine.num_engines=$NUM_GPUS"
    configuration, settings = read_configuration(script, {})
    assert configuration.run(settings).gpus == 4
    configuration, settings = read_configuration(script.partition("\n")[2], {})
    with pytest.raises(RlhfsimError, match=r"policy_num_gpus_per_node \(\$\{NUM_GPUS\} is not set\)"):
        configuration.run(settings)


def test_log_probs_of_nemo_rl_in_chunks_keep_no_fp32_copies() -> None:
    keys = "policy: {model_name: Qwen/Qwen2.5-7B, logprob_chunk_size: 1024, dtensor_cfg: {enabled: true}}\n"
    keys += "grpo: {num_prompts_per_step: 32}\ncluster: {gpus_per_node: 8, num_nodes: 1}\n"
    whole = keys.replace("logprob_chunk_size: 1024, ", "")
    first = whole.replace("enabled", "_v2: false, enabled")
    megatron = keys.replace("dtensor_cfg", "megatron_cfg")
    for text, score in ((keys, 6), (megatron, 4), (whole, None), (first, 10)):
        configuration, settings = read_configuration(text, {}, "nemo-rl")
        software = configuration.run(settings).software
        assert (software.head.score_bytes if software else None) == score


def test_aliases_of_a_framework_s_configuration_are_read_and_bounded(tmp_path: Path) -> None:
    """NeMo-RL's distillation_math.yaml lays the teacher over the policy."""
    file, base = tmp_path / "run.yaml", "base: &a {gpus_per_node: 8, num_nodes: 2}\ncluster:\n  <<: *a\n"
    own = base + "  num_nodes: 4\npolicy: {model_name: Qwen/Qwen3-8B}\ngrpo: {num_prompts_per_step: 64}\n"
    file.write_text(own)
    configuration, settings = read_configuration([file], {}, "nemo-rl")
    assert configuration.run(settings).gpus == 32
    doubled = "".join(f"x{i}: &x{i} [*x{i - 1}, *x{i - 1}]\n" for i in range(1, 20))
    for many in ("x: &x [*x]\n", "x0: &x0 [1, 1]\n" + doubled):
        file.write_text(own + many)
        with pytest.raises(RlhfsimError, match="stand for more than 50,000 values"):
            read_configuration([file], {}, "nemo-rl")


@pytest.mark.parametrize(("ep", "groups"), [(1, 1), (8, 1), (32, 4)])
def test_vllm_of_nemo_rl_has_as_many_attention_ranks_as_its_experts_ask_for(ep: int, groups: int) -> None:
    """vllm_generation.py: vllm_dp_size = expert_parallel_size // tensor_parallel_size, where that is more than one."""
    vllm = f"generation: {{vllm_cfg: {{tensor_parallel_size: 8, expert_parallel_size: {ep}}}}}"
    text = NEMO_RL.replace("train_global", f"{vllm}, train_global").replace("num_nodes: 1", "num_nodes: 8")
    configuration, settings = read_configuration(text.replace("Qwen2.5-7B", "Qwen3-30B-A3B"), {}, "nemo-rl")
    rollout = configuration.run(settings).rollout
    assert (rollout.tp, rollout.ep, rollout.attention_dp, rollout.dp) == (8, ep, groups, 8 // groups)


@pytest.mark.parametrize("engine", ["megatron", "trtllm", "sglang"])
def test_an_engine_of_nemo_rl_that_is_not_vllm_is_refused_by_its_key(engine: str) -> None:
    """It was read as vLLM at its defaults, which had no room for the weights."""
    text = NEMO_RL.replace("train_global", f"generation: {{backend: {engine}}}, train_global")
    configuration, settings = read_configuration(text, {}, "nemo-rl")
    with pytest.raises(RlhfsimError, match=f"policy.generation.backend is '{engine}'") as refused:
        configuration.run(settings)
    assert refused.value.code == "engine-not-read"
    other = settings.with_values({"policy.generation.backend": "vllm"})
    assert configuration.run(other).rollout.tp == 1


@pytest.mark.parametrize(
    ("said", "backend"),
    [
        ("model_engine=veomni", None),
        ("actor_rollout_ref.actor.strategy=torchtitan", None),
        ("model_engine=megatron", "megatron"),
        ("actor_rollout_ref.actor.strategy=fsdp", "fsdp2"),
        ("data.seed=1", "fsdp2"),
    ],
)
def test_an_engine_of_verl_that_is_not_priced_is_refused(said: str, backend: str | None) -> None:
    """It was read as FSDP, whose shards it has not."""
    text = f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B {said}"
    configuration, settings = read_configuration(text, {}, "verl")
    if backend is not None:
        assert configuration.run(settings).backend == backend
        return
    with pytest.raises(RlhfsimError, match="how it shards is not known") as refused:
        configuration.run(settings)
    assert refused.value.code == "engine-not-read"


def test_a_configuration_of_nemo_rl_needs_the_file_on_which_it_rests(tmp_path: Path) -> None:
    """It was read without it, with a verdict."""
    own, base = tmp_path / "own.yaml", tmp_path / "elsewhere" / "stage1.yaml"
    own.write_text("defaults: ../../a/stage1.yaml\n" + NEMO_RL)
    with pytest.raises(RlhfsimError, match=r"defaults names \.\./\.\./a/stage1\.yaml") as refused:
        read_configuration([own], {}, "nemo-rl")
    assert refused.value.code == "missing-base"
    base.parent.mkdir()
    base.write_text("defaults: ../grpo_math_8B.yaml\ngrpo: {num_prompts_per_step: 48}\n")
    configuration, settings = read_configuration([base, own], {}, "nemo-rl")
    run = configuration.run(settings)
    assert (run.prompts, run.model, run.layout.tp) == (48, "Qwen/Qwen2.5-7B", 1)
    assert settings.find("grpo.num_generations_per_prompt") == 32  # of the example below both


NEMO_RL = """policy: {model_name: Qwen/Qwen2.5-7B, train_global_batch_size: 512, dtensor_cfg: {enabled: true}}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
TRL_RUN = """num_processes: 8
model_name_or_path: Qwen/Qwen2.5-7B
use_vllm: true
gradient_accumulation_steps: 4
steps_per_generation: 4
"""


@pytest.mark.parametrize(
    ("name", "text", "old"),
    [
        ("nemo-rl", NEMO_RL, "recompute"),
        ("nemo-rl", NEMO_RL + "loss_fn: {force_on_policy_ratio: true}", "reused"),
        (
            "nemo-rl",
            NEMO_RL + "loss_fn: {force_on_policy_ratio: true}\ngrpo: {seq_logprob_error_threshold: 2}",
            "recompute",
        ),
        ("trl", TRL_RUN, "recompute"),
        ("trl", TRL_RUN + "trl_version: 0.23.0", "recompute"),
        ("trl", TRL_RUN + "trl_version: 0.22.2", "reused"),
        ("trl", TRL_RUN + "trl_version: 0.22.2\nnum_iterations: 2", "recompute"),
        ("trl", TRL_RUN + "vllm_importance_sampling_correction: false", "reused"),
        ("trl", TRL_RUN + "vllm_importance_sampling_correction: false\nnum_iterations: 2", "recompute"),
    ],
)
def test_old_log_probs_are_those_that_the_framework_takes(name: str, text: str, old: str) -> None:
    configuration, settings = read_configuration(text, {}, name)
    assert configuration.run(settings).old_logprobs == old


SIZES = {
    "slime": (
        *("rollout_num_gpus_per_engine", "sglang_pp_size", "sglang_ep_size", "expert_model_parallel_size"),
        *("sglang_dp_size", "context_parallel_size", "expert_tensor_parallel_size"),
    ),
    "nemo-rl": (
        "policy.generation.vllm_cfg.expert_parallel_size",
        "policy.generation.vllm_kwargs.max_num_batched_tokens",
    ),
    "skyrl": (
        "generator.inference_engine.max_num_batched_tokens",
        "generator.inference_engine.expert_parallel_size",
    ),
    "openrlhf": ("train.batch_size", "vllm.tensor_parallel_size"),
}


@pytest.mark.parametrize("framework", SIZES)
def test_sizes_of_nothing_are_refused_where_they_are_read(framework: str, tmp_path: Path) -> None:
    _, files, _ = exported(framework)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for key in SIZES[framework]:
        found, settings = read_configuration([tmp_path / "launch.sh"], {key: "0"}, framework)
        with pytest.raises(RlhfsimError) as caught:
            found.run(settings)
        assert caught.value.code in ("bad-setting", "bad-value", "layout-does-not-fill"), caught.value


@pytest.mark.parametrize(("said", "flat"), [({}, True), ({"version": 1}, True), ({"version": 2}, None)])
def test_accelerates_fsdp_is_the_first_where_no_version_is_said(
    said: dict[str, int], flat: bool | None
) -> None:
    keys = {f"fsdp_config.fsdp_{name}": str(number) for name, number in said.items()}
    given = {"num_processes": "8", "distributed_type": "FSDP", **keys}
    command = "trl grpo --model_name_or_path Qwen/Qwen2.5-7B"
    configuration, settings = read_configuration(command, given)
    run = configuration.run(settings)
    assert run.backend == "fsdp2"
    assert (run.software and run.software.flat_parameters) == flat


def test_a_loss_of_trl_that_is_a_list_is_no_loss_of_ours() -> None:
    said = "from trl import GRPOConfig\nGRPOConfig(loss_type=['cispo'], num_generations=8)\n"
    configuration, settings = read_configuration(said, {"num_processes": "8", "model": "qwen2.5-7b"})
    assert configuration.run(settings).algorithm == "grpo"
