"""The probes by name: what each is, in how many processes, and how long it may take."""

from __future__ import annotations

from rlhfsim.frozen import frozen


@frozen
class Probe:
    """One micro-benchmark."""

    name: str
    title: str
    parts: tuple[str, ...] = ("",)
    """One process each."""
    quick: tuple[str, ...] | None = None
    """The processes of a quick run, where they are others."""
    limit_s: float = 120.0
    """Time limit of each process."""
    package: str = "executor.microbench"
    """Where its module, of the same name, lies."""


PROBES = (
    Probe(name="gemm", title="matrix products, one token to a training batch", limit_s=240),
    Probe(name="attention", title="causal attention of a forward pass", limit_s=180),
    Probe(name="memory", title="copies in memory, and between GPU and host"),
    Probe(name="collectives", title="all-reduce among the local ranks"),
    Probe(name="storage", title="write with fsync, read past the page cache", limit_s=180),
    Probe(name="optimizer", title="AdamW against the number of parameters"),
    Probe(name="train", title="forward and backward against layers"),
    Probe(
        name="decode", title="steps of vLLM against layers, batch and context", parts=("2", "6"), limit_s=240
    ),
    Probe(
        name="start", title="interpreter and vLLM engine", parts=("1", "2", "3"), quick=("1",), limit_s=400
    ),
    Probe(name="sleep", title="sleep and wake of vLLM", limit_s=240),
)
BY_NAME = {probe.name: probe for probe in PROBES}
