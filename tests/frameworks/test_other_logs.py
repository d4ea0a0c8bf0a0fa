"""Console logs of slime, SkyRL and AReaL, in the forms that their sources print; MFU lines of NeMo-RL."""

from __future__ import annotations

from pathlib import Path
from pprint import pformat

import pytest

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.logs.framework import framework_named
from rlhfsim.interchange.logs.imported import Choices, Imported, import_run
from rlhfsim.interchange.logs.records import Log, merged

RAY = "\x1b[36m(MegatronTrainRayActor pid=38610)\x1b[0m "
MEGATRON = {
    "rank": 0,
    "world_size": 8,
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": 8,
    "colocate": True,
    "hf_checkpoint": "/root/models/Qwen2.5-7B-Instruct",
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 8,
    "global_batch_size": 256,
    "rollout_max_response_len": 4096,
    "rollout_num_gpus_per_engine": 2,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 9216,
    "update_weights_interval": 1,
    "recompute_granularity": "full",
    "use_kl_loss": True,
    "sglang_mem_fraction_static": 0.7,
    "fp8_format": None,
}


def imported(folder: Path, lines: list[str], *config: Path, **more: str) -> Imported:
    path = folder / "job.log"
    path.write_text("\n".join(lines) + "\n")
    choices = Choices(gpu="h100", configs=config, given=more.pop("given", {}), prompt_tokens=200.0)
    return import_run(path, None, choices)


def test_slime_is_read_from_the_log_alone(tmp_path: Path) -> None:
    lines = [RAY + f"------------------------ arguments {'-' * 24}"]
    lines += [f"{RAY}  {key} {'.' * (40 - len(key))} {value}" for key, value in MEGATRON.items()]
    for i in range(4):
        generated = {
            "rollout/response_len/mean": 1500.0,
            "rollout/response_len/max": 4096,
            "perf/rollout_time": 60.0,
        }
        lines.append(f"(RolloutManager pid=7) [2026-01-05 12:20:29] rollout.py:390 - perf {i}: {generated}")
        lines.append(f"{RAY}[2026-01-05] data.py:210 - rollout {i}: {{'rollout/total_lengths': 1720.0}}")
        wait = (
            {"perf/train_wait_time": 70.0, "perf/update_weights_time": 4.0, "perf/wake_up_time": 2.0}
            if i
            else {}
        )
        times = {"perf/ref_log_probs_time": 8.0, "perf/actor_train_time": 25.0, "perf/train_time": 34.0}
        whole = {"perf/step_time": 104.0} if i else {}
        lines.append(f"{RAY}[2026-01-05] train_metric_utils.py:44 - perf {i}: {wait | times | whole}")
    run = imported(tmp_path, lines)
    placement = run.setup.placement
    assert (run.framework.name, len(run.steps)) == ("slime", 3), "the first rollout has no wait before it"
    assert (placement.actor.layout.tp, placement.schedule.staleness, placement.rollout.sleep) == (2, 0, 2)
    assert run.mapped["perf/actor_train_time"] == ("actor.train",)
    assert run.mapped["perf/update_weights_time"] == ("actor.generate.load", "actor.sync")
    assert not run.unmapped_times
    assert (run.lengths.response, run.lengths.longest) == (1500, 4096)
    with pytest.raises(RlhfsimError, match=r"1e\+200 tokens in a sequence"):
        imported(tmp_path, [line.replace("1500.0", "1e200") for line in lines])


SKYRL = {
    "trainer": {
        "placement": {"colocate_all": True, "policy_num_nodes": 1, "policy_num_gpus_per_node": 8},
        "policy": {"model": {"path": "Qwen/Qwen2.5-7B-Instruct"}},
        "strategy": "fsdp2",
        "train_batch_size": 128,
        "policy_mini_batch_size": 128,
        "micro_train_batch_size_per_gpu": 4,
        "micro_forward_batch_size_per_gpu": 4,
        "max_prompt_length": 512,
        "algorithm": {"advantage_estimator": "grpo", "use_kl_loss": True},
    },
    "generator": {
        "n_samples_per_prompt": 5,
        "sampling_params": {"max_generate_length": 1024},
        "inference_engine": {"num_engines": 8, "tensor_parallel_size": 1, "gpu_memory_utilization": 0.8},
    },
    "environment": {"env_class": "gsm8k"},
}
TIMES = {
    "generate": 20.0,
    "fwd_logprobs_values_reward": 9.0,
    "policy_train": 30.0,
    "train_critic_and_policy": 30.5,
}


def skyrl_lines(i: int, console: bool) -> list[str]:
    head = "(skyrl_entrypoint pid=9) 2026-03-01 10:00:00.123 | INFO     | skyrl.train.trainer:train:260 - "
    times = {**TIMES, "sync_weights": 3.0, "step": 63.5}
    if not console:
        return [f"{head}Finished: '{name}', time cost: {value:.2f}s" for name, value in times.items()]
    values = {"generate/avg_num_tokens": "400.0000", "generate/max_num_tokens": "1024"}
    values |= {f"timing/{name}": f"{value:.4f}" for name, value in times.items()}
    return [
        f"{head}Step {i}: ",
        *(f"(skyrl_entrypoint pid=9) {line}" for line in pformat(values).splitlines()),
    ]


