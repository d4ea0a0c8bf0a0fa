"""What every vLLM worker process adds for RLHF: it receives weights, stages them and counts its memory.

vLLM mixes this class into its worker (`worker_extension_cls`); methods are called through `collective_rpc`
and start with `rlhf_` because they share a namespace with vLLM's own. A person's error is returned, not
raised: the multiprocess executor would turn it into text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from executor.engines.memory import Meter
from executor.engines.protocols import ChannelSpec
from executor.engines.vllm import api as vllm_api
from executor.samples import Transfer
from executor.weight_transfer.channel import Receiver, to_host
from executor.weight_transfer.packing import Named
from rlhfsim.errors import RlhfsimError

Result = TypeVar("Result")


@dataclass(slots=True)
class Staging:
    """A receive into host memory that goes on in a thread."""

    receiver: Receiver
    thread: threading.Thread | None = None
    weights: list[Named] | RlhfsimError = field(default_factory=list)


class WeightReceiver:
    """Mixed into vLLM's worker."""

    rlhf_receivers: dict[str, Receiver]
    rlhf_staging: Staging | None
    rlhf_meter: Meter
    rlhf_whole: bool
    """False between the first and the last tensor of a load."""

    def rlhf_prepare(self) -> None:
        """Called once after start, when all workers have mapped what they share."""
        self.rlhf_receivers, self.rlhf_staging, self.rlhf_whole = {}, None, True
        self.rlhf_meter = Meter()
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
        return _load(self, receiver, receiver.receive(version))

    def rlhf_intact(self) -> bool:
        """Whether the model holds one whole set of weights."""
        return self.rlhf_whole

    def rlhf_stage(self, channel: str, version: int) -> None:
        """Start to receive into host memory."""
        staging = self.rlhf_staging = Staging(self.rlhf_receivers[channel])
        device = str(self.device)  # type: ignore[attr-defined]

        def receive() -> list[Named]:
            if device.startswith("cuda"):
                torch.cuda.set_device(device)  # of this thread
            return to_host(staging.receiver.receive(version))

        def run() -> None:
            staging.weights = _or_error(receive)

        staging.thread = threading.Thread(target=run, name="stage-weights", daemon=True)
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
        if isinstance(staging.weights, RlhfsimError):
            return staging.weights
        start = time.monotonic()
        transfer = _load(self, staging.receiver, iter(staging.weights))
        if isinstance(transfer, RlhfsimError):
            return transfer
        return replace(transfer, seconds=transfer.seconds + time.monotonic() - start)

    def rlhf_memory(self) -> dict[str, float]:
        """Bytes of this worker."""
        kv = float(sum(tensor.numel() * tensor.element_size() for tensor in vllm_api.kv_tensors(self)))
        return self.rlhf_meter.read() | {"kv": kv}

    def rlhf_forget_peaks(self) -> None:
        """A call begins."""
        self.rlhf_meter.start()

    def rlhf_close(self) -> None:
        """Let go of all channels."""
        for receiver in self.rlhf_receivers.values():
            receiver.close()
        self.rlhf_receivers = {}


def _load(worker: WeightReceiver, receiver: Receiver, weights: Iterator[Named]) -> Transfer | RlhfsimError:
    def load() -> Transfer:
        vllm_api.load_weights(worker, weights, whole=not receiver.spec.adapters_only)
        assert receiver.transfer is not None
        return receiver.transfer

    return _or_error(load)


def _or_error(call: Callable[[], Result]) -> Result | RlhfsimError:
    """The call's result, or its error as a value that travels between processes."""
    try:
        return call()
    except RlhfsimError as error:
        return error
    except Exception as error:
        return RlhfsimError("weight-sync-failed", f"{type(error).__name__}: {error}")
