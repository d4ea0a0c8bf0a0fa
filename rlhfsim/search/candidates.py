"""A complete plan, judged: its memory ledger and its simulated step."""

from __future__ import annotations

import math

from rlhfsim.frozen import frozen
from rlhfsim.memory.ledger import Ledger, ledger
from rlhfsim.memory.residency import engine_in_plan
from rlhfsim.search.request import Request
from rlhfsim.search.scope import Steps
from rlhfsim.simulation.asynchronous.priced_rollout import least_seconds
from rlhfsim.simulation.run import Simulated, simulate
from rlhfsim.specs.model.roles import Models
from rlhfsim.specs.placement.placement import Placement
from rlhfsim.step.calls import CallSetting
from rlhfsim.step.iteration import Iteration, Known, closed_form, program, switch_seconds
from rlhfsim.step.measured import memory_doubt
from rlhfsim.units import format

STEPS, WARMUP = 6, 3
"""Steps that are simulated where staleness is allowed: measured ones, and those before."""


@frozen
class Candidate:
    """A complete plan with its simulated step and its memory."""

    placement: Placement
    iteration: Iteration
    ledger: Ledger

    @property
    def seconds(self) -> float:
        """Step time."""
        return self.iteration.seconds


def risk(request: Request, memory: Ledger) -> str | None:
    """Why a plan may not run: it does not fit, or does so only with luck."""
    if memory.rejected_by:
        return memory.rejected_by
    if request.max_memory is not None and most_bytes(memory) > request.max_memory:
        return f"more than {format(request.max_memory, 'byte')} on a GPU"
    if memory.probability_out_of_memory > request.max_oom:
        return f"probability of running out of memory above {request.max_oom:.0%}"
    return None


def most_bytes(memory: Ledger) -> float:
    """Bytes on the fullest GPU of the cluster, whatever it holds."""
    return max(phase.bytes for phase in memory.phases)


def value(request: Request, candidate: Candidate) -> float:
    """What is minimised; money and energy are time on a cluster that is rented whole."""
    # not the peak of the ledger: on mixed hardware that is the fullest GPU, not the most bytes
    return most_bytes(candidate.ledger) if request.objective == "memory" else candidate.seconds


def judged(
    request: Request,
    models: Models,
    placement: Placement,
    *,
    cutoff: float | None = None,
    steps: Steps | None = None,
) -> Candidate | None:
    """A plan with its simulated step; None where it may not run.

    `cutoff`: an asynchronous plan whose interval lies above it is not simulated to the end. `steps`: plans
    of the same work and cluster that were simulated, to which this one is added.
    """
    doubt = memory_doubt(models, request.backend, request.workload, request.cluster)
    memory = ledger(models, placement, request.workload, request.cluster, doubt=doubt)
    if risk(request, memory):
        return None
    return simulated(request, models, placement, memory, cutoff=cutoff, steps=steps)


def simulated(
    request: Request,
    models: Models,
    placement: Placement,
    memory: Ledger,
    *,
    cutoff: float | None = None,
    steps: Steps | None = None,
) -> Candidate:
    """The step on the KV capacity that the ledger leaves; see `judged`."""
    steps = {} if steps is None else steps
    highest = math.inf if cutoff is None else cutoff
    if placement in steps and highest <= steps[placement][1]:
        return Candidate(placement=placement, iteration=steps[placement][0], ledger=memory)
    setting = CallSetting(
        models=models, placement=placement, workload=request.workload, cluster=request.cluster
    )
    kv_tokens = memory.kv_tokens if memory.kv_tokens and memory.kv_tokens > 0 else None
    run = _simulated(setting, kv_tokens, cutoff)
    steps[placement] = run.iteration, highest if run.stopped else math.inf
    return Candidate(placement=placement, iteration=run.iteration, ledger=memory)


def timed(setting: CallSetting, kv_tokens: float | None) -> Iteration:
    """The simulated step of a plan that is taken to fit; without randomness, on expected lengths."""
    return _simulated(setting, kv_tokens, None).iteration


def _simulated(setting: CallSetting, kv_tokens: float | None, cutoff: float | None) -> Simulated:
    """A step, in steady state where staleness is allowed."""
    if setting.placement.schedule.asynchronous:
        seed = setting.workload.seed
        return simulate(setting, kv_tokens, steps=STEPS, warmup=WARMUP, seed=seed, cutoff=cutoff)
    return simulate(setting, kv_tokens)


def streaming_seconds(request: Request, models: Models, placement: Placement, prices: Known) -> float:
    """The closed form of a streaming plan, a tighter bound than that of its pools; 0 for any other plan."""
    if not placement.schedule.streaming or placement.rollout is None or request.objective == "memory":
        return 0.0
    setting, kv_tokens = _running(request, models, placement)
    return closed_form(program(setting, kv_tokens, prices), placement.schedule).seconds


def stale_seconds(request: Request, models: Models, placement: Placement) -> float:
    """What the step of a plan with stale samples does not go below; 0 for any other plan."""
    if not placement.schedule.asynchronous or placement.rollout is None:
        return 0.0
    setting, kv_tokens = _running(request, models, placement)
    return least_seconds(setting, kv_tokens, program(setting, kv_tokens).steps)


def lent_moves(request: Request, models: Models, placement: Placement) -> tuple[float, ...]:
    """Seconds until lent GPUs of the trainer generate, and until they train again."""
    return switch_seconds(*_running(request, models, placement)) if placement.schedule.lend else ()


def _running(request: Request, models: Models, placement: Placement) -> tuple[CallSetting, float | None]:
    """A plan with a rollout, and the KV capacity of a replica."""
    assert placement.rollout is not None
    profile = request.cluster.node_groups[placement.pool(placement.rollout.pool).hardware].profile
    kv_tokens = engine_in_plan(models, placement, request.workload, profile).kv_tokens
    setting = CallSetting(
        models=models, placement=placement, workload=request.workload, cluster=request.cluster
    )
    return setting, kv_tokens
