"""A plan as overrides of NeMo-RL's example configurations (NVIDIA-NeMo/RL at 7ea279a: examples/configs)."""

from __future__ import annotations

from rlhfsim.interchange.export import Exporter, Value, Written, override, script, the_rollout
from rlhfsim.interchange.fields import shares
from rlhfsim.interchange.launch_script import needs_of
from rlhfsim.interchange.nemo_rl.keys import GIVEN, LOOPS, TABLE, TRANSPORT, loop_of
from rlhfsim.interchange.nemo_rl.unsaid import alike, unsaid_of
from rlhfsim.interchange.predictions import title_of
from rlhfsim.interchange.training_keys import written_for
from rlhfsim.plan import Plan

NEEDS = needs_of("nemo-rl")
BASES = {"megatron": "_megatron.yaml", "fsdp2": ".yaml"}
"""Training backend -> how the configuration under examples/configs that is overridden ends."""


def write(plan: Plan) -> Written:
    """The plan in NeMo-RL's keys.

    Raises:
        RlhfsimError: an algorithm without a rollout, or a rollout that is not whole nodes.
    """
    if loop_of(plan) not in GIVEN:
        the_rollout(plan, f"NeMo-RL's run_grpo.py, {', '.join(f'run_{loop}.py' for loop in LOOPS)}")
    return written_for(plan, "nemo-rl", TABLE.write(plan), unsaid_of(plan))


def files(plan: Plan, written: Written) -> dict[str, str]:
    """The launch script."""
    head = title_of(plan, "NeMo-RL 7ea279a")
    loop = loop_of(plan)
    size = "" if loop == "distillation" else "_1B"
    base = f"{loop}.yaml" if loop in GIVEN else f"{loop}_math{size}{BASES[plan.placement.backend]}"
    command = f'cd "${{NEMO_RL}}" && exec uv run examples/run_{loop}.py --config examples/configs/{base}'
    return {"launch.sh": script(head, NEEDS, written, override, command)}


LEFT_OPEN = {
    **TABLE.left_open,
    "actor.pack_tokens": TABLE.keys_of("actor.micro_batch", "actor.packs"),
    "actor.score_pack_tokens": TABLE.keys_of("scored.micro_batch", "actor.score_packs"),
    "actor.offload_optimizer": TABLE.keys_of("actor.offload_optimizer", "actor.offload_fraction"),
    "weight_path": (TRANSPORT,),
}
ENGINE_ALONE = 0.8
"""Share of memory in recipes whose engine has its GPUs alone (recipes/llm/performance/*-async-*.yaml)."""


def usual(plan: Plan) -> dict[str, Value]:
    """What the examples of 8B and more, and the base, set (examples/configs, see `examples.yaml`)."""
    alone = {} if shares(plan) else dict.fromkeys(TABLE.keys_of("rollout.memory_utilization"), ENGINE_ALONE)
    return {
        **dict.fromkeys(TABLE.keys_of("actor.micro_batch"), 1),
        **dict.fromkeys(TABLE.keys_of("scored.micro_batch"), 1 if alike(plan) else 4),
        **alone,
    }


EXPORT = Exporter(
    version="7ea279a",
    write=write,
    files=files,
    left_open=LEFT_OPEN,
    usual=usual,
    start="bash launch.sh",
    needs=NEEDS,
    install="pip install uv",
    ray='uv run --directory "${NEMO_RL}" ray',
)
