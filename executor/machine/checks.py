"""A node's facts against what a run needs: what is missing, and the remedy of each in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from executor.machine.facts import ABSENT, LEAST_DRIVER, SHARED, Facts, version
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.hardware.profile_files import find_profile
from rlhfsim.units import GIB
from rlhfsim.units import format as shown

Outcome = Literal["ok", "missing", "not checked"]
SHARED_BYTES = 1 * GIB
"""What NCCL's documentation asks of a container: `--shm-size=1g`."""
OPEN_FILES = 8192
"""What Ray asks for (ray/_private/worker.py)."""
THREADS = 200
"""Threads of one process with Ray, torch and NCCL, which count against the limit of processes."""
PORTS = 1000
"""Process groups, stores and Ray take some ten ports a process."""
SWITCHED = re.compile(r"SXM|HBM3|NVL|GB\d00|B[23]00")
"""Names of GPUs that are sold with NVLink between them."""
NO_GPU = "no GPU here"


@frozen
class Needs:
    """What a run asks of each node; None: not known."""

    gpus: int | None = None
    """GPUs of the node that gives most."""
    gpu_kind: str | None = None
    """Hardware profile."""
    processes_per_gpu: int = 1
    host_bytes: float | None = None
    shared_bytes: float = SHARED_BYTES
    disk_bytes: float | None = None
    """Bytes of the checkpoints that are kept and the one that is being written."""
    host_adam: bool | None = None
    """Optimizer states are on the host."""


@frozen
class Check:
    """One thing that was looked at."""

    name: str
    outcome: Outcome
    found: str
    """What is there, against what is needed."""
    remedy: str = ""
    """One line; empty unless something is missing."""


def checks(facts: Facts, needs: Needs) -> Iterator[Check]:
    """Everything about one node."""
    yield _driver(facts)
    yield _gpus(facts, needs)
    yield _nvlink(facts)
    yield _nccl(facts)
    yield _shared_memory(facts, needs)
    yield from _limits(facts, needs)
    yield _compiler(facts, needs)
    yield _memory(facts, needs)
    yield _disk(facts, needs)
    yield _ports(facts)


def judged(name: str, fits: bool, found: str, remedy: str) -> Check:
    """ok, or missing with its remedy."""
    return Check(name=name, outcome="ok" if fits else "missing", found=found, remedy="" if fits else remedy)


def not_checked(name: str, why: str) -> Check:
    """What could not be seen here."""
    return Check(name=name, outcome="not checked", found=why)


def _driver(facts: Facts) -> Check:
    torch = f"torch {facts.torch}"
    if facts.driver is None:
        if facts.no_gpus == ABSENT:
            return not_checked("driver", ABSENT)
        remedy = "nvidia-smi says why: reboot after a new driver, or install it for this kernel"
        return judged("driver", False, facts.no_gpus, remedy)
    if facts.torch is None:
        return judged("driver", False, "torch is not installed", "pip install 'rlhfsim[real-gpu]'")
    if facts.torch_cuda is None:
        remedy = "install torch built for CUDA: pip install 'rlhfsim[real-gpu]' in a new environment"
        return judged("driver", False, f"driver {facts.driver}, but {torch} is built without CUDA", remedy)
    least = LEAST_DRIVER.get(version(facts.torch_cuda)[0])
    if least is None:
        return not_checked(
            "driver", f"the driver that CUDA {facts.torch_cuda} of {torch} needs is not known here"
        )
    return judged(
        "driver",
        version(facts.driver) >= version(least),
        f"driver {facts.driver}; CUDA {facts.torch_cuda} of {torch} needs {least} or newer",
        f"install driver {least} or newer on the host, or torch built for an older CUDA",
    )


def _gpus(facts: Facts, needs: Needs) -> Check:
    if not facts.gpus:
        if facts.driver is None and not needs.gpus:
            return not_checked("GPUs", facts.no_gpus)
        return judged("GPUs", False, facts.no_gpus, "docker run --gpus all, or ask the scheduler for GPUs")
    name, count = facts.gpus[0].name, len(facts.gpus)
    kind, asked = _kind(name), f", the plan needs {needs.gpus}" if needs.gpus else ""
    found = f"{count} x {name}, {shown(facts.gpus[0].memory_bytes, 'byte')} each{asked}"
    if any(gpu.mig for gpu in facts.gpus):
        return judged(
            "GPUs", False, f"{found}; MIG is on", "NCCL and CUDA IPC need whole GPUs: nvidia-smi -mig 0"
        )
    if kind is not None and needs.gpu_kind is not None and kind != needs.gpu_kind:
        remedy = f"design for this kind: rlhfsim design --gpu {kind}"
        return judged("GPUs", False, f"{found} of {needs.gpu_kind}", remedy)
    remedy = "design for fewer (rlhfsim design --gpus N), or free the others from CUDA_VISIBLE_DEVICES"
    return judged("GPUs", count >= (needs.gpus or 1), found, remedy)


def _kind(name: str) -> str | None:
    """The profile of a GPU by the driver's name; None: it has none."""
    try:
        return find_profile(name.removeprefix("NVIDIA ")).stem
    except RlhfsimError:
        return None


def _nvlink(facts: Facts) -> Check:
    if len(facts.gpus) < 2:
        return not_checked("NVLink", "fewer than two GPUs here")
    waiting = {gpu.fabric for gpu in facts.gpus} - {"Completed", "N/A"}
    if waiting:
        remedy = "systemctl restart nvidia-fabricmanager, of the driver's own version"
        return judged("NVLink", False, f"the NVSwitch fabric is {', '.join(sorted(waiting))}", remedy)
    if facts.links is None:
        return not_checked("NVLink", "nvidia-smi topo shows no links")
    found = f"at least {facts.links} links between any two GPUs"
    if not facts.links:
        found = "none between some GPUs: they talk over PCIe"
    expected = SWITCHED.search(facts.gpus[0].name) is not None
    remedy = (
        "start nvidia-fabricmanager and pass all GPUs to the container; nvidia-smi nvlink -s shows the links"
    )
    return judged("NVLink", bool(facts.links) or not expected, found, remedy)


