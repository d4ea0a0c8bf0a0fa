"""Releases of OpenRLHF before 0.11.2 in its flags, as exports write them: 0.9.10 has underscores.

Source: command lines of these releases, read 2026-11-22.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlhfsim.interchange.releases import Release

_UNDERSCORES = {
    "--actor.adam.lr": "--actor_learning_rate",
    "--actor.eps_clip_low_high": "--eps_clip_low_high",
    "--actor.lr_": "--lr_",
    "--ckpt.": "--",
    "--critic.adam.lr": "--critic_learning_rate",
    "--data.": "--",
    "--eval.": "--eval_",
    "--logger.": "--",
    "--actor.gradient_checkpointing_enable": "--gradient_checkpointing",
    "--actor.model_name_or_path": "--pretrain",
    "--actor.num_": "--actor_num_",
    "--actor.policy_loss_type": "--policy_loss_type",
    "--algo.advantage.estimator": "--advantage_estimator",
    "--algo.dynamic_filtering_enable": "--dynamic_filtering",
    "--algo.kl.estimator": "--kl_estimator",
    "--algo.kl.init_coef": "--init_kl_coef",
    "--algo.kl.use_loss": "--use_kl_loss",
    "--critic.model_name_or_path": "--critic_pretrain",
    "--critic.num_": "--critic_num_",
    "--data.max_len": "--max_len",
    "--data.prompt_dataset": "--prompt_data",
    "--ds.": "--",
    "--ds.enable_sleep": "--deepspeed_enable_sleep",
    "--ds.lora.": "--lora_",
    "--ds.tensor_parallel_size": "--ds_tensor_parallel_size",
    "--ref.num_": "--ref_num_",
    "--ref.offload": "--ref_reward_offload",
    "--reward.model_name_or_path": "--reward_pretrain",
    "--reward.num_": "--reward_num_",
    "--reward.offload": "--ref_reward_offload",
    "--reward.overlong_": "--overlong_",
    "--reward.remote_url": "--remote_rm_url",
    "--rollout.": "--",
    "--rollout.batch_size": "--rollout_batch_size",
    "--rollout.max_tokens_per_gpu": "--rollout_max_tokens_per_gpu",
    "--rollout.micro_batch_size": "--micro_rollout_batch_size",
    "--train.": "--",
    "--train.async_enable": "--async_train",
    "--train.batch_size": "--train_batch_size",
    "--train.colocate_all": "--colocate_all_models",
    "--train.dynamic_batch_enable": "--use_dynamic_batch",
    "--train.max_tokens_per_gpu": "--train_max_tokens_per_gpu",
    "--train.micro_batch_size": "--micro_train_batch_size",
    "--train.partial_rollout_enable": "--partial_rollout",
    "--vllm.": "--vllm_",
    "--vllm.enforce_eager": "--enforce_eager",
}
RELEASES: Mapping[str, Release] = {
    "0.11.0": Release(),
    "0.10.4": Release(),
    "0.9.10": Release(renamed=_UNDERSCORES),
}

_OF_GIVEN_DATA = {
    "--model.gradient_checkpointing_enable": "--gradient_checkpointing",
    "--model.model_name_or_path": "--pretrain",
    "--ref.offload": "--ref_offload",
    "--adam.lr": "--learning_rate",
}
OF_GIVEN_DATA: Mapping[str, Release] = {
    name: Release(renamed={**release.renamed, **_OF_GIVEN_DATA}) if release.renamed else release
    for name, release in RELEASES.items()
}
"""The same in the flags of its trainers of given data."""
