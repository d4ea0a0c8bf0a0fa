"""Tokens of every prompt of a data file, counted before anything starts: one that is too long ends no run.

Too long is what exceeds `data.max_prompt_tokens`, or the positions of the model that a response leaves free.
Such rows are dropped, cut at their beginning, or refused (`data.on_long`). Counts of large files are kept in
the user's cache under a hash of file, tokenizer and columns.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import time

import numpy as np
from numpy.typing import NDArray

from executor.settings import Data, Say
from executor.tasks.files import FileSource
from executor.tasks.text import ByteText, Text
from rlhfsim.cache import PRIVATE, Cache
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.outputs import cache_folder

CHUNK = 1_000
"""Prompts that are counted at a time."""
KEPT = 10_000
"""Prompts from which on their lengths are worth a file."""
TOLD_S = 5.0
"""Between two words on how far it is."""

Lengths = NDArray[np.int32]


@frozen
class PromptLengths:
    """What a data file asks of the engines."""

    rows: int
    longest: int
    """Tokens, of what stays."""
    too_long: int
    """Rows that exceed the limit."""
    limit: int | None

    def words(self, on_long: str) -> str:
        """For the person who starts the run."""
        text = f"data: {self.rows:,} prompts, the longest that is used has {self.longest:,} tokens"
        if not self.too_long:
            return text
        done = {"drop": "dropped", "truncate": "cut at their beginning"}[on_long]
        return f"{text}; {self.too_long:,} of more than {self.limit:,} tokens are {done} (data.on_long)"


def fit(
    source: FileSource, text: Text | ByteText, data: Data, positions: int | None, say: Say
) -> PromptLengths:
    """Count all prompts and do with those beyond the limit what `data.on_long` says.

    `positions`: tokens that the model leaves for a prompt; None: not known.

    Raises:
        RlhfsimError: prompts are too long and are to be refused, or none is short enough.
    """
    lengths = _counted(source, text, say)
    limits = [limit for limit in (data.max_prompt_tokens, positions) if limit is not None]
    limit = max(0, min(limits)) if limits else None
    long = np.flatnonzero(lengths > limit) if limit is not None else np.empty(0, np.int64)
    if len(long) and (data.on_long == "refuse" or (len(long) == len(lengths) and data.on_long == "drop")):
        raise RlhfsimError(
            "prompts-too-long",
            f"{len(long):,} of {len(lengths):,} prompts have more than {limit:,} tokens "
            f"(this one {lengths[long[0]]:,}, the longest {lengths.max():,})",
            place=source.place(int(long[0])),
            help="set data.on_long: truncate, raise data.max_prompt_tokens, or lower sampling.max_tokens",
        )
    kept = np.minimum(lengths, limit) if limit is not None and data.on_long == "truncate" else lengths
    if data.on_long == "drop":
        source.drop(long.tolist())
        kept = np.delete(lengths, long)
    return PromptLengths(rows=len(lengths), longest=int(kept.max()), too_long=len(long), limit=limit)


def _counted(source: FileSource, text: Text | ByteText, say: Say) -> Lengths:
    """(rows,) tokens, from the cache where they are known."""
    if len(source) < KEPT:
        return _count(source, text, say)
    try:
        kept = _cache().read(_name(source, text)) or b""
        known: Lengths = np.load(io.BytesIO(kept), allow_pickle=False)
        if known.shape == (len(source),) and known.dtype == np.int32:
            return known
    except (OSError, RlhfsimError, ValueError, EOFError):
        pass  # never counted, or the file is broken
    counted, written = _count(source, text, say), io.BytesIO()
    np.save(written, counted)
    with contextlib.suppress(RlhfsimError):  # a home that cannot be written to: counted again next time
        _cache().write(_name(source, text), written.getvalue())
    return counted


def _count(source: FileSource, text: Text | ByteText, say: Say) -> Lengths:
    counts: list[int] = []
    told = time.monotonic()
    for start in range(0, len(source), CHUNK):
        counts += text.lengths(source.prompts(start, start + CHUNK))
        if time.monotonic() - told > TOLD_S:
            told = time.monotonic()
            say(f"counting the tokens of {len(source):,} prompts: {100 * len(counts) // len(source)} %")
    return np.array(counts, np.int32)


def _cache() -> Cache:
    return Cache(cache_folder("prompt_lengths"), PRIVATE)


def _name(source: FileSource, text: Text | ByteText) -> str:
    """The file of the lengths of these prompts under this tokenizer."""
    parts = (*source.identity(), text.identity())
    return f"{hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()}.npy"
