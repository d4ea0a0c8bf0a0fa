"""What a training stack does to kernels, messages and tensors, whatever GPU it runs on."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Literal

from pydantic import Field

from rlhfsim.elementwise import Size, where
from rlhfsim.frozen import frozen
from rlhfsim.specs.hashing import Hashed, hashed_once
from rlhfsim.specs.loading import checked
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.heads import Head
from rlhfsim.specs.placement.layout_columns import AnyLayout

Graphs = Literal["none", "partial", "full"]
Stack = Literal["megatron", "compiled", "eager"]
"""Kinds of training software, whose kernels keep different shares of their speed: Megatron-Core with
Transformer Engine, torch.compile, modules of PyTorch one by one."""
Bytes = Annotated[float, Field(gt=0, le=64)]


@hashed_once
@checked
@frozen
class Software(Hashed):
    """A training stack; a plan without one has `default_software` of its backend."""

    stack: Stack = "megatron"
    """Whose `kernel_speed_*`, `attention_speed_*`, `fp8_speed_*` hold; `compiled` saves fewer activations."""
    fused: bool = True
    """Element-wise chains run as one kernel."""
    graphs: Graphs = "none"
    """CUDA graphs: none, over attention and router, over the whole iteration."""
    flash: bool = True
    """FlashAttention; False: scores go through memory."""
    flash2: bool = False
    """FlashAttention-2 (SDPA of PyTorch), where the GPU has a faster generation."""
    reduce_bytes: Bytes | None = None
    """Bytes per gradient element on the wire; the backend's when absent."""
    fp32_sums: bool = False
    """Gradients that arrive in BF16 are summed in FP32; under ZeRO-1 all ranks then reduce all of them."""
    copies_each: bool = False
    """Copies of shards (HSDP) sum their gradients after every micro-batch, not once a step."""
    sums_whole: bool = False
    """FSDP adds up whole gradients on every GPU, FSDP1 in BF16, and reduces them once a step (`no_sync`)."""
    whole_reference: bool = False
    """FSDP2 wraps a reference as one group, whose weights it gathers all at once."""
    balanced: bool = False
    """Experts receive equal loads (benchmarks force it)."""
    recomputed: tuple[str, ...] = ()
    """Modules repeated in the backward in addition to `Layout.recompute`: keys of `layer_time.MODULES`."""
    fused_experts: bool = False
    """Grouped MLP with activation and quantisation in its kernels (Transformer Engine op fuser)."""
    fp8_attention: bool = False
    """The attention core runs in FP8."""
    bf16_layers: Annotated[int, Field(ge=0, le=4096)] = 0
    """Last layers whose products stay in BF16 where the others train in FP8 or FP4."""
    bf16_matrices: tuple[str, ...] = ()
    """Matrices of all layers that stay in BF16, by their names in `kernels.layers`, as `qkv` and `out`."""
    user_buffers: bool = False
    """Tensor-parallel collectives run in chunks at the same time as their GEMMs (Transformer Engine)."""
    head: Head | None = None
    """Where the logits of all tokens are held at once; the framework's when absent."""
    weight_bytes: Bytes | None = None
    """Bytes of an element of a trained shard under FSDP; None: 4, weight and master in one."""
    plain_bytes: Bytes | None = None
    """Bytes of a weight that torch's own optimizer updates where it lies, under DDP or on one GPU (ZeRO-0),
    as of models that score; None: DeepSpeed's BF16 weights with a master copy."""
    plain_scored: bool = False
    """ZeRO-0 of models that score on several GPUs means the same: the policy's is ZeRO-0 too."""
    gradient_bytes: Bytes | None = None
    """Bytes per stored gradient element; the backend's when absent."""
    frees_gradients: bool | None = None
    """Gradient buffers exist during training calls alone; None: as in the framework."""
    moment_bytes: Bytes | None = None
    """Bytes of both Adam moments of an element; the optimizer's when absent."""
    base_bytes: Bytes = 2.0
    """Bytes of an element of the frozen base under adapters."""
    adapters: Annotated[int, Field(ge=1, le=1024)] = 1
    """Sets of adapters that are held side by side; all have gradients, one has an optimizer."""
    fp32_combine: bool = False
    """Router weights multiply what comes back from experts in FP32."""
    overlaps_reduction: bool = True
    """DeepSpeed reduces one bucket while it computes the next (its own default under ZeRO-3 alone)."""
    flat_parameters: bool = False
    """FSDP1: the parameters of a layer are one flat tensor, which is gathered in place."""
    frees_experts: bool = False
    """Experts that ZeRO-3 gathered go with their layer, though autograd saved a view of them."""
    inputs_kept: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Inputs of layers that stay on the GPU, where the others wait on the host; None: all stay."""

    def plain(self, layout: AnyLayout, *, trained: bool) -> Size:
        """Bytes of a weight of a role that no ZeRO and no FSDP holds; 0: one of them does."""
        known = (layout.dp * layout.cp == 1) | trained | self.plain_scored
        return where((layout.zero == 0) & known, self.plain_bytes or 0.0, 0.0)


@cache
def default_software(backend: Backend) -> Software:
    """Fused kernels in Megatron-Core; the others run eager PyTorch modules."""
    return Software() if backend == "megatron" else Software(stack="eager", fused=False)
