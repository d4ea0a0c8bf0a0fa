"""What a framework runs of a plan, and how that is known.

A framework is a folder of `rlhfsim.specs.frameworks` with a file `runs.yaml`; nothing lists them.
The search offers what the chosen framework runs, `estimate` says what it does not, the executor refuses it,
the docs print the table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import field, replace
from functools import cache
from typing import Any, Literal, TypeVar

from rlhfsim import resources
from rlhfsim.frozen import frozen
from rlhfsim.specs.frameworks.costs import costs_of
from rlhfsim.specs.frameworks.features import (
    hardware_features,
    layout_features,
    model_features,
    model_kinds,
    pool_features,
    residency_features,
    rollout_features,
    schedule_features,
    workload_features,
)
from rlhfsim.specs.frameworks.files import data_of, heads_of
from rlhfsim.specs.frameworks.says import Places, Same, Says
from rlhfsim.specs.model.model import ModelSpec
from rlhfsim.specs.placement.backends import (
    BACKENDS,
    SERVED,
    Backend,
    BackendRules,
    broken_hosting,
    broken_rule,
    broken_sums,
    sums_fp32,
)
from rlhfsim.specs.placement.heads import Head
from rlhfsim.specs.placement.layout import Dispatcher, Layout, RolloutLayout, ServingEngine
from rlhfsim.specs.placement.placement import Placement, Schedule
from rlhfsim.specs.placement.software import Software, default_software
from rlhfsim.specs.placement.weight_paths import APART, EVERYWHERE, WEIGHT_PATHS, Topology, WeightPath
from rlhfsim.specs.workload.roles import TRAINED
from rlhfsim.specs.workload.workload import Algorithm, Workload

Known = Literal["run on GPUs", "run on CPUs", "written only"]
Name = TypeVar("Name", bound=str)
OWN = "rlhfsim"
"""The framework that `rlhfsim launch` is."""
COMMON: tuple[Algorithm, ...] = ("ppo", "grpo", "dr-grpo", "rloo", "reinforce++")
"""Algorithms that generate and that a framework trains by unless its folder says otherwise; the folder also
says which trainers of given data it has."""
PRICED_ENGINE = "vLLM"
ANY = "any"
"""No framework: all that is priced competes."""
LENDS = "trainer's GPUs lent to the rollout"
LARGE_TRAINER: Backend = "megatron"
"""What frameworks with several training backends train large policies by: plans of others are plans that
nobody runs at that size (all published RL steps above 72B: measured_runs.csv); mixtures of experts too."""
ASKED_FOR = frozenset(
    {
        "late groups thrown away",
        "late groups generated again",
        "MTP layers trained with the policy",
        "EAGLE-3 heads trained with the policy",
        "router replay",
        "largest logits of a teacher",
        "several teachers",
        "further roles",
        "prefill apart from decode",
    }
)
"""Features that no search chooses for a question that says nothing of them: who has them runs no more of the
plans that come out by default."""
_NAMED = data_of("", "features")
FEATURES: Mapping[str, str] = _NAMED["features"]
"""What a plan may ask of a framework apart from its training backend and weight path -> how to do without."""
KINDS: Mapping[str, str] = _NAMED["kinds"]
"""Kinds of model that a framework may be seen not to run -> how to do without."""


@frozen
class Lacks:
    """Something in a plan that a framework does not run."""

    code: str
    """`rollout-expert-parallelism-not-run`."""
    what: str
    remedy: str


@frozen
class Examples:
    """By which training backend most of a framework's own examples train."""

    dense: Backend
    """Backend of dense policies up to `largest`; larger ones and mixtures of experts have `LARGE_TRAINER`."""
    largest: float
    """Parameters."""
    source: str
    """Files, release and counts."""