def _nccl(facts: Facts) -> Check:
    if not facts.gpus:
        return not_checked("NCCL", NO_GPU)
    if facts.torch_cuda and facts.nccl is None:
        return judged("NCCL", False, "no NCCL next to torch", "pip install 'rlhfsim[real-gpu]'")
    names = re.split(r"[,:]", (facts.named_interface or "").lstrip("^="))
    unknown = [n for n in names if n and not any(i.startswith(n) for i in facts.interfaces)]
    if unknown:
        found = (
            f"NCCL_SOCKET_IFNAME={facts.named_interface} names no interface of {', '.join(facts.interfaces)}"
        )
        return judged("NCCL", False, found, f"export NCCL_SOCKET_IFNAME={_interface(facts)}, or unset it")
    network = ", ".join(facts.infiniband) or "sockets"
    return judged("NCCL", True, f"NCCL {facts.nccl}; between nodes over {network}", "")


def _interface(facts: Facts) -> str:
    return next((name for name in facts.interfaces if not name.startswith(("lo", "docker", "veth"))), "lo")


def _shared_memory(facts: Facts, needs: Needs) -> Check:
    need = shown(needs.shared_bytes, "byte")
    if facts.shared_bytes is None:
        return judged("shared memory", False, f"no {SHARED}", f"mount a tmpfs of {need} there")
    return judged(
        "shared memory",
        facts.shared_bytes >= needs.shared_bytes,
        f"{shown(facts.shared_bytes, 'byte')} free at {SHARED}, needed {need}",
        f"docker run --shm-size={-(-needs.shared_bytes // GIB):.0f}g; Kubernetes: an emptyDir (Memory) there",
    )


def _limits(facts: Facts, needs: Needs) -> Iterator[Check]:
    """ulimit of open files, locked memory and processes."""
    files, locked, processes = facts.open_files, facts.locked_bytes, facts.processes
    remedy = f"ulimit -n {OPEN_FILES} (docker run --ulimit nofile=65536, LimitNOFILE= of systemd)"
    fits = files is None or files >= OPEN_FILES
    yield judged("open files", fits, f"{_number(files)}, needed {OPEN_FILES:,}", remedy)
    remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept)"
    found = "unlimited" if locked is None else shown(locked, "byte")
    if facts.infiniband:
        yield judged("locked memory", locked is None, f"{found}; InfiniBand needs unlimited", remedy)
    else:
        yield judged("locked memory", True, f"{found}; only InfiniBand needs more, there is none", "")
    need = THREADS * needs.processes_per_gpu * max(1, needs.gpus or len(facts.gpus))
    remedy = f"ulimit -u {need} (docker run --pids-limit -1, TasksMax=infinity of systemd)"
    fits = processes is None or processes >= need
    yield judged("processes", fits, f"{_number(processes)}, needed {need:,} with threads", remedy)


def _number(limit: int | None) -> str:
    return "unlimited" if limit is None else f"{limit:,}"


def _compiler(facts: Facts, needs: Needs) -> Check:
    """DeepSpeed builds CPUAdam with the compiler and the CUDA of torch when it is first used."""
    if needs.host_adam is False:
        return not_checked("compiler", "the plan keeps optimizer states on the GPUs: CPUAdam is not built")
    if not facts.gpus or facts.torch_cuda is None:
        return not_checked("compiler", f"{NO_GPU if not facts.gpus else 'torch without CUDA'}: no CPUAdam")
    nvcc = facts.cuda_compiler or "not here"
    found = f"{facts.compiler or 'no C++ compiler'}, nvcc {nvcc}, torch's CUDA {facts.torch_cuda}"
    fits = facts.compiler is not None and facts.cuda_compiler == facts.torch_cuda
    remedy = f"apt install g++ and nvcc of CUDA {facts.torch_cuda}; torch's AdamW is several times slower"
    return judged("compiler", fits, found, remedy)


def _memory(facts: Facts, needs: Needs) -> Check:
    free = f"{shown(facts.free_bytes, 'byte')} free"
    if not facts.gpus or needs.host_bytes is None:
        why = NO_GPU if not facts.gpus else "no plan is given"
        return not_checked("host memory", f"{free}; {why}, so not compared with a plan")
    return judged(
        "host memory",
        facts.free_bytes >= needs.host_bytes,
        f"{free}, the plan's peak is {shown(needs.host_bytes, 'byte')} a node",
        "end other processes, raise the container's memory limit, or design without offload",
    )


def _disk(facts: Facts, needs: Needs) -> Check:
    free = f"{shown(facts.disk_bytes, 'byte')} free at {facts.disk}"
    if needs.disk_bytes is None:
        return not_checked("disk", f"{free}; no plan is given")
    return judged(
        "disk",
        facts.disk_bytes >= needs.disk_bytes,
        f"{free}, checkpoints need {shown(needs.disk_bytes, 'byte')}",
        "name a larger file system with --out, or keep fewer: checkpoints.keep in the settings",
    )


def _ports(facts: Facts) -> Check:
    return judged(
        "ports",
        facts.ports >= PORTS,
        f"{facts.ports:,} that the kernel hands out, needed {PORTS:,}",
        'sysctl -w net.ipv4.ip_local_port_range="32768 60999"',
    )
