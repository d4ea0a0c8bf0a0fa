"""Links that are shared by whatever uses them at the same time: max-min fair, slower and never faster.

A flow is work of so many seconds at full rate, and the share of that time for which it needs each
link whole. Flow i progresses at a rate x_i <= 1, so that on every link l

    sum_i x_i u_il <= 1          u_il = share of the flow's time bound by l, times its part of l

Rates are max-min fair: all rise together until a link is full, its flows stay there, the others
rise on (Bertsekas and Gallager, Data Networks, section 6.5.2). They change only when a flow starts
or ends. Two flows of 12 s that need one link for 0.6 of their time run at 1 / 1.2 and take 14.4 s.

How to use it:

    flow = yield shared_links.run(cost, links)      # links of a step: `Topology.links(pools)`
    flow.lost                                  # {link: seconds that it waited for others}
    flow = shared_links.start(seconds, {"nic:a": 0.6}); yield flow.done; shared_links.stop(flow)

A flow alone, or on links of its own, takes exactly its seconds.

Not known here: order of messages inside a call (a call needs its links evenly over its time), and
gaps in another pool's traffic that one could hide in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from rlhfsim.kernels.cost import Cost, Part, Resource, part
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.placement.placement import ResourcePool

Use = Mapping[str, float]
"""Share of a flow's time for which it needs each link whole."""
Links = Mapping[str, Use]
"""By resource of a cost: links that its seconds occupy, and which part of each."""

FULL = 1 + 1e-12
"""A link this full has no room left."""
SHARED_STORAGE = "shared storage"
"""The storage parts that go to the one shared file system; other ones are disks of a node."""
RESOURCE: dict[str, Resource] = {
    "nic": "network",
    "spine": "network",
    "nvlink": "nvlink",
    "pcie": "pcie",
    "host": "host",
    "disk": "storage",
    "storage": "storage",
}
"""Resource of a link, by the first word of its name."""


def fair_rates(uses: Sequence[Use]) -> list[tuple[float, str | None]]:
    """The max-min fair rate of each flow, at most 1, and the link that limits it."""
    rates: list[tuple[float, str | None]] = [(1.0, None)] * len(uses)
    rising = [i for i, use in enumerate(uses) if any(use.values())]
    room: dict[str, float] = {link: 1.0 for use in uses for link in use}
    while rising:
        load = dict.fromkeys(room, 0.0)
        for i in rising:
            for link, share in uses[i].items():
                load[link] += share
        level, link = min((max(0.0, room[name]) / load[name], name) for name in load if load[name] > 0)
        if level * FULL >= 1:
            break
        full = [i for i in rising if uses[i].get(link, 0.0) > 0]
        for i in full:
            rates[i] = level, link
            for name, share in uses[i].items():
                room[name] -= level * share
        rising = [i for i in rising if i not in full]
    return rates


@dataclass(slots=True, kw_only=True, eq=False)
class Flow:
    """Work in progress."""

    seconds: float
    """Work, seconds at full rate."""
    use: Use
    done: simpy.Event
    """Triggered with the flow itself when the work is done."""
    left: float
    """Work left at `since`, seconds at full rate."""
    since: float
    """When `rate` last changed."""
    rate: float = 1.0
    limit: str | None = None
    """The link that holds it below 1."""
    lost: dict[str, float] = field(default_factory=dict)
    """Seconds by which sharing each link has delayed it."""
    timer: int = 0
    """The one timer that counts; earlier ones are stale."""

    @property
    def contention(self) -> tuple[Part, ...]:
        """The delay as parts of a cost, one a link."""
        return tuple(
            part(RESOURCE[link.split(":")[0]], seconds, "contention")
            for link, seconds in self.lost.items()
            if seconds > 0
        )


