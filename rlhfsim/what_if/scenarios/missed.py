"""A target that no listed value meets: by how much the nearest misses, and the first change that meets it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.specs.placement.backends import BACKENDS
from rlhfsim.what_if.scenarios.points import Cases, PointQuestion

SWITCHES = ("rollout-logprobs", "fp8", "async", "lora")
"""What may be allowed, that which changes learning least first."""
GPUS = ("h200", "b200")
"""Kinds of GPU that are tried in place of the first."""


def changes(case: PointQuestion, cases: Cases, place: Place) -> Iterator[tuple[str, PointQuestion]]:
    """A change in words and the question under it: other software, then what changes learning, then GPUs."""
    tried: list[tuple[str, Mapping[str, Any]]] = []
    request = case.request
    for backend in BACKENDS:
        if backend != request.backend:
            tried.append((f"backend {backend}", {"request.backend": backend, "request.framework": None}))
    for name in SWITCHES:
        if name not in request.switches | request.forbid:
            allowed = [*sorted(request.allow), name]
            tried.append((f"{name} allowed", {"request.allow": allowed}))
    if len(request.cluster.node_groups) == 1:
        tried += [(gpu, {"cluster.node_groups.0.gpu": gpu}) for gpu in GPUS]
    for words, given in tried:
        try:
            yield words, cases.patched(case.name, given, dict.fromkeys(given, place), on=case)
        except RlhfsimError:  # a change that this base cannot have
            continue
