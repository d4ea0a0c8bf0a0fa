"""Layers of a pipeline stage, cut out of a Hugging Face decoder, and the reading of their weights.

Between layers travel (hidden, positions): hidden (B, L, H), positions (B, L) int64 from 0 in every sequence.
Sequences are padded on the right, so causal attention alone keeps padding out of every response; in packed
rows (several sequences end to end, positions start again) it stays within each sequence.
Legend: B rows of a micro-batch, L tokens of its longest row, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from executor.engines.pipeline.shards import MatrixPart, cuts, shard
from executor.engines.transformers import attention
from executor.engines.transformers.heads import configuration
from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.frozen import frozen
from rlhfsim.specs.frameworks.runs import OWN, framework
from rlhfsim.specs.workload.roles import Head

FAMILIES = tuple(framework(OWN).pipeline_types or ())
"""Model types whose decoder layers take (hidden, mask, positions, rotary embedding) and return hidden."""
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEADS: dict[Head, str] = {"causal": "lm_head.weight", "value": "score.weight", "score": "score.weight"}


@frozen
class Decoder:
    """A model without storage: what stages are cut from."""

    config: Any
    layers: nn.ModuleList
    """Decoder layers on the meta device."""
    norm: nn.Module
    rotary: nn.Module
    """Rotary embedding with its frequencies, on the CPU."""
    tied: bool
    """The causal head is the embedding."""
    dtype: torch.dtype


@frozen
class Weight:
    """A parameter of this rank and where it belongs in the checkpoint."""

    name: str
    """Hugging Face name."""
    parameter: nn.Parameter
    cut: MatrixPart | None = None
    """How it is split over tensor-parallel ranks; None: each holds all of it."""


def decoder(folder: str, dtype: torch.dtype) -> Decoder:
    """The model of `folder` without storage.

    Raises:
        RlhfsimError: a family or an attention that the pipeline does not cut.
    """
    from transformers import AutoModelForCausalLM

    config = configuration(folder)
    if config.model_type not in FAMILIES:
        raise unknown_name("pipeline model type", config.model_type, FAMILIES)
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise RlhfsimError(
            "pipeline-sliding-window",
            "the pipeline engine does not cut models with sliding-window attention",
            help="use pp: 1",
        )
    with torch.device("meta"):
        named = {"attn_implementation": attention.implementation(config, dtype)}
        model = cast(Any, AutoModelForCausalLM).from_config(config, dtype=dtype, **named).model
    rotary = type(model.rotary_emb)(config=config)
    tied = bool(config.tie_word_embeddings)
    return Decoder(
        config=model.config, layers=model.layers, norm=model.norm, rotary=rotary, tied=tied, dtype=dtype
    )


class Embedding(nn.Module):
    """Token ids to hidden states; also the head's matrix where the two are tied."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype))
        self.padding_idx = config.pad_token_id

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(tokens (B, L), positions) to (hidden (B, L, H), positions)."""
        tokens, positions = inputs
        return functional.embedding(tokens, self.weight, self.padding_idx), positions

    def weights(self) -> Iterator[Weight]:
        """Its parameter by name."""
        yield Weight(name=EMBEDDING, parameter=self.weight)


class Block(nn.Module):
    """One decoder layer, its linear layers sharded over `tp` ranks."""

    def __init__(self, model: Decoder, index: int, *, tp: int, tp_rank: int, recompute: bool) -> None:
        super().__init__()
        self.index, self.recompute, self.config = index, recompute, model.config
        self.cuts = cuts(tp, tp_rank)
        layer = copy.deepcopy(model.layers[index])
        shard(layer, tp)
        self.layer = layer.to_empty(device="cpu")
        self.rotary = (model.rotary,)  # in a tuple: no submodule, shared by the stage, stays fp32

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(hidden, positions) to the same; with recompute only the input is kept for the backward pass."""
        hidden, positions = inputs
        if self.recompute and torch.is_grad_enabled():
            hidden = cast(Tensor, checkpoint(self._run, hidden, positions, use_reentrant=False))
        else:
            hidden = self._run(hidden, positions)
        return hidden, positions

    def _run(self, hidden: Tensor, positions: Tensor) -> Tensor:
        rotary = self.rotary[0](hidden, positions)
        lengths = attention.sequences(self.config, positions)
        return cast(Tensor, self.layer(hidden, position_embeddings=rotary, **lengths))

    def weights(self) -> Iterator[Weight]:
        """Its parameters by name."""
        for name, parameter in self.layer.named_parameters():
            cut = self.cuts.get(name.rsplit(".", 2)[-2] + "." + name.rsplit(".", 1)[-1])
            yield Weight(name=f"model.layers.{self.index}.{name}", parameter=parameter, cut=cut)


class Norm(nn.Module):
    """The norm after the last decoder layer."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.norm = copy.deepcopy(model.norm).to_empty(device="cpu")

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(hidden, positions) to the same, as between all layers."""
        return cast(Tensor, self.norm(inputs[0])), inputs[1]

    def weights(self) -> Iterator[Weight]:
        """Its parameter by name."""
        yield Weight(name=NORM, parameter=cast(nn.Parameter, self.norm.weight))


class HeadMatrix(nn.Module):
    """The head's matrix (V or 1, H). The loss applies it, at response tokens only: logits of prompts and
    padding are never made (logits are the peak of RLHF memory, NeMo-RL issue 456)."""

    def __init__(self, head: Head, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.head: Head = head
        rows = config.vocab_size if head == "causal" else 1
        self.weight = nn.Parameter(torch.empty(rows, config.hidden_size, dtype=dtype))

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        """Hidden (B, L, H) as it is."""
        return inputs[0]

    def weights(self) -> Iterator[Weight]:
        """Its parameter by name."""
        yield Weight(name=HEADS[self.head], parameter=self.weight)
