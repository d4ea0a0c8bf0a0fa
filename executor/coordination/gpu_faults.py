"""Faults of GPUs and their libraries, recognised in what a rank said: cause, and remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from executor.coordination.failures import PartFailed, causes
from executor.coordination.others import Held
from executor.engines.fake import ENGINE_PARTS
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan
from rlhfsim.units import GIB
from rlhfsim.units import format as shown

Readings = Mapping[str, Mapping[str, float]]
"""Part -> bytes by the keys of `engines.memory`."""
KEPT_BYTES = 1 * GIB
"""Memory that a sleeping engine may keep beyond its ledger: contexts and workspaces come and go."""
OTHER_SHARE = 0.9
"""Share of the planned memory below which a GPU is of another kind."""


class GpuFault(NamedTuple):
    """One kind of failure."""

    code: str
    words: str
    """How libraries say it, a regular expression."""
    cause: str
    remedy: str
    again: bool
    """The same plan meets it again: no restart helps."""


FAULTS = (
    GpuFault(
        "collective-order",
        r"Detected mismatch between collectives on ranks",
        "ranks entered different collectives",
        "check that every node has the same versions (rlhfsim check-machine --address ADDRESS); a loss or "
        "sampler of your own must not branch on the rank",
        again=True,
    ),
    GpuFault(
        "ipc-not-permitted",
        r"pidfd_(open|getfd)|expandable segments.*(not supported|IPC)",
        "the allocator's memory cannot be handed to another process",
        "leave expandable_segments out of PYTORCH_ALLOC_CONF, or give the container SYS_PTRACE",
        again=True,
    ),
    GpuFault(
        "host-memory-not-pinned",
        r"host memory is not pinned",
        "copies to the host in the background need pinned memory",
        "rlhfsim check-machine shows limits and free host memory: raise them, or design without offload",
        again=True,
    ),
    GpuFault(
        "ipc-handle-freed",
        r"invalid resource handle|mapping of buffer object failed|[Pp]roducer process has been terminated",
        "the weights' memory was freed by its owner before the receiver opened it (CUDA IPC)",
        "if it returns, take another weight path: rlhfsim sync plan.json lists them",
        again=False,
    ),
    GpuFault(
        "collective-late",
        r"Watchdog caught collective|[Tt]imed out waiting \d+ms|took longer than",
        "a rank came late, died, or waits in another collective",
        "look at clocks and other processes of its GPU (nvidia-smi), or raise limits.call_s; with "
        "variables.TORCH_DISTRIBUTED_DEBUG: DETAIL torch names the collective of each rank",
        again=False,
    ),
)
_RUNS = re.compile(r"Rank (\d+) is running collective: CollectiveFingerPrint\([^)]*?OpType=(\w+)")


def fault_of(failure: PartFailed) -> GpuFault | None:
    """The kind of a failure; None: of no kind known here."""
    text = said(failure)
    return next((fault for fault in FAULTS if re.search(fault.words, text)), None)


def said(error: BaseException) -> str:
    """The text of an error and of those that caused it."""
    return "\n".join(map(str, causes(error)))


def stop_of(failure: PartFailed, fault: GpuFault) -> RlhfsimError:
    """The error that ends a run which would fail again: who, in which call, why, what to do."""
    running = sorted(set(_RUNS.findall(said(failure))))
    each = ", ".join(f"rank {rank} {kind}" for rank, kind in running)
    where = f"{failure.part} in {failure.call}" if failure.call else failure.part
    cause = f"{fault.cause} ({each})" if each else fault.cause
    detail = "" if each else f": {failure.detail}"
    return RlhfsimError(fault.code, f"{where}: {cause}{detail}", help=fault.remedy)


def check_devices(plan: Plan, held: Mapping[str, Held]) -> None:
    """Every process works on memory of the size that a plan for one kind of GPU reckons with.

    Raises:
        RlhfsimError: one does not: its node has other GPUs than the driver's.
    """
    one_kind = len({hardware.profile for hardware in plan.hardware}) == 1
    for part, one in held.items() if one_kind else ():
        if one.total < OTHER_SHARE * plan.prediction.capacity_bytes:
            raise RlhfsimError(
                "another-gpu",
                f"{part} would start on {one.where} with {shown(one.total, 'byte')}, the plan reckons with "
                f"{shown(plan.prediction.capacity_bytes, 'byte')} on each of its GPUs",
                help="rlhfsim check-machine plan.json --address ADDRESS shows the GPUs of every node: leave "
                "that node out, or design for its kind",
            )


def check_asleep(plan: Plan, call: str, leaving: set[str], readings: Readings) -> None:
    """The rollout engine gave back the parts that the plan's ledger lets leave.

    Raises:
        RlhfsimError: it kept more than trainers can do without.
    """
    planned = sum(_largest(plan, name) for name, part in ENGINE_PARTS.items() if part in leaving)
    peak = max(_trainers(plan), default=0.0)
    for part, reading in readings.items():
        kept = planned - (reading["device_peak"] - reading["device"])
        if kept > KEPT_BYTES and peak + kept > plan.prediction.capacity_bytes:
            raise RlhfsimError(
                "engine-keeps-memory",
                f"{part} keeps {shown(kept, 'byte')} more than planned in {call}: with it the other roles' "
                f"{shown(peak, 'byte')} exceed {shown(plan.prediction.capacity_bytes, 'byte')}",
                help="take sleep level 2, a lower memory_utilization of the rollout engine, or smaller "
                "micro-batches",
            )


def _largest(plan: Plan, component: str) -> float:
    wanted = "rollout", component, _pool(plan)
    rows = (r.bytes for r in plan.prediction.ledger if (r.role, r.component, r.pool) == wanted)
    return max(rows, default=0.0)


def _pool(plan: Plan) -> str:
    """The rollout's."""
    return plan.placement.rollout.pool if plan.placement.rollout is not None else ""


def _trainers(plan: Plan) -> Iterator[float]:
    """Bytes of each phase on the rollout's pool in which its engine sleeps."""
    ledger, pool = plan.prediction.ledger, _pool(plan)
    for phase in {row.phase for row in ledger}:
        rows = [row for row in ledger if row.phase == phase and row.pool == pool]
        if not any(row.role == "rollout" and row.component == "kv_cache" for row in rows):
            yield sum(row.bytes for row in rows)
