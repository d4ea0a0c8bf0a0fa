"""What each training backend can run and how many bytes it keeps; what a framework runs of it is listed
with the framework (`rlhfsim.specs.frameworks.runs`)."""

from __future__ import annotations

from typing import Literal

from rlhfsim.frozen import frozen
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.workload.workload import Workload

Backend = Literal["deepspeed", "fsdp2", "megatron"]


@frozen
class BackendRules:
    """Limits and accounting of one backend."""

    title: str
    tensor_parallel: bool
    pipeline_parallel: bool
    context_parallel: bool
    expert_parallel: bool
    zero_stages: tuple[int, ...]
    """ZeRO stages with tp = pp = 1."""
    zero_stages_tp: tuple[int, ...]
    """ZeRO stages together with tp > 1 (or ep > 1)."""
    zero_stages_pp: tuple[int, ...]
    """ZeRO stages together with pp > 1."""
    offload_stages: tuple[int, ...]
    """ZeRO stages under which optimizer states can live on the host."""
    hosted_stages: tuple[int, ...] = ()
    """Those under which the weights of a trained role can live there too; of roles that score any."""
    partial_offload: tuple[int, ...] = ()
    """Those under which only a share of them can (`offload_fraction`)."""
    hybrid_stages: tuple[int, ...] = ()
    """Stages that can shard over a part of the ranks, in as many copies (HSDP)."""
    hosted: bool = False
    """The weights of a role that scores live there always, and come layer by layer."""
    offloads_all: bool = False
    """Weights leave for the host together with optimizer states, or neither does."""
    tp_with_pp: Literal["yes", "unverified", "no"]
    sequence_parallel: bool
    """Activations between TP regions are split over tp."""
    virtual_stages: bool
    interleaves_recompute: bool
    """Selective recompute is available (else none or full)."""
    trains_pieces: bool
    """Training may begin on samples that are finished while others still generate."""
    gradient_bytes: float
    """Bytes per gradient element as stored for the optimizer step."""
    reduce_bytes: float
    """Bytes per gradient element as reduced over data-parallel ranks."""
    whole_stages: tuple[int, ...] = ()
    """ZeRO stages under which all ranks reduce all gradients, of which each keeps its share, and gather the
    new weights at the end of an update, where nothing hides it."""
    fp32_sums: tuple[int, ...] = ()
    """ZeRO stages under which gradients that are stored in fewer bytes can be summed in FP32."""
    fp32_sums_offload: tuple[int, ...] = ()
    """The same with optimizer states on the host."""
    source: str


BACKENDS: dict[Backend, BackendRules] = {
    "deepspeed": BackendRules(
        title="DeepSpeed",
        tensor_parallel=True,
        pipeline_parallel=True,
        context_parallel=True,
        expert_parallel=False,
        zero_stages=(0, 1, 2, 3),
        zero_stages_tp=(0, 1, 2),
        zero_stages_pp=(0, 1),
        offload_stages=(1, 2, 3),
        hosted_stages=(3,),
        partial_offload=(3,),
        tp_with_pp="yes",
        sequence_parallel=False,
        virtual_stages=False,
        interleaves_recompute=False,
        trains_pieces=False,
        gradient_bytes=2,
        reduce_bytes=2,
        whole_stages=(1, 2),
        fp32_sums=(1, 2, 3),
        fp32_sums_offload=(3,),
        source="Ulysses of DeepSpeed, ring attention of OpenRLHF 0.11.2 (--ds.ring_attn_size); "
        "DeepSpeed 0.19 AutoTP (ZeRO 0-2) and pipeline engine (ZeRO 0-1) documentation; PR #5099 "
        "for 2-byte gradients; 0.19.8, allreduce_and_scatter and the end of step of "
        "runtime/zero/stage_1_and_2.py, for whole reductions; "
        "tp x pp: shards of executor/engines/pipeline/shards.py inside DeepSpeed's stages, weights after "
        "two steps within "
        "1e-5 of the unsharded model on 4 ranks (tests/executor/test_pipeline.py; DeepSpeed 0.19.8, AutoTP "
        "itself does not); "
        "the executor scores pieces of a streamed batch and trains on the whole",
    ),
    "fsdp2": BackendRules(
        title="PyTorch FSDP2",
        tensor_parallel=True,
        pipeline_parallel=False,
        context_parallel=True,
        expert_parallel=True,
        zero_stages=(0, 2, 3),
        zero_stages_tp=(3,),
        zero_stages_pp=(),
        offload_stages=(0, 2, 3),
        hosted_stages=(0, 2, 3),
        hybrid_stages=(2, 3),
        offloads_all=True,
        tp_with_pp="no",
        sequence_parallel=True,
        virtual_stages=False,
        interleaves_recompute=True,
        trains_pieces=True,
        gradient_bytes=4,
        reduce_bytes=4,
        source="PyTorch fully_shard with FP32 reduce, the setting of verl and torchtitan; "
        "experts over ranks: prime-rl (trainer.model.ep), NeMo AutoModel (ep_size)",
    ),
    "megatron": BackendRules(
        title="Megatron-Core",
        tensor_parallel=True,
        pipeline_parallel=True,
        context_parallel=True,
        expert_parallel=True,
        zero_stages=(0, 1),
        zero_stages_tp=(0, 1),
        zero_stages_pp=(0, 1),
        offload_stages=(0, 1),
        partial_offload=(0, 1),
        tp_with_pp="yes",
        sequence_parallel=True,
        virtual_stages=True,
        interleaves_recompute=True,
        trains_pieces=True,
        gradient_bytes=4,
        reduce_bytes=4,
        source="Megatron-Core: distributed optimizer, FP32 main gradients, sequence parallelism with TP, "
        "--optimizer-offload-fraction",
    ),
}


