"""What the user asks of the planner."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import field, replace
from typing import Any, Literal, cast

from rlhfsim.errors import RlhfsimError, unknown_name
from rlhfsim.frozen import frozen
from rlhfsim.search.role_fields import FIXABLE_ROLES, Relation, check_fixed, named
from rlhfsim.specs.frameworks.runs import ANY, OWN, Runs, framework, frameworks, runner_of
from rlhfsim.specs.frameworks.says import FROZEN_BASE, Same
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.placement.backends import BACKENDS, Backend, BackendRules
from rlhfsim.specs.placement.layout import Layout
from rlhfsim.specs.placement.weight_paths import SEARCHED, WeightPath
from rlhfsim.specs.quantities import UsdPerHour
from rlhfsim.specs.ranges import Lag, PoolGpus, Risk, SearchTime
from rlhfsim.specs.workload.workload import Lora, Workload
from rlhfsim.step.rule_rewards import with_measured

Objective = Literal["time", "tokens", "cost", "energy", "memory"]
"""tokens, cost and energy are time: the cluster is rented whole and works through the same tokens."""
SWITCHES: dict[str, str] = {
    "async": "generation and training overlap; samples are up to --max-staleness versions old",
    "lend": "the trainer's GPUs generate too while they would wait for such samples",
    "lora": "adapters are trained instead of all weights",
    "qlora": "adapters are trained on a base in 4 bit",
    "fp8": "the rollout runs in FP8; its log-probs differ from the trainer's",
    "fp8-kv": "the KV cache of the rollout is FP8; its log-probs differ from the trainer's",
    "mxfp4": "MLPs and experts of the rollout are MXFP4; its log-probs differ from the trainer's",
    "nvfp4": "the rollout is NVFP4; its log-probs differ from the trainer's",
    "adam8bit": "8-bit Adam moments",
    "fp8-training": "matrix products of training and scoring in FP8",
    "bf16-gradients": "gradients are kept and reduced in BF16 where the backend does so in FP32",
    "rollout-logprobs": "old log-probs come from the rollout engine, not from a forward of the trainer",
}
"""Choices that change what is learnt; each competes only when allowed."""
STALE = frozenset({"async", "lend"})
"""Switches that are schedules, with samples of older weights, and the architectures of their plans."""
FP32_SUMS = "fp32-sums"
"""Sums in FP32 where the backend's are BF16: `design` takes them by itself where sums are long."""
FORBIDDABLE: dict[str, str] = {
    "naive": "all roles resident all the time",
    "smart": "same pool, memory freed and offloaded between phases",
    "hybrid": "same pool, weights handed over in GPU memory",
    "disaggregated": "a pool for the rollout, one for the rest",
    "split": "roles in two groups",
    "standalone": "a pool for each role",
    "colocated": "actor, critic, reference and reward in one pool",
    "streaming": "finished samples are scored while others still generate, and trained where the backend can",
    "offload": "anything moved to host memory between or during phases",
    "partial-offload": "a share of the optimizer states on the host while training",
    "hsdp": "a copy of the shards in every node",
    "recompute": "activations computed again in the backward pass",
    **{path: f"weight path {path}" for path in SEARCHED if path != "lora"},
}
RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
WITHOUT: dict[str, tuple[str, ...]] = {
    "streaming": ("streaming",),
    "offload to the host": ("offload",),
    "partial optimizer offload": ("partial-offload",),
    "HSDP": ("hsdp",),
}
"""Feature of a framework -> choices that do not compete without it."""
LORA_RANK = 32
"""Rank that competes when LoRA is allowed."""


@frozen
class Limit:
    """A bound on one field of one role: `actor.tp<=4`, `critic.gpus=16`, `rollout.sleep!=1`."""

    role: str
    field: str
    """Field of the layout or the role; or `gpus`, the size of its pool; `hardware`, its node group."""
    relation: Relation
    value: int | float | str

    def holds(self, value: Any) -> Any:
        """Whether a value (or each of an array) obeys."""
        return value is not None and RELATIONS[self.relation](value, self.value)

    @property
    def text(self) -> str:
        """As the user writes it."""
        return f"{self.role}.{self.field}{self.relation}{self.value}"


class _Runner:
    """Base of a frozen, slotted dataclass that remembers who runs its plans; neither compared nor pickled."""

    __slots__ = ("_left_out", "_runs")
    _left_out: frozenset[str]
    _runs: Runs | None


