"""Seconds of the weight paths between options of actor and rollout, kept between searches."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhfsim.kernels.device import Device
from rlhfsim.kernels.devices import device_on
from rlhfsim.search.options import OptionTable, PriceKey, sync_layout
from rlhfsim.search.pools import SyncSeconds
from rlhfsim.search.request import Request
from rlhfsim.search.space import Partition
from rlhfsim.specs.hardware.calibrated import bias_of
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.placement import AnyRolePlacement
from rlhfsim.specs.placement.weight_paths import WEIGHT_PATHS, WeightPath
from rlhfsim.step.timetable import SYNC
from rlhfsim.weight_sync.endpoints import PoolPair, Route, route
from rlhfsim.weight_sync.weight_sync import SyncCost, cost, seconds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Priced = dict[tuple[object, ...], dict[tuple[object, object, bool], float]]
"""Path, whether it stays in a pool, hardware of both ends -> layouts of both ends, as the path reads them,
and whether both fit into one scale-up domain -> seconds."""


class Paths:
    """Prices each path once for each pair of layouts."""

    def __init__(self, request: Request, models: Models, priced: Priced) -> None:
        """`priced`: by searches over the same models on the same GPUs and network."""
        self.request, self.models, self._priced = request, models, priced
        self._examples: dict[tuple[PriceKey, WeightPath], dict[int, tuple[object, Any]]] = {}
        self._least: dict[tuple[object, ...], float] = {}

    def between(self, partition: Partition, actor: OptionTable, rollout: OptionTable) -> SyncSeconds:
        """Seconds of the partition's path for rows of two tables; inf where it cannot join them."""
        own = self._priced.setdefault(
            (partition.path, partition.joined, actor.key.hardware, rollout.key.hardware), {}
        )
        trained, served = self._classes(actor, partition.path), self._classes(rollout, partition.path)
        columns = int(rollout.sync_class.max(initial=-1)) + 1
        factor = self._bias(partition, actor.key)
        domain = min(self._device(key).domain for key in (actor.key, rollout.key))

        def of_rows(trains: Ints, serves: Ints) -> Floats:
            pairs = actor.sync_class[trains] * columns + rollout.sync_class[serves]
            times = np.bincount(pairs, minlength=1).astype(np.float64)
            asked = np.flatnonzero(times)
            names, missing = [], {}
            for i, j in zip(*(place.tolist() for place in np.divmod(asked, columns)), strict=True):
                (x, source), (y, target) = trained[i], served[j]
                names.append(name := (x, y, source.gpus + target.gpus <= domain))
                if name not in own:
                    missing[name] = source, target
            if missing:
                one = self._route(partition, actor.key, rollout.key, source, target)
                found = factor * seconds(partition.path, one, list(missing.values()))
                own.update(zip(missing, found.tolist(), strict=True))
            times[asked] = [own[name] for name in names]
            return np.asarray(times[pairs])

        return of_rows

    def least(self, partition: Partition, actor: OptionTable, rollout: OptionTable) -> float:
        """The fastest transfer between any two options."""
        name = partition.path, partition.joined, actor.key, rollout.key
        if name not in self._least:
            rows = [np.unique(t.sync_class, return_index=True)[1] for t in (actor, rollout)]
            one, two = np.repeat(rows[0], len(rows[1])), np.tile(rows[1], len(rows[0]))
            self._least[name] = float(self.between(partition, actor, rollout)(one, two).min(initial=inf))
        return self._least[name]

    def _bias(self, partition: Partition, actor: PriceKey) -> float:
        """Measured over priced seconds of the path, where runs of the framework say so."""
        cluster = self.request.cluster
        known = cluster.node_groups[actor.hardware].profile.biases.get(cluster.framework or "")
        entry = bias_of(known, SYNC, partition.path)
        return entry.factor.value if entry else 1.0

    def _classes(self, table: OptionTable, path: WeightPath) -> dict[int, tuple[object, Any]]:
        """Layout of each class as the path reads it, and one of its layouts."""
        known = self._examples.setdefault((table.key, path), {})
        numbers, rows = np.unique(table.sync_class, return_index=True)
        for number, row in zip(numbers.tolist(), rows.tolist(), strict=True):
            if number not in known:
                role = table.options[row]
                known[number] = sync_layout(role, WEIGHT_PATHS[path].counts), role.layout
        return known

    def _device(self, key: PriceKey) -> Device:
        return device_on(self.request.cluster, key.hardware, self.request.backend)

    def _route(
        self, partition: Partition, actor: PriceKey, rollout: PriceKey, train: Any, serve: Any
    ) -> Route:
        pools = PoolPair(self._device(actor), self._device(rollout), partition.joined)
        request = self.request
        return route(self.models.actor, train, serve, pools, request.backend, request.workload.lora)

    def cost(
        self,
        partition: Partition,
        source: tuple[PriceKey, AnyRolePlacement],
        target: tuple[PriceKey, AnyRolePlacement],
    ) -> SyncCost:
        """The partition's path between an option of the actor and one of the rollout."""
        (actor, train), (rollout, serve) = source, target
        return cost(partition.path, self._route(partition, actor, rollout, train.layout, serve.layout))
