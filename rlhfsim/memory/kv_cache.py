"""Memory of the inference engine: its weights, what it keeps back, and the KV cache that is left.

The engine is vLLM (block tables, profiling run at start); SGLang splits its memory alike with
`mem_fraction_static` for weights and KV cache together. Bytes per GPU.

Not known here: logits of drafted tokens, LoRA slots, encoder caches of multi-modal models, and
windowed layers' savings beyond their window (the engine's token count ignores them too).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from rlhfsim.elementwise import Size, by_word, kept, least, most, where
from rlhfsim.kernels.layers import (
    attention_matrices,
    expert_matrices,
    heads,
    mlp_matrices,
    recurrent_matrices,
    shared_matrices,
)
from rlhfsim.memory.states import stage_layers
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.drafts import draft_of, own_params
from rlhfsim.specs.placement.engine_numbers import VLLM
from rlhfsim.specs.placement.layout_columns import AnyRolloutLayout, RolloutRoles
from rlhfsim.specs.placement.placement import RolloutPlacement
from rlhfsim.specs.quantities import BYTES_PER_ELEMENT

BF16, FP32 = 2.0, 4.0
VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to a multiple of 64 on every rank (VocabParallelEmbedding)."""


STATE_SHARE = 0.9 / 1.9
"""Most of the pool that states take (`mamba_full_memory_ratio` 0.9 of sgl-project/sglang, server_args.py)."""


class KvCapacity(NamedTuple):
    """What the engine has left for the KV cache."""

    bytes: Size
    """Per GPU; negative when the engine cannot start."""
    tokens: Size
    """Per replica, whole blocks; 0 when the engine cannot start."""


@kept(maxsize=65536)
def rollout_weights(
    model: ModelSpec,
    layout: AnyRolloutLayout,
    *,
    linear_bytes: float | None = None,
    expert_bytes: float | None = None,
) -> Size:
    """Weight bytes on the fullest GPU of a replica.

    Heads and FFN are split over tp (KV heads and MLA latents copied), experts over all GPUs of the
    replica, layers over pp (rounded up, and those with experts: the fullest stage); embedding, LM head,
    router and norms stay 16-bit, attention and end layers where the layout says so.
    """
    if layout.bf16_layers:  # the mean layer of the model is taken for those that stay BF16
        kept, rest = layout.bf16_share(model.num_layers), replace(layout, bf16_layers=0)
        whole = rollout_weights(model, replace(rest, precision="bf16"))
        return kept * whole + (1 - kept) * rollout_weights(model, rest)
    linear = BYTES_PER_ELEMENT[layout.precision] if linear_bytes is None else linear_bytes
    expert = linear if expert_bytes is None else expert_bytes
    own = BYTES_PER_ELEMENT[layout.attention_precision] if linear_bytes is None else linear_bytes
    t, gpus = layout.tp, layout.tp * layout.attention_dp
    mixers = {
        "attention": sum(m.params for m in attention_matrices(model, t)),
        "recurrent": sum(m.params for m in recurrent_matrices(model, t)),
        "none": 0,
    }
    plain = sum(m.params for m in mlp_matrices(model, t))
    shared = sum(m.params for m in shared_matrices(model, t))
    routed = sum(m.params for m in expert_matrices(model, 1)[1:3]) / gpus
    experts = linear * shared + expert * routed + BF16 * (model.params_router + model.params_latent)
    ffns = {"dense": linear * plain, "experts": experts, "none": 0.0}
    vectors = BF16 * model.recurrent.vector_params / t if model.recurrent else 0.0

    def layers(pp: int) -> Size:
        found: Size = 0.0
        for kind in stage_layers(model, pp, "last" if pp > 1 else "only"):
            small = BF16 * model.params_layer_norms + (vectors if kind.mixer == "recurrent" else 0.0)
            found += kind.layers * (own * mixers[kind.mixer] + ffns[kind.ffn] + small)
        return found

    vision = BF16 * model.params_vision / t
    return by_word(layout.pp, layers) + vision + _tables(model, layout) + draft_weights(model, layout)