@frozen
class Request(_Runner):
    """A design question: cluster, workload and what may compete."""

    cluster: Cluster
    """With the framework of the question: its software is priced."""
    workload: Workload
    backend: Backend = None  # type: ignore[assignment]  # None is left open; it never stays
    """Training backend; left open: the framework's usual one."""
    backend_by: Literal["option", "all open", "left open", "examples", "seconds", "fit", "ours"] = "option"
    """What decides it (`what_if.usual_trainer`): whoever asks; nobody yet, nor who runs the plan; nobody yet;
    the framework's own examples, more speed than that of those, that no plan of those fits, or that our
    executor alone has a plan of a large policy."""
    framework: str | None = None
    """Whose plans compete: a name, or `any` for all that is priced; None: ours where it trains with the
    backend, else the first that does."""
    objective: Objective = "time"
    allow: frozenset[str] = frozenset()
    """Subset of `SWITCHES`."""
    forbid: frozenset[str] = frozenset()
    """Subset of `SWITCHES` and `FORBIDDABLE`."""
    fix: Mapping[str, Mapping[str, int | str]] = field(default_factory=dict)
    """Role -> field of `search.role_fields` -> value: `{"actor": {"tp": 8}}`."""
    limits: tuple[Limit, ...] = ()
    """Bounds on layouts, roles and pool sizes."""
    architecture: str | None = None
    """Only this architecture."""
    weight_path: WeightPath | None = None
    """Only this weight path."""
    max_gpus_per_role: PoolGpus | None = None
    """Largest pool when there are several."""
    time_limit: SearchTime | None = None
    """Seconds of search; then the best so far is the answer and the certificate shows the gap."""
    max_staleness: Lag = 1
    max_oom: Risk = 0.1
    """Largest probability of running out of memory that a plan may carry."""
    max_memory: float | None = None
    """Most bytes on any GPU; None: what the GPU holds."""
    price: UsdPerHour | None = None
    """USD per GPU-hour given by the user; replaces the profile's."""

    def __post_init__(self) -> None:
        """Check the names."""
        for name in self.allow:
            known_switch(name)
        for what, names, known in (
            ("choice", self.forbid, [*SWITCHES, *FORBIDDABLE]),
            ("role", self.fix, FIXABLE_ROLES),
        ):
            for name in set(names) - set(known):
                raise unknown_name(what, name, known)
        check_fixed(self.fix)
        if self.framework not in (None, ANY, *(known := [x.name for x in frameworks()])):
            raise unknown_name("framework", self.framework or "", [*known, ANY])
        if self.backend is None:
            self._leave_open()
        self._check_framework()
        runs = self.runs
        priced = replace(self.cluster, framework=runs.name if runs else None)
        object.__setattr__(self, "cluster", priced)
        if runs and self.workload.old_logprobs == "recompute" and runs.reuses_logprobs(self.workload):
            object.__setattr__(self, "workload", replace(self.workload, old_logprobs="reused"))
        object.__setattr__(self, "workload", with_measured(self.workload, self.cluster))
        if both := self.allow & self.forbid:
            raise RlhfsimError(
                "allowed-and-forbidden",
                f"{sorted(both)[0]!r} is both allowed and forbidden",
                help="drop one of the two",
            )

    @property
    def runs(self) -> Runs | None:
        """What the framework runs; None: whatever is priced."""
        try:
            return self._runs
        except AttributeError:
            object.__setattr__(self, "_runs", self._runner())
            return self._runs

    @property
    def alike(self) -> tuple[Same, ...]:
        """What roles must share: the framework says or sets it up once for several, or they are one model."""
        said = self.runs.says.alike(self.backend) if self.runs else ()
        return (*said, FROZEN_BASE) if self.workload.base_is_reference else said

    def _runner(self) -> Runs | None:
        if self.framework == ANY:
            return None
        if self.framework:
            return framework(self.framework).of(self.workload)
        found = runner_of(self.backend, self.cluster.vendors, self.workload.algorithm)
        return found.of(self.workload) if found else None

    @property
    def trainer(self) -> BackendRules:
        """What competes of the training backend."""
        return self.runs.trainers[self.backend] if self.runs else BACKENDS[self.backend]

    def rules(self, role: str) -> BackendRules:
        """What competes of the layouts of a role."""
        return self.runs.rules(self.backend, role, self.workload) if self.runs else self.trainer

    @property
    def left_out(self) -> frozenset[str]:
        """Choices that do not compete: forbidden, or not run by the framework."""
        try:
            return self._left_out
        except AttributeError:
            features = self.runs.features if self.runs else WITHOUT
            lacking = (names for feature, names in WITHOUT.items() if feature not in features)
            object.__setattr__(self, "_left_out", self.forbid.union(*lacking))
            return self._left_out

    @property
    def hardware_limits(self) -> tuple[Limit, ...]:
        """Which kind of hardware a role is on: a fact about the cluster rather than a wish."""
        return tuple(x for x in self.limits if x.field == "hardware")

    def _leave_open(self) -> None:
        """Name who trains: ours, or the first framework that runs the GPUs, by its usual backend."""
        name, vendors = self.framework, self.cluster.vendors
        named = name is not None
        if name is None and framework(OWN).lacks_hardware(vendors):
            first = runner_of(None, vendors, self.workload.algorithm)
            name = first.name if first else None
            object.__setattr__(self, "framework", name)
        runs = framework(OWN if name in (None, ANY) else name)
        object.__setattr__(self, "backend", runs.usual_trainer(models_of(self.workload).actor))
        if runs.examples or not named:
            object.__setattr__(self, "backend_by", "left open" if named else "all open")

    def _check_framework(self) -> None:
        if self.runs is None:
            return
        lacks = self.runs.lacks_hardware(self.cluster.vendors)
        if self.backend not in self.runs.trainers:
            lacks = self.runs.lacks_layout(self.backend, Layout(), self.workload, "actor")
        if lacks is not None:
            raise RlhfsimError(lacks.code, f"{self.runs.title} does not run {lacks.what}", help=lacks.remedy)

    @property
    def switches(self) -> frozenset[str]:
        """Switches in force."""
        return self.allow - self.forbid

    @property
    def stale(self) -> bool:
        """Whether samples may be of older weights."""
        return bool(self.switches & STALE)