class SharedLinks:
    """All links of a cluster and the flows on them."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self.flows: list[Flow] = []
        self.lost: dict[str, float] = {}
        """Seconds of delay by link, all flows together."""
        self._crowded = False

    def run(self, cost: Cost, links: Links) -> simpy.Event:
        """Event that fires, with its flow, when `cost` has run over `links`."""
        return self.start(cost.seconds, use_of(cost, links)).done

    def start(self, seconds: float, use: Use) -> Flow:
        """A flow of `seconds` at full rate."""
        now = self.env.now
        flow = Flow(seconds=seconds, use=use, done=self.env.event(), left=seconds, since=now)
        self.flows.append(flow)
        self._share(flow)
        return flow

    def stop(self, flow: Flow) -> float:
        """Ends a flow early; seconds of work that it had left. Its `done` never fires."""
        self._advance(flow)
        flow.timer += 1
        self.flows.remove(flow)
        self._share(None)
        return flow.left

    def _share(self, started: Flow | None) -> None:
        """New rates; only flows whose rate changes get a new end."""
        crowded = self._over()
        if crowded or self._crowded:
            rates = fair_rates([f.use for f in self.flows])
            for flow, (rate, link) in zip(list(self.flows), rates, strict=True):
                if rate != flow.rate or link != flow.limit:
                    self._advance(flow)
                    flow.rate, flow.limit = rate, link
                    if flow is not started:
                        self._schedule(flow)
        self._crowded = crowded
        if started is not None:
            self._schedule(started)

    def _over(self) -> bool:
        load: dict[str, float] = {}
        for flow in self.flows:
            for link, share in flow.use.items():
                load[link] = load.get(link, 0.0) + share
        return any(total > FULL for total in load.values())

    def _advance(self, flow: Flow) -> None:
        passed = self.env.now - flow.since
        flow.left = max(0.0, flow.left - passed * flow.rate)
        flow.since = self.env.now
        if flow.limit is not None:
            delay = passed * (1 - flow.rate)
            flow.lost[flow.limit] = flow.lost.get(flow.limit, 0.0) + delay
            self.lost[flow.limit] = self.lost.get(flow.limit, 0.0) + delay

    def _schedule(self, flow: Flow) -> None:
        flow.timer += 1
        timer = flow.timer

        def ended(_: Any) -> None:
            if flow.timer == timer:
                self._end(flow)

        assert flow.rate > 0, "a flow without a rate never ends"
        wait = self.env.timeout(flow.left / flow.rate)
        assert wait.callbacks is not None
        wait.callbacks.append(ended)

    def _end(self, flow: Flow) -> None:
        self._advance(flow)
        flow.left = 0.0
        self.flows.remove(flow)
        self._share(None)
        flow.done.succeed(flow)


def use_of(cost: Cost, links: Links) -> dict[str, float]:
    """Share of a cost's time for which it needs each link whole."""
    total = cost.seconds
    use: dict[str, float] = {}
    if not links or total <= 0:
        return use
    for p in cost.parts:
        for link, share in links.get(_key(p), {}).items():
            use[link] = use.get(link, 0.0) + share * p.seconds / total
    return {link: min(1.0, share) for link, share in use.items() if share > 0}


def _key(p: Part) -> str:
    shared = p.resource == "storage" and p.rests_on.startswith("shared_storage")
    return SHARED_STORAGE if shared else p.resource


# --- which links a pool has -------------------------------------------------------------------------


class Topology:
    """Links of every pool of a plan; CPU workers have none.

    A pool has its NICs, its NVLink and its PCIe lanes to itself. Host memory and disks belong to
    nodes: a pool takes the share of them that it has of the node's GPUs, for costs are priced with
    all GPUs of a node at work (`kernels.links.host_rate`). So is the spine of an oversubscribed
    fabric: every GPU is priced with its part of it (`Device.network_bandwidth`), a pool takes its
    share of the GPUs. The shared file system is one link: prices are those of one client alone.
    """

    def __init__(self, cluster: Cluster, pools: Sequence[ResourcePool]) -> None:
        self._links = {p.name: _pool_links(cluster, p) for p in pools}
        self._joined: dict[tuple[str, ...], Links] = {}

    def links(self, pools: tuple[str, ...]) -> Links:
        """Links of a call on these pools: it uses those of each of them."""
        if pools not in self._joined:
            joined: dict[str, dict[str, float]] = {}
            for pool in pools:
                for key, use in self._links.get(pool, {}).items():
                    mine = joined.setdefault(key, {})
                    for link, share in use.items():
                        mine[link] = min(1.0, mine.get(link, 0.0) + share)
            self._joined[pools] = joined
        return self._joined[pools]


def _pool_links(cluster: Cluster, pool: ResourcePool) -> Links:
    nodes = _node_shares(cluster, pool)
    wire = {f"nic:{pool.name}": 1.0}
    if cluster.oversubscription > 1:
        wire["spine"] = min(1.0, pool.gpus / cluster.gpus)
    return {
        "network": wire,
        "nvlink": {f"nvlink:{pool.name}": 1.0},
        "pcie": {f"pcie:{pool.name}": 1.0},
        "host": {f"host:{node}": share for node, share in nodes.items()},
        "storage": {f"disk:{node}": share for node, share in nodes.items()},
        SHARED_STORAGE: {"storage": 1.0},
    }


def _node_shares(cluster: Cluster, pool: ResourcePool) -> dict[str, float]:
    """Nodes under a pool and its share of their GPUs; nodes that it has whole are counted as one."""
    size = cluster.node_groups[pool.hardware].gpus_per_node
    begin, end = pool.start, pool.start + pool.gpus
    shares: dict[str, float] = {}
    for node in dict.fromkeys((begin // size, (end - 1) // size)):
        here = min(end, (node + 1) * size) - max(begin, node * size)
        name = f"node {node}" if not pool.hardware else f"node {node} of {pool.hardware}"
        if here < size:
            shares[name] = here / size
    if len(shares) < -(-end // size) - begin // size:
        shares[pool.name] = 1.0
    return shares
