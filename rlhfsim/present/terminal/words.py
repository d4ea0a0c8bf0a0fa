"""Words, numbers and the look that all views of a plan share."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from functools import lru_cache

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhfsim import units
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.present.terminal.bars import DARK, FULL, LIGHT, MEDIUM
from rlhfsim.specs.hardware.hardware import Profile
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS
from rlhfsim.specs.workload.lengths import AnyLengths, Empirical, Fixed

WIDTH = 100
"""Columns that no output exceeds."""
LABEL = 8
"""Width of the labels of header and summary."""
NARROW = 90
"""Below this many columns tables leave out what the bars show."""
RESOURCES: dict[str, tuple[str, str, str]] = {
    "compute": ("compute", "green", "arithmetic of the GPUs"),
    "hbm": ("HBM", "cyan", "bandwidth of GPU memory"),
    "nvlink": ("NVLink", "blue", "the fabric inside a node"),
    "network": ("network", "magenta", "the fabric between nodes"),
    "pcie": ("PCIe", "yellow", "the link between GPU and host"),
    "storage": ("storage", "yellow", "disks"),
    "host": ("host", "yellow", "CPU and host memory"),
    "bubble": ("bubble", "red", "pipeline stages that wait for each other"),
    "tail": ("tail", "red", "GPUs that wait for the longest responses"),
    "overhead": ("overhead", "bright_black", "launches and framework"),
}
"""Resource -> word, colour, meaning."""
ARCHITECTURES = {
    "naive": "rollout and training share the GPUs, everything stays in memory",
    "smart": "rollout and training share the GPUs, memory is freed between phases, weights copied",
    "hybrid": "rollout and training share the GPUs, weights handed over in GPU memory",
    "disaggregated": "rollout and training on GPUs of their own, one waits for the other",
    "async": "rollout and training on GPUs of their own, working at the same time",
}
ROLES = {
    "colocated": "all roles in one pool",
    "split": "roles in groups",
    "standalone": "every role in its own pool",
}
PATHS = {path: rules.title for path, rules in WEIGHT_PATHS.items()}
GROUPS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "weights": (FULL, "green", ("weights",)),
    "gradients, optimizer": (DARK, "blue", ("gradients", "optimizer")),
    "KV cache": (MEDIUM, "magenta", ("kv_cache",)),
    "activations, buffers, rest": (LIGHT, "yellow", ()),
}
"""What a memory bar tells apart: words -> glyph, colour, components; the last takes the rest."""


COMPONENTS = {
    "kv_cache": "KV cache",
    "gathered": "gathered weights",
    "buffers": "gradient buffers",
    "profile_peak": "engine activations",
    "non_torch": "engine, other",
    "cuda_graphs": "CUDA graphs",
    "sync_buffers": "sync buffers",
    "framework": "CUDA context",
    "nccl": "NCCL",
}
"""Component of the ledger -> words, where its name alone does not say it."""
DERIVED = {
    "length_balance": "how evenly drawn lengths spread over the ranks",
    "rules.seconds_per_sample": "given by the workload",
}
"""What a time can rest on besides coefficients and curves."""


def console(*, stderr: bool = False) -> Console:
    """The console of every command: at most `WIDTH` columns, `WIDTH` into pipes."""
    stream = sys.stderr if stderr else sys.stdout
    if not (stream.encoding or "ascii").lower().startswith("utf") and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    return Console(
        width=max(60, min(WIDTH, width)), stderr=stderr, highlight=False, markup=False, emoji=False
    )


def new_table(width: int | None = WIDTH) -> Table:
    """A table without edges, as every command shows it; without a width as wide as its content."""
    return Table(
        box=SIMPLE, width=width, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold"
    )


@lru_cache(maxsize=32)
def _profile(name: str) -> Profile:
    """A profile, read once: the views of one plan ask for it again and again."""
    return load_profile(name)


def profile_of(plan: Plan, pool: str) -> Profile | None:
    """The profile under a pool of the plan; None where it is not found here any more."""
    hardware = next((p.hardware for p in plan.placement.pools if p.name == pool), 0)
    try:
        return _profile(plan.hardware[hardware].profile)
    except RlhfsimError:
        return None


def percent(share: float) -> str:
    """A probability in words of one glance: `<1 %`, `12 %`, `>99 %`."""
    if 0 < share < 0.005:
        return "<1 %"
    return ">99 %" if 0.99 < share < 1 else f"{share:.0%}".replace("%", " %")


def lengths_text(lengths: AnyLengths) -> str:
    """`1,024 tokens`, `lognormal (mean 2,000, at most 8,192 tokens)`."""
    if isinstance(lengths, Fixed):
        return f"{lengths.value:,.0f} tokens"
    if isinstance(lengths, Empirical):
        return f"lengths of {lengths.file}"
    return f"{lengths.kind} (mean {lengths.mean:,.0f}, at most {lengths.max:,.0f} tokens)"


def is_move(name: str) -> bool:
    """Whether a phase brings a role into GPU memory or out of it."""
    return name.endswith((".load", ".unload"))


def component_text(component: str) -> str:
    """A component of the ledger in words."""
    return COMPONENTS.get(component, component.replace("_", " "))


def resource_text(resource: str) -> Text:
    """The resource as a word in its colour."""
    word, colour, _ = RESOURCES.get(resource, (resource, "", ""))
    return Text(word, style=colour)


def decimals(step: float) -> int:
    """Decimals of seconds in a table whose longest time is `step`."""
    return 0 if step >= 10_000 else 1 if step >= 100 else 2 if step >= 1 else 4


def fixed(seconds: float, digits: int) -> str:
    """Seconds with a fixed number of decimals; what would round to zero says so."""
    least = 10.0**-digits
    return f"<{least:.{digits}f}" if 0 < seconds < least / 2 else f"{seconds:,.{digits}f}"


def size(num_bytes: float) -> str:
    """`79.2 GB`."""
    return units.format(num_bytes, "byte")


def labelled(rows: Mapping[str, str]) -> Table:
    """Label and text, one pair a row; labels of all such grids stand under each other."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True, min_width=LABEL)
    grid.add_column()
    for label, text in rows.items():
        grid.add_row(label, text)
    return grid
