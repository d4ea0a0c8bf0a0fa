"""Words and numbers for people: what the terminal, the pages and the findings call the same things."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from rlhfsim.choice import RunnerUp
from rlhfsim.plan import Plan, Prediction
from rlhfsim.search.explain import kind
from rlhfsim.specs.quantities import Coefficient
from rlhfsim.specs.workload.lengths import AnyLengths, Empirical, Fixed, stats
from rlhfsim.units import BILLION, DAY, HOUR, MILLION, MINUTE, TERA, Dimension, format, significant
from rlhfsim.units import likely as likely
from rlhfsim.units import percent as percent

# --- names ------------------------------------------------------------------------------------------


class ResourceWords(NamedTuple):
    """A resource that can bound a phase."""

    word: str
    """In a column."""
    meaning: str
    phrase: str
    """In a sentence."""
    effect: str
    """What happens while it binds."""


RESOURCES = {
    "compute": ResourceWords(
        "compute", "arithmetic of the GPUs", "arithmetic", "the GPUs calculate at their limit"
    ),
    "hbm": ResourceWords(
        "HBM", "bandwidth of GPU memory", "GPU memory bandwidth", "the GPUs wait for their own memory (HBM)"
    ),
    "nvlink": ResourceWords(
        "scale-up",
        "the fabric inside a node: NVLink, xGMI or PCIe",
        "the fabric inside a node",
        "GPUs of one node exchange data",
    ),
    "network": ResourceWords("network", "the fabric between nodes", "the network", "nodes exchange data"),
    "wan": ResourceWords(
        "WAN", "the link to the other region", "the WAN", "weights cross to the other region"
    ),
    "pcie": ResourceWords("PCIe", "the link between GPU and host", "PCIe", "data moves between GPU and host"),
    "storage": ResourceWords("storage", "disks", "disks", "data is read or written"),
    "host": ResourceWords("host", "CPU and host memory", "the host", "CPUs and host memory work"),
    "environment": ResourceWords(
        "environment",
        "workers of the environment, on CPUs",
        "the environment's workers",
        "responses wait for the environment",
    ),
    "rewards": ResourceWords(
        "rewards",
        "workers that score by rules, or requests to a judge",
        "the workers that score by rules",
        "samples wait for their rewards",
    ),
    "controller": ResourceWords(
        "controller",
        "the process that drives the step",
        "the controller",
        "the controller works on the batch",
    ),
    "custom": ResourceWords(
        "own parts",
        "your own parts of the algorithm, in the process that drives the step",
        "your own parts of the algorithm",
        "your own parts of the algorithm work on the batch",
    ),
    "bubble": ResourceWords(
        "bubble",
        "pipeline stages that wait for each other",
        "pipeline bubbles",
        "pipeline stages wait for each other",
    ),
    "tail": ResourceWords(
        "tail",
        "GPUs that wait for the longest responses",
        "waiting for the longest responses",
        "GPUs wait for the longest responses",
    ),
    "overhead": ResourceWords(
        "overhead",
        "launches and framework",
        "launches and framework",
        "launching work and the framework around it",
    ),
}


class CauseWords(NamedTuple):
    """A cause of the gap between prediction and measurement."""

    word: str
    meaning: str
    label: str
    """In a figure."""
    phrase: str
    """In a sentence."""


CAUSES = {
    "lengths": CauseWords(
        "lengths", "prompts and responses are not as long as planned", "lengths", "other lengths than planned"
    ),
    "compute": CauseWords(
        "compute", "arithmetic of the GPUs takes longer or shorter", "arithmetic", "arithmetic"
    ),
    "hbm": CauseWords("HBM", "reads and writes of GPU memory", "GPU memory", "GPU memory"),
    "network": CauseWords("network", "links inside a node and between nodes", "links", "links"),
    "overhead": CauseWords(
        "overhead",
        "launches, framework, host, PCIe, disks, unplanned calls",
        "overhead",
        "launches and framework",
    ),
    "waiting": CauseWords(
        "waiting", "no call works, or ranks and stages wait for each other", "waiting", "waiting"
    ),
    "order": CauseWords(
        "order", "calls run at the same time in one of the two only", "order", "the order of calls"
    ),
}
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
_PHASES = re.compile(r"\b(?:\w+\.(?:generate|train|logprob|value|score|sync)(?:\.\w+)?|moves(?= [+-]))")
STREAMING = "finished samples are scored while others still generate"
"""What a streaming schedule does."""
ARCHITECTURES = {
    "naive": (
        "rollout and training share the GPUs, everything stays in memory",
        "generation and training share the GPUs and everything stays in GPU memory",
    ),
    "smart": (
        "rollout and training share the GPUs, memory is freed between phases, weights copied",
        "generation and training share the GPUs; memory is freed between phases and weights are copied",
    ),
    "hybrid": (
        "rollout and training share the GPUs, weights handed over in GPU memory",
        "generation and training share the GPUs and hand weights over inside GPU memory",
    ),
    "disaggregated": (
        "rollout and training on GPUs of their own, one waits for the other",
        "generation and training have GPUs of their own and take turns",
    ),
    "lend": (
        "rollout on GPUs of its own, and on the trainer's while they would wait",
        "generation and training have GPUs of their own and work at the same time; while training waits for "
        "samples its GPUs generate too",
    ),
    "async": (
        "rollout and training on GPUs of their own, working at the same time",
        "generation and training have GPUs of their own and work at the same time",
    ),
}
"""Architecture -> in brackets, in a sentence."""
MEMORY_GROUPS: dict[str, tuple[str, ...]] = {
    "weights": ("weights",),
    "gradients, optimizer": ("gradients", "optimizer"),
    "KV cache": ("kv_cache",),
    "activations, buffers, rest": (),
}
"""What a memory bar tells apart -> components; the last takes the rest."""
COMPONENTS = {
    "kv_cache": ("KV cache", "the KV cache"),
    "gathered": ("gathered weights", "gathered weights"),
    "buffers": ("gradient buffers", "gradient buffers"),
    "profile_peak": ("engine activations", "the engine's activations"),
    "non_torch": ("engine, other", "the engine"),
    "cuda_graphs": ("CUDA graphs", "CUDA graphs"),
    "retained": ("kept asleep", "what the sleeping engine keeps"),
    "framework": ("CUDA context", "the CUDA context"),
    "nccl": ("NCCL", "NCCL"),
    "optimizer": ("optimizer", "optimizer states"),
}
"""Component of the ledger -> as a label, in a sentence, where its name alone does not say it."""
CUT_SHOWN = 0.05
"""Share of the mean from which on what a cut takes of it is shown."""
_ACRONYMS = "RL HBM NVLink PCIe NIC RPC KV GPU CPU PUE MoE GEMM NCCL ZeRO CUDA"
ACRONYMS = {word.lower(): word for word in _ACRONYMS.split()}


def bound_by(resource: str) -> str:
    """What bounds a phase, in a sentence."""
    return RESOURCES[resource].phrase if resource in RESOURCES else resource


def call(phase: str) -> str:
    """A phase in words: `generation`, `training of the policy`."""
    for end, word in ((".load", "load for "), (".unload", "unload after ")):
        if phase.endswith(end):
            base = phase.removesuffix(end)
            return word + CALLS.get(base, base)
    return CALLS.get(phase, phase)


def called(text: str) -> str:
    """A sentence with its phases in words."""
    return _PHASES.sub(lambda found: call(found[0]), text)


def is_move(phase: str) -> bool:
    """Whether a phase brings a role into GPU memory or out of it."""
    return phase.endswith((".load", ".unload"))


def component_text(name: str) -> str:
    """A component of the ledger as a label."""
    return COMPONENTS[name][0] if name in COMPONENTS else name.replace("_", " ")


def component(name: str) -> str:
    """A component of the ledger in a sentence."""
    return COMPONENTS[name][1] if name in COMPONENTS else name.replace("_", " ")


def spoken(coefficient: str) -> str:
    """A coefficient as people read it: `rl_call_time` is RL call time."""
    return " ".join(ACRONYMS.get(word, word) for word in coefficient.replace("_", " ").split())


def plan_text(plan: Plan) -> str:
    """Kind and layouts of a plan: `hybrid (actor TP1 DP8 ZeRO-2, rollout TP4 x2)`."""
    rollout = plan.placement.rollout
    beside = f", rollout {rollout.layout.label}" if rollout else ""
    return f"{kind(plan)} (actor {plan.placement.actor.layout.label}{beside})"


def layout_labels(plan: Plan) -> tuple[str, str]:
    """Layouts of actor and rollout; `-` without a rollout."""
    rollout = plan.placement.rollout
    return plan.placement.actor.layout.label, rollout.layout.label if rollout else "-"


def pools(plan: Plan) -> str:
    """Which roles have which GPUs: `64 GPUs for all roles`, `40 GPUs for actor, 24 GPUs for rollout`."""
    shares = []
    for pool in plan.placement.pools:
        roles = [name for name, role in plan.placement.roles.items() if role.pool == pool.name]
        whole = len(plan.placement.pools) == 1 and len(roles) > 1
        shares.append(f"{plural(pool.gpus, 'GPU')} for {'all roles' if whole else listed(roles)}")
    return ", ".join(shares)


def full(p: Prediction | RunnerUp) -> float:
    """Share of the fullest GPU that a plan takes."""
    return p.peak_memory_bytes / p.capacity_bytes


def gpus(plan: Plan) -> int:
    """GPUs of the cluster."""
    return sum(h.gpus for h in plan.hardware)


# --- numbers ----------------------------------------------------------------------------------------


def signed(share: float, decimals: int = 0) -> str:
    """`+12 %`, `-3 %`, `0 %`."""
    rounded = round(100 * share, decimals)
    return f"{rounded:+,.{decimals}f} %" if rounded else f"{0:.{decimals}f} %"


def seconds(value: float) -> str:
    """`2 min 54 s`, `37.2 s`, `3 h 5 min`, `2.1 days`."""
    if value < 100:
        return short_seconds(value)
    if value < HOUR - 0.5:
        whole = round(value)
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    if value < 2 * DAY:
        minutes = round(value / MINUTE)
        return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")
    return f"{significant(value / DAY, 3)} days"


def short_seconds(value: float) -> str:
    """`174 s`, `37.2 s`, `0 s`."""
    return format(value, "s") if value else "0 s"


def money(usd: float) -> str:
    """`$9.29`, `$9,290`, `$1.2 million`."""
    if usd >= MILLION:
        return f"${significant(usd / MILLION, 3)} million"
    return f"${usd:,.0f}" if usd >= 100 else f"${usd:,.2f}" if usd >= 0.1 else f"${significant(usd, 2)}"


def size(num_bytes: float) -> str:
    """`79.2 GB`."""
    return format(num_bytes, "byte")


def count(number: int, *, largest: float = 1e21) -> str:
    """`1.6 quadrillion`, `240 billion`, `1,024`; `1.0e+21` from `largest` on."""
    if number >= largest:
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


def parameters(number: float) -> str:
    """`70.6B`, `350M`."""
    scale, letter = (BILLION, "B") if number >= BILLION else (MILLION, "M")
    return f"{significant(number / scale)}{letter}"


def plural(number: int, noun: str) -> str:
    """`1 step`, `1,024 steps`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def decimals(step: float) -> int:
    """Decimals of seconds in a table whose longest time is `step`."""
    return 0 if step >= 10_000 else 1 if step >= 100 else 2 if step >= 1 else 4