def second_pool_for_rollout(request: Request) -> Request:
    """The last kind of hardware serves the rollout alone, the first everything else (`--rollout-gpus`)."""
    last = len(request.cluster.node_groups) - 1
    if not last:
        return request
    kinds = {role: last if role == "rollout" else 0 for role in FIXABLE_ROLES}
    limits = tuple(Limit(role=s, field="hardware", relation="=", value=k) for s, k in kinds.items())
    return replace(request, limits=(*request.limits, *limits))


def limited(request: Request, limit: Limit) -> Request:
    """The limit in place of what is said about the same field; `=` on a degree is tried as such."""
    limits = tuple(x for x in request.limits if (x.role, x.field) != (limit.role, limit.field))
    fields = {k: v for k, v in request.fix.get(limit.role, {}).items() if k != limit.field}
    if limit.relation == "=" and limit.field in named(limit.role, "fixed"):
        fields[limit.field] = cast(int | str, limit.value)
    else:
        limits = (*limits, limit)
    fix = {role: values for role, values in {**request.fix, limit.role: fields}.items() if values}
    return replace(request, fix=fix, limits=limits)


def known_switch(name: str) -> str:
    """The name, where it is one of `SWITCHES`."""
    if name not in SWITCHES:
        raise unknown_name("switch", name, SWITCHES)
    return name


def switches_of(asked: Workload, workload: Workload) -> tuple[str, ...]:
    """The switches with which a workload was made from the one that was asked."""
    return tuple(
        name
        for name in SWITCHES
        if switched(workload, frozenset({name})) == workload and switched(asked, frozenset({name})) != asked
    )


CHANGES: dict[str, dict[str, Any]] = {
    "lora": {"lora": Lora(rank=LORA_RANK)},
    "qlora": {"lora": Lora(rank=LORA_RANK, base="nf4")},
    "fp8-training": {"train_precision": "fp8"},
    "fp8": {"rollout_precision": "fp8"},
    "fp8-kv": {"kv_precision": "fp8"},
    "mxfp4": {"rollout_precision": "mxfp4"},
    "nvfp4": {"rollout_precision": "nvfp4"},
    "adam8bit": {"optimizer": "adam8bit"},
    "bf16-gradients": {"gradients": "bf16"},
    FP32_SUMS: {"gradients": "fp32"},
    "rollout-logprobs": {"old_logprobs": "rollout"},
}
"""Switch -> fields of the workload; those of `STALE` are schedules."""


def switches_on(workload: Workload, allowed: Iterable[str]) -> tuple[str, ...]:
    """The allowed switches that a workload has."""
    return tuple(n for n in allowed if n in CHANGES and switched(workload, frozenset({n})) == workload)


def switched(workload: Workload, switches: Set[str]) -> Workload:
    """The workload with numerics-changing switches turned on."""
    for switch in sorted(switches & set(CHANGES)):  # qlora after lora
        workload = replace(workload, **CHANGES[switch])
    return workload
