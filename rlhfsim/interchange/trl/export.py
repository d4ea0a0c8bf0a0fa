"""A plan as the configuration of TRL and of accelerate (TRL 1.16.0, its commands from `grpo` to `kto`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import yaml

from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.export import Exporter, Setting, Unsaid, Written, longest_prompt, scored_alike
from rlhfsim.interchange.instead import Instead, instead, instead_of
from rlhfsim.interchange.launch_script import bash, needs_of
from rlhfsim.interchange.nearest import with_placement
from rlhfsim.interchange.predictions import headline, title_of
from rlhfsim.interchange.training_keys import written_for
from rlhfsim.interchange.trl.keys import ACCELERATE, LOSSES, SERVER, SHARED_PREFILL, TABLE, accumulation
from rlhfsim.outputs import comment
from rlhfsim.plan import Plan
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.workload.workload import Algorithm

COMMANDS: dict[Algorithm, str] = dict.fromkeys(LOSSES, "grpo") | {
    "rloo": "rloo",
    "sft": "sft",
    "reward_model": "reward",
    "dpo": "dpo",
    "kto": "kto",
}
NEEDS = needs_of("trl")
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
    return written_for(plan, "trl", TABLE.write(plan), _unsaid(plan))


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


def _most_sequences(plan: Plan) -> int:
    """Sequences at a time of an engine on the actor's GPUs: the samples of a batch on its ranks."""
    assert plan.placement.rollout is not None
    each = plan.placement.actor.layout.micro_batch * accumulation(plan) * plan.workload.mini_batches
    return each * plan.placement.rollout.layout.tp


@cache
def rows() -> tuple[Instead, ...]:
    """What is run in place of fields that no key says."""
    return instead_of("trl", {"SHARED_PREFILL": SHARED_PREFILL, "most_sequences": _most_sequences})


def _unsaid(plan: Plan) -> Iterator[Unsaid]:
    if plan.workload.generates:
        yield Unsaid(
            f"prompts of at most {longest_prompt(plan)} tokens", "TRL has no limit: filter the data set"
        )
    yield from instead(plan, *rows())
    reference = plan.placement.role("reference")
    if reference is not None and not scored_alike(plan, reference):
        same = replace(reference, layout=plan.placement.actor.layout)
        yield Unsaid(
            "the reference's own layout",
            "as the policy's",
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
    }
    server = [section.settings for section in written.sections if section.title == SERVER]
    named["launch.sh"] = _script(plan, kind, apart=bool(server))
    if server:
        named["server.sh"] = _server(plan, server[0])
    return named


def _lines(written: Written) -> Iterator[str]:
    for section in written.sections:
        if section.title in (ACCELERATE, SERVER):
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


def _script(plan: Plan, kind: str, *, apart: bool) -> str:
    lines = []
    if apart:
        lines += ["# The rollout's engine first, on its own GPUs (CUDA_VISIBLE_DEVICES): bash server.sh", ""]
    lines.append(f"exec trl {kind} --config {kind}.yaml --accelerate_config accelerate.yaml \\")
    reward = ' --reward_funcs "${REWARD}"' if plan.workload.generates else ""
    lines.append('    --model_name_or_path "${MODEL}" --dataset_name "${DATASET}" \\')
    lines.append(f'    --learning_rate "${{LR}}"{reward} "$@"')
    return bash(title_of(plan, "TRL 1.16.0"), NEEDS, "\n".join(lines))


def _server(plan: Plan, settings: Sequence[Setting]) -> str:
    command = [
        'VLLM_SERVER_DEV_MODE=1 exec vllm serve "${MODEL}" \\',
        '    --weight-transfer-config \'{"backend":"nccl"}\' \\',
        *(f"    {s.key}{'' if s.value is True else f' {s.value}'} \\" for s in settings),
        '    --logprobs-mode processed_logprobs --max-logprobs -1 "$@"',
    ]
    return bash(f"{headline(plan)}, the rollout of TRL 1.16.0", NEEDS, "\n".join(command))


EXPORT = Exporter(
    version="1.16.0",
    write=write,
    files=files,
    left_open=TABLE.left_open,
    usual=lambda plan: {"model_name_or_path": plan.workload.model},
    start="bash launch.sh",
    needs=NEEDS,
    install='pip install "trl[vllm,peft]==1.16.0" deepspeed',
    ray="",
)
