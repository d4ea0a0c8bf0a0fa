"""A CUDA device for processes of a CPU build of torch: what `device.cpp` is, built, loaded and shown to torch.cuda.

`python device.py PROGRAM ARGUMENT...` runs a program on it. `torch.device("cuda")` is then real: its memory is
REHEARSAL_BYTES of host memory, first fit, poisoned with NaN while nobody owns it; operations are the CPU's; a
copy between pinned memory and the device waits in its stream until that stream, or an event in it, is waited for
or the next kernel of the stream runs; NCCL's groups are gloo's on the same bytes. What it does not have: speed,
CUDA graphs, CUDA IPC, vLLM's kernels, kernels that run late (only copies do).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import runpy
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")
NAME, CAPABILITY = "Rehearsal GPU", (9, 0)
KEPT: list[Any] = []
"""Registered operators are there as long as their library."""


def _torch() -> Path:
    spec = find_spec("torch")  # found, not imported: the device is loaded before
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def build() -> Path:
    """The compiled device: about ten seconds of CPU once, kept by its source and the version of torch."""
    key = hashlib.sha256(SOURCE.read_bytes() + version("torch").encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"rlhfsim-rehearsal-{os.getuid()}-{key}.so"
    if not built.exists():
        fresh, torch = built.with_suffix(f".{os.getpid()}"), _torch()
        include = [f"-I{torch / 'include' / part}" for part in ("", "torch/csrc/api/include")]
        libraries = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
        command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", *include, str(SOURCE), "-o", str(fresh)]
        subprocess.run([*command, *libraries], check=True)
        fresh.replace(built)
    return built


def install() -> None:
    """Make this process compute on the device; torch must not be imported yet."""
    assert "torch" not in sys.modules, "torch looks for CUDA once, when it is imported"
    load()
    import torch

    show(torch)


def load() -> None:
    """The compiled device, before torch is imported."""
    path = build()
    ctypes.CDLL(str(_torch() / "lib" / "libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(path))


def show(torch: Any) -> None:
    """Everything that torch's Python must know of it."""
    torch.ops.rehearsal.start()
    _show(torch)
    _storages(torch)
    _handles(torch)
    _groups(torch)
    _integers(torch)
    _attention()


def _show(torch: Any) -> None:
    """What torch.cuda says of the device; the generic interface knows it already."""
    cuda, here, ops = torch.cuda, torch.accelerator, torch.ops.rehearsal
    memory = torch.accelerator.memory

    class Stream(torch.Stream):  # type: ignore[misc]
        def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Any:
            return (
                super().__new__(cls, **given)
                if given
                else super().__new__(cls, device=device or "cuda", priority=priority)
            )

    class Event(torch.Event):  # type: ignore[misc]
        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
        ) -> Any:
            return super().__new__(cls, device="cuda", enable_timing=enable_timing)

    @contextmanager
    def in_stream(stream: Any) -> Any:
        if stream is None:
            yield
            return
        before = here.current_stream()
        here.set_stream(stream)
        try:
            yield
        finally:
            here.set_stream(before)

    def properties(of: Any = None) -> Any:
        total = memory.get_memory_info()[1]
        major, minor = CAPABILITY
        index = of if isinstance(of, int) else torch.device(of or "cuda").index
        return SimpleNamespace(
            name=NAME,
            major=major,
            minor=minor,
            total_memory=total,
            multi_processor_count=1,
            uuid=_uuid(here.current_device_index() if index is None else index),
        )

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": _count,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "current_device": here.current_device_index,
        "set_device": lambda device: here.set_device_index(
            torch.device(device) if isinstance(device, str) else device
        ),
        "synchronize": here.synchronize,
        "Stream": Stream,
        "Event": Event,
        "current_stream": here.current_stream,
        "default_stream": lambda _=None: here.current_stream(),
        "set_stream": here.set_stream,
        "stream": in_stream,
        "is_current_stream_capturing": lambda: False,
        "get_device_properties": properties,
        "get_device_name": lambda _=None: NAME,
        "get_device_capability": lambda _=None: CAPABILITY,
        "is_bf16_supported": lambda *_: True,
        "mem_get_info": memory.get_memory_info,
        "empty_cache": memory.empty_cache,
        "ipc_collect": ops.collect,
        "get_rng_state": lambda _=None: ops.random_state(),
        "set_rng_state": lambda state, _=None: ops.put_random_state(state),
        "manual_seed": ops.seed,
        "manual_seed_all": ops.seed,
        "_is_in_bad_fork": lambda: False,
        "_exchange_device": torch._C._accelerator_exchangeDevice,
        "_maybe_exchange_device": torch._C._accelerator_maybeExchangeDevice,
    }
    counts = (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "memory_stats",
    )
    for name, answer in (answers | {name: getattr(memory, name) for name in counts}).items():
        setattr(cuda, name, answer)
    cuda.nvtx = None
    cuda.reset_peak_memory_stats = cuda.reset_max_memory_allocated = memory.reset_peak_memory_stats


