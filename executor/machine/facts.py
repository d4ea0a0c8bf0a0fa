"""Facts of this node: read from the kernel, from files and from three commands that have a time limit.

`nvidia-smi` tells of the driver, the GPUs and the links between them.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from rlhfsim.frozen import frozen
from rlhfsim.provenance import installed_version
from rlhfsim.units import KIB, MIB

COMMAND_S = 6.0
"""Most that a command may take; without persistence mode nvidia-smi needs about a second a GPU."""
SHARED = Path("/dev/shm")
ABSENT, SILENT = "no nvidia-smi here", "nvidia-smi is here and does not answer"

QUERY, TOPOLOGY = ("nvidia-smi", "-q", "-x"), ("nvidia-smi", "topo", "-m")
LEAST_DRIVER: Mapping[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""Oldest Linux driver by the major version of CUDA (NVIDIA, CUDA Compatibility: minor versions)."""


@frozen
class Gpu:
    """One GPU as the driver shows it."""

    index: int
    name: str
    uuid: str
    memory_bytes: float
    used_bytes: float
    mig: bool
    """It is cut into instances, between which neither NCCL nor CUDA IPC works."""
    fabric: str
    """State of its NVSwitch fabric: `Completed`, `In Progress`, or `N/A` where it has none."""


@frozen
class Facts:
    """One node; None: it could not be read, or there is no limit."""

    host: str
    torch: str | None
    """Version of torch; None: not installed."""
    torch_cuda: str | None
    """CUDA that torch was built for; None: for none."""
    nccl: str | None
    """Version of the NCCL that is installed with torch."""
    driver: str | None
    gpus: tuple[Gpu, ...]
    """Those that this process may use."""
    no_gpus: str
    """Why driver and GPUs are not known."""
    links: int | None
    """NVLinks between the two GPUs that have the fewest."""
    shared_bytes: float | None
    """Free at /dev/shm."""
    open_files: int | None
    locked_bytes: int | None
    processes: int | None
    free_bytes: float
    """Host memory that is free, within the limit of the container."""
    disk: str
    disk_bytes: float
    """Free where the run's folder is going to be."""
    compiler: str | None
    cuda_compiler: str | None
    """CUDA of nvcc."""
    infiniband: tuple[str, ...]
    """Devices of InfiniBand or RoCE."""
    interfaces: tuple[str, ...]
    """Network interfaces."""
    named_interface: str | None
    """NCCL_SOCKET_IFNAME."""
    ports: int
    """Ports that the kernel hands out."""


def read(out: Path, visible: str | None) -> Facts:
    """Facts of this node; `out`: the run's folder, `visible`: CUDA_VISIBLE_DEVICES, None: all GPUs count."""
    nvcc = shutil.which("nvcc") or f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin/nvcc"
    with ThreadPoolExecutor() as pool:
        query, topology, nvcc_says = pool.map(_said, (QUERY, TOPOLOGY, (nvcc, "--version")))
    driver, gpus, why = _gpus(query, visible)
    release = re.search(r"release ([\d.]+)", nvcc_says or "")
    network = Path("/sys/class")
    folder = next(path for path in (out.absolute(), *out.absolute().parents) if path.is_dir())
    return Facts(
        host=socket.gethostname(),
        torch=installed_version("torch", missing="") or None,
        torch_cuda=_torch_cuda(),
        nccl=installed_version("nvidia-nccl-cu13", "nvidia-nccl-cu12", missing="") or None,
        driver=driver,
        gpus=gpus,
        no_gpus=why,
        links=fewest_links(topology or ""),
        shared_bytes=float(shutil.disk_usage(SHARED).free) if SHARED.is_dir() else None,
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        processes=_processes(),
        free_bytes=_free_bytes(),
        disk=str(folder),
        disk_bytes=float(shutil.disk_usage(folder).free),
        compiler=next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None),
        cuda_compiler=release[1] if release else None,
        infiniband=_names(network / "infiniband"),
        interfaces=_names(network / "net"),
        named_interface=os.environ.get("NCCL_SOCKET_IFNAME"),
        ports=_ports(),
    )


def gpu_names() -> list[str]:
    """Names of the GPUs of this node that this process may use; none where no driver answers."""
    return [gpu.name for gpu in _gpus(_said(QUERY), os.environ.get("CUDA_VISIBLE_DEVICES"))[1]]


def libraries(*names: str) -> dict[str, str]:
    """Versions of those libraries that are installed, vLLM also under its name for CPUs alone."""
    return {name: found for name in names if (found := installed_version(name, f"{name}-cpu", missing=""))}


