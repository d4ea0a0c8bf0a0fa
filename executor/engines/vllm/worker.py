"""What every vLLM worker process adds for RLHF: it receives weights, stages them and counts its memory.

vLLM mixes this class into its worker (`worker_extension_cls`); methods are called through `collective_rpc`
and start with `rlhf_` because they share a namespace with vLLM's own. A person's error is returned, not
raised: the multiprocess executor would turn it into text.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import psutil
import torch

from executor.engines import device
from executor.engines.memory import Meter
from executor.engines.protocols import Link
from executor.engines.vllm import api as vllm_api
from executor.machine.facts import SHARED
from executor.samples import Transfer
from executor.weight_transfer import shared_memory
from executor.weight_transfer.channel import Receiver
from executor.weight_transfer.files import FlatFile, read_flat
from executor.weight_transfer.packing import Named
from rlhfsim.errors import RlhfsimError
from rlhfsim.units import GIB

Result = TypeVar("Result")
if not device.available():
    vllm_api.wait_asleep()


class Staging:
    """A receive into host memory that goes on in a thread: one copy of the weights a node of a replica.

    All its workers are sent everything; each keeps every n-th tensor in a file that the others there map.
    """

    def __init__(
        self, receiver: Receiver, version: int, rank: int, ranks: int, device: str, size: int
    ) -> None:
        self._receiver, self._rank, self._ranks = receiver, rank, ranks
        self._size = size
        """Bytes of the replica's weights."""
        self._result: Transfer | RlhfsimError
        self._seen = 0
        first = receiver.index - rank
        folder = shared_memory.prefix(receiver.spec.folder)
        self._tables = [SHARED / f"{folder}staged-{first}-{version}-{i}.json" for i in range(ranks)]
        self.thread = threading.Thread(
            target=self._run, args=(version, device), name="stage-weights", daemon=True
        )
        self.thread.start()

    def _run(self, version: int, device: str) -> None:
        self._result = _or_error(partial(self._receive, version, device))

    def _receive(self, version: int, device: str) -> Transfer:
        if device.startswith("cuda"):
            torch.accelerator.set_device_index(torch.device(device))  # of this thread
        check_room(self._size)
        mine = self._tables[self._rank]
        file = FlatFile(mine.with_suffix(".weights"))
        transfer = self._receiver.receive(version, partial(self._keep, file))
        mine.write_text(json.dumps(file.finish()), encoding="utf-8")
        return transfer

    def _keep(self, file: FlatFile, tensors: Sequence[Named]) -> None:
        file.add([named for i, named in enumerate(tensors, self._seen) if i % self._ranks == self._rank])
        self._seen += len(tensors)

    def load(self, reload: vllm_api.Reload) -> Transfer:
        """Load what all workers of the replica kept."""
        self.thread.join()
        if isinstance(self._result, RlhfsimError):
            raise self._result
        start = time.monotonic()
        for table in self._tables:
            for tensors in read_flat(json.loads(table.read_text(encoding="utf-8"))):
                reload.load(tensors)
        reload.finish()
        return replace(self._result, seconds=self._result.seconds + time.monotonic() - start)

    def forget(self) -> None:
        """Remove this worker's share, once all have loaded."""
        mine = self._tables[self._rank]
        shared_memory.remove([mine, mine.with_suffix(".weights")])


def check_room(size: int) -> None:
    """Refuse to stage more than the host has room for, measured now.

    Raises:
        RlhfsimError: with need and room.
    """
    room = min(psutil.virtual_memory().available, shutil.disk_usage(SHARED).free)
    if size > room:
        raise RlhfsimError(
            "no-room-to-stage",
            f"a replica's copy of the weights takes {size / GIB:.1f} GiB of host memory, "
            f"{SHARED} and the host have {room / GIB:.1f} GiB left",
            help="set overlapped_sync: false, or give /dev/shm more memory",
        )


class WeightReceiver:
    """Mixed into vLLM's worker."""

    rlhf_receiver: Receiver | None
    rlhf_staging: Staging | None
    rlhf_meter: Meter
    rlhf_whole: bool
    """False between the first and the last tensor of a load."""

    def rlhf_prepare(self) -> None:
        """Called once after start, when all workers have mapped what they share."""
        self.rlhf_receiver, self.rlhf_staging, self.rlhf_whole = None, None, True
        self.rlhf_meter = Meter()
        vllm_api.use_full_logprobs(self)
        vllm_api.unlink_shared_memory()

    def rlhf_connect(self, links: Sequence[Link]) -> None:
        """This worker receives over the link of its rank from now on."""
        rank: int = self.rank  # type: ignore[attr-defined]  # of vLLM's worker
        self.rlhf_close()
        channel, receiver = links[rank]
        route: Any = None
        if channel.native:
            from executor.engines.vllm.transfer import NativeReceiver

            route = partial(NativeReceiver, self)
        self.rlhf_receiver = Receiver(channel, receiver, route)

    def rlhf_receive(self, version: int) -> Transfer | RlhfsimError:
        """Load weights as they arrive."""
        return _or_error(partial(self._rlhf_receive, version))

    def _rlhf_receive(self, version: int) -> Transfer:
        reload = self._rlhf_reload()
        transfer = self._rlhf_connected().receive(version, reload.load)
        reload.finish()
        return transfer

    def _rlhf_connected(self) -> Receiver:
        assert self.rlhf_receiver is not None, "connect first"
        return self.rlhf_receiver

    def _rlhf_reload(self) -> vllm_api.Reload:
        return vllm_api.Reload(self, whole=not self._rlhf_connected().spec.adapters_only)

    def rlhf_intact(self) -> bool:
        """Whether the model holds one whole set of weights."""
        return self.rlhf_whole

    def rlhf_stage(self, version: int) -> None:
        """Start to receive into host memory."""
        worker: Any = self
        ranks = worker.parallel_config.local_world_size  # share the memory of a node
        size = ranks * sum(p.nbytes for p in worker.model_runner.get_model().parameters())
        self.rlhf_staging = Staging(
            self._rlhf_connected(), version, worker.rank % ranks, ranks, str(worker.device), size
        )

    def rlhf_staged(self) -> bool:
        """Whether the stage ended, well or not."""
        return self.rlhf_staging is not None and not self.rlhf_staging.thread.is_alive()

    def rlhf_commit(self) -> Transfer | RlhfsimError:
        """Load what was staged, by all workers of the replica; its time is added to the transfer's."""
        assert self.rlhf_staging is not None, "commit without stage"
        return _or_error(partial(self.rlhf_staging.load, self._rlhf_reload()))

    def rlhf_unstage(self) -> None:
        """Give the host memory of the stage back."""
        if self.rlhf_staging is not None:
            self.rlhf_staging.forget()
        self.rlhf_staging = None

    def rlhf_memory(self) -> dict[str, float]:
        """Bytes of this worker."""
        kv = float(sum(tensor.nbytes for tensor in vllm_api.kv_tensors(self)))
        return self.rlhf_meter.read() | {"kv": kv}

    def rlhf_forget_peaks(self) -> None:
        """A call begins."""
        self.rlhf_meter.start()

    def rlhf_close(self) -> None:
        """Let go of the channel."""
        if self.rlhf_receiver is not None:
            self.rlhf_receiver.close()
        self.rlhf_receiver = None


def _or_error(call: Callable[[], Result]) -> Result | RlhfsimError:
    """The call's result, or its error as a value that travels between processes."""
    try:
        return call()
    except RlhfsimError as error:
        return error
    except Exception as error:
        return RlhfsimError("weight-sync-failed", f"{type(error).__name__}: {error}")
