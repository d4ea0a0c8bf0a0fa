"""What a weight sync has to move: bytes and named tensors of a model, and the shards at both ends."""

from __future__ import annotations

from dataclasses import field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from rlhfsim.elementwise import Size, most, some, where
from rlhfsim.frozen import frozen
from rlhfsim.kernels.device import Device
from rlhfsim.memory.states import lora_params
from rlhfsim.specs.hardware.wan import WanLink
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import EngineLayout
from rlhfsim.specs.placement.layout_columns import AnyLayout
from rlhfsim.specs.quantities import BYTES_PER_ELEMENT
from rlhfsim.specs.workload.workload import Lora

TRAINED_BYTES = 2.0
"""Bytes per element of the weights that a trainer hands over (BF16)."""
_DEFAULT_ADAPTER = Lora()


@frozen
class Weights:
    """A model as a weight sync sees it, in the exchange (Hugging Face) naming."""

    dense: float
    """Elements outside the routed experts."""
    experts: float
    """Elements of the routed experts."""
    dense_tensors: int
    """Named tensors outside the routed experts."""
    expert_tensors: int
    """Named tensors of the routed experts: one per matrix, expert and layer."""
    layers: int
    num_experts: int
    """Routed experts of one layer; 0 in a dense model."""
    ffn: float
    """Elements of the dense MLPs."""
    ffn_tensors: int
    """Named tensors of the dense MLPs."""
    largest: float
    """Elements of the largest tensor."""
    params: float = field(init=False)
    """All elements (N)."""
    tensors: int = field(init=False)
    """All named tensors."""

    def __post_init__(self) -> None:
        """Add up what most stages read."""
        object.__setattr__(self, "params", self.dense + self.experts)
        object.__setattr__(self, "tensors", self.dense_tensors + self.expert_tensors)


def mean_bytes(weights: Weights, rollout: EngineLayout) -> float:
    """Storage of a mean element in the rollout; attention and end layers may keep BF16."""
    narrow = BYTES_PER_ELEMENT[rollout.precision]
    if not rollout.islands:
        return narrow
    whole = rollout.attention_precision == rollout.precision
    share = 1.0 if whole else (weights.ffn + weights.experts) / weights.params
    share *= 1.0 - rollout.bf16_share(weights.layers)
    return share * narrow + (1.0 - share) * TRAINED_BYTES


@lru_cache(maxsize=256)
def without_ffn(weights: Weights, *, scales: bool = False) -> Weights:
    """Everything but the MLPs and experts; with `scales` the experts' block scales stay, as names."""
    return replace(
        weights,
        dense=weights.dense - weights.ffn,
        dense_tensors=weights.dense_tensors - weights.ffn_tensors,
        experts=0.0,
        expert_tensors=weights.expert_tensors if scales else 0,
        ffn=0.0,
        ffn_tensors=0,
    )


@lru_cache(maxsize=1024)
def weights_of(model: ModelSpec) -> Weights:
    """Bytes and tensor names of a model; names are counted as its checkpoint lists them."""
    matrices = 3 if model.gated else 2
    moe = model.moe
    shared = matrices if moe and moe.num_shared_experts else 0  # one MLP of all their widths
    latent = 2 if model.params_latent else 0
    per_moe_layer = (1 + (moe.router_bias if moe else 0) + shared + latent) if moe else 0
    routed = moe.num_moe_layers * moe.num_experts if moe else 0
    experts = routed * model.params_expert
    return Weights(
        dense=model.num_params - experts,
        experts=experts,
        dense_tensors=model.num_attention_layers * _attention_tensors(model)
        + (model.num_recurrent_layers * model.recurrent.tensors if model.recurrent else 0)
        + model.num_layers * model.norms_per_layer
        + model.num_dense_layers * matrices
        + model.num_moe_layers * per_moe_layer
        + model.extra_norms
        + (1 if model.tied_embeddings else 2),
        expert_tensors=routed * matrices,
        ffn=model.num_dense_layers * model.params_layer_dense_mlp,
        ffn_tensors=model.num_dense_layers * matrices,
        layers=model.num_layers,
        num_experts=moe.num_experts if moe else 0,
        largest=max(model.params_embedding, model.hidden * model.ffn),
    )


def _attention_tensors(model: ModelSpec) -> int:
    attention = model.attention
    if attention.kind == "mla":
        return 7 if attention.q_lora_rank else 5
    bias = (3 if attention.qkv_bias else 0) + (1 if attention.out_bias else 0)
    return 4 + bias + (2 if attention.qk_norm != "none" else 0)


