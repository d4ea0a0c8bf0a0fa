"""A plan as the configuration of TRL and of accelerate (TRL 1.16.0: `trl grpo`, `rloo`, `dpo`, `kto`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import yaml

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.export import (
    Exporter,
    Section,
    Setting,
    Unsaid,
    Written,
    call,
    headline,
    held,
    longest_prompt,
    longest_response,
    nodes_of,
    of_old_logprobs,
    predicted,
    scored_alike,
    title_of,
)
from rlhfsim.frameworks.launch_script import bash
from rlhfsim.frameworks.nearest import with_placement, with_rollout, with_workload
from rlhfsim.frameworks.training_keys import TRAINING_NEEDS, written_for
from rlhfsim.outputs import comment
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import RolloutPlacement
from rlhfsim.specs.workload.workload import CLIP_RANGES

LOSSES = {"grpo": "grpo", "dr-grpo": "dr_grpo", "dapo": "dapo", "gspo": "grpo", "cispo": "cispo"}
"""`loss_type` of the GRPO trainer; GSPO's is that of GRPO with ratios of whole responses."""
COMMANDS = dict.fromkeys(LOSSES, "grpo") | {"rloo": "rloo", "dpo": "dpo", "kto": "kto"}
ACCELERATE = "accelerate"
"""Title of the section that becomes accelerate.yaml."""
NEEDS = {
    **TRAINING_NEEDS,
    "MODEL": "folder or Hugging Face name of the policy",
    "DATASET": "data set of prompts",
    "REWARD": "reward function, module.name",
}
FIXED = {
    "compute_environment": "LOCAL_MACHINE",
    "downcast_bf16": "no",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}


def write(plan: Plan) -> Written:
    """The plan in the keys of TRL and accelerate.

    Raises:
        RlhfsimError: a batch that does not split.
    """
    command(plan)
    sections = [
        Section(title=ACCELERATE, settings=tuple(_accelerate(plan))),
        Section(title="batch and lengths", settings=tuple(_batch(plan))),
        Section(title="training", settings=tuple(_training(plan))),
    ]
    rollout = plan.placement.rollout
    if rollout is not None:
        sections.append(Section(title="algorithm", settings=tuple(_algorithm(plan))))
        sections.append(Section(title="rollout", settings=tuple(_rollout(plan, rollout))))
    return written_for(plan, "trl", sections, _unsaid(plan))


def command(plan: Plan) -> str:
    """`grpo` of `trl grpo`.

    Raises:
        RlhfsimError: no command trains so.
    """
    if plan.workload.algorithm not in COMMANDS:
        raise RlhfsimError(
            "algorithm-without-command",
            f"TRL has no command for {plan.workload.algorithm.upper()}",
            help=f"its commands: {', '.join(dict.fromkeys(COMMANDS.values()))}",
        )
    return COMMANDS[plan.workload.algorithm]


def _accelerate(plan: Plan) -> Iterator[Setting]:
    placed = plan.placement.actor
    nodes, each = nodes_of(plan, plan.placement.pool(placed.pool).gpus)
    yield Setting(key="num_machines", value=nodes, why=predicted(plan))
    yield Setting(key="num_processes", value=nodes * each)
    zero, offloaded = placed.layout.zero, placed.layout.offload_optimizer == "cpu"
    if plan.placement.backend == "deepspeed":
        yield Setting(key="distributed_type", value="DEEPSPEED" if zero else "MULTI_GPU")
        if zero:
            prefix = "deepspeed_config"
            yield Setting(key=f"{prefix}.zero_stage", value=zero, why=call(plan, "actor.train"))
            where = "cpu" if offloaded else "none"
            yield Setting(key=f"{prefix}.offload_optimizer_device", value=where)
            params = "cpu" if placed.layout.offload_params == "cpu" else "none"
            yield Setting(key=f"{prefix}.offload_param_device", value=params)
            yield Setting(key=f"{prefix}.zero3_init_flag", value=zero == 3)
            yield Setting(key=f"{prefix}.zero3_save_16bit_model", value=zero == 3)
        return
    yield Setting(key="distributed_type", value="FSDP")
    yield Setting(key="fsdp_config.fsdp_version", value=2, why=call(plan, "actor.train"))
    yield Setting(key="fsdp_config.fsdp_auto_wrap_policy", value="TRANSFORMER_BASED_WRAP")
    yield Setting(key="fsdp_config.fsdp_cpu_ram_efficient_loading", value=True)
    yield Setting(key="fsdp_config.fsdp_offload_params", value=offloaded)
    yield Setting(key="fsdp_config.fsdp_reshard_after_forward", value=zero == 3)
    yield Setting(key="fsdp_config.fsdp_state_dict_type", value="FULL_STATE_DICT")


