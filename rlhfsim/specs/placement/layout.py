"""How one model is cut over the GPUs of its pool."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.hashing import Hashed, hashed_once
from rlhfsim.specs.loading import checked
from rlhfsim.specs.placement.engine_numbers import VLLM
from rlhfsim.specs.placement.speculation import Speculation

Degree = Annotated[int, Field(ge=1, le=65536)]
PackTokens = Annotated[int, Field(ge=1, le=100_000_000)]
Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "cpu", "nvme"]
Dispatcher = Literal["alltoall", "deepep", "deepep-ll", "hybridep", "allgather"]
"""What brings tokens to their experts and back: NCCL's all-to-all (a copy for each chosen expert), DeepEP's
normal or low-latency kernels, HybridEP, or all tokens on all ranks."""
ServingEngine = Literal["vllm", "sglang"]
"""What generates."""


@hashed_once
@checked
@frozen
class Layout(Hashed):
    """Training or forward layout; GPUs = tp x pp x cp x dp, experts over ep of dp x cp x tp."""

    tp: Degree = 1
    pp: Degree = 1
    dp: Degree = 1
    cp: Degree = 1
    ep: Degree = 1
    etp: Degree = 1
    """Tensor parallelism inside one expert (Megatron's expert-tensor-parallel)."""
    dispatcher: Dispatcher | None = None
    """None: not said; priced as one copy of a token for each GPU, with an interval that holds the others."""
    ep_overlap: bool | None = None
    """Tokens of one micro-batch travel while another computes (`overlap_moe_expert_parallel_comm` of
    Megatron-Core); None: not said, priced as off."""
    vp: Degree = 1
    """Virtual pipeline stages (interleaved 1F1B) per GPU."""
    zero: Annotated[int, Field(ge=0, le=3)] = 1
    """ZeRO stage over dp x cp; FSDP full shard is 3, Megatron's distributed optimizer 1."""
    shards: Annotated[int, Field(ge=2, le=65536)] | None = None
    """Ranks over which ZeRO shards one copy of a model, where dp x cp hold several (HSDP); None: one copy."""
    sequence_parallel: bool = True
    """Megatron-style: activations outside the TP regions are split over tp."""
    micro_batch: Degree = 1
    """Sequences per micro-batch; 1 where `pack_tokens` says how large it is."""
    pack_tokens: PackTokens | None = None
    """Most tokens of a pack per GPU: a micro-batch is then one pack, of cp times as many tokens."""
    score_micro_batch: Degree | None = None
    """Sequences per micro-batch in passes without gradients; None: as `micro_batch`."""
    score_pack_tokens: PackTokens | None = None
    """Most tokens of a pack per GPU in passes without gradients; None: as `pack_tokens`."""
    recompute: Recompute = "full"
    offload_optimizer: Offload = "none"
    """Optimizer states live (and Adam runs) on the host during training."""
    offload_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of them that does; the rest stays on the GPU."""
    offload_params: Offload = "none"
    """ZeRO-3 parameters live on the host and are fetched per layer."""

    def __post_init__(self) -> None:
        """Check the rules that hold on every cluster."""
        if self.ep > self.dp * self.cp * self.tp:
            raise RlhfsimError(
                "ep-exceeds-ranks",
                f"expert parallelism {self.ep} exceeds dp x cp x tp = {self.dp * self.cp * self.tp}",
                help="use ep <= dp x cp x tp",
            )
        if (other := self._neither()) is not None:
            raise RlhfsimError(
                "micro-batch-or-packs",
                f"{other}: a micro-batch is sequences, or one pack of pack_tokens",
                help="give micro_batch (and score_micro_batch) or pack_tokens (and score_pack_tokens)",
            )
        if self.shards and self.dp * self.cp % self.shards:
            raise RlhfsimError(
                "shards-do-not-divide",
                f"{self.dp * self.cp} ranks (dp x cp) do not make whole groups of {self.shards} shards",
                help="use shards that divide dp x cp",
            )
        if self.offload_fraction < 1 and self.offload_optimizer == "none":
            raise RlhfsimError(
                "fraction-of-nothing",
                f"offload_fraction {self.offload_fraction:g} without offload_optimizer",
                help="set offload_optimizer: cpu",
            )
        if self.vp > 1 and self.pp == 1:
            raise RlhfsimError(
                "vp-without-pp",
                f"virtual stages vp={self.vp} need pipeline parallelism",
                help="set pp > 1 or vp: 1",
            )

    def _neither(self) -> str | None:
        """A size of micro-batches that does not go with the others."""
        if not self.pack_tokens:
            return "score_pack_tokens alone" if self.score_pack_tokens else None
        if self.micro_batch > 1:
            return f"micro_batch {self.micro_batch}"
        return f"score_micro_batch {self.score_micro_batch}" if self.score_micro_batch else None

    @property
    def gpus(self) -> int:
        """GPUs that the layout fills."""
        return self.tp * self.pp * self.cp * self.dp

    def sequences(self, *, scoring: bool) -> int:
        """Sequences of a micro-batch, where packs do not say how large it is."""
        return (self.score_micro_batch if scoring else None) or self.micro_batch

    def pack(self, *, scoring: bool) -> int | None:
        """Most tokens of a pack over its cp ranks; None where `micro_batch` counts sequences."""
        each = self.score_pack_tokens if scoring and self.score_pack_tokens else self.pack_tokens
        return each * self.cp if each else None

    @property
    def label(self) -> str:
        """Short form for tables: `TP8 PP2 DP4 ZeRO-1`."""
        parts = [f"TP{self.tp}", f"PP{self.pp}" if self.pp > 1 else "", f"CP{self.cp}" if self.cp > 1 else ""]
        parts += [
            f"EP{self.ep}" if self.ep > 1 else "",
            self.dispatcher or "",
            f"DP{self.dp}",
            f"ZeRO-{self.zero}" if self.zero else "",
            f"HSDP{self.shards}" if self.shards else "",
        ]
        return " ".join(part for part in parts if part)


class EngineLayout(Hashed):
    """What follows from the fields of a rollout layout, or from columns of them."""

    __slots__ = ()
    tp: int
    pp: int
    dp: int
    attention_dp: int
    dispatcher: Dispatcher | None
    cuda_graphs: bool
    precision: str
    bf16_attention: bool
    bf16_layers: int
    speculation: Speculation | None

    @property
    def captured(self) -> bool:
        """Whether decode steps are CUDA graphs.

        DeepEP's normal kernels cannot be captured: the host waits for their counts. vLLM and SGLang then turn
        graphs off.
        """
        return self.cuda_graphs and self.dispatcher != "deepep"

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence gets in a step of the engine, on average."""
        return 1.0 if self.speculation is None else self.speculation.tokens_per_step

    @property
    def attention_precision(self) -> str:
        """Precision of the attention projections."""
        kept = self.bf16_attention or self.precision == "mxfp4"
        return "bf16" if kept else self.precision

    @property
    def islands(self) -> bool:
        """Whether part of the layers keeps BF16 next to narrower weights."""
        return self.attention_precision != self.precision or self.bf16_layers > 0

    def bf16_share(self, num_layers: int) -> float:
        """Share of the layers that keep BF16."""
        return min(1.0, self.bf16_layers / num_layers)

    @property
    def replica_gpus(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pp * self.attention_dp

    @property
    def gpus(self) -> int:
        """GPUs that the layout fills."""
        return self.replica_gpus * self.dp


@hashed_once
@checked
@frozen
class RolloutLayout(EngineLayout):
    """Layout of the inference engine; replicas = dp, GPUs = tp x attention_dp x pp x dp."""

    tp: Degree = 1
    pp: Degree = 1
    dp: Degree = 1
    """Independent replicas (attention-data-parallel groups are one replica: see `attention_dp`)."""
    prefill: Annotated[int, Field(ge=0, le=65536)] = 0
    """Replicas of the dp that only prefill and send the KV cache to the others; 0: each does both."""
    ep: Degree = 1
    """Experts over the tp x attention_dp GPUs of one replica."""
    engine: ServingEngine | None = None
    """None: the one that its framework has by default."""
    attention_dp: Degree = 1
    """Attention data parallelism inside one replica (vLLM data-parallel-size with EP)."""
    dispatcher: Dispatcher | None = None
    """What brings tokens to experts on other GPUs; None: not said, priced as the cheaper of all-gather and
    DeepEP's low-latency kernels, with an interval that holds the others where attention is data-parallel."""
    max_num_seqs: Annotated[int, Field(ge=1, le=1_000_000)] = VLLM.max_num_seqs
    """Most running sequences per replica, all pipeline stages together (per attention-DP rank)."""
    memory_utilization: Annotated[float, Field(gt=0, le=1)] = VLLM.memory_utilization
    """Share of usable memory that the engine takes for weights, KV cache and activations."""
    max_batched_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = VLLM.max_batched_tokens
    cuda_graphs: bool = True
    precision: Literal["bf16", "fp16", "fp8", "mxfp4", "nvfp4"] = "bf16"
    """Weights and matrix products of the rollout; embeddings, LM head, routers and norms stay 16-bit. MXFP4:
    MLPs and experts alone, computed in BF16; NVFP4: computed in FP4 where the GPU can."""
    bf16_attention: bool = False
    """Attention projections stay BF16."""
    bf16_layers: Annotated[int, Field(ge=0, le=4096)] = 0
    """First and last layers, together, that stay BF16."""
    kv_precision: Literal["bf16", "fp16", "fp8"] = "bf16"
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        """Check that speculation has no pipeline, and that a dispatcher has experts to reach."""
        if self.ep > self.tp * self.attention_dp:
            raise RlhfsimError(
                "ep-exceeds-ranks",
                f"rollout expert parallelism {self.ep} exceeds tp x attention_dp = "
                f"{self.tp * self.attention_dp}",
                help="use ep <= tp x attention_dp",
            )
        if self.dispatcher is not None and (self.ep == 1 or self.ep != self.tp * self.attention_dp):
            raise RlhfsimError(
                "dispatcher-without-experts",
                f"rollout dispatcher {self.dispatcher} with ep {self.ep} on {self.tp * self.attention_dp} "
                "GPUs (tp x attention_dp): tokens are sent where each GPU holds experts of its own",
                help="set ep to tp x attention_dp, or leave out dispatcher",
            )
        if self.prefill >= self.dp:
            raise RlhfsimError(
                "no-replica-decodes",
                f"{self.prefill} of {self.dp} rollout replicas only prefill, none decodes",
                help="set prefill below dp, 0 for replicas that do both",
            )
        if self.speculation is not None and self.pp > 1:
            raise RlhfsimError(
                "speculation-with-pipeline",
                f"speculative decoding and rollout pp {self.pp}: engines draft inside one stage",
                help="set pp: 1, or leave out speculation",
            )

    @property
    def open_dispatcher(self) -> bool:
        """Whether tokens reach experts in a way that is not said."""
        return self.dispatcher is None and self.attention_dp > 1 and self.ep == self.tp * self.attention_dp

    @property
    def label(self) -> str:
        """Short form for tables: `TP4 x8`, `TP1 attention-DP16 EP16 x4`."""
        extra = f" PP{self.pp}" if self.pp > 1 else ""
        extra += f" attention-DP{self.attention_dp}" if self.attention_dp > 1 else ""
        extra += f" EP{self.ep}" if self.ep > 1 else ""
        extra += f" {self.dispatcher}" if self.dispatcher else ""
        extra += f" on {self.engine}" if self.engine else ""
        extra += f" +{self.speculation.draft_tokens} drafted" if self.speculation else ""
        extra += f" {self.prefill}P:{self.dp - self.prefill}D" if self.prefill else ""
        return f"TP{self.tp}{extra} x{self.dp}"
