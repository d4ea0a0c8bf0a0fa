"""Weight syncs of `weight_sync.csv` against predictions from configuration alone.

Scored (`weight_sync`): rows that time the transfer or the refit, offload and wake included where their
scope holds them (`_around`). Whole framework steps, first syncs and rows without a scope are listed
apart (`weight_sync.other_scope`). Coefficients that rows gave are fitted by `lab.fits.weight_sync`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.kernels.cost import Cost
from rlhfsim.kernels.devices import device_of
from rlhfsim.kernels.links import network, slower
from rlhfsim.specs.frameworks.costs import names
from rlhfsim.specs.hardware.hardware import NodeGroup
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.placement.layout import Layout, RolloutLayout
from rlhfsim.validation.assumptions import apply
from rlhfsim.validation.outcome import Change, Outcome, Skip, needed, unchanged
from rlhfsim.validation.rows import Row
from rlhfsim.weight_sync import offload, paths, storage
from rlhfsim.weight_sync.endpoints import PoolPair, Route, route
from rlhfsim.weight_sync.stages import Priced

KIND, OTHER = "weight_sync", "weight_sync.other_scope"
TRANSFER_SCOPES = (
    "update only",
    "transfer only",
    "transfer + update",
    "weight transfer",
    "refit",
    "total refit",
)
"""Beginnings of the scopes that time the transfer or the refit."""
_DEGREE = re.compile(r"(?<![a-wyz_])(tp|pp|cp|ep|etp|dp)\s*=?\s*(\d+)", re.IGNORECASE)
"""A degree; an `x` may come before it, as in TP4xPP8."""
_SHARDED = re.compile(r"fsdp|zero-?3|veomni", re.IGNORECASE)
_NODE_GPUS = 8
MASTER_BYTES = 4.0
"""Bytes per parameter of what FSDP workers reload to send: FP32."""


def outcomes(rows: list[Row], change: Change = unchanged) -> list[Outcome]:
    """One outcome a row."""
    return [_outcome(row, change) for row in rows]


@frozen
class SyncCase:
    """A row as the inputs of its prediction."""

    row: Row
    ends: Route
    price: Callable[[Route], Priced]
    measured: float
    """Seconds."""
    notes: tuple[str, ...]

    def cost(self, ends: Route) -> Cost:
        """The scope of the row between two ends."""
        return self.price(ends).cost + _around(self.row, ends)


def case_of(row: Row) -> SyncCase:
    """The inputs of a row whose blanks are filled.

    Raises:
        RlhfsimError: why the row cannot be predicted.
    """
    seconds, low, high = (row.number(c) for c in ("seconds", "seconds_low", "seconds_high"))
    notes: tuple[str, ...] = ()
    if seconds is None and low is not None and high is not None:
        seconds, notes = (low + high) / 2, ("middle of the published range",)
    measured = needed(seconds, "no seconds are published")
    if row.text("scope") == "single parameter sync" and row.text("model_config_key") == "qwen2.5-7b":
        raise Skip("15 GB in 0.02 to 0.12 s exceeds the link: probably the time of an asynchronous launch")
    words = row.words("mechanism")
    if "one handle a tensor" in words:
        raise Skip("one CUDA IPC handle a tensor is not a path here: buckets share one")
    price = needed(
        next((price for beginning, price in _MECHANISMS if beginning in words), None),
        f"mechanism {words!r} is not one of the weight paths",
    )
    return SyncCase(row=row, ends=_ends(row), price=price, measured=measured, notes=notes)


def _outcome(row: Row, change: Change) -> Outcome:
    filled, assumptions = apply(KIND, row)
    ends = f"{filled.text('train_parallel') or '?'} -> {filled.text('gen_parallel') or '?'}"
    label = f"{filled.text('model')} {ends}, {filled.text('gpu_type') or 'GPU not stated'}"
    basic = partial(Outcome.of, row, kind_of(row), label)
    detail: dict[str, float | str] = {
        "scope": row.text("scope") or "not stated",
        "mechanism": row.words("mechanism"),
    }
    try:
        case = case_of(filled)
        source, target = (
            replace(end, profile=change(end.profile, framework_of(filled)))
            for end in (case.ends.source, case.ends.target)
        )
        cost = case.cost(replace(case.ends, source=source, target=target))
    except RlhfsimError as error:
        return basic(skipped=error.message, assumptions=assumptions, detail=detail)
    detail |= {f"seconds.{r}": s for r, s in cost.by_resource().items()}
    notes = (*assumptions, *case.notes)
    return basic(cost=cost, measured=case.measured, assumptions=notes, detail=detail)


def kind_of(row: Row) -> str:
    """`KIND` where the scope is the transfer or the refit."""
    scope = row.words("scope")
    return KIND if scope.startswith(TRANSFER_SCOPES) else OTHER


# --- reading a row ------------------------------------------------------------------------------------


def _around(row: Row, ends: Route) -> Cost:
    """What else the scope of a row holds: the trained role leaves, the engine wakes, weights come and go."""
    scope, model = row.words("scope"), resolve_model(row.words("model_config_key"))
    if "offload" in scope or scope.startswith("total refit"):
        away = offload.leaving(ends.source, model, ends.train, ends.backend)
        return away + offload.wake(ends.target, 0.0, level=2)
    if scope.startswith("per-step") and "offload off" not in row.words("train_parallel"):
        size = model.num_params * MASTER_BYTES / ends.train.gpus
        pinned = ends.backend in offload.PINNING
        return offload.copy_in(ends.source, size, pinned=pinned) + offload.copy_out(
            ends.source, size, pinned=pinned
        )
    return Cost()


def _bridged(ends: Route, *, overlapped: bool = True) -> Priced:
    """NeMo-RL: the whole root node joins, tensors come from Megatron-Bridge through all stages."""
    nics = min(ends.source.gpus_per_node, ends.train.gpus)
    return paths.broadcast(ends, nics=nics, lanes=False, overlapped=overlapped)


def _remote_host(ends: Route) -> Priced:
    """Checkpoint-engine's P2P: 16 GPUs read over RDMA from hosts of other instances."""
    one = replace(ends, rollout=replace(ends.rollout, dp=1))
    link = slower(network(ends.target), network(ends.source))
    return storage.host_update(one, staged=link)