def _tables(model: ModelSpec, layout: AnyRolloutLayout) -> Size:
    """Embedding and LM head, of which a stage of a pipeline has one."""
    table = _padded_vocab(model.vocab, layout.tp) / layout.tp * model.embedding_width * BF16
    return table * where(layout.pp > 1, 1, 1 if model.tied_embeddings else 2)


def draft_weights(model: ModelSpec, layout: AnyRolloutLayout) -> Size:
    """Bytes of what drafts, in BF16: a whole model, or a head with its layer; embeddings are the policy's."""
    speculation = layout.speculation
    draft = None if speculation is None else draft_of(model, speculation)
    if speculation is None or draft is None:
        return 0.0
    alone = replace(layout, precision="bf16", speculation=None)
    if speculation.method == "draft":
        return rollout_weights(draft, alone)
    layer = rollout_weights(draft, alone) - _tables(draft, alone)
    return layer + BF16 * own_params(model, speculation) / layout.tp


def _padded_vocab(vocab: int, tp: Size) -> Size:
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab // multiple) * multiple


def kv_bytes_per_token(model: ModelSpec, layout: AnyRolloutLayout) -> Size:
    """KV bytes that one token adds on each GPU of its replica (G3), layers split over pp; a drafter's too."""
    element = BYTES_PER_ELEMENT[layout.kv_precision]
    share = -(-model.num_layers // layout.pp) / model.num_layers
    own = model.kv_bytes_per_token_per_gpu(layout.tp, element) * share
    draft = None if layout.speculation is None else draft_of(model, layout.speculation)
    return own if draft is None else own + draft.kv_bytes_per_token_per_gpu(layout.tp, element)


def profile_peak(model: ModelSpec, layout: AnyRolloutLayout, *, sampler_bytes_per_logit: float) -> Size:
    """Activation bytes that the engine measures at start and keeps free for ever after.

        max( forward of `max_batched_tokens`, sampling of `max_num_seqs` rows of V logits )

    Every rank samples over the gathered vocabulary, so the second term does not shrink with tp:
    5.64 GiB for Qwen3-32B at tp 1 and at tp 2 (llm-d planner, vLLM 0.11, 1024 sequences).
    """
    sampling = layout.max_num_seqs * model.vocab * sampler_bytes_per_logit
    return most(forward_bytes(model, layout.tp) * layout.max_batched_tokens, sampling)


@kept(maxsize=65536)
def forward_bytes(model: ModelSpec, tp: Size) -> Size:
    """Bytes per token alive at once in the widest layer of an inference forward.

    Residual and normalised stream, then either QKV with the attention output or the MLP's inputs
    and product; k routed copies of them in a MoE layer.
    """
    local, gates = heads(model.attention, tp), 3 if model.gated else 2
    attention = (local.query + local.kv) * local.qk_dim + 2 * local.query * local.v_dim
    scan = (model.recurrent.in_width + 2 * model.recurrent.inner) / tp if model.recurrent else 0.0
    widest = most(attention, scan, gates * model.ffn / tp if model.num_dense_layers else 0.0)
    if model.moe:
        expert = model.moe.top_k * (model.expert_width + gates * model.moe.expert_ffn / tp)
        shared = gates * model.moe.num_shared_experts * model.moe.shared_ffn / tp
        widest = most(widest, expert + shared)
    return BF16 * (2 * model.hidden + widest)


def kv_capacity(
    model: ModelSpec,
    layout: AnyRolloutLayout,
    *,
    total_memory: float,
    weights: Size,
    activation_peak: Size,
    non_torch: Size,
    graphs: float,
) -> KvCapacity:
    """KV cache of one replica (G7).

        bytes = util x total - weights - activation peak - non-torch - graphs

    `total_memory` is what the driver offers. `graphs`: bytes of CUDA graphs, which vLLM counts inside `util`
    since 0.21 and captured on top of it before. Source: vLLM 0.32.0, `determine_available_memory` of
    v1/worker/gpu_worker.py; VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS of envs.py is 1. Its estimate grows with
    the number of captured sizes and can exceed what they take (vLLM issues 45178, 53013).
    Tokens are those of all attention-data-parallel ranks, in whole blocks.
    """
    budget = layout.memory_utilization * total_memory
    left = budget - weights - activation_peak - non_torch - graphs
    block = VLLM.block_tokens
    blocks = most(0.0, left - states_bytes(model, layout, left)) // (
        kv_bytes_per_token(model, layout) * block
    )
    return KvCapacity(bytes=left, tokens=blocks * block * layout.attention_dp)


