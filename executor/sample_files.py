"""Samples in a file, for parts of an algorithm that keep some: arrays as they are, the rest as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from executor.samples import Conversation, Fault, Sample

_PLAIN = "plain"


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write them as .npz; `meta` as JSON has it."""
    arrays: dict[str, Any] = {}
    plain = []
    for number, sample in enumerate(samples):
        row = {field.name: getattr(sample, field.name) for field in fields(Sample)}
        if sample.conversation is not None:
            arrays[f"{number}.sampled"] = sample.conversation.sampled
            row["conversation"] = asdict(sample.conversation) | {"sampled": None}
        for name in [name for name, value in row.items() if isinstance(value, np.ndarray)]:
            arrays[f"{number}.{name}"] = row.pop(name)
        plain.append(row)
    arrays[_PLAIN] = np.frombuffer(json.dumps(plain, default=str).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez(file, **arrays)


def read_samples(path: Path) -> list[Sample]:
    """The samples of such a file."""
    with np.load(path, allow_pickle=False) as file:
        rows = json.loads(file[_PLAIN].tobytes())
        for name in file.files:
            number, _, field = name.partition(".")
            if field:
                rows[int(number)][field] = file[name]
    for row in rows:
        sampled, talk = row.pop("sampled", None), row["conversation"]
        if talk is not None:
            fault = None if talk["fault"] is None else Fault(*talk["fault"])
            row["conversation"] = Conversation(**talk | {"sampled": sampled, "fault": fault})
    return [Sample(**row) for row in rows]