_MECHANISMS: tuple[tuple[str, Callable[[Route], Priced]], ...] = (
    ("checkpoint-engine broadcast", storage.host_update),
    ("checkpoint-engine P2P", _remote_host),
    ("verl checkpoint engine mooncake", lambda e: paths.broadcast(e, loaded=False)),
    ("NCCL packed broadcast, before", lambda e: _bridged(e, overlapped=False)),
    ("NCCL packed broadcast", _bridged),
    ("NCCL broadcast", paths.broadcast),
    ("NCCL full broadcast", paths.broadcast),
    ("NCCL + checkpoint-engine", storage.host),
    ("vLLM native weight transfer (NCCL)", paths.broadcast),
    ("per tensor", paths.broadcast_per_parameter),
    ("delta_sharded", paths.delta),
    ("NCCL-Xfer", lambda e: paths.p2p(e, whole=True)),
    # NeMo-RL at that time: training and rollout store the same format, FP8 with FP8
    ("NCCL-Reshard", lambda e: paths.p2p(e, trained_fp8=e.quantised, sliced=True)),
    ("NCCL P2P", paths.p2p),
    ("NIXL", paths.p2p),
    ("RDMA WRITE", paths.p2p),
    ("DDMA", paths.p2p),
    ("RDMA P2P (Mooncake)", paths.p2p_staged),
    ("no metadata preparation", paths.ipc_per_parameter),
    ("CUDA IPC colocated refit, after", lambda e: paths.ipc(e, prequantised=True)),
    ("IPC", paths.ipc),
    ("hybrid engine reshard", paths.ipc),
)
"""First match wins."""