def _count() -> int:
    """As `device.cpp` counts."""
    visible = len((os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(","))
    return int(os.environ.get("REHEARSAL_DEVICES", visible))


def _uuid(index: int) -> str:
    """Of a GPU that this process sees, the same in every process that sees it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(index + 1)))
    return f"GPU-{visible.split(',')[index]}"


def _storages(torch: Any) -> None:
    """A CPU build neither resizes storages of a GPU nor makes any."""
    resize, to = torch.UntypedStorage.resize_, torch.UntypedStorage.to

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type != "cuda":
            return resize(storage, size)
        torch.ops.rehearsal.resize_storage(
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), size
        )
        return storage

    def to_(storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
        if torch.device(device).type != "cuda" or storage.device.type == "cuda":
            return to(storage, device=device, non_blocking=non_blocking)
        made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
        return made.copy_(storage, non_blocking)

    torch.UntypedStorage.resize_, torch.UntypedStorage.to = resize_, to_


def _handles(torch: Any) -> None:
    """Storages cross processes by handles, counted as torch counts them: the owner's memory waits for readers."""
    storage, ops = torch.UntypedStorage, torch.ops.rehearsal

    def share(self: Any) -> tuple[Any, ...]:
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        handle = ops.exported(whole).encode()
        return (self.device.index, handle, self.nbytes(), 0, handle, 0, b"", False)

    def open_shared(_: Any, device: int, handle: bytes, size: int, *__: Any) -> Any:
        with torch.device("cuda", device):
            return ops.opened(handle.decode(), size).untyped_storage()

    def release(_: Any, handle: bytes, __: int, **___: Any) -> None:
        ops.released(handle.decode())

    storage._share_cuda_ = share
    storage._new_shared_cuda = classmethod(open_shared)
    storage._release_ipc_counter_cuda = classmethod(release)


def _integers(torch: Any) -> None:
    """Histograms of integers, which CUDA has and the CPU has not: by floats."""
    histogram = torch.histc
    torch.histc = lambda values, *rest, **given: histogram(values.float(), *rest, **given).to(values.dtype)


def _attention() -> None:
    """CUDA's flash kernels; before, everything that torch.library looks for must be there."""
    import flash

    KEPT.append(flash.register())


COLLECTIVES = (
    *("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce"),
    *("reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "gather"),
)


def _groups(torch: Any) -> None:
    """Groups of NCCL are gloo's, whose tensors `device.cpp` hands over as host memory."""
    if not torch.distributed.is_available():
        return
    c10d: Any = torch.distributed.distributed_c10d
    start, new = c10d._new_process_group_helper, c10d.init_process_group

    def init_process_group(backend: Any = None, *rest: Any, device_id: Any = None, **given: Any) -> Any:
        return new("cpu:gloo,cuda:gloo" if backend == "nccl" else backend, *rest, **given)

    def helper(size: Any, rank: Any, ranks: Any, backend: Any, *rest: Any, **given: Any) -> Any:
        both = "cpu:gloo,cuda:gloo" if str(backend) in ("nccl", "gloo") else backend
        group, *others = start(size, rank, ranks, both, *rest, **given)
        if str(backend) == "gloo":
            on_host.append(group)
        return group, *others

    on_host: list[Any] = []
    c10d.init_process_group = torch.distributed.init_process_group = init_process_group
    c10d._new_process_group_helper = helper
    for name in COLLECTIVES:
        setattr(torch.distributed, name, _on_the_device(torch, getattr(c10d, name), on_host))


def _on_the_device(torch: Any, call: Any, on_host: list[Any]) -> Any:
    """A collective that takes tensors of the device alone, as NCCL does, but in groups `on_host`."""

    @functools.wraps(call)
    def checked(*args: Any, **given: Any) -> Any:
        values = [*args, *given.values()]
        lists = [value if isinstance(value, list | tuple) else [value] for value in values]
        host = any(
            isinstance(one, torch.Tensor) and one.device.type == "cpu" for each in lists for one in each
        )
        ours = torch.distributed.get_backend() != "gloo" and not any(value in on_host for value in values)
        if host and ours:
            raise RuntimeError("No backend type associated with device type cpu")
        return call(*args, **given)

    return checked


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
