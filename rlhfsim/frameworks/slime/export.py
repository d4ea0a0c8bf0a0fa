"""A plan as slime's command line (THUDM/slime at 624b824: its flags, Megatron's and SGLang's)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from rlhfsim.errors import RlhfsimError
from rlhfsim.frameworks.export import (
    Exporter,
    Section,
    Setting,
    Value,
    Written,
    call,
    held,
    longest_prompt,
    longest_response,
    memory,
    nodes_of,
    predicted,
    script,
    the_rollout,
    title_of,
)
from rlhfsim.frameworks.slime.heads import CHUNK_ROWS, CHUNKED
from rlhfsim.frameworks.slime.unsaid import unsaid_of
from rlhfsim.plan import Plan
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.placement import RolePlacement, RolloutPlacement
from rlhfsim.specs.placement.speculation import Speculation
from rlhfsim.specs.workload.workload import Workload

ESTIMATORS = {"ppo": "ppo", "grpo": "grpo", "dr-grpo": "grpo", "reinforce++": "reinforce_plus_plus"}
KL_COEFFICIENT = 0.001
"""Above 0, or the reference is not read; how large is not the plan's to say."""
FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
SHAPES = {
    "deepseek-r1": "deepseek-v3",
    "deepseek-v3": "deepseek-v3",
    "glm-4-9b": "glm4-9B",
    "kimi-k2": "kimi-k2",
    "llama-3.1-8b": "llama3.1-8B-Instruct",
    "llama-3.2-3b": "llama3.2-3B-Instruct",
    "mimo-7b": "mimo-7B-rl",
    "moonlight-16b-a3b": "moonlight",
    **{f"qwen2.5-{size.lower()}": f"qwen2.5-{size}" for size in ("0.5B", "1.5B", "3B", "7B", "32B")},
    **{f"qwen3-{size.lower()}": f"qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    "qwen3-30b-a3b": "qwen3-30B-A3B",
    "qwen3-235b-a22b": "qwen3-235B-A22B",
}
"""Model -> the file of slime's scripts/models with its shape, which slime compares with its config.json."""
DRAFTING = {"ngram": "NGRAM", "mtp": "EAGLE", "eagle": "EAGLE3", "draft": "STANDALONE"}
"""What drafts -> SGLang's algorithm."""
NEEDS = {
    "SLIME": "folder of the slime repository",
    "MEGATRON": "folder of the Megatron-LM repository",
    "MODEL": "folder of the policy as on Hugging Face",
    "FP8_MODEL": "folder of the policy as on Hugging Face, its weights in FP8",
    "MODEL_ARGS_FILE": "bash file that sets MODEL_ARGS, the shape in Megatron flags, as scripts/models",
    "PROMPTS": "JSON lines file of training prompts",
    "REWARD_TYPE": "rule of slime/rollout/rm_hub, such as math or dapo",
    "REWARD_URL": "address of a served reward model",
    "GENERATE": "path of a Python function that plays the turns of an environment",
    "SYNC_DIR": "folder that training and rollout share, for weights",
    "DRAFT_MODEL": "folder or Hugging Face name of what drafts tokens",
}


def write(plan: Plan) -> Written:
    """The plan in slime's flags.

    Raises:
        RlhfsimError: a batch that it cannot cut.
    """
    rollout = the_rollout(plan, "slime")
    _check(plan)
    sections = (
        Section(title="where it runs", settings=tuple(_where(plan, rollout))),
        Section(title="batch and lengths", settings=tuple(_batch(plan))),
        Section(title="algorithm", settings=tuple(_algorithm(plan))),
        Section(title="training", settings=tuple(_training(plan))),
        Section(title="rollout", settings=tuple(_rollout(plan, rollout))),
    )
    return Written(sections=sections, unsaid=tuple(unsaid_of(plan, rollout)))


def _check(plan: Plan) -> None:
    work, layout = plan.workload, plan.placement.actor.layout
    each = work.num_sequences // work.mini_batches
    if each % (layout.dp * layout.micro_batch):
        raise RlhfsimError(
            "batch-not-cut-by-ranks",
            f"an optimizer step of {each} samples does not split into micro-batches of {layout.micro_batch} "
            f"for {layout.dp} ranks",
            help="design with --mini-batches, --prompts and --samples whose share is a multiple of the ranks",
        )


def _where(plan: Plan, rollout: RolloutPlacement) -> Iterator[Setting]:
    placement = plan.placement
    nodes, each = nodes_of(plan, placement.pool(placement.actor.pool).gpus)
    apart = rollout.pool != placement.actor.pool
    yield Setting(key="--actor-num-nodes", value=nodes, why=predicted(plan))
    yield Setting(key="--actor-num-gpus-per-node", value=each)
    yield Setting(key="--num-gpus-per-node", value=plan.hardware[0].gpus_per_node)
    yield Setting(key="--rollout-num-gpus", value=rollout.layout.gpus)
    if apart:
        yield from _schedule(plan)
        if placement.actor.residency == "offloaded" and placement.critic is None:
            yield Setting(key="--offload-train", value=True, why=memory(plan))
    else:
        yield Setting(key="--colocate", value=True, why="training and rollout share the GPUs")
        if not (placement.actor.offload_between or placement.actor.residency == "offloaded"):
            yield Setting(key="--no-offload-train", value=True, why=memory(plan))
        if not rollout.sleep:
            yield Setting(key="--no-offload-rollout", value=True)
    if placement.weight_path == "disk":
        yield Setting(key="--update-weight-transport", value="disk", why=call(plan, "actor.sync"))
        yield Setting(key="--update-weight-disk-dir", value="${SYNC_DIR}")
    elif apart:
        yield Setting(key="--update-weight-transport", value="nccl", why=call(plan, "actor.sync"))


def _schedule(plan: Plan) -> Iterator[Setting]:
    """`train_async.py` is another program; what keeps generating over its updates is a function of it."""
    schedule = plan.placement.schedule
    if schedule.asynchronous:
        yield Setting(key="--update-weights-interval", value=1, why="the rollout never waits for an update")
    if schedule.continuous:
        why = "samples go on over an update, under the new weights"
        yield Setting(key="--rollout-function-path", value=FULLY_ASYNC, why=why)


def _batch(plan: Plan) -> Iterator[Setting]:
    work = plan.workload
    yield Setting(key="--prompt-data", value="${PROMPTS}")
    yield Setting(key="--num-epoch", value=1, why="passes over the prompts; --num-rollout N counts steps")
    yield Setting(key="--rollout-batch-size", value=work.prompts, why="prompts")
    yield Setting(key="--n-samples-per-prompt", value=work.samples)
    each = work.num_sequences // work.mini_batches
    yield Setting(key="--global-batch-size", value=each, why="samples of one optimizer step")
    yield from _submitted(work)
    total = longest_prompt(plan) + longest_response(plan)
    yield Setting(key="--rollout-max-prompt-len", value=longest_prompt(plan))
    yield Setting(key="--rollout-max-response-len", value=longest_response(plan))
    yield Setting(key="--rollout-max-context-len", value=total, why="prompt and response")
    if work.environment is not None:
        yield Setting(key="--custom-generate-function-path", value="${GENERATE}")


def _submitted(work: Workload) -> Iterator[Setting]:
    """Prompts that are generated together, where they are more than those that are trained on."""
    sampling = work.dynamic_sampling
    prompts = work.prompts if sampling is None else max(work.prompts, sampling.prompts_of(work.prompts))
    prompts = max(prompts, math.ceil(work.prompts * (1 + work.oversampling)))
    if prompts > work.prompts:
        why = "prompts at a time: what is left when the batch is full is aborted"
        yield Setting(key="--over-sampling-batch-size", value=prompts, why=why)
    if sampling is not None:
        why = f"{sampling.kept:.0%} of the groups are expected to be kept"
        yield Setting(key="--dynamic-sampling-filter-path", value=FILTER, why=why)


def _algorithm(plan: Plan) -> Iterator[Setting]:
    work = plan.workload
    yield Setting(key="--advantage-estimator", value=ESTIMATORS[work.algorithm])
    if work.algorithm == "dr-grpo":
        yield Setting(key="--disable-grpo-std-normalization", value=True)
    if work.algorithm == "reinforce++":
        yield Setting(key="--normalize-advantages", value=True, why="slime refuses the estimator without")
    if plan.placement.reference is not None:
        in_reward = work.algorithm in ("ppo", "reinforce++")
        why = "above 0, so that the reference is read; how large is yours to choose"
        yield Setting(key="--kl-coef" if in_reward else "--kl-loss-coef", value=KL_COEFFICIENT, why=why)
        if not in_reward:
            yield Setting(key="--use-kl-loss", value=True)
            yield Setting(key="--kl-loss-type", value="low_var_kl")
        yield Setting(key="--ref-load", value="${MODEL}")
    if work.old_logprobs == "rollout":
        why = "old log-probs are those of the rollout: one forward pass less"
        yield Setting(key="--use-rollout-logprobs", value=True, why=why)
    if plan.placement.reward is not None:
        yield Setting(key="--rm-type", value="remote_rm")
        yield Setting(key="--rm-url", value="${REWARD_URL}")
    else:
        yield Setting(key="--rm-type", value="${REWARD_TYPE}")


def _training(plan: Plan) -> Iterator[Setting]:
    placed, work = plan.placement.actor, plan.workload
    quantised = plan.placement.rollout is not None and plan.placement.rollout.layout.precision == "fp8"
    why = "the rollout has the precision of this checkpoint" if quantised else ""
    yield Setting(key="--hf-checkpoint", value="${FP8_MODEL}" if quantised else "${MODEL}", why=why)
    yield Setting(key="--load", value="${MODEL}")
    layers = resolve_model(work.model).num_layers if placed.layout.pp > 1 else 1
    yield from _degrees(placed, layers, call(plan, "actor.train"))
    yield from _recompute(placed.layout, held(plan, "actor.train", placed.pool))
    if placed.layout.offload_optimizer == "cpu":
        yield Setting(key="--optimizer-cpu-offload", value=True, why=memory(plan))
        yield Setting(key="--optimizer-offload-fraction", value=placed.layout.offload_fraction)
        yield Setting(key="--overlap-cpu-optimizer-d2h-h2d", value=True)
        yield Setting(key="--use-precision-aware-optimizer", value=True)
    if work.gradients == "bf16":
        yield Setting(key="--grad-reduce-in-bf16", value=True)
    else:
        yield Setting(key="--accumulate-allreduce-grads-in-fp32", value=True)
    if work.train_precision == "fp8":
        yield Setting(key="--transformer-impl", value="transformer_engine")
        yield Setting(key="--fp8-format", value="e4m3")
        yield Setting(key="--fp8-recipe", value="blockwise")
    yield Setting(key="--attention-dropout", value=0.0, why="Megatron's own is 0.1")
    yield Setting(key="--hidden-dropout", value=0.0)
    yield from _micro_batch(placed.layout)
    yield from _chunks(plan)


def _degrees(placed: RolePlacement, layers: int, why: str) -> Iterator[Setting]:
    layout = placed.layout
    degrees: Mapping[str, Value] = {
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "expert-model-parallel-size": layout.ep,
        "expert-tensor-parallel-size": layout.etp,
    }
    for i, (name, value) in enumerate(degrees.items()):
        yield Setting(key=f"--{name}", value=value, why="" if i else why)
    for end, number in ends(layers, layout.pp).items():
        yield Setting(key=f"--decoder-{end}-pipeline-num-layers", value=number, why=f"of {layers} layers")
    if layout.vp > 1:
        yield Setting(key="--num-virtual-stages-per-pipeline-rank", value=layout.vp)
    if layout.sequence_parallel and layout.tp > 1:
        yield Setting(key="--sequence-parallel", value=True)


def ends(layers: int, stages: int) -> dict[str, int]:
    """Layers of the first and the last stage where they do not split evenly: Megatron asks for these."""
    if layers % stages == 0:
        return {}
    each = math.ceil(layers / stages)
    if (last := layers - each * (stages - 1)) > 0:
        return {"last": last}
    if (both := layers - each * (stages - 2)) > 1:
        return {"first": math.ceil(both / 2), "last": both // 2}
    return {"last": layers - (each - 1) * (stages - 1)}


def _recompute(layout: Layout, why: str) -> Iterator[Setting]:
    if layout.recompute == "none":
        return
    yield Setting(key="--recompute-granularity", value=layout.recompute, why=why)
    if layout.recompute == "full":
        yield Setting(key="--recompute-method", value="uniform")
        yield Setting(key="--recompute-num-layers", value=1)


def _micro_batch(layout: Layout) -> Iterator[Setting]:
    if layout.pack_tokens is None:
        yield Setting(key="--micro-batch-size", value=layout.micro_batch)
        return
    yield Setting(key="--use-dynamic-batch-size", value=True)
    yield Setting(key="--max-tokens-per-gpu", value=layout.pack_tokens)
    score = layout.score_pack_tokens or layout.pack_tokens
    yield Setting(key="--log-probs-max-tokens-per-gpu", value=score)


def _chunks(plan: Plan) -> Iterator[Setting]:
    software = plan.placement.software
    if software is not None and software.head == CHUNKED:
        why = "logits of scoring in chunks of tokens"
        yield Setting(key="--log-probs-chunk-size", value=CHUNK_ROWS, why=why)


def _rollout(plan: Plan, placed: RolloutPlacement) -> Iterator[Setting]:
    layout = placed.layout
    why = call(plan, "actor.generate")
    yield Setting(key="--rollout-num-gpus-per-engine", value=layout.replica_gpus, why=why)
    yield Setting(key="--sglang-pp-size", value=layout.pp)
    yield Setting(key="--sglang-ep-size", value=layout.ep)
    if layout.attention_dp > 1:
        yield Setting(key="--sglang-dp-size", value=layout.attention_dp)
        yield Setting(key="--sglang-enable-dp-attention", value=True)
    why = held(plan, "actor.generate", placed.pool)
    yield Setting(key="--sglang-mem-fraction-static", value=layout.memory_utilization, why=why)
    running = layout.max_num_seqs * layout.attention_dp
    yield Setting(key="--sglang-max-running-requests", value=running, why="of a whole engine")
    yield Setting(key="--sglang-server-concurrency", value=running, why="slime sends no more to an engine")
    yield Setting(key="--sglang-chunked-prefill-size", value=layout.max_batched_tokens * layout.attention_dp)
    if not layout.cuda_graphs:
        yield Setting(key="--sglang-disable-cuda-graph", value=True)
    if layout.kv_precision == "fp8":
        yield Setting(key="--sglang-kv-cache-dtype", value="fp8_e4m3")
    if layout.speculation is not None:
        yield from _drafting(layout.speculation)


def _drafting(drafted: Speculation) -> Iterator[Setting]:
    prefix = "--sglang-speculative"
    why = f"{drafted.tokens_per_step:.2f} tokens a step at an acceptance of {drafted.acceptance:g}"
    yield Setting(key=f"{prefix}-algorithm", value=DRAFTING[drafted.method], why=why)
    if drafted.method != "ngram":
        yield Setting(key=f"{prefix}-num-steps", value=drafted.draft_tokens)
        yield Setting(key=f"{prefix}-eagle-topk", value=1)
    yield Setting(key=f"{prefix}-num-draft-tokens", value=drafted.draft_tokens + 1, why="the last token too")
    if drafted.method in ("draft", "eagle"):
        yield Setting(key=f"{prefix}-draft-model-path", value="${DRAFT_MODEL}")


def flag(setting: Setting) -> str:
    """`--flag value` as bash reads it; a switch without value."""
    if setting.value is True:
        return setting.key
    value = f'"{setting.value}"' if "$" in str(setting.value) else setting.value
    return f"{setting.key} {value}"


def files(plan: Plan, written: Written) -> dict[str, str]:
    """The launch script: a Ray job, on the cluster that runs or on one of this node."""
    head = title_of(plan, "slime 624b824")
    program = "train_async.py" if plan.placement.schedule.asynchronous else "train.py"
    known = SHAPES.get(next(m.name for m in plan.models if m.role == "actor"))
    shape = f"${{SLIME}}/scripts/models/{known}.sh" if known else "${MODEL_ARGS_FILE}"
    environment = '{"env_vars": {"PYTHONPATH": "%s", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}'
    command = "\n".join(
        [
            f'source "{shape}"',
            "ray status > /dev/null 2>&1 || ray start --head --disable-usage-stats",
            "exec ray job submit --address=http://127.0.0.1:8265 \\",
            f'    --runtime-env-json="$(printf \'{environment}\' "${{MEGATRON}}")" \\',
            f'    -- python3 "${{SLIME}}/{program}" "${{MODEL_ARGS[@]}}"',
        ]
    )
    return {"launch.sh": script(head, NEEDS, written, flag, command)}


EXPORT = Exporter(
    version="624b824",
    write=write,
    files=files,
    start="bash launch.sh",
    needs=NEEDS,
    install='pip install "ray[default]"  # and slime, Megatron-LM and SGLang of its image',
)
