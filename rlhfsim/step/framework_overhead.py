"""What an RL framework adds to the calls that it makes, and what it can begin early.

Packed calls take longer, a controller works; training may take samples as they arrive.

Fitted on one published phase table (`lab.fits.rlhf`). The third addition, time of the
rollout worker per decode step, is part of `rollout.generation`.

Not known here: how the additions depend on the framework, its release and the number of samples.
"""

from __future__ import annotations

from dataclasses import replace

from rlhfsim.kernels.cost import Cost, part
from rlhfsim.kernels.device import Device
from rlhfsim.specs.placement.backends import BACKENDS, Backend
from rlhfsim.specs.workload.workload import Workload
from rlhfsim.step.timetable import Step
from rlhfsim.trace import CONTROLLER, CPU_POOL

TRAINING = ("critic.train", "actor.train")


def packed_call(device: Device, cost: Cost) -> Cost:
    """A scoring or training call on packs, as an RL framework runs it.

        T = T_pre (1 + a)      a = `rl_call_overhead`, T_pre the same call of a pre-training run

    Packs of unlike fill, losses in FP32 over the whole vocabulary, host work between micro-batches,
    tensors that cross process borders. Padded batches of one length have none of the first.
    """
    name = "rl_call_overhead"
    extra = part("overhead", cost.seconds * device[name], name, spread=device.spread(name))
    return cost + Cost(parts=(extra,))


def controller(device: Device) -> Cost:
    """What one process does with the batch in a step: advantages, masks, tensors, metrics.

    The training loops of NeMo-RL (`grpo.py`) and verl (`ray_trainer.py`); no pool of GPUs works then.
    """
    name = "controller_time"
    return Cost(parts=(part("host", device[name], name, spread=device.spread(name)),))


def with_controller(steps: list[Step], cost: Cost, *, blocking: bool = False) -> list[Step]:
    """The steps with the controller's work between the last scoring call and training, which waits.

    `blocking`: it also waits until the scoring roles have left memory (`blocking_moves`).
    """
    if not cost.seconds:
        return steps
    first = next(i for i, s in enumerate(steps) if s.name.startswith(TRAINING))
    needs = steps[first].needs
    needs = _with_moves(steps, needs) if blocking else needs
    own = Step(name=CONTROLLER, pools=(CPU_POOL,), cost=cost, needs=needs, streams=True)
    later = [
        replace(s, needs=(*s.needs, CONTROLLER)) if s.name.startswith(TRAINING) else s for s in steps[first:]
    ]
    return [*steps[:first], own, *later]


def _with_moves(steps: list[Step], needs: tuple[str, ...]) -> tuple[str, ...]:
    """Calls come back to the controller when their role has left memory again, if it does."""
    names = {s.name for s in steps}
    return tuple(f"{n}.unload" if f"{n}.unload" in names else n for n in needs)


def trains_pieces(workload: Workload, backend: Backend) -> bool:
    """Whether training can begin on the samples that are there while others still generate.

    The gradients of one optimizer step add up in any order; a second step waits for the whole batch.
    """
    one_step = workload.epochs * workload.mini_batches == 1
    return one_step and BACKENDS[backend].trains_pieces