def fixed(seconds: float | None, digits: int) -> str:
    """Seconds with a fixed number of decimals; what would round to zero says so; `-` where unknown."""
    if seconds is None:
        return "-"
    least = 10.0**-digits
    return f"<{least:.{digits}f}" if 0 < seconds < least / 2 else f"{seconds:,.{digits}f}"


def span(low: str, high: str) -> str:
    """`1.2-3.4 ms`: the unit once where both ends have it."""
    (first, _, unit), (_, _, other) = low.partition(" "), high.partition(" ")
    return f"{first if unit == other else low}-{high}"


def error_text(share: float | None) -> str:
    """`3.4 %`, `12 times` from a factor of ten; `-` where unknown."""
    if share is None:
        return "-"
    return f"{significant(100 * share, 2)} %" if share < 10 else f"{share:,.0f} times"


def long_term(value: float, dimension: Dimension) -> str:
    """A figure of a purchase, times in days: `30 d`, `2.187 USD/h`."""
    return f"{significant(value / DAY)} d" if dimension == "s" else format(value, dimension, digits=4)


def value_text(c: Coefficient) -> str:
    """A coefficient with its unit."""
    return format(c.value, c.dimension)


def between(c: Coefficient) -> str:
    """`0.72-0.81`, `1.2-3.4 ms`: P10 and P90 of a coefficient."""
    return span(format(c.low, c.dimension), format(c.high, c.dimension))


