"""A lower bound on the step of a plan, from the numbers of its pools.

Proof, for every schedule: a call cannot run before its inputs exist and a pool runs one call at a
time, in the simulation as here; a link that is shared only makes calls longer. With a, R, F, X of
`search.pools` and S the weight sync:

    scored  >=  max(a + max_p R_p, u)                     synchronous: scoring waits for generation
    scored  >=  max_k (c_k + (K-k+1)/K R_p)               streaming: piece k of K is generated at a_k <= a
    u        =  a + rules, or where rules score while others are decoded
                max(max_k (a_k + (K-k+1)/K rules), a + t)      t of one response
    c_k      =  max(max_(j<=k) (a_j + (k-j+1)/K rules), a_k + t)   where scoring waits for rules, else a_k
    end_p   >=  max(scored + C, a + F_p) + X_p            a pool that trains; C is the controller's work
    T       >=  max_p end_p,   max(end_actor, end_rollout) + S

In a synchronous step without shared links the first form is an equality: the simulation finds the
same number. Streamed training may overlap scoring, so there a pool only has its own work,
end_p >= max(a, R_p + X_p). With staleness the learner needs its own chain for every step, and the
rollout its work: T >= max(scored' + X_p + S', T_rollout), where scored' starts at 0 and S' is what
the schedule exposes (`simulation.asynchronous.run` proves T_rollout). GPUs that are lent generate only
while the learner waits: with t of them in addition to the rollout's g, its work of W_g seconds on g alone
ends no sooner than (g W_g + t L) / (g + t) into a step whose learner takes L.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from rlhfsim.kernels.devices import device_on
from rlhfsim.search.columns import Floats, Numbers
from rlhfsim.search.request import Request
from rlhfsim.search.space import Partition
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.framework_overhead import controller, own_parts, trains_pieces
from rlhfsim.step.rule_rewards import rules_ahead, rules_cost, rules_latency

ORDERED = 1e-11
"""Share of the learner's chain in the bound of a rollout that never drains: of equal ones the fastest learner
comes first, as simulations with it say most about the others. Bounds are compared up to 1e-9."""


def objective_bound(partition: Partition, request: Request, pools: Sequence[Numbers], sync: Floats) -> Floats:
    """What no plan with these pools goes below: seconds of a step, or bytes on a GPU."""
    if request.objective == "memory":
        return _most([p.peak for p in pools])
    return step_bound(partition, request, pools, sync)


def rules_seconds(workload: Workload) -> float:
    """Rule rewards on CPU workers."""
    if workload.reward.rules is None or not workload.generates:
        return 0.0
    return rules_cost(workload).seconds


def head_seconds(workload: Workload) -> float:
    """Time between generation and the first forward call: rules that are not overlapped."""
    return rules_seconds(workload) if workload.rules_first else 0.0


def controller_seconds(request: Request, partition: Partition) -> float:
    """The controller's work and that of own parts of the algorithm, between scoring and training."""
    own = sum(cost.seconds for cost in own_parts(request.workload).values())
    if not request.workload.generates:
        return own
    index = partition.pool_of("actor")
    assert index is not None
    return own + controller(device_on(request.cluster, partition.hardware[index], request.backend)).seconds


def step_bound(partition: Partition, request: Request, pools: Sequence[Numbers], sync: Floats) -> Floats:
    """Seconds that no step with these pools goes below; `sync` where the ends sit apart."""
    work, own = request.workload, controller_seconds(request, partition)
    rules = rules_seconds(work)
    if partition.schedule.asynchronous:
        return _stale(partition, rules, own, pools, sync)
    if partition.schedule.streaming:
        return _streaming(partition, request, own, pools, sync)
    a = _most([p.until_generated_s for p in pools])
    scored = np.maximum(a + _most([p.until_scored_s for p in pools]), _most([p.until_ruled_s for p in pools]))
    ends = [
        np.maximum(scored + own, a + p.until_free_s) + p.training_s if _trains(group) else a + p.until_free_s
        for group, p in zip(partition.groups, pools, strict=True)
    ]
    return _joined(partition, [*ends], sync, scored + own)


def rules_streamed(partition: Partition, request: Request) -> bool:
    """Whether rules score samples as they are generated."""
    schedule = partition.schedule
    ahead = rules_ahead(request.workload, request.cluster.framework) and not schedule.asynchronous
    return schedule.streaming or ahead