def _ends(row: Row) -> Route:
    key = needed(row.text("model_config_key"), "the shape of the model is not known")
    gpu = re.split(r" \(|/", needed(row.text("gpu_type"), "GPU type not stated").strip())[0]
    model = resolve_model(key)
    layers = re.search(r"(\d+)layer", row.words("model"))
    model = model.scaled(int(layers[1])) if layers else model
    profile = load_profile(gpu)
    same = row.text("colocated") == "yes"
    rollout = _rollout(row)
    train = _train(row, rollout)
    source, target = (
        device_of(
            NodeGroup(profile=profile, gpus=-(-n // _NODE_GPUS) * _NODE_GPUS, gpus_per_node=_NODE_GPUS),
            framework=framework_of(row),
            backend=_backend(row),
        )
        for n in (train.gpus, rollout.gpus)
    )
    one_node = "1 node, intra-node" in row.words("train_parallel")
    ends = route(model, train, rollout, PoolPair(source, target, same), _backend(row))
    if same or one_node or not ends.one_domain:
        return ends
    # a pool of its own starts at a node of its own
    apart = replace(target, domain=min(target.domain, rollout.gpus))
    return replace(ends, source=replace(source, domain=min(source.domain, train.gpus)), target=apart)


def framework_of(row: Row) -> str | None:
    """The framework whose software costs are known; None: pooled."""
    words = re.split(r"[^a-z-]+", row.words("train_framework").lower())
    return next((name for name in names() if name in words), None)


def _backend(row: Row) -> Backend:
    words = f"{row.words('train_framework')} {row.words('train_parallel')}"
    return "fsdp2" if _SHARDED.search(words) else "megatron"


def _degrees(text: str) -> dict[str, int]:
    return {name.lower(): int(number) for name, number in _DEGREE.findall(text)}


def _pool_gpus(row: Row, layout: str, column: str) -> int | None:
    """GPUs of a pool: its column, or nodes of eight where the layout says so."""
    nodes = re.search(r"(\d+) nodes?\b", layout)
    return row.integer(column) or (int(nodes[1]) * _NODE_GPUS if nodes else None)


def _rollout(row: Row) -> RolloutLayout:
    text = needed(row.text("gen_parallel"), "rollout layout not stated")
    d = _degrees(text)
    replica, apart = d.get("tp", 1) * d.get("pp", 1), row.integer("attention_dp") or 1
    gpus = _pool_gpus(row, text, "dst_gpus") or replica * d.get("dp", 1)
    low = "fp8" in f"{row.words('weight_dtype')} {row.words('model')}".lower()
    return RolloutLayout(
        tp=max(1, d.get("tp", 1) // apart),
        pp=d.get("pp", 1),
        dp=max(1, gpus // replica),
        ep=d.get("ep", 1),
        attention_dp=apart,
        precision="fp8" if low else "bf16",
    )


def _train(row: Row, rollout: RolloutLayout) -> Layout:
    """Training layout; where the weights start in host memory it plays no part."""
    text = row.words("train_parallel")
    if "checkpoint-engine" in row.words("mechanism") and not text:
        return Layout(dp=rollout.gpus)
    d = _degrees(text.split("gen ")[0])
    gpus = _pool_gpus(row, text, "src_gpus")
    if not d and gpus is None:
        raise Skip("training layout not stated")
    tp, pp, cp = (d.get(name, 1) for name in ("tp", "pp", "cp"))
    dp = max(1, (gpus or tp * pp * cp * max(d.get("dp", 1), d.get("ep", 1))) // (tp * pp * cp))
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        ep=min(d.get("ep", 1), dp * cp * tp),
        etp=d.get("etp", 1),
        zero=3 if _backend(row) == "fsdp2" else 1,
    )