def memory(key: str) -> float:
    """Bytes of host memory by a key of /proc/meminfo; 0 where it has none."""
    return _stated("/proc/meminfo", key) * KIB


def _stated(file: str, key: str) -> float:
    """The number behind a key in a file of the kernel; 0 where it has none."""
    match = re.search(rf"^{key}:?\s*(\d+)", Path(file).read_text(), re.MULTILINE)
    return float(match[1]) if match else 0.0


def _said(command: tuple[str, ...]) -> str | None:
    """What a command prints; None: it is not there, fails, or takes too long."""
    with suppress(OSError, subprocess.TimeoutExpired):
        ran = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        return ran.stdout if ran.returncode == 0 else None
    return None


def _gpus(query: str | None, visible: str | None) -> tuple[str | None, tuple[Gpu, ...], str]:
    """Driver, GPUs that may be used, and why there are none."""
    try:
        driver, gpus = parse_query(query or "")
    except ElementTree.ParseError:
        return None, (), SILENT if shutil.which(QUERY[0]) else ABSENT
    names = None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    used = tuple(
        gpu
        for gpu in gpus
        if names is None or any(str(gpu.index) == n or gpu.uuid.startswith(n) for n in names)
    )
    return driver, used, "" if used else f"{len(gpus)} GPUs, CUDA_VISIBLE_DEVICES={visible!r} shows none"


def _torch_cuda() -> str | None:
    """CUDA of the installed torch, without importing it: that takes long on a shared file system."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    text = file.read_text() if file and file.is_file() else ""
    match = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else None


def _limit(which: int) -> int | None:
    """The hard limit, to which a process raises its own."""
    limit = resource.getrlimit(which)[1]
    return None if limit == resource.RLIM_INFINITY else limit


def _processes() -> int | None:
    """The user's or the container's limit, whichever is lower."""
    limits = _limit(resource.RLIMIT_NPROC), _group("pids.max")
    return min((limit for limit in limits if limit is not None), default=None)


def _group(name: str) -> int | None:
    """A number of the container's control group."""
    with suppress(OSError, ValueError):
        return int(Path("/sys/fs/cgroup", name).read_text())
    return None


def _free_bytes() -> float:
    free = memory("MemAvailable")
    most, used = _group("memory.max"), _group("memory.current")
    if most is None or used is None:
        return free
    return min(free, float(most - used + _cached()))


def _cached() -> int:
    """Bytes of files that the container's kernel would drop for memory."""
    with suppress(OSError):
        return int(_stated("/sys/fs/cgroup/memory.stat", "inactive_file"))
    return 0


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.glob("*")))


def _ports() -> int:
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return int(last) - int(first) + 1


def parse_query(text: str) -> tuple[str, tuple[Gpu, ...]]:
    """Driver version and GPUs from the XML of `nvidia-smi -q -x`.

    Raises:
        ElementTree.ParseError: it is no such XML.
    """
    root = ElementTree.fromstring(text)
    gpus = [
        Gpu(
            index=index,
            name=gpu.findtext("product_name", "unknown"),
            uuid=gpu.findtext("uuid", ""),
            memory_bytes=_bytes(gpu.findtext("fb_memory_usage/total", "")),
            used_bytes=_bytes(gpu.findtext("fb_memory_usage/used", "")),
            mig=gpu.findtext("mig_mode/current_mig") == "Enabled",
            fabric=gpu.findtext("fabric/state", "N/A"),
        )
        for index, gpu in enumerate(root.iter("gpu"))
    ]
    return root.findtext("driver_version", ""), tuple(gpus)


def _bytes(text: str) -> float:
    match = re.match(r"(\d+) MiB", text)
    return float(match[1]) * MIB if match else 0.0


def fewest_links(text: str) -> int | None:
    """NVLinks between the two GPUs that have the fewest, from `nvidia-smi topo -m`; None: one GPU."""
    rows = [re.sub(r"\x1b\[\d*m", "", line).split() for line in text.splitlines()]
    head = next((row for row in rows if row[:1] == ["GPU0"] and row[1:2] != ["X"]), [])
    count = sum(name.startswith("GPU") and name[3:].isdigit() for name in head)
    links = [
        int(cell[2:]) if re.fullmatch(r"NV\d+", cell) else 0
        for row in rows
        if row and row[0] in head[:count] and row is not head
        for cell in row[1 : 1 + count]
        if cell != "X"
    ]
    return min(links, default=None)


def version(text: str) -> tuple[int, ...]:
    """`580.65.06` as numbers that compare."""
    return tuple(int(part) for part in re.findall(r"\d+", text))