@frozen
class Route:
    """Both ends of a weight sync, or of many: row i of the layouts that train goes to row i of the others."""

    weights: Weights
    train: Any
    """`AnyLayout`."""
    rollout: Any
    """`EngineLayout`."""
    source: Device
    """GPU of the training pool."""
    target: Device
    """GPU of the rollout pool."""
    backend: Backend
    same_pool: bool
    """Training and rollout use the same GPUs."""
    rdma: bool = True
    """The network lets a GPU write into another node's GPU memory."""
    adapters: float = 0.0
    """Elements of LoRA adapters: of the policy's, or of default ones for comparison."""
    has_adapters: bool = False
    """The policy trains adapters."""
    sharded: bool = field(init=False)
    """Weights are cut over data-parallel ranks (ZeRO-3, FSDP): in all rows or in none."""
    sent_bytes_per_element: float = field(init=False)
    """Storage of a mean element on the wire: that of the rollout, which is quantised before it."""

    def __post_init__(self) -> None:
        """Work out what every stage of every path reads."""
        object.__setattr__(self, "sharded", some(self.train.zero == 3))
        object.__setattr__(self, "sent_bytes_per_element", mean_bytes(self.weights, self.rollout))

    @property
    def stored(self) -> float:
        """Bytes of the model as trained (M)."""
        return self.weights.params * TRAINED_BYTES

    @property
    def quantised(self) -> bool:
        """Whether weights are quantised at sync."""
        return self.sent_bytes_per_element < TRAINED_BYTES

    @property
    def sent(self) -> float:
        """Bytes of the whole model as the rollout stores it (S)."""
        return self.weights.params * self.sent_bytes_per_element

    @property
    def tensors(self) -> int:
        """Named tensors that are handed over; block-quantised matrices bring their scales."""
        return self.weights.tensors * (2 if self.quantised else 1)

    @property
    def stages(self) -> Size:
        """Pipeline stages of training, each with weights of its own."""
        return 1 if self.sharded else self.train.pp

    @property
    def dense_ranks(self) -> Size:
        """GPUs over which the dense weights of a stage are cut."""
        return self.train.gpus if self.sharded else self.train.tp

    @property
    def expert_ranks(self) -> Size:
        """GPUs over which the routed experts of a stage are cut."""
        train = self.train
        return train.gpus if self.sharded else where(train.ep > 1, train.ep * train.etp, train.tp)

    @property
    def train_share(self) -> tuple[Size, Size]:
        """Share of the dense and of the expert elements that one training GPU holds."""
        return 1 / (self.dense_ranks * self.stages), 1 / (self.expert_ranks * self.stages)

    @property
    def rollout_share(self) -> tuple[Size, Size]:
        """Share of the dense and of the expert elements that one rollout GPU holds."""
        layout = self.rollout
        return 1 / (layout.tp * layout.pp), 1 / layout.replica_gpus

    @property
    def train_shard(self) -> Size:
        """Bytes of weights on one training GPU."""
        return self._bytes(self.train_share, TRAINED_BYTES)

    @property
    def rollout_shard(self) -> Size:
        """Bytes of weights on one rollout GPU."""
        return self._bytes(self.rollout_share, self.sent_bytes_per_element)

    def _bytes(self, share: tuple[Size, Size], width: float) -> Size:
        return (self.weights.dense * share[0] + self.weights.experts * share[1]) * width

    @property
    def gather_ranks(self) -> Size:
        """GPUs of one gather on the training side (one pipeline stage)."""
        return most(self.dense_ranks, self.expert_ranks) if self.weights.experts else self.dense_ranks

    @property
    def local_tensors(self) -> Size:
        """Tensors as the engines store them on one rollout GPU: experts fused, stages apart."""
        fused = 2 * self.weights.layers if self.weights.experts else 0
        return (self.weights.dense_tensors + fused) / self.rollout.pp

    @property
    def wan(self) -> WanLink | None:
        """The link between the regions of the two ends; None: they are in one."""
        return None if self.same_pool else self.target.wan

    @property
    def one_domain(self) -> Size:
        """Both pools together fit in one scale-up domain."""
        if self.wan is not None:
            return False
        apart = self.train.gpus + self.rollout.gpus
        return apart <= min(self.source.domain, self.target.domain)


class PoolPair(NamedTuple):
    """The pools that train and generate."""

    source: Device
    target: Device
    same: bool
    """Both are one pool."""
    rdma: bool = True
    """Memory of GPUs is read over the network."""


def route(
    model: ModelSpec,
    train: AnyLayout,
    rollout: EngineLayout,
    pools: PoolPair,
    backend: Backend,
    lora: Lora | None = None,
) -> Route:
    """The two ends of a weight sync of `model`."""
    return Route(
        weights=weights_of(model),
        train=train,
        rollout=rollout,
        source=pools.source,
        target=pools.target,
        backend=backend,
        same_pool=pools.same,
        rdma=pools.rdma,
        adapters=lora_params(model, (lora or _DEFAULT_ADAPTER).rank),
        has_adapters=lora is not None,
    )
