"""What every vLLM worker process adds for RLHF: it receives weights, stages them and counts its memory.

vLLM mixes this class into its worker (`worker_extension_cls`); methods are called through `collective_rpc`
and start with `rlhf_` because they share a namespace with vLLM's own. A person's error is returned, not
raised: the multiprocess executor would turn it into text.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from executor.engines.protocols import ChannelSpec
from executor.engines.vllm import api as vllm_api
from executor.samples import Transfer
from executor.weight_transfer.channel import Receiver, to_host
from rlhfsim.errors import RlhfsimError

Result = TypeVar("Result")


@dataclass(slots=True)
class Staging:
    """A receive into host memory that goes on in a thread."""

    receiver: Receiver
    version: int
    thread: threading.Thread | None = None
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    error: RlhfsimError | None = None


class WeightReceiver:
    """Mixed into vLLM's worker."""

    rlhf_receivers: dict[str, Receiver]
    rlhf_staging: Staging | None
    rlhf_whole: bool
    """False between the first and the last tensor of a load."""

    def rlhf_prepare(self) -> None:
        """Called once after start, when all workers have mapped what they share."""
        self.rlhf_receivers, self.rlhf_staging, self.rlhf_whole = {}, None, True
        vllm_api.use_full_logprobs(self)
        vllm_api.unlink_shared_memory()

    def rlhf_connect(self, channel: ChannelSpec, first_receiver: int) -> None:
        """This worker becomes receiver first_receiver + its rank."""
        rank: int = self.rank  # type: ignore[attr-defined]  # of vLLM's worker
        previous = self.rlhf_receivers.pop(channel.name, None)
        if previous is not None:
            previous.close()
        self.rlhf_receivers[channel.name] = Receiver(channel, first_receiver + rank)

    def rlhf_receive(self, channel: str, version: int) -> Transfer | RlhfsimError:
        """Load weights as they arrive."""
        receiver = self.rlhf_receivers[channel]

        def load() -> Transfer:
            whole = not receiver.spec.adapters_only
            vllm_api.load_weights(self, receiver.receive(version), whole=whole)
            assert receiver.transfer is not None
            return receiver.transfer

        return _told(load)

    def rlhf_intact(self) -> bool:
        """Whether the model holds one whole set of weights."""
        return self.rlhf_whole

    def rlhf_stage(self, channel: str, version: int) -> None:
        """Start to receive into host memory."""
        staging = Staging(self.rlhf_receivers[channel], version)
        device = str(self.device)  # type: ignore[attr-defined]
        staging.thread = threading.Thread(
            target=_stage, args=(staging, device), name="stage-weights", daemon=True
        )
        self.rlhf_staging = staging
        staging.thread.start()

    def rlhf_staged(self) -> bool:
        """Whether the stage ended, well or not."""
        staging = self.rlhf_staging
        return staging is not None and staging.thread is not None and not staging.thread.is_alive()

    def rlhf_commit(self) -> Transfer | RlhfsimError:
        """Load what was staged; its time is added to the transfer's."""
        staging, self.rlhf_staging = self.rlhf_staging, None
        assert staging is not None, "commit without stage"
        assert staging.thread is not None
        staging.thread.join()
        if staging.error is not None:
            return staging.error

        def load() -> Transfer:
            transfer = staging.receiver.transfer
            assert transfer is not None
            start = time.monotonic()
            whole = not staging.receiver.spec.adapters_only
            vllm_api.load_weights(self, iter(staging.tensors), whole=whole)
            return replace(transfer, seconds=transfer.seconds + time.monotonic() - start)

        return _told(load)

    def rlhf_memory(self) -> dict[str, float]:
        """Bytes of this worker now."""
        kv = float(sum(tensor.numel() * tensor.element_size() for tensor in vllm_api.kv_tensors(self)))
        host = float(resident_bytes())
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            return {"allocated": float(total - free), "host": host, "kv": kv}
        return {"allocated": host, "host": host, "kv": kv}

    def rlhf_close(self) -> None:
        """Let go of all channels."""
        for receiver in self.rlhf_receivers.values():
            receiver.close()
        self.rlhf_receivers = {}


def _stage(staging: Staging, device: str) -> None:
    def receive() -> None:
        if device.startswith("cuda"):
            torch.cuda.set_device(device)  # of this thread
        staging.tensors = to_host(staging.receiver.receive(staging.version))

    result = _told(receive)
    staging.error = result if isinstance(result, RlhfsimError) else None


def _told(call: Callable[[], Result]) -> Result | RlhfsimError:
    """The call's result, or its error as a value that travels between processes."""
    try:
        return call()
    except RlhfsimError as error:
        return error
    except Exception as error:
        return RlhfsimError("weight-sync-failed", f"{type(error).__name__}: {error}")


def resident_bytes() -> int:
    """Resident set of this process."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