@frozen
class Runs:
    """What one framework runs."""

    name: str
    """Name of its folder, `-` for `_`."""
    title: str
    trainers: Mapping[Backend, BackendRules]
    """Training backends, the first is the usual one where `examples` say nothing; each with what the
    framework runs of it."""
    known_trainers: Mapping[Backend, Known]
    weight_paths: Mapping[WeightPath, Mapping[Topology, Known]]
    features: Mapping[str, Known]
    """How each of `FEATURES` is known; what is missing is not run."""
    only_with: Mapping[str, tuple[Backend, ...]] = field(default_factory=dict)
    """Feature -> the training backends with which it is run; what is missing is run with all."""
    heads: Mapping[Backend, Head] = field(default_factory=dict)
    """Where the logits of a whole micro-batch are in memory at once; a backend that is missing works in our
    chunks (Megatron: `UNFUSED`)."""
    padded_heads: Mapping[Backend, Head] = field(default_factory=dict)
    """The same where samples are padded, if that differs."""
    software: Mapping[Backend, Software] = field(default_factory=dict)
    """What its training stack does where a plan says nothing; of a backend that is missing the default."""
    shares: Literal["any", "batch", "update", "micro_batch"] = "any"
    """What the data-parallel ranks must divide: nothing, the samples of a step, those of an update, or those
    together with micro-batches of samples."""
    copies_each: bool = False
    """Copies of shards (HSDP) sum their gradients after every micro-batch, not once a step."""
    pads: bool = False
    """The samples of a micro-batch are padded to its longest, never packed."""
    always_swaps: bool = False
    """A reference on the actor's GPUs has no other residency than swapped."""
    hosts_reference: tuple[Backend, ...] = ()
    """Backends under which a reference has its weights on the host, whatever the configuration."""
    reuses: Mapping[Algorithm, bool] = field(default_factory=dict)
    """Algorithms under which the only update of a batch gives the old log-probs itself, whatever is asked ->
    whether with a reference too."""
    scores_rules: Literal["late", "ahead", "ahead without a reward model"] = "late"
    """Whether rules score responses as they arrive, while others are decoded."""
    filters_on_arrival: bool = False
    """Groups are filtered as they arrive, before a reward model on the actor's GPUs has scored them."""
    frees_gradients: tuple[Backend, ...] = ()
    """Backends whose gradient buffers it gives back before scoring calls; FSDP2 does so itself."""
    frees_experts: bool = False
    """Under ZeRO-3 it lets experts go with their layer, which transformers alone keeps gathered."""
    engine: str = PRICED_ENGINE
    """What generates; where it has no figures of its own it is priced with those of `PRICED_ENGINE`."""
    other_engines: tuple[ServingEngine, ...] = ()
    """What generates where a plan names it."""
    algorithms: tuple[Algorithm, ...] | None = COMMON
    """What it trains by; None: all."""
    one_epoch: bool = False
    """It trains on a batch once."""
    critics: tuple[Backend, ...] | None = None
    """Backends that it trains a critic with; None: all."""
    says: Says = field(default_factory=Says)
    """What its configuration can say of a plan that it runs."""
    serves_reward: bool = False
    """A reward model runs in an inference engine of its own (`SERVED`), not in the trainer."""
    pipeline_types: Collection[str] | None = None
    """Types of models (`model_type` of a config.json) that its pipeline cuts into stages; None: all."""
    kinds_not_run: Collection[str] = ()
    """Those of `KINDS` that it was seen not to run; nothing is claimed about others."""
    dispatchers: tuple[Dispatcher, ...] = ()
    """What brings tokens to experts in training, of what its configuration can say."""
    rollout_dispatchers: tuple[Dispatcher, ...] = ()
    """The same in its inference engine; not DeepEP's normal kernels, which cost the CUDA graphs."""
    differs: Mapping[Algorithm, Mapping[str, Any]] = field(default_factory=dict)
    """Algorithm -> fields of this class that are others where it trains by that."""
    examples: Examples | None = None
    """Where it has several training backends: which one its own examples use."""
    source: str

    def usual_trainer(self, model: ModelSpec) -> Backend:
        """The training backend of most of its own examples of such a policy."""
        if self.examples is None:
            return next(iter(self.trainers))
        return LARGE_TRAINER if self.trains_large(model) else self.examples.dense

    def trains_large(self, model: ModelSpec) -> bool:
        """Whether a policy is one of those that its own examples train by `LARGE_TRAINER`."""
        own = self.examples
        return own is not None and (model.moe is not None or model.num_params > own.largest)

    def of(self, workload: Workload) -> Runs:
        """What it runs of the algorithm of a workload."""
        return self.by(workload.algorithm)

    def by(self, algorithm: Algorithm | None) -> Runs:
        """What it runs where it trains by an algorithm; None: by its usual ones."""
        others = self.differs.get(algorithm) if algorithm else None
        return replace(self, **others) if others else self

    def reuses_logprobs(self, work: Workload) -> bool:
        """Whether it skips the forward for old log-probs of its own accord, as the training pass has them."""
        beside = self.reuses.get(work.algorithm)
        return beside is not None and work.one_update and (beside or not work.has_reference)

    def rules_ahead(self, work: Workload) -> bool:
        """Whether rules score responses as they arrive."""
        return self.scores_rules == "ahead" or (self.scores_rules != "late" and not work.has_reward_model)

    def serves(self, role: str) -> bool:
        """Whether an inference engine runs a role that scores."""
        return role == "reward" and self.serves_reward

    def rules(self, backend: Backend, role: str, workload: Workload) -> BackendRules:
        """What is run of the layouts of a role."""
        rules = SERVED if self.serves(role) else self.trainers[backend]
        own = role == "reference" and not workload.base_is_reference
        return _hosted(rules) if own and backend in self.hosts_reference else rules

    def lacks_layout(self, backend: Backend, layout: Layout, workload: Workload, role: str) -> Lacks | None:
        """What of a training or scoring layout is not run."""
        lacks = self.lacks_cut(backend, layout, workload, role)
        return lacks or (self.lacks_shares(layout, workload) if role in TRAINED else None)

    def lacks_cut(self, backend: Backend, layout: Layout, workload: Workload, role: str) -> Lacks | None:
        """What of it is not run however many data-parallel ranks there are."""
        trained = role == "actor"
        if backend not in self.trainers:
            title = BACKENDS[backend].title
            return Lacks(
                code="backend-not-run", what=f"training by {title}", remedy=self._other_trainer(backend)
            )
        rules = self.rules(backend, role, workload)
        if layout.cp > 1 and not rules.context_parallel:
            ways = "recompute: full, offload_optimizer: cpu" + (" or tp" if rules.tensor_parallel else "")
            return Lacks(
                code="context-parallelism-not-run",
                what=f"sequences of the {role} over {layout.cp} GPUs (context parallelism: Ulysses)",
                remedy=f"set cp: 1; long sequences fit with {ways}, or in --framework verl",
            )
        hosting = broken_hosting(rules, layout) if role in TRAINED or not rules.hosted_stages else None
        if (broken := broken_rule(rules, layout) or hosting) is not None:
            remedy = "design again: rlhfsim design keeps to what the framework runs"
            return Lacks(code="layout-not-run", what=f"the layout of the {role} ({broken})", remedy=remedy)
        sums = role in TRAINED and sums_fp32(workload, backend)
        if sums and (broken := broken_sums(rules, layout)) is not None:
            remedy = "use zero: 2, or leave out workload.gradients"
            return Lacks(code="fp32-sums-not-run", what=f"the layout of the {role} ({broken})", remedy=remedy)
        return self._first(layout_features(layout, adapters=trained and workload.lora is not None), backend)

    def lacks_shares(self, layout: Layout, workload: Workload) -> Lacks | None:
        """Samples that the framework does not share out over the ranks of a layout."""
        if self.shares == "any":
            return None
        samples = workload.num_sequences // (1 if self.shares == "batch" else workload.mini_batches)
        by_samples = self.shares == "micro_batch" and layout.pack_tokens is None
        each = layout.dp * (layout.micro_batch if by_samples else 1)
        if samples % each == 0:
            return None
        what = f"{samples:,} samples over {layout.dp} data-parallel ranks"
        if by_samples:
            what += f" in micro-batches of {layout.micro_batch}"
        return Lacks(code="batch-not-shared", what=what, remedy="use a batch that they divide")

    def lacks_model(self, layout: Layout, model: ModelSpec, model_type: str | None) -> Lacks | None:
        """What of a model's layout is not run; a type that is not known (None) is judged by its shape."""
        if (lacks := self._first(model_features(model))) is not None:
            return lacks
        if layout.pp == 1 or self.pipeline_types is None:
            return None
        known = model.moe is None if model_type is None else model_type in self.pipeline_types
        if not known or model.attention.num_windowed_layers:
            what = f"pipeline parallelism of {model.name} (it cuts {', '.join(self.pipeline_types)})"
            return Lacks(code="pipeline-model-not-run", what=what, remedy="use pp: 1")
        if model.attention.num_kv_heads % layout.tp or model.ffn % layout.tp:
            what = f"tp {layout.tp} inside pipeline stages, which splits a key-value head of {model.name}"
            return Lacks(code="pipeline-heads-not-run", what=what, remedy="use a tp that divides both")
        return None

    def lacks_kinds(
        self, model: ModelSpec, backend: Backend | None = None, *, generates: bool
    ) -> Lacks | None:
        """What of the policy's kind, or of its kinds of layer, is not run."""
        for kind in model_kinds(model, generates=generates):
            if kind in self.kinds_not_run:
                return Lacks(code=_code(kind), what=kind, remedy=KINDS[kind])
        return self._first(model_features(model), backend)

    def lacks_feature(self, name: str, backend: Backend | None = None) -> Lacks | None:
        """Whether one of `FEATURES` is not run."""
        return self._first([name], backend)

    def lacks_pools(
        self, groups: Collection[Collection[str]], workload: Workload, backend: Backend | None = None
    ) -> Lacks | None:
        """What of the sets of roles that share GPUs is not run."""
        filtered = self.filters_on_arrival and workload.dynamic_sampling is not None
        if filtered and any({"actor", "reward"} <= set(group) for group in groups):
            return _UNSCORED
        return self._first(pool_features(groups), backend)

    def lacks_rollout(
        self, layout: RolloutLayout, *, one_node: bool, backend: Backend | None = None
    ) -> Lacks | None:
        """What of a rollout layout is not run with a training backend; None: with none of its backends.

        `one_node`: every replica lies inside a node.
        """
        named = layout.engine
        if named is not None and named != self.engine.lower() and named not in self.other_engines:
            return Lacks(
                code="rollout-engine-not-run",
                what=f"{named} as the engine of its rollout",
                remedy=f"leave out engine: it generates with {self.engine}",
            )
        return self._first(rollout_features(layout, one_node=one_node), backend)

    def lacks_path(self, path: WeightPath, topology: Topology) -> Lacks | None:
        """Whether a weight path is not run where actor and rollout lie so."""
        if path == "none" or topology in self.weight_paths.get(path, {}):
            return None
        others = [name for name, where in self.weight_paths.items() if topology in where and name != "lora"]
        return Lacks(
            code="weight-path-not-run",
            what=f"weight path {path} ({topology})",
            remedy=f"use weight_path {' or '.join(others)}",
        )

    def lacks_hardware(self, vendors: Collection[str]) -> Lacks | None:
        """Whether a kind of GPU is not run (`Profile.vendor`)."""
        return self._first(hardware_features(vendors))

    def lacks_schedule(self, schedule: Schedule) -> Lacks | None:
        """What of a schedule is not run."""
        return self._first(schedule_features(schedule))

    def trains_by(self, algorithm: Algorithm) -> bool:
        """Whether it has a trainer of an algorithm."""
        return self.algorithms is None or algorithm in self.algorithms

    def lacks_workload(self, workload: Workload, backend: Backend | None = None) -> Lacks | None:
        """What of a workload is not run, whatever the placement; None: with none of its backends."""
        if not self.trains_by(workload.algorithm):
            remedy = f"use --algorithm {' or '.join(self.algorithms or ())}"
            what = f"{workload.title}{' through an export of ours' if workload.distils else ''}"
            return Lacks(code="algorithm-not-run", what=what, remedy=remedy)
        if self.one_epoch and workload.epochs > 1:
            what = f"{workload.epochs} epochs on a batch"
            return Lacks(code="epochs-not-run", what=what, remedy="use --epochs 1")
        critics = self.trainers if self.critics is None else self.critics
        if workload.has_critic and (backend not in critics if backend else not critics):
            beside = f" with {BACKENDS[backend].title}" if backend else ""
            remedy = f"use --backend {' or '.join(critics)}" if critics else "use --algorithm grpo"
            return Lacks(code="critic-not-run", what=f"a critic{beside}", remedy=remedy)
        return self._first(workload_features(workload), backend)

    def lacks(
        self,
        placement: Placement,
        workload: Workload,
        topology: Topology,
        *,
        one_node: bool,
        vendors: Collection[str] = (),
    ) -> Iterator[Lacks]:
        """Everything in a plan that is not run, once."""
        backend = placement.backend
        found = [self.lacks_hardware(vendors), self.lacks_workload(workload, backend)]
        found.append(self.lacks_schedule(placement.schedule))
        found.append(self.lacks_pools(placement.groups, workload, backend))
        for role, placed in placement.trainers.items():
            found.append(self.lacks_layout(backend, placed.layout, workload, role))
            found.append(self._first(residency_features(placed), backend))
        if placement.rollout is not None:
            found.append(self.lacks_rollout(placement.rollout.layout, one_node=one_node, backend=backend))
            found.append(self.lacks_path(placement.weight_path, topology))
            anew = placement.rollout.residency == "recreated" and placement.weight_path != "disk"
            found.append(_ANEW if anew else None)
        elif workload.generates:
            found.append(self._first(["rollout by the training modules"]))
        yield from dict.fromkeys(missing for missing in found if missing is not None)

    def known(
        self, placement: Placement, workload: Workload, topology: Topology, *, one_node: bool
    ) -> Mapping[str, Known]:
        """How it is known that what a plan uses runs, by feature."""
        used = [*workload_features(workload), *schedule_features(placement.schedule)]
        used += pool_features(placement.groups)
        for role, placed in placement.trainers.items():
            lora = role == "actor" and workload.lora is not None
            used += [*layout_features(placed.layout, adapters=lora), *residency_features(placed)]
        found = {name: self.features[name] for name in used if name in self.features}
        found[BACKENDS[placement.backend].title] = self.known_trainers[placement.backend]
        if placement.rollout is not None:
            for name in rollout_features(placement.rollout.layout, one_node=one_node):
                found[name] = self.features[name]
            path = placement.weight_path
            found[f"weight path {path} ({topology})"] = self.weight_paths[path][topology]
        return found

    def _first(self, used: Iterable[str], backend: Backend | None = None) -> Lacks | None:
        for name in used:
            backends = self.only_with.get(name, self.trainers)
            if name in self.features and (backend is None or backend in backends):
                continue
            if name not in self.features:
                return Lacks(code=_code(name), what=name, remedy=FEATURES[name])
            what = f"{name} with {BACKENDS[backend].title}" if backend else name
            remedy = f"{FEATURES[name]}, or use --backend {' or '.join(backends)}"
            return Lacks(code=_code(name), what=what, remedy=remedy)
        return None

    def _other_trainer(self, backend: Backend) -> str:
        names = [x.name for x in frameworks() if backend in x.trainers]
        elsewhere = f", or design for {' or '.join(names)} (--framework {names[0]})" if names else ""
        return f"use --backend {' or '.join(self.trainers)}{elsewhere}"


