"""What an RL framework adds to the calls that it makes, and what it can begin early.

Calls and their micro-batches take host time, a controller works; training may take samples as they arrive.

Fitted on one published phase table (`lab.fits.rlhf`). The third addition, time of the
rollout worker per decode step, is part of `rollout.generation`.

Not known here: how the additions depend on the framework, its release and the number of samples.
"""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.elementwise import Size, some, where
from rlhfsim.kernels.cost import Cost, part
from rlhfsim.kernels.device import Device
from rlhfsim.kernels.links import pageable_rate
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.placement.backends import BACKENDS, Backend
from rlhfsim.specs.placement.layout_columns import AnyLayout
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.rule_rewards import spread_of
from rlhfsim.step.timetable import Step
from rlhfsim.trace import CONTROLLER, CPU_POOL

OWN_PARTS, MEASURED_PARTS = "custom.seconds_per_sample", "custom.measured_seconds_per_sample"
"""What the time of the user's own parts rests on."""
TRAINING = ("critic.train", "actor.train")


def framework_call(device: Device, cost: Cost, launched: Size) -> Cost:
    """A scoring or training call as an RL framework runs it.

        T = T_pre + c + n h      c = `rl_call_time`, h = `rl_layer_time`, n layers that a host launches

    T_pre is the same call of a pre-training run. An RL framework reads losses and metrics back after every
    micro-batch, so that its host never launches ahead, and cuts or packs the next one meanwhile; around the
    call it carries tensors over process borders. Neither depends on how fast the GPU computes.
    """
    own = [
        part("host", times * device[name], name, spread=device.spread(name))
        for name, times in (("rl_call_time", 1.0), ("rl_layer_time", launched))
    ]
    return Cost(parts=(*cost.parts, *[p for p in own if some(p.seconds > 0)]))


def launched_layers(layout: AnyLayout, layers: int, micro_batches: Size, *, trained: bool) -> Size:
    """Layers that the host of a rank launches in a call: once forward, once backward, once to recompute."""
    passes = where(layout.recompute == "full", 3.0, 2.0) if trained else 1.0
    return micro_batches * passes * layers / layout.pp


def controller(device: Device) -> Cost:
    """What one process does with the batch in a step: advantages, masks, tensors, metrics.

    The training loops of NeMo-RL (`grpo.py`) and verl (`ray_trainer.py`); no pool of GPUs works then.
    """
    name = "controller_time"
    return Cost(parts=(part("controller", device[name], name, spread=device.spread(name)),))


def own_parts(workload: Workload, cluster: Cluster | None = None) -> dict[str, Cost]:
    """Phase -> what the user's own parts of the algorithm take for all samples of a step, on the driver."""
    count, costs = workload.num_sequences, dict[str, Cost]()
    for name, seconds in workload.custom.driver_s.items():
        spread = spread_of(name, seconds, cluster)
        rests_on = OWN_PARTS if spread is None else MEASURED_PARTS
        costs[name] = Cost(parts=(part("custom", seconds * count, rests_on, spread=spread or (1.0, 1.0)),))
    return costs


def routes(device: Device, size: float) -> Cost:
    """What one process takes to pass on `size` bytes from where they are computed to the trainer: in and out.

    An upper end where several collect, or where an engine's answers are taken in while others generate.
    """
    copied = pageable_rate(device, 1)
    seconds = 2 * size / copied.value
    return Cost(parts=(part("host", seconds, copied.rests_on, spread=copied.spread),))


def with_driver(
    steps: list[Step], cost: Cost, *, name: str = CONTROLLER, streams: bool = True, blocking: bool = False
) -> list[Step]:
    """The steps with work of the driver between the last scoring call and training, which waits.

    `blocking`: it also waits until the scoring roles have left memory (`blocking_moves`).
    """
    if not cost.seconds:
        return steps
    first = next(i for i, s in enumerate(steps) if s.name.startswith(TRAINING))
    needs = steps[first].needs
    needs = _with_moves(steps, needs) if blocking else needs
    own = Step(name=name, pools=(CPU_POOL,), cost=cost, needs=needs, streams=streams)
    later = [replace(s, needs=(*s.needs, name)) if s.name.startswith(TRAINING) else s for s in steps[first:]]
    return [*steps[:first], own, *later]


def _with_moves(steps: list[Step], needs: tuple[str, ...]) -> tuple[str, ...]:
    """Calls come back to the controller when their role has left memory again, if it does."""
    names = {s.name for s in steps}
    return tuple(f"{n}.unload" if f"{n}.unload" in names else n for n in needs)


def trains_pieces(workload: Workload, backend: Backend) -> bool:
    """Whether training can begin on the samples that are there while others still generate.

    The gradients of one optimizer step add up in any order; a second step waits for the whole batch, and so
    do own parts of the algorithm.
    """
    one_step = workload.epochs * workload.mini_batches == 1 and not workload.custom.driver_s
    return one_step and BACKENDS[backend].trains_pieces