def test_skyrl_is_read_from_its_console_and_from_its_timers_alone(tmp_path: Path) -> None:
    config = [f"(skyrl_entrypoint pid=9) {line}" for line in pformat(SKYRL).splitlines()]
    lengths = "(skyrl_entrypoint pid=9) 2026-03-01 | INFO | x:y:1 - Step {}: \n{{'generate/avg_num_tokens': '400.0'}}"
    for console in (True, False):
        lines = list(config)
        for i in (1, 2, 3):
            lines += skyrl_lines(i, console) + ([] if console else [lengths.format(i)])
        run = imported(tmp_path, lines)
        assert (run.framework.name, len(run.steps)) == ("skyrl", 3)
        assert run.steps[1].values["timing/step"] == 63.5
        assert "timing/train_critic_and_policy" not in run.mapped
        assert run.lengths.response == 400
        assert not run.unmapped_times


AREAL = """
gconfig: {n_samples: 8, max_new_tokens: 2048}
rollout: {max_head_offpolicyness: 2, backend: "vllm:d4t1"}
actor: {path: Qwen/Qwen2.5-1.5B-Instruct, recompute_logprob: true, backend: "fsdp:d4", mb_spec: {max_tokens_per_mb: 10240}}
cluster: {n_nodes: 1, n_gpus_per_node: 8, name_resolve: {type: nfs}}
train_dataset: {batch_size: 64}
"""


def test_areal_is_read_from_the_tables_of_its_console(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(AREAL)
    lines = []
    for i in (1, 2, 3):
        lines += [
            f"20260301-10:00:0{i}.123 StatsLogger INFO: Epoch 1/10 Step {i}/117 Train step {i}/1170 done."
        ]
        lines += ["20260301-10:00:00.123 StatsLogger INFO: Stats (1/1):", "╒══╤══╕"]
        lines += ["│ ppo_actor/seq_len/avg │ 9.0000e+02 │ ppo_actor/prompt_len/avg │ 1.5000e+02 │", "├──┼──┤"]
        lines += ["│ timeperf/rollout │ 1.2000e+01 │ timeperf/recompute_logp │ 4.0000e+00 │"]
        lines += ["│ timeperf/train_step │ 2.0000e+01 │ timeperf/update_weights │ 1.5000e+00 │"]
        lines += ["│ timeperf/compute_advantage │ 1.0000e-01 │ timeperf/eval │ 5.0000e+01 │", "╘══╧══╛"]
    run = imported(tmp_path, lines, tmp_path / "config.yaml")
    assert (run.framework.name, len(run.steps)) == ("areal", 3)
    assert run.mapped["timeperf/rollout"] == ("actor.generate.wait",), "it generates ahead of the updates"
    assert abs(run.steps[0].values["timeperf/step"] - 37.6) < 1e-6
    assert (run.lengths.prompt, run.lengths.response) == (200.0, 750.0)
    assert not run.unmapped_times


def test_nemo_rl_s_mfu_lines_say_the_peak_that_it_counts_with() -> None:
    nemo = framework_named("nemo-rl")
    lines = ["=" * 20 + " Step 1/10 " + "=" * 20]
    lines += ["  \u2022 Training FLOPS: 3166.40 TFLOPS (395.80 TFLOPS per rank)"]
    lines += [
        "  \u2022 Training Model Floating Point Utilization: 40.00%",
        "  \u2022 Total step time: 61.50s",
    ]
    (record,) = merged([Log(records=tuple(nemo.records(lines)))]).records
    peak = nemo.peak(None, [record.values])
    assert abs(peak - 989.5e12) < 1e9
    assert nemo.peak(None, [{}]) is None


@pytest.mark.parametrize("spoiled", ["2026-01-01", "1.2.3", "...", "--", "9" * 5000 + "x"])
def test_what_is_no_number_in_a_line_of_times_is_left_out(spoiled: str) -> None:
    for name, head, line in (
        ("nemo-rl", "=== Step 1/10 ===", f"  \u2022 policy_training: {spoiled}s"),
        ("nemo-rl", "=== Step 1/10 ===", f"  \u2022 Mean Generation Length: {spoiled}"),
        ("nemo-rl", f"=== Step {'9' * 5000}/10 ===", "  \u2022 policy_training: 1.0s"),
        ("skyrl", "", f"Finished: 'step', time cost: {spoiled}s"),
        ("verl", "", f"step:{'9' * 5000} - timing_s/step:1.0"),
    ):
        assert not framework_named(name).records([head, line]), (name, line)


def test_nemo_rl_s_rewards_are_timed_with_its_generation() -> None:
    timers = {timer.metric: timer for timer in framework_named("nemo-rl").timers}
    assert {"actor.generate", "rules.score", "reward.score"} <= {*timers["timing/train/generation"].covers}
    assert "timing/train/reward_calculation" not in timers  # reads off what environments have given