@cache
def _hosted(rules: BackendRules) -> BackendRules:
    return replace(rules, hosted=True)


def _code(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower()) + "-not-run"


_UNSCORED = Lacks(
    code="groups-filtered-before-rewards",
    what="dynamic sampling by a reward model on the actor's GPUs: it filters groups before they are scored",
    remedy="give the reward model GPUs of its own, use rules, or leave out workload.dynamic_sampling",
)
_ANEW = Lacks(
    code="recreated-rollout-needs-disk",
    what="a rollout that is created anew for each call, without weights on disk",
    remedy="set weight_path: disk",
)


@cache
def frameworks() -> tuple[Runs, ...]:
    """Every framework for which plans can be made: ours, those on the priced engine, those whose costs are
    known, those that run most."""
    return tuple(sorted(map(framework, resources.frameworks_with("runs")), key=_rank))


def _rank(runs: Runs) -> tuple[bool, bool, bool, int, str]:
    known = bool(costs_of(runs.name).shared)
    most = len(set(runs.features) - ASKED_FOR) + len(runs.weight_paths)
    return runs.name != OWN, runs.engine != PRICED_ENGINE, not known, -most, runs.name


@cache
def framework(name: str) -> Runs:
    """What one of `frameworks` runs, by its name."""
    given = data_of(name, "runs")
    return Runs(name=name, **_fields(name, given, given.pop("known"), FEATURES))


