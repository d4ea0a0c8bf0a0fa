"""Memory of every pool through a step, as bars against its capacity."""

from __future__ import annotations

from rlhfsim.plan import Plan
from rlhfsim.present.basis import capacity_of
from rlhfsim.present.memory import State, states
from rlhfsim.present.tables import grid
from rlhfsim.present.terminal.bars import DARK, FULL, LIGHT, MEDIUM, Axis, BarLegend, HorizontalBar, Stretch
from rlhfsim.present.terminal.console import WIDTH, Part, drawn, stacked, styled
from rlhfsim.present.words import percent, size

LOOKS = {
    "weights": (FULL, "green"),
    "gradients, optimizer": (DARK, "blue"),
    "KV cache": (MEDIUM, "magenta"),
    "activations, buffers, rest": (LIGHT, "yellow"),
}
"""Group of components -> glyph, colour."""


def memory_chart(plan: Plan, width: int = WIDTH) -> Part:
    """Memory of every pool through the step against its capacity, the peak marked."""
    parts: list[Part] = []
    for pool in plan.placement.pools:
        if rows := states(plan, pool.name):
            title = f"pool {pool.name}, " if len(plan.placement.pools) > 1 else ""
            parts.append(styled(f"{title}{pool.gpus} GPUs: bytes on the fullest GPU", style="bold"))
            parts.append(_pool_chart(rows, capacity_of(plan, pool.name), width))
    return stacked(
        *parts, BarLegend(LOOKS, plan.prediction.peak_memory_bytes > plan.prediction.capacity_bytes)
    )


def _pool_chart(rows: list[State], capacity: float, width: int) -> Part:
    peak = max(rows, key=lambda state: state.bytes)
    scale = max(capacity, peak.bytes) * 1.02

    def bar(state: State) -> HorizontalBar:
        stretches = [
            Stretch(amount=state.groups[group], glyph=glyph, style=colour)
            for group, (glyph, colour) in LOOKS.items()
        ]
        return HorizontalBar(stretches=stretches, scale=scale, limit=capacity)

    return drawn(
        grid(
            ("phase", ">bytes", ">full", Axis(label=size(capacity), at=capacity, scale=scale), ""),
            (
                (s.phase, size(s.bytes), percent(s.bytes / capacity), bar(s), "< peak" if s is peak else "")
                for s in rows
            ),
            styles=["bold" if state is peak else "" for state in rows],
        ),
        width,
    )
