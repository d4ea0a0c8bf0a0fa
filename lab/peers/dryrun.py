"""Our asynchronous schedules beside DryRun-RL (github.com/psrl-project/DryRun-RL) on ten workloads.

    python -m lab.peers.dryrun PATH_OF_A_CHECKOUT          writes lab/peers/dryrun_rl.csv and the table of its page

The peer runs twice. `as it is`: a training step hands its weights over as it *begins*, and the transfer stops
nobody. `in order`: its own engine, policies and loop, but weights exist when their training step ends, and
replicas stand still while they move (without partial rollouts they drain first). The second run takes one
known difference away and shows what else is left.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from lab.peers.workloads import BLOCK, PROMPT, STEPS, WARMUP, WORKLOADS, Workload, seconds
from rlhfsim.specs.placement.placement import Late

FACTS = Path(__file__).with_name("dryrun_rl.csv")
PAGE = Path(__file__).parents[2] / "docs" / "asynchronous_peer.md"
POLICIES = ("areal", "roll", "verl", "slime")
"""Four policies of five; `psrl` imports a package that its repository does not hold."""
CLOSE = 0.05
BOUND = 1.02
"""Most that a step takes over its training and weight sync where the trainer bounds it."""
NAMED = {workload.name: workload for workload in WORKLOADS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """What the peer answered."""

    workload: str
    policy: str
    as_it_is: float
    """Seconds of a step of the peer as published."""
    in_order: float
    """Seconds where weights are handed over after their training step."""
    dropped: int
    """Samples that the policy threw away."""
    commit: str


def facts() -> list[Fact]:
    """The committed answers."""
    with FACTS.open() as file:
        return [
            Fact(
                workload=row["workload"],
                policy=row["policy"],
                as_it_is=float(row["as_it_is_s"]),
                in_order=float(row["in_order_s"]),
                dropped=int(row["dropped"]),
                commit=row["commit"],
            )
            for row in csv.DictReader(file)
        ]


# --- the peer -------------------------------------------------------------------------------------------


def ask(workload: Workload, policy: str, *, in_order: bool) -> tuple[float, int]:
    """Seconds of a step in the peer's steady state, and samples it threw away."""
    driver = _simulators()[in_order]
    of = importlib.import_module("dryrun.simulator")
    roofline = importlib.import_module("dryrun.cost.rollout").UnifiedRoofline
    training = importlib.import_module("dryrun.cost.training.fixed").FixedTrainingCost
    costs = workload.costs
    simulator = driver(
        rollout_cost=roofline(F=1e-9, W=costs.fixed, G=costs.each, A_d=costs.read),
        training_cost=training(workload.learn),
        policy=_policy(policy, workload),
        lengths=list(workload.lengths()),
        cfg=of.SimConfig(
            batch_size=workload.batch,
            max_staleness=workload.staleness,
            n_versions=WARMUP + STEPS,
            sync_time=workload.sync,
            partial_rollout=workload.partial and policy != "slime",
            kv_blocks=workload.capacity // BLOCK,
            block_size=BLOCK,
            max_concurrency=workload.slots,
            reject_if_kv_full=False,
            prompt_lengths=[PROMPT],
            n_instances=workload.replicas,
        ),
    )
    result = simulator.run()
    assert not result.livelocked
    ends = [end for _, end in result.train_timestamps]
    return (ends[-1] - ends[WARMUP - 1]) / (len(ends) - WARMUP), len(result.dropped)


def _policy(name: str, workload: Workload) -> Any:
    module = importlib.import_module(f"dryrun.policy.{name}")
    match name:
        case "areal":
            return module.ArealPolicy()
        case "roll":
            return module.RollPolicy()
        case "verl":
            return module.VerlPolicy(staleness_threshold=workload.staleness, trigger_parameter_sync_step=1)
        case _:
            return module.SlimePolicy()


class _AsItIs:
    """As published; what has finished is forgotten, for it is copied at every event."""

    def _train(self, batch: list[Any]) -> None:
        super()._train(batch)
        for instance in self.instances:
            instance.completed.clear()