def states_bytes(model: ModelSpec, layout: AnyRolloutLayout, pool: Size) -> Size:
    """Bytes of `pool` on each GPU for the states of recurrent layers; 0 in a model without any.

        min(max_num_seqs x state / t, 0.47 pool)

    SGLang gives states at most 0.9 of what tokens get (`mamba_full_memory_ratio`); vLLM takes both from one
    pool as sequences come, so that shorter batches leave it more tokens than this.
    """
    if model.recurrent is None:
        return 0.0
    shares = least(layout.tp, model.recurrent.num_heads) * layout.pp
    return least(layout.max_num_seqs * model.state_bytes / shares, STATE_SHARE * most(0.0, pool))


class EngineBytes(NamedTuple):
    """The inference engine on one GPU."""

    weights: Size
    """Its own copy; 0 where it generates with the training weights."""
    kv_cache: Size
    """Bytes of the KV pool; 0 when the engine cannot start."""
    profile_peak: Size
    non_torch: Size
    """Libraries and NCCL inside the engine's share."""
    cuda_graphs: Size
    retained: Size
    """Pools and workspaces that it keeps asleep, in addition to what is counted awake."""
    framework: Size
    kv_tokens: Size
    """KV capacity of one replica, tokens."""
    shortfall: Size
    """Bytes by which weights and reserves exceed the engine's share of memory; 0 if it starts."""
    sleep: Size
    recreated: Size
    cut: Size
    """Share of a module's elements that lies on this GPU."""

    @property
    def host(self) -> float:
        """Host bytes of this GPU's copy at sleep level 1."""
        return self.weights if self.sleep == 1 else 0.0


def engine_bytes(
    model: ModelSpec, role: RolloutPlacement | RolloutRoles, *, profile: Profile, shared_weights: float = 0.0
) -> EngineBytes:
    """The engine's split of memory, or columns of it; `shared_weights`: bytes that training already holds for
    it.

    The KV pool is what `memory_utilization` of the usable memory leaves (G7), CUDA graphs inside it; the
    context comes on top of that share. Non-torch bytes are those that vLLM logs, and the buffers of an
    NCCL communicator for each parallel dimension.
    """
    layout = role.layout
    full = rollout_weights(model, layout)
    peak = profile_peak(model, layout, sampler_bytes_per_logit=profile["sampler_bytes_per_logit"])
    groups = 1 * (layout.tp > 1) + (layout.pp > 1) + (layout.attention_dp > 1)
    non_torch = profile["vllm_non_torch_bytes"] + groups * profile["nccl_bytes"]
    total = profile.usable_memory.value
    graphs = profile["cuda_graph_bytes"] if layout.captured else 0.0
    left, tokens = kv_capacity(
        model,
        layout,
        total_memory=total,
        weights=full,
        activation_peak=peak,
        non_torch=non_torch,
        graphs=graphs,
    )
    return EngineBytes(
        weights=most(0.0, full - shared_weights),
        kv_cache=most(0.0, left),
        profile_peak=peak,
        non_torch=non_torch,
        cuda_graphs=graphs,
        retained=where((role.sleep_level > 0) & (layout.tp > 1), profile["sleeping_engine_bytes"], 0.0),
        framework=profile["framework_bytes"],
        kv_tokens=tokens,
        shortfall=most(0.0, -left),
        sleep=role.sleep_level,
        recreated=role.residency == "recreated",
        cut=1 / layout.tp,
    )