def lengths(spec: AnyLengths, *, file: bool = False) -> str:
    """`1,024 tokens`, `lognormal (mean 292, 250 as cut, at most 512 tokens)`; a file by name if asked."""
    if isinstance(spec, Fixed):
        return f"{spec.value:,.0f} tokens"
    if isinstance(spec, Empirical):
        return f"lengths of {spec.file}" if file else "lengths read from a file"
    mean = stats(spec).mean
    cut = f", {mean:,.0f} as cut" if abs(mean - spec.mean) > CUT_SHOWN * spec.mean else ""
    return f"{spec.kind} (mean {spec.mean:,.0f}{cut}, at most {spec.max:,.0f} tokens)"


def work_parts(names: Sequence[str]) -> str:
    """Fields of `what_if.work.StepWork` in words: `samples and response length`."""
    return listed([name.replace("_len", " length").replace("_", " ") for name in names])


# --- sentences --------------------------------------------------------------------------------------

_UNIT = re.compile(
    r"(?<=\d) (?=(?:s|ms|us|min|h|days|kB|MB|GB|TB|GPUs?|USD|kWh|kg|tokens|steps"
    r"|million|billion|trillion|quadrillion|quintillion)\b|%)"
)


def tied(text: str) -> str:
    """The text with numbers tied to their units, so that no line breaks between them."""
    return _UNIT.sub("\u00a0", text)


def capital(text: str) -> str:
    """The first letter raised."""
    return text[:1].upper() + text[1:]


def listed(items: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else ""