def ruled(workload: Workload, pieces: Floats, *, streamed: bool) -> Floats:
    """When rules have scored the last response of each row of (n, pieces), whose last is the end."""
    whole, work = pieces[..., -1], rules_seconds(workload)
    if not streamed or not work:
        return np.asarray(whole + work)
    taken = _after([pieces[..., k] for k in range(pieces.shape[-1])], np.asarray(work))
    return np.asarray(np.maximum(taken, whole + rules_latency(workload)))


def _streaming(
    partition: Partition, request: Request, own: float, pools: Sequence[Numbers], sync: Floats
) -> Floats:
    """Rules and controller are a pool of their own; a piece passes them one after the other."""
    rollout = partition.pool_of("rollout")
    assert rollout is not None
    workload = request.workload
    pieces, head = pools[rollout].pieces, head_seconds(workload)
    streams = trains_pieces(workload, request.backend)
    count, whole = len(pieces), pieces[-1]
    passed = _passed(pieces, head)
    if head:
        passed = [np.maximum(p, at + rules_latency(workload)) for p, at in zip(passed, pieces, strict=True)]
    scores = [np.maximum(p.until_scored_s - head, 0.0) for p in pools]
    scored = np.maximum(_most([_after(passed, r) for r in scores]), pools[rollout].until_ruled_s)
    ready = scored + (own if workload.custom.driver_s else own / count)
    ends = []
    for group, p, r in zip(partition.groups, pools, scores, strict=True):
        if not _trains(group):
            ends.append(np.maximum(whole, _after(passed, r)))
        elif streams:
            ends.append(np.maximum(_after(passed, r + p.training_s), ready + p.training_s / count))
        else:
            ends.append(ready + p.training_s)
    return _joined(partition, ends, sync, ready)


def _passed(pieces: Sequence[Floats], work: float) -> list[Floats]:
    """max_(j<=k) a_j + (k-j+1)/K w: when each piece has passed work that takes one after the other."""
    passed: list[Floats] = []
    for at in pieces:
        begin = np.maximum(at, passed[-1]) if passed else at
        passed.append(begin + work / len(pieces))
    return passed


def _after(pieces: Sequence[Floats], work: Floats) -> Floats:
    """max_k a_k + (K-k+1)/K w: the work of piece k and of those behind it comes after its arrival."""
    count = len(pieces)
    return _most([at + (count - k) / count * work for k, at in enumerate(pieces)])


def _stale(partition: Partition, rules: float, own: float, pools: Sequence[Numbers], sync: Floats) -> Floats:
    """Pools run side by side for good; `until_generated_s` of the rollout is its bound per batch."""
    rollout = partition.pool_of("rollout")
    assert rollout is not None
    batches = partition.pace == "batches"
    learn = _learner(partition, rules, own, pools)
    generated = pools[rollout].until_generated_s + (pools[rollout].until_free_s if batches else 0.0)
    if partition.schedule.lend:
        actor = partition.pool_of("actor")
        assert actor is not None
        own, lent = pools[rollout].gpus, pools[actor].gpus
        generated = (own * generated + lent * learn) / (own + lent)
    ordered = 0.0 if batches else ORDERED * learn
    if not partition.schedule.overlapped_sync:
        return np.asarray(np.maximum(learn, generated) + sync + ordered)
    paired = (generated + learn + sync) / 2 if batches else np.asarray(0.0)
    return _most([learn, generated, sync, paired]) + ordered


def learner_seconds(partition: Partition, request: Request, pools: Sequence[Numbers]) -> Floats:
    """What the learner's chain takes for one batch where the rollout runs at the same time."""
    own = controller_seconds(request, partition)
    return _learner(partition, rules_seconds(request.workload), own, pools)


def _learner(partition: Partition, rules: float, own: float, pools: Sequence[Numbers]) -> Floats:
    scored = np.maximum(_most([p.until_scored_s for p in pools]), rules)
    return _most(
        [
            np.maximum(scored + own, p.until_free_s) + p.training_s if _trains(group) else p.until_free_s
            for group, p in zip(partition.groups, pools, strict=True)
            if "rollout" not in group
        ]
    )


def _joined(partition: Partition, ends: Sequence[Floats], sync: Floats, ready: Floats) -> Floats:
    """The end of the last pool, or of the sync that waits for its two ends."""
    last = np.maximum(_most(ends), ready)
    actor, rollout = partition.pool_of("actor"), partition.pool_of("rollout")
    if partition.joined or actor is None or rollout is None:
        return last
    synced: Floats = np.maximum(last, np.maximum(ends[actor], ends[rollout]) + sync)
    return synced


def _trains(group: Sequence[str]) -> bool:
    return "actor" in group or "critic" in group


def _most(arrays: Sequence[Floats]) -> Floats:
    return np.asarray(reduce(np.maximum, arrays))