SERVED = BackendRules(
    title="an inference engine that serves a reward model",
    tensor_parallel=True,
    pipeline_parallel=False,
    context_parallel=False,
    expert_parallel=False,
    zero_stages=(0,),
    zero_stages_tp=(0,),
    zero_stages_pp=(),
    offload_stages=(),
    tp_with_pp="no",
    sequence_parallel=False,
    virtual_stages=False,
    interleaves_recompute=False,
    trains_pieces=False,
    gradient_bytes=0,
    reduce_bytes=0,
    source="verl 0.9.1, experimental/reward_loop/reward_model.py: replicas of tp x pp x dp GPUs behind one "
    "router; pipelines of such a server are not priced",
)
"""What runs a reward model that an engine of its own serves: whole copies, cut by tensor parallelism."""


def violation(backend: Backend, layout: Layout, role: str = "actor") -> str | None:
    """Why `backend` cannot run `layout` of a role, or None; any reward model may be served."""
    if role == "reward" and broken_rule(SERVED, layout) is None:
        return None
    return broken_rule(BACKENDS[backend], layout)


def broken_rule(rules: BackendRules, layout: Layout) -> str | None:
    """The rule that a layout breaks, or None."""
    runs = _stages(rules, layout)
    broken = (
        ("tensor", layout.tp > 1 and not rules.tensor_parallel),
        ("pipeline", layout.pp > 1 and not rules.pipeline_parallel),
        ("context", layout.cp > 1 and not rules.context_parallel),
        ("expert", layout.ep > 1 and not rules.expert_parallel),
        ("interleaved", layout.vp > 1 and not rules.virtual_stages),
        ("tp x pp", layout.tp > 1 and layout.pp > 1 and rules.tp_with_pp != "yes"),
        ("selective", layout.recompute == "selective" and not rules.interleaves_recompute),
        ("zero", layout.zero not in runs),
        ("offload", layout.offload_optimizer != "none" and layout.zero not in rules.offload_stages),
        ("shards", layout.shards is not None and layout.zero not in rules.hybrid_stages),
        ("experts in shards", layout.shards is not None and layout.ep > 1),
        ("share", layout.offload_fraction < 1 and layout.zero not in rules.partial_offload),
        (
            "weights stay",
            rules.offloads_all and layout.offload_optimizer != "none" and layout.offload_params == "none",
        ),
    )
    rule = next((name for name, is_broken in broken if is_broken), None)
    return rule and f"{rules.title} {_meaning(rules, layout)[rule]}"


def _meaning(rules: BackendRules, layout: Layout) -> dict[str, str]:
    """What each rule of `broken_rule` says of a backend."""
    runs = _listed(_stages(rules, layout))
    return {
        "tensor": "has no tensor parallelism",
        "pipeline": "has no pipeline parallelism",
        "context": "has no context parallelism here",
        "expert": "has no expert parallelism here",
        "interleaved": "has no interleaved pipeline",
        "tp x pp": f"with tp x pp together is {rules.tp_with_pp}",
        "selective": "has no selective recompute",
        "zero": f"runs ZeRO {runs} with this tp and pp, not ZeRO-{layout.zero}",
        "offload": f"offloads optimizer states with ZeRO {_listed(rules.offload_stages)} only",
        "shards": f"shards over a part of the ranks with ZeRO {_listed(rules.hybrid_stages)} only",
        "experts in shards": "shards experts over all ranks",
        "share": f"offloads a share of the optimizer states with ZeRO {_listed(rules.partial_offload)} only",
        "weights stay": "offloads optimizer states together with the weights (offload_params) only",
    }


def broken_hosting(rules: BackendRules, layout: Layout) -> str | None:
    """Why the weights of a trained layout cannot live on the host (`offload_params`), or None."""
    if layout.offload_params == "none":
        return None
    if not rules.hosted_stages:
        return f"{rules.title} keeps no weights on the host while they work"
    if layout.zero not in rules.hosted_stages:
        return f"{rules.title} keeps weights on the host with ZeRO {_listed(rules.hosted_stages)} only"
    alone = rules.offloads_all and layout.offload_optimizer == "none"
    return f"{rules.title} offloads weights together with optimizer states only" if alone else None


def broken_sums(rules: BackendRules, layout: Layout) -> str | None:
    """Why the gradients of a trained layout cannot be summed in FP32 (`workload.gradients: fp32`), or None.

    DeepSpeed 0.19.8 has no FP32 sums under stage 0, and adds up on the host in the weights' precision under
    stages 1 and 2 (`accumulated_grads_in_cpu` of runtime/zero/stage_1_and_2.py).
    """
    offloads = layout.offload_optimizer != "none"
    stages = rules.fp32_sums_offload if offloads else rules.fp32_sums
    if rules.gradient_bytes >= 4 or layout.zero in stages:
        return None
    where = " with the optimizer on the host" if offloads else ""
    return f"{rules.title} sums gradients in FP32 with ZeRO {_listed(stages)} only{where}"


def sums_fp32(workload: Workload, backend: Backend) -> bool:
    """Whether a backend that stores gradients in fewer bytes is asked to sum them in FP32."""
    return workload.gradients == "fp32" and BACKENDS[backend].gradient_bytes < 4


def _stages(rules: BackendRules, layout: Layout) -> tuple[int, ...]:
    if layout.pp > 1:
        return rules.zero_stages_pp
    return rules.zero_stages_tp if layout.tp > 1 else rules.zero_stages


def _listed(stages: tuple[int, ...]) -> str:
    return ", ".join(map(str, stages)) or "none"