WHERE: Mapping[str, tuple[Topology, ...]] = {"apart": APART, "everywhere": EVERYWHERE}
"""Words of the files for places of actor and rollout."""


def _fields(framework: str, given: Mapping[str, Any], known: Known, others: Iterable[str]) -> dict[str, Any]:
    """Fields of `Runs` as a file says them; `others`: features that it may name as not run."""
    said, heads = _frozen(given), heads_of(framework)
    if "without" in said:
        without = said.pop("without")
        said["features"] = tuple(name for name in others if name not in without)
    features, written = said.get("features", ()), said.pop("written_only", ())
    if "trainers" in said:
        said["known_trainers"] = known_by(known, *said["trainers"])
    makes: Mapping[str, Callable[[Any], Any]] = {
        "trainers": lambda own: {name: replace(BACKENDS[name], **rules) for name, rules in own.items()},
        "heads": lambda own: {backend: heads[head] for backend, head in own.items()},
        "padded_heads": lambda own: {backend: heads[head] for backend, head in own.items()},
        "software": lambda own: {name: replace(default_software(name), **does) for name, does in own.items()},
        "weight_paths": lambda own: {
            path: known_by(known, *WHERE.get(where, where)) for path, where in _paths(own).items()
        },
        "features": lambda own: known_by(known, *own) | known_by("written only", *written),
        "says": lambda own: Says(**_made(own, SAID)),
        "examples": lambda own: Examples(**own),
        "differs": lambda own: {
            algorithm: _fields(framework, fields, known, features) for algorithm, fields in own.items()
        },
    }
    return _made(said, makes)


