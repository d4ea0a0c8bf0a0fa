"""Designs of many questions: each searched once, kept on disk, and priced for whoever asks.

A design is known by the hash of what enters its search: pools with the hashes of their profiles, fabric,
workload, shapes of the models, files of lengths, what may compete, and the code and tables that predict.
Prices do not enter: no objective depends on them, since the cluster is rented whole, and money follows
from the step afterwards:

    USD per step = step seconds x sum over pools (GPUs x price)

On disk a design is one file, named by its hash and written in one step, with a hash of its content. A file
that cannot be read, was edited or renamed, or that another version wrote in another form, counts as absent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from rlhfsim.cache import Cache
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan
from rlhfsim.provenance import content_hash
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.prices import market_of
from rlhfsim.specs.hardware.profiles import profile_hash
from rlhfsim.specs.loading import adapter, checked, read_bytes
from rlhfsim.specs.model.roles import models_of
from rlhfsim.specs.workload.lengths import AnyLengths, Empirical
from rlhfsim.step.prediction import usd_per_step
from rlhfsim.units import format

ROOT = Path(__file__).resolve().parents[2]
PREDICTS = (
    "specs",
    "kernels",
    "memory",
    "rollout",
    "training",
    "weight_sync",
    "step",
    "simulation",
    "search",
    "what_if/design.py",
    "what_if/engine.py",
    "units.py",
    "plan.py",
    "what_if/scenarios/designs.py",
    "what_if/scenarios/workers.py",
)
"""Folders and files of the package that a prediction depends on."""


@checked
@frozen
class DesignResult:
    """What a search came to."""

    plan: Plan | None
    """None: nothing fits."""
    shortage: str | None = None
    """Where nothing fits: what is missing."""
    gap: float = 0.0
    """Share of the step by which a plan could still be shorter."""
    seconds: float = 0.0
    """Seconds of the search."""


@cache
def model_hash() -> str:
    """Hash of the code and the tables that predict; profiles have hashes of their own."""
    digest = hashlib.sha256()
    for name in PREDICTS:
        path = ROOT / name
        files = (
            [path]
            if path.is_file()
            else sorted(p for p in path.rglob("*") if p.suffix in (".py", ".json", ".yaml"))
        )
        for file in files:
            digest.update(file.relative_to(ROOT).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def search_key(request: Request) -> str:
    """Hash of everything that a search depends on; prices are not among it."""
    cluster, workload = request.cluster, request.workload
    pools = [(profile_hash(p.profile), p.gpus, p.gpus_per_node, p.fabric, p.wan) for p in cluster.node_groups]
    models = models_of(workload)
    return content_hash(
        model_hash(),
        pools,
        cluster.oversubscription,
        workload,
        models,
        [_observed(workload.prompt_len), _observed(workload.response_len)],
        _competing(request),
    )


def _competing(request: Request) -> dict[str, Any]:
    """What may compete, sets and limits in one order."""
    names = {field.name for field in fields(Request)} - {"cluster", "workload", "price"}
    values = {name: getattr(request, name) for name in names}
    return {k: sorted(v, key=str) if isinstance(v, frozenset | tuple) else v for k, v in values.items()}


def _observed(lengths: AnyLengths) -> str:
    """Hash of a file of lengths; empty where there is none."""
    if not isinstance(lengths, Empirical):
        return ""
    return hashlib.sha256(read_bytes(Path(lengths.file))).hexdigest()


def priced(designed: DesignResult, cluster: Cluster) -> DesignResult:
    """The same design at the prices of a cluster: exactly what a search with these prices gives."""
    plan = designed.plan
    if plan is None:
        return designed
    usd = usd_per_step(cluster, plan.prediction.step_s)
    prediction = replace(plan.prediction, usd_per_step=usd)
    prices = [group.profile.price for group in cluster.node_groups]
    hardware = tuple(
        replace(h, price=price, market=market_of(h.profile, price))
        for h, price in zip(plan.hardware, prices, strict=True)
    )
    return replace(designed, plan=replace(plan, prediction=prediction, hardware=hardware))


# --- kept on disk -----------------------------------------------------------------------------------


class Store:
    """A folder of designs."""

    def __init__(self, folder: Path) -> None:
        """The folder is made where it is absent.

        Raises:
            RlhfsimError: it cannot be made, or others can put files into it.
        """
        self._cache = Cache(folder)
        self._cache.check()

    def recall(self, key: str) -> DesignResult | None:
        """The design of this key; None where there is none that is whole and as it was kept."""
        try:
            kept = json.loads(self._cache.read(f"{key}.json") or b"")
            return _read(kept["design"]) if kept["check"] == content_hash(key, kept["design"]) else None
        except (RlhfsimError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def keep(self, key: str, designed: DesignResult) -> None:
        """Write a design; a reader sees all of it or nothing."""
        design = _plain(designed)
        kept = {"check": content_hash(key, design), "design": design}
        self._cache.write(f"{key}.json", json.dumps(kept).encode() + b"\n")


def _plain(designed: DesignResult) -> Any:
    return adapter(DesignResult).dump_python(designed, mode="json")


def _read(data: Any) -> DesignResult:
    designed: DesignResult = adapter(DesignResult).validate_python(data)
    return designed


# --- every design of a scenario ---------------------------------------------------------------------

Runner = Callable[[Sequence[Request]], Iterator[tuple[int, DesignResult] | None]]
"""Searches requests in any order: index and design as each is done; None now and then while it waits."""
Progress = Callable[[int, int], object]
"""Designs that are there, and all that are wanted so far."""
MANY, FEW = 50, 3
"""Above so many searches, how long all will take is judged by the first, the middle and the last one."""


class Designs:
    """Every design that was asked for; those in the store are not searched again."""

    def __init__(
        self,
        runner: Runner,
        store: Store | None = None,
        progress: Progress | None = None,
        most_s: float | None = None,
    ) -> None:
        """`store`: None keeps nothing; `most_s`: of all searches together, None: any time."""
        self.runner, self.store, self.progress, self.most_s = runner, store, progress, most_s
        self.known: dict[str, DesignResult] = {}
        self.searched = self.from_cache = self.wanted = 0

    def ensure(self, requests: Sequence[Request]) -> None:
        """Search what is not there yet.

        Raises:
            RlhfsimError: they are many, and take longer than `most_s`, judged by a few that are searched.
        """
        missing: dict[str, Request] = {}
        for request in requests:
            key = search_key(request)
            if key not in self.known and key not in missing and not self._recalled(key):
                missing[key] = request
        self.wanted = len(self.known) + len(missing)
        self._tell()
        if self.most_s is not None and len(missing) > MANY:
            few = [list(missing)[i * (len(missing) - 1) // (FEW - 1)] for i in range(FEW)]
            self.check_time([missing.pop(key) for key in few], len(missing))
        self._search(missing)

    def forget(self, but: int) -> None:
        """All but the designs that were asked for last."""
        for key in list(self.known)[: max(0, len(self.known) - but)]:
            del self.known[key]

    def check_time(self, few: Sequence[Request], left: int) -> None:
        """Search a few requests, which say how long those that are left will take.

        Raises:
            RlhfsimError: longer than `most_s`.
        """
        keys = {search_key(request): request for request in few}
        self._search({key: request for key, request in keys.items() if not self._recalled(key)})
        each = sum(self.known[key].seconds for key in keys) / len(keys) if keys else 0.0
        if self.most_s is not None and each * left > self.most_s:
            raise RlhfsimError(
                "long-search",
                f"{left:,} designs are left to search, about {format(each * left, 's')} of one core "
                f"(the first {len(keys)} took {format(each, 's')} each)",
                help="--yes searches them all; or ask for fewer: --only NAME, or request.time_limit",
            )

    def _search(self, missing: Mapping[str, Request]) -> None:
        names = list(missing)
        for done in self.runner(list(missing.values())) if missing else ():
            if done is not None:
                key, designed = names[done[0]], _read(_plain(done[1]))  # 0 is 0.0, as a resumed run has it
                self.known[key] = designed
                self.searched += 1
                if self.store is not None:
                    self.store.keep(key, designed)
            self._tell()

    def _recalled(self, key: str) -> bool:
        designed = self.store.recall(key) if self.store is not None else None
        if designed is None:
            return False
        self.known[key] = designed
        self.from_cache += 1
        return True

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(len(self.known), self.wanted)

    def of(self, request: Request) -> DesignResult:
        """The design of a request at its prices."""
        return self.all([request])[0]

    def all(self, requests: Sequence[Request]) -> list[DesignResult]:
        """The designs of requests at their prices, searched side by side."""
        self.ensure(requests)
        return [priced(self.known[search_key(request)], request.cluster) for request in requests]
