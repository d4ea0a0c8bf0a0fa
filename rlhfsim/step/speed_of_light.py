"""Seconds below which no software brings a call: its FLOP, bytes and traffic at datasheet rates."""

from __future__ import annotations

import math
from dataclasses import replace

from rlhfsim.kernels.flop import attention_flop, forward_flop, matmul_flop, training_flop
from rlhfsim.kernels.sequences import Sequences
from rlhfsim.rollout.engine_step import kernel_name
from rlhfsim.rollout.generation import Generation
from rlhfsim.rollout.steady_state import batches_at_once
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
from rlhfsim.specs.quantities import BYTES_PER_ELEMENT
from rlhfsim.specs.workload.dataflow import Call, dataflow
from rlhfsim.specs.workload.lengths import stats
from rlhfsim.step.calls import CallSetting
from rlhfsim.training.packing import sequences_of
from rlhfsim.weight_sync.endpoints import TRAINED_BYTES, mean_bytes, weights_of


def limits(setting: CallSetting, generation: Generation | None) -> dict[str, float]:
    """Call -> seconds at the limits of the hardware that it runs on; calls on CPUs have none.

        train, score   model FLOP / (n F)
        generate       max( FLOP / (n F),  (passes W / r + sum_i kappa (p l_i + l_i^2 / 2) / n) / B )
        sync           max( bytes that a domain lacks / (its GPUs B_nic),  W / r / B_hbm )

    n GPUs of peak rate F and memory bandwidth B, W bytes of active weights, r GPUs of a replica, passes: the
    mean response over the batches that run at once (`batches_at_once`), kappa bytes of KV cache a token, p
    prompt and l response. Optimistic: every response runs at the same time as all others, nothing is
    recomputed or padded, windowed layers read no cache.
    """
    seconds = {call.name: limit_of(setting, call, generation) for call in dataflow(setting.workload)}
    return {name: limit for name, limit in seconds.items() if limit is not None}


def limit_of(setting: CallSetting, call: Call, generation: Generation | None) -> float | None:
    """Seconds of one call at the limits of its hardware; None where it has none, or nothing is generated."""
    if call.kind == "generate":
        return None if generation is None else _generate(setting, generation)
    if call.kind == "sync":
        return _sync(setting)
    if call.role == "rules":
        return None
    work, role = setting.workload, setting.placement.roles[call.role]
    sequences, model = sequences_of(replace(work, packing=True)), setting.models.of(call.role)
    flop = forward_flop(model, sequences)
    if call.kind == "train":
        frozen = matmul_flop(model, sequences.tokens) if work.lora and call.role == "actor" else 0.0
        flop = work.epochs * (training_flop(model, sequences) - frozen)
    return flop / (role.layout.gpus * setting.device(role).peak(work.train_precision))


def _generate(setting: CallSetting, generation: Generation) -> float:
    role, model, work = setting.placement.rollout, setting.models.actor, setting.workload
    assert role is not None
    device, layout = setting.device(role), role.layout
    prompt, response = stats(work.prompt_len), stats(work.response_len)
    tokens = generation.decode_tokens
    count = tokens / response.mean
    seen = count * (prompt.mean * response.mean + response.mean_square / 2)
    passes = tokens / count / layout.tokens_per_step
    if (schedule := setting.placement.schedule).asynchronous:
        passes /= max(1.0, batches_at_once(schedule.staleness))
    read = passes * _weights(setting) / layout.replica_gpus
    whole = 1 - model.attention.num_windowed_layers / model.num_layers
    cache = whole * seen * model.kv_bytes_per_token(BYTES_PER_ELEMENT[layout.kv_precision]) / layout.gpus
    prompts = Sequences(count=work.gen_prompts, mean=prompt.mean, mean_square=prompt.mean_square, maximum=0)
    once = work.gen_batches * prompts.tokens
    cores = attention_flop(model, prompts) * work.gen_batches
    flop = matmul_flop(model, once + tokens) + cores
    compute = flop / (layout.gpus * device.peak(kernel_name(layout.precision)))
    return max(compute, (read + cache) / device.profile.hbm.value)


def _weights(setting: CallSetting) -> float:
    """Bytes of the weights that a token of the rollout is multiplied with."""
    role, model = setting.placement.rollout, setting.models.actor
    assert role is not None
    return model.num_matmul_params_active * mean_bytes(weights_of(model), role.layout)


def _sync(setting: CallSetting) -> float | None:
    """A domain of GPUs lacks what its rollout holds and its own trainers do not."""
    placement, actor, rollout = setting.placement, setting.placement.actor, setting.placement.rollout
    path = placement.weight_path
    if rollout is None or path == "none" or WEIGHT_PATHS[path].adapters_only:
        return None
    device, trained = setting.device(rollout), actor.layout
    held = min(device.domain, placement.pool(rollout.pool).gpus)
    size = TRAINED_BYTES * weights_of(setting.models.actor).params
    wanted = min(1.0, held / rollout.layout.replica_gpus)
    copy = trained.tp * trained.pp * (trained.dp * trained.cp if trained.zero == 3 else 1)
    together = actor.pool == rollout.pool
    own = min(wanted, held / (trained.shards or copy)) if together else 0.0
    across = (wanted - own) * size / (held * device.network_bandwidth)
    inside = setting.cluster.gpus <= device.domain and not together
    if inside:
        across = wanted * size / (held * device.profile.scale_up.bandwidth.value)
    link = None if together or WEIGHT_PATHS[path].changes_only else device.wan
    if link is not None:
        sent = weights_of(setting.models.actor).params * mean_bytes(
            weights_of(setting.models.actor), rollout.layout
        )
        across = max(across, sent / (link.goodput or link.bandwidth or math.inf))
    return max(across, size / rollout.layout.replica_gpus / device.profile.hbm.value)
