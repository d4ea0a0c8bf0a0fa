"""Megatron-Core's own arguments that several frameworks pass on under a group of theirs."""

from __future__ import annotations

from rlhfsim.interchange.table import Key, flag, number


def hosted_adam(role: str, group: str) -> tuple[Key, ...]:
    """Rows of the share of the optimizer states that lie and are updated on the host; `group` comes before
    the names."""
    hosted = f"{role}.offload_optimizer"
    return (
        Key(hosted, f"{group}optimizer_cpu_offload", codec=flag("cpu", "none")),
        Key(
            f"{role}.offload_fraction",
            f"{group}optimizer_offload_fraction",
            1.0,
            number(),
            when=f"{hosted}=cpu",
        ),
    )