class _InOrder:
    """Training, then (drained) the transfer with replicas at rest, then the new version."""

    def _train(self, batch: list[Any]) -> None:
        start, policy, taken = self.t, self.policy, {id(r) for r in batch}
        for request in batch:
            request.consume_version = self.version
        self.ready = [r for r in self.ready if id(r) not in taken]
        self.consumed += batch
        self.n_consumed += len(batch)
        self._admit()
        self._run_engine(deadline=self.t + self.training_cost.latency_model.latency_s)
        if not self.cfg.partial_rollout:
            self._drain()
        self.t += self.cfg.sync_time
        self._meet()
        self.version += 1
        policy.on_version_advance(self.version, self._state())
        self.engine_version = policy.engine_version_after_train(self._state())
        self._discard(self._too_old() + policy.expire(self._state()))
        self._abort()
        self._admit()
        self.train_timestamps.append((start, self.t))

    def _meet(self) -> None:
        """All replicas are at the time of the trainer; what has finished is forgotten."""
        for instance in self.instances:
            instance.t_local = self.t
            instance.completed.clear()

    def _abort(self) -> None:
        """Partial rollouts stop what runs."""
        if self.cfg.partial_rollout and self.inflight:
            for instance in self.instances:
                instance.abort_all()
            self.policy.on_abort(list(self.inflight), self._state())

    def _too_old(self) -> list[Any]:
        """ROLL: what finished while the last batch within its bound was training."""
        late: list[Any] = []
        for step, group in getattr(self.policy, "groups", {}).items():
            if step < self.version - self.cfg.max_staleness:
                late += group.finished
                self.policy.completed_prompts -= len(group.finished)
                group.finished.clear()
        return late

    def _drain(self) -> None:
        usual = self.policy.admit_quota
        self.policy.admit_quota = lambda state: 0
        while self.inflight:
            self._run_engine()
        self.policy.admit_quota = usual


@cache
def _simulators() -> tuple[Any, Any]:
    """The peer's simulator as it is, and in order."""
    simulator: Any = importlib.import_module("dryrun.simulator").Simulator
    return type("AsItIs", (_AsItIs, simulator), {}), type("InOrder", (_InOrder, simulator), {})


# --- the table ------------------------------------------------------------------------------------------


@cache
def ours(workload: Workload, policy: str) -> float:
    """Our seconds for the schedule that the policy stands for; without staleness nothing is late."""
    late: Late = "drop" if policy == "roll" and workload.staleness else "wait"
    return seconds(workload, one_step_off=policy == "slime", late=late)


def trainer_bound(fact: Fact) -> bool:
    """Whether a step takes what its training takes, so that no rule of staleness can tell planners apart."""
    workload = NAMED[fact.workload]
    return ours(workload, fact.policy) <= BOUND * (workload.learn + workload.sync)


def table(known: list[Fact]) -> str:
    """Rows of the page: both runs of the peer beside ours, first where the trainer does not decide alone."""
    free = [fact for fact in known if not trainer_bound(fact)]
    bound = [fact for fact in known if trainer_bound(fact)]
    return (
        f"**{len(free)} cells that the trainer does not bound:** {_close(free)}.\n\n{_rows(free)}\n"
        f"**{len(bound)} cells that the trainer bounds:** {_close(bound)}.\n\n{_rows(bound)}"
    )


def _close(known: list[Fact]) -> str:
    """How many answers are close, as it is and in order."""
    near = [
        sum(abs(ours(NAMED[f.workload], f.policy) / theirs(f) - 1) <= CLOSE for f in known)
        for theirs in (attrgetter("as_it_is"), attrgetter("in_order"))
    ]
    return f"as it is {near[0]} within {CLOSE:.0%}, in order {near[1]}"


def _rows(known: list[Fact]) -> str:
    lines = [
        "| workload | policy | ours, s | DryRun-RL as it is, s | difference | in order, s | difference |\n",
        "| --- | --- | --- | --- | --- | --- | --- |\n",
    ]
    for fact in known:
        value = ours(NAMED[fact.workload], fact.policy)
        cells = [f"{theirs:.2f} | {_difference(value, theirs)}" for theirs in (fact.as_it_is, fact.in_order)]
        lines.append(f"| {fact.workload} | {fact.policy} | {value:.2f} | {' | '.join(cells)} |\n")
    return "".join(lines)


def _difference(value: float, theirs: float) -> str:
    gap = value / theirs - 1
    return f"{gap:+.1%}" if abs(gap) <= CLOSE else f"**{gap:+.1%}**"


def write_page(known: list[Fact]) -> None:
    """The table between its marks."""
    text = PAGE.read_text()
    begin, end = text.index("<!-- table -->\n") + len("<!-- table -->\n"), text.index("<!-- end -->")
    PAGE.write_text(text[:begin] + table(known) + text[end:])


def main() -> None:
    """Ask the peer everything and write facts and page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="folder of a DryRun-RL checkout")
    checkout: Path = parser.parse_args().checkout
    sys.path.insert(0, str(checkout))
    commit = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    with FACTS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["workload", "policy", "as_it_is_s", "in_order_s", "dropped", "commit"])
        for workload in WORKLOADS:
            for policy in POLICIES:
                (free, lost), (strict, _) = (ask(workload, policy, in_order=x) for x in (False, True))
                writer.writerow([workload.name, policy, f"{free:.4f}", f"{strict:.4f}", lost, commit])
                value = ours(workload, policy)
                print(
                    f"{workload.name:16} {policy:6} {value:7.2f} {free:7.2f} {value / free - 1:+7.1%} "
                    f"{strict:7.2f} {value / strict - 1:+7.1%}  {lost} dropped",
                    flush=True,
                )
    if PAGE.exists():
        write_page(facts())


if __name__ == "__main__":
    main()