def accumulation(plan: Plan) -> int:
    """Micro-batches of a rank in one optimizer step.

    Raises:
        RlhfsimError: the samples of an optimizer step do not split into them.
    """
    work, layout = plan.workload, plan.placement.actor.layout
    pairs = 2 if work.algorithm == "dpo" else 1
    each = layout.dp * max(1, layout.micro_batch // pairs)
    samples = work.num_sequences // work.mini_batches // pairs
    if samples % each:
        raise RlhfsimError(
            "batch-not-cut-by-micro-batches",
            f"TRL accumulates whole micro-batches: {samples} samples of an optimizer step are no multiple "
            f"of {layout.dp} ranks x {each // layout.dp}",
            help="design with --prompts, --samples and --mini-batches that the GPUs divide",
        )
    return samples // each


def _batch(plan: Plan) -> Iterator[Setting]:
    work, layout = plan.workload, plan.placement.actor.layout
    steps = accumulation(plan)
    pairs = 2 if work.algorithm == "dpo" else 1
    yield Setting(
        key="per_device_train_batch_size",
        value=max(1, layout.micro_batch // pairs),
        why=held(plan, "actor.train", plan.placement.actor.pool),
    )
    yield Setting(key="gradient_accumulation_steps", value=steps)
    if not work.generates:
        yield Setting(key="max_length", value=longest_prompt(plan) + longest_response(plan))
        return
    yield Setting(key="num_generations", value=work.samples)
    why = f"{work.prompts} prompts x {work.samples} samples, {work.mini_batches} optimizer steps a batch"
    yield Setting(key="steps_per_generation", value=steps * work.mini_batches, why=why)
    yield Setting(key="num_iterations", value=work.epochs)
    yield Setting(key="max_completion_length", value=longest_response(plan))


def _training(plan: Plan) -> Iterator[Setting]:
    work, layout = plan.workload, plan.placement.actor.layout
    yield Setting(key="bf16", value=True)
    why = held(plan, "actor.train", plan.placement.actor.pool)
    yield Setting(key="gradient_checkpointing", value=layout.recompute != "none", why=why)
    if work.optimizer == "adam8bit":
        yield Setting(key="optim", value="adamw_bnb_8bit")
    if work.lora is not None:
        yield Setting(key="use_peft", value=True)
        yield Setting(key="lora_r", value=work.lora.rank)
        yield Setting(key="lora_alpha", value=2 * work.lora.rank)
        if work.lora.base == "nf4":
            yield Setting(key="load_in_4bit", value=True)
            yield Setting(key="use_bnb_nested_quant", value=True)


def _algorithm(plan: Plan) -> Iterator[Setting]:
    kl = plan.placement.reference is not None
    yield Setting(key="beta", value=0.001 if kl else 0.0, why="" if kl else "no reference model")
    if command(plan) == "grpo":
        algorithm = plan.workload.algorithm
        yield Setting(key="loss_type", value=LOSSES[algorithm])
        if algorithm == "dr-grpo":
            yield Setting(key="scale_rewards", value="none")
        if algorithm == "gspo":
            yield Setting(key="importance_sampling_level", value="sequence")
        if algorithm in CLIP_RANGES:
            low, high = CLIP_RANGES[algorithm]
            yield Setting(key="epsilon", value=low)
            yield Setting(key="epsilon_high", value=1 + high if algorithm == "cispo" else high)


def _rollout(plan: Plan, placed: RolloutPlacement) -> Iterator[Setting]:
    layout, apart = placed.layout, placed.pool != plan.placement.actor.pool
    yield Setting(key="use_vllm", value=True, why=call(plan, "actor.generate"))
    yield Setting(key="vllm_mode", value="server" if apart else "colocate")
    total = longest_prompt(plan) + longest_response(plan)
    yield Setting(key="vllm_max_model_length", value=total)
    if plan.workload.old_logprobs != "recompute":
        why = "one forward pass less"
        yield Setting(key="vllm_importance_sampling_correction", value=False, why=why)
    if apart:
        return
    yield Setting(key="vllm_tensor_parallel_size", value=layout.tp)
    why = held(plan, "actor.generate", placed.pool)
    yield Setting(key="vllm_gpu_memory_utilization", value=layout.memory_utilization, why=why)
    yield Setting(key="vllm_enable_sleep_mode", value=placed.sleep > 0)


def _unsaid(plan: Plan) -> Iterator[Unsaid]:
    if plan.workload.generates:
        yield Unsaid(
            what=f"prompts of at most {longest_prompt(plan)} tokens",
            instead="TRL has no limit: filter the data set",
        )
        if plan.workload.packing:
            yield Unsaid(
                what="packed sequences",
                instead="those of a micro-batch are padded to its longest",
                of=("workload.packing",),
            )
        yield from of_old_logprobs(plan)
    rollout = plan.placement.rollout
    if rollout is not None and rollout.pool == plan.placement.actor.pool:
        actor = plan.placement.actor.layout
        most = actor.micro_batch * accumulation(plan) * plan.workload.mini_batches * rollout.layout.tp
        if rollout.layout.max_num_seqs != most:
            yield Unsaid(
                what=f"max_num_seqs {rollout.layout.max_num_seqs}",
                instead=f"{most}, the samples of a batch on the ranks of a replica",
                nearest=with_rollout(plan, rollout, max_num_seqs=most),
                of=("rollout.layout.max_num_seqs",),
            )
    if plan.workload.gradients == "fp32" and plan.placement.backend == "deepspeed":
        yield Unsaid(
            what="gradients summed in FP32",
            instead="accelerate's file has no key: DeepSpeed's own",
            nearest=with_workload(plan, gradients="backend"),
            of=("workload.gradients",),
        )
    reference = plan.placement.reference
    if reference is not None and not scored_alike(plan, reference):
        same = replace(reference, layout=plan.placement.actor.layout)
        yield Unsaid(
            what="the reference's own layout",
            instead="as the policy's",
            nearest=with_placement(plan, reference=same),
            of=tuple(f"reference.layout.{f.name}" for f in fields(Layout)),
        )


def files(plan: Plan, written: Written) -> dict[str, str]:
    """Configuration of TRL and of accelerate, and the script that starts them."""
    kind = command(plan)
    head = "".join(f"{comment(text)}\n" for text in title_of(plan, "TRL 1.16.0").splitlines())
    named = {
        f"{kind}.yaml": head + "\n".join(_lines(written)) + "\n",
        "accelerate.yaml": yaml.safe_dump(_accelerate_file(written), sort_keys=True),
        "launch.sh": _script(plan, kind),
    }
    rollout = plan.placement.rollout
    if rollout is not None and rollout.pool != plan.placement.actor.pool:
        named["server.sh"] = _server(plan, rollout)
    return named


def _lines(written: Written) -> Iterator[str]:
    for section in written.sections:
        if section.title == ACCELERATE:
            continue
        yield comment(f"--- {section.title}")
        for setting in section.settings:
            if str(setting.value).startswith("${"):
                continue  # given by the launch script
            if setting.why:
                yield comment(setting.why)
            yield yaml.safe_dump({setting.key: setting.value}).strip()


def _accelerate_file(written: Written) -> dict[str, Any]:
    found: dict[str, Any] = dict(FIXED)
    section = next(s for s in written.sections if s.title == ACCELERATE)
    for setting in section.settings:
        group, _, name = setting.key.rpartition(".")
        (found.setdefault(group, {}) if group else found)[name] = setting.value
    return found


def _script(plan: Plan, kind: str) -> str:
    lines, rollout = [], plan.placement.rollout
    if rollout is not None and rollout.pool != plan.placement.actor.pool:
        lines += ["# The rollout's engine first, on its own GPUs (CUDA_VISIBLE_DEVICES): bash server.sh", ""]
    lines.append(f"exec trl {kind} --config {kind}.yaml --accelerate_config accelerate.yaml \\")
    reward = ' --reward_funcs "${REWARD}"' if plan.workload.generates else ""
    lines.append('    --model_name_or_path "${MODEL}" --dataset_name "${DATASET}" \\')
    lines.append(f'    --learning_rate "${{LR}}"{reward} "$@"')
    return bash(title_of(plan, "TRL 1.16.0"), NEEDS, "\n".join(lines))


def _server(plan: Plan, placed: RolloutPlacement) -> str:
    layout = placed.layout
    total = longest_prompt(plan) + longest_response(plan)
    eager = " --enforce-eager" if not layout.cuda_graphs else ""
    fp8 = " --quantization fp8" if layout.precision == "fp8" else ""
    cache = " --kv-cache-dtype fp8" if layout.kv_precision == "fp8" else ""
    command = [
        'VLLM_SERVER_DEV_MODE=1 exec vllm serve "${MODEL}" \\',
        '    --weight-transfer-config \'{"backend":"nccl"}\' \\',
        f"    --tensor-parallel-size {layout.tp} --data-parallel-size {layout.dp} "
        f"--pipeline-parallel-size {layout.pp} \\",
        f"    --gpu-memory-utilization {layout.memory_utilization} --max-num-seqs {layout.max_num_seqs} "
        f"--max-num-batched-tokens {layout.max_batched_tokens} --max-model-len {total}{eager}{fp8}{cache} \\",
        '    --logprobs-mode processed_logprobs --max-logprobs -1 "$@"',
    ]
    return bash(f"{headline(plan)}, the rollout of TRL 1.16.0", NEEDS, "\n".join(command))


EXPORT = Exporter(
    version="1.16.0",
    write=write,
    files=files,
    start="bash launch.sh",
    needs=NEEDS,
    install='pip install "trl[vllm,peft]==1.16.0" deepspeed',
    ray="",
)