def _paths(own: Any) -> Mapping[str, Any]:
    """Weight paths with where they are run; `all`: those that our executor has a transport for."""
    if own != "all":
        return dict(own)
    return {path: tuple(rules.transports) for path, rules in WEIGHT_PATHS.items() if rules.transports}


SAID: Mapping[str, Callable[[Any], Any]] = {
    "sharing": lambda own: Places(**own),
    "alone": lambda own: Places(**own),
    "same": lambda rows: tuple(Same(**row) for row in rows),
    "groups": lambda groups: tuple(map(frozenset, groups)),
}
"""Fields of `Says` -> what is made of them in a file."""


def _made(given: Mapping[str, Any], makes: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    return {name: makes[name](value) if name in makes else value for name, value in given.items()}


def _frozen(value: Any) -> Any:
    """What a file says, its lists as tuples."""
    if isinstance(value, Mapping):
        return {key: _frozen(inner) for key, inner in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def runs_of(name: str | None) -> Runs | None:
    """What a framework of `frameworks` runs; None for no framework, and for one that is only read."""
    return next((runs for runs in frameworks() if runs.name == name), None)


def engine_of(framework: str | None) -> str:
    """The rollout engine of a framework."""
    runs = runs_of(framework)
    return runs.engine if runs else PRICED_ENGINE


def known_by(known: Known, *names: Name) -> dict[Name, Known]:
    """The same evidence for each of these names."""
    return dict.fromkeys(names, known)


@cache
def runner_of(
    backend: Backend | None, vendors: frozenset[str] = frozenset(), algorithm: Algorithm | None = None
) -> Runs | None:
    """The first framework that trains with a backend on such GPUs, ours if it does; None: only priced.

    One that trains by the algorithm, if any does. No `backend`: with any.
    """
    trains = [found for found in frameworks() if backend is None or backend in found.trainers]
    here = [found for found in trains if not found.lacks_hardware(vendors)]
    able = (x for x in here if algorithm is None or x.trains_by(algorithm))
    return next(able, next(iter(here), None))
