"""Micro-batches of token ids from samples, padded or packed, and the way back to one array a sample.

Sequences are padded on the right: a causal mask alone then keeps padding out of every response, and what a
token's id is never matters (a policy may sample the pad id). A packed micro-batch is one row with the
sequences end to end; position ids start again at each, and attention stays within each. Both hold as many
sequences as their memory was priced for, so short ones make fewer micro-batches.

Legend: B sequences, L tokens of a row, N response tokens of the micro-batch, T tokens of the longest
response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from executor.engines.balance import alike, bins, units_of
from executor.samples import Floats, Sample
from rlhfsim.frozen import frozen

Select = Literal["tokens", "last"]
"""tokens: the hidden states that predict each response token; last: the one of each sequence's last token."""


@frozen
class MicroBatch:
    """What one forward pass reads."""

    samples: tuple[Sample, ...]
    """Empty in a micro-batch that only keeps ranks in step."""
    places: tuple[int, ...] = ()
    """Places of the samples among those that were divided into micro-batches."""
    tokens: Tensor
    """(B, L) padded, or (1, L) packed."""
    positions: Tensor
    """As `tokens`: 0, 1, ... in every sequence."""
    index: Tensor
    """(N,) or (B,) places in the flattened rows, see `Select`."""
    targets: Tensor
    """(N,) response tokens; (B,) last tokens."""

    @property
    def empty(self) -> bool:
        """Whether it only keeps ranks in step."""
        return not self.samples

    def rows(self, flat: Tensor) -> Tensor:
        """(N,) values of all response tokens to (B, T), zeros on the right; keeps the gradient."""
        return torch.nn.utils.rnn.pad_sequence(list(flat.split(self._lengths)), batch_first=True)

    def split(self, flat: Tensor) -> list[Floats]:
        """(N,) values of all response tokens to one array a sample."""
        return [part.numpy().copy() for part in flat.detach().float().cpu().split(self._lengths)]

    @property
    def _lengths(self) -> list[int]:
        return [sample.num_tokens for sample in self.samples]


def micro_batches(
    samples: Sequence[Sample],
    tokens: int,
    *,
    packed: bool,
    select: Select = "tokens",
    paired: bool = False,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """Micro-batches of at most `tokens` tokens, padding included, in no order of the samples.

    `paired` keeps both sides of a group in one of them. A sequence (or pair) that is longer comes alone.
    """
    units = units_of(samples, paired)
    lengths = [[samples[i].length for i in unit] for unit in units]
    shares = bins([sum(each) for each in lengths], tokens) if packed else alike(lengths, tokens)
    return [
        micro_batch(samples, packed=packed, select=select, device=device, places=places)
        for places in (tuple(i for u in share for i in units[u]) for share in shares)
    ]


def micro_batch(
    samples: Sequence[Sample],
    *,
    packed: bool,
    select: Select = "tokens",
    device: torch.device | str = "cpu",
    places: Sequence[int] | None = None,
) -> MicroBatch:
    """One micro-batch of the samples at `places`, by default all."""
    places = tuple(places) if places is not None else tuple(range(len(samples)))
    samples = [samples[i] for i in places]
    rows = [np.concatenate([sample.prompt, sample.response]).astype(np.int64) for sample in samples]
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    tokens, positions, starts = _packed(rows) if packed else _padded(rows)
    index, targets = _selected(samples, rows, starts, lengths, select)
    arrays = {"tokens": tokens, "positions": positions, "index": index, "targets": targets}
    tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    return MicroBatch(samples=tuple(samples), places=places, **tensors)


def filler(device: torch.device | str = "cpu") -> MicroBatch:
    """A micro-batch of no samples: a rank that ran out joins the collectives of the others with it."""
    return MicroBatch(
        samples=(),
        tokens=torch.zeros(1, 2, dtype=torch.int64, device=device),
        positions=torch.arange(2, device=device)[None],
        index=torch.zeros(1, dtype=torch.int64, device=device),
        targets=torch.zeros(1, dtype=torch.int64, device=device),
    )


def _padded(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens (B, L), positions (B, L) and where each sequence starts in the flattened rows (B,)."""
    length = max(map(len, rows))
    tokens = np.zeros((len(rows), length), dtype=np.int64)
    for line, row in zip(tokens, rows, strict=True):
        line[: len(row)] = row
    positions = np.broadcast_to(np.arange(length), tokens.shape).copy()
    return tokens, positions, np.arange(len(rows)) * length


def _packed(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens (1, L), positions (1, L) and starts (B,)."""
    lengths = np.array([len(row) for row in rows])
    positions = np.concatenate([np.arange(length) for length in lengths])
    return np.concatenate(rows)[None], positions[None], np.cumsum(lengths) - lengths


def _selected(
    samples: Sequence[Sample], rows: list[np.ndarray], starts: np.ndarray, lengths: np.ndarray, select: Select
) -> tuple[np.ndarray, np.ndarray]:
    """Places of hidden states and the tokens that belong to them.

    Token t of a response behind P prompt tokens is predicted at place P - 1 + t.
    """
    if select == "last":
        return starts + lengths - 1, np.array([row[-1] for row in rows])
    places = [
        start + len(sample.prompt) - 1 + np.arange(sample.num_tokens)
        for start, sample in zip(starts, samples, strict=True)
    ]
    responses = [sample.response.astype(np.int64) for sample in samples]
    return np.concatenate(places), np.concatenate(responses)
