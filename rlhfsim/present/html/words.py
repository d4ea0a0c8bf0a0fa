"""Words and numbers for people who look rather than read."""

from __future__ import annotations

import re

from rlhfsim.plan import Plan
from rlhfsim.specs.workload.lengths import AnyLengths, Empirical, Fixed
from rlhfsim.units import BILLION, DAY, HOUR, MILLION, MINUTE, TERA, format, significant

RESOURCES = {
    "compute": ("arithmetic", "the GPUs calculate at their limit"),
    "hbm": ("GPU memory bandwidth", "the GPUs wait for their own memory (HBM)"),
    "nvlink": ("NVLink", "GPUs of one node exchange data"),
    "network": ("the network", "nodes exchange data"),
    "pcie": ("PCIe", "data moves between GPU and host"),
    "storage": ("disks", "data is read or written"),
    "host": ("the host", "CPUs and host memory work"),
    "bubble": ("pipeline bubbles", "pipeline stages wait for each other"),
    "tail": ("waiting for the longest responses", "GPUs wait for the longest responses"),
    "overhead": ("launches and framework", "launching work and the framework around it"),
}
"""Resource -> word, what it means."""
CALLS = {
    "actor.generate": "generation",
    "actor.train": "training of the policy",
    "critic.train": "training of the critic",
    "reference.logprob": "reference log-probs",
    "actor.logprob": "policy log-probs",
    "critic.value": "critic values",
    "reward.score": "reward model",
    "rules.score": "reward rules",
    "actor.sync": "weight sync",
    "moves": "loads and unloads",
    "actor.generate.wait": "waiting for generation",
    "waiting": "waiting",
    "controller": "controller",
}
ROLES = {
    "rollout": "generates",
    "actor": "is trained",
    "critic": "is trained",
    "reference": "scores",
    "reward": "scores",
}
ARCHITECTURES = {
    "naive": "generation and training share the GPUs and everything stays in GPU memory",
    "smart": "generation and training share the GPUs; memory is freed between phases and weights are copied",
    "hybrid": "generation and training share the GPUs and hand weights over inside GPU memory",
    "disaggregated": "generation and training have GPUs of their own and take turns",
    "async": "generation and training have GPUs of their own and work at the same time",
}
GROUPS: dict[str, tuple[str, ...]] = {
    "weights": ("weights",),
    "gradients, optimizer": ("gradients", "optimizer"),
    "KV cache": ("kv_cache",),
    "activations, buffers, rest": (),
}
"""What a memory bar tells apart -> components; the last takes the rest."""
COMPONENTS = {
    "kv_cache": "the KV cache",
    "gathered": "gathered weights",
    "buffers": "gradient buffers",
    "profile_peak": "the engine's activations",
    "non_torch": "the engine",
    "cuda_graphs": "CUDA graphs",
    "sync_buffers": "sync buffers",
    "framework": "the CUDA context",
    "nccl": "NCCL",
    "optimizer": "optimizer states",
}

_UNIT = re.compile(
    r"(?<=\d) (?=(?:s|ms|us|min|h|days|kB|MB|GB|TB|GPUs?|USD|kWh|kg|tokens|steps|million|billion|trillion|quadrillion|quintillion)\b|%)"
)


def percent(share: float) -> str:
    """`<1 %`, `12 %`, `>99 %`, `150 %`."""
    if 0 < share < 0.005:
        return "<1 %"
    return ">99 %" if 0.995 <= share < 1 else f"{share:.0%}".replace("%", " %")


def signed(share: float) -> str:
    """`+12 %`, `-3 %`."""
    return f"{share:+.0%}".replace("%", " %")


def seconds(value: float) -> str:
    """`2 min 54 s`, `37.2 s`, `3 h 5 min`, `2.1 days`."""
    if value < 100:
        return format(value, "s") if value else "0 s"
    if value < HOUR - 0.5:
        whole = round(value)
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    if value < 2 * DAY:
        minutes = round(value / MINUTE)
        return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")
    return f"{significant(value / DAY, 3)} days"


def money(usd: float) -> str:
    """`$9.29`, `$9,290`, `$1.2 million`."""
    if usd >= MILLION:
        return f"${significant(usd / MILLION, 3)} million"
    return f"${usd:,.0f}" if usd >= 100 else f"${usd:,.2f}" if usd >= 0.1 else f"${significant(usd, 2)}"


def size(num_bytes: float) -> str:
    """`79.2 GB`."""
    return format(num_bytes, "byte")


def count(number: int) -> str:
    """`1.6 quadrillion`, `240 billion`, `1,024`."""
    if number >= 1e21:
        return f"{number:.1e}"
    for unit, word in (
        (1e18, "quintillion"),
        (1e15, "quadrillion"),
        (TERA, "trillion"),
        (BILLION, "billion"),
        (MILLION, "million"),
    ):
        if number >= unit:
            return f"{significant(number / unit, 2)} {word}"
    return f"{number:,}"


def tied(text: str) -> str:
    """The text with numbers tied to their units, so that no line breaks between them."""
    return _UNIT.sub("\u00a0", text)


def call(phase: str) -> str:
    """A phase in words: `generation`, `training of the policy`."""
    for end, word in ((".load", "load for "), (".unload", "unload after ")):
        if phase.endswith(end):
            base = phase.removesuffix(end)
            return word + CALLS.get(base, base)
    return CALLS.get(phase, phase)


def capital(text: str) -> str:
    """The first letter raised."""
    return text[:1].upper() + text[1:]


def listed(items: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else ""


def gpus(plan: Plan) -> int:
    """GPUs of the cluster."""
    return sum(h.gpus for h in plan.hardware)


def lengths(spec: AnyLengths) -> str:
    """`1,024 tokens`, `lognormal (mean 2,000, at most 8,192 tokens)`."""
    if isinstance(spec, Fixed):
        return f"{spec.value:,.0f} tokens"
    if isinstance(spec, Empirical):
        return "lengths read from a file"
    return f"{spec.kind} (mean {spec.mean:,.0f}, at most {spec.max:,.0f} tokens)"


def component(name: str) -> str:
    """A component of the ledger."""
    return COMPONENTS.get(name, name.replace("_", " "))


def is_move(phase: str) -> bool:
    """Whether a phase brings a role into GPU memory or out of it."""
    return phase.endswith((".load", ".unload"))
