"""Weights between GPUs by vLLM's own transfer engines (CUDA IPC, NCCL): both ends of a channel.

vLLM packs and moves the bytes. The calls that its trainer side makes to the rollout travel through the store
of the channel, so each of them has a time limit and a failure on either side reaches the other. What is sent
and what arrives is counted into the checksum on the device.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import (
    ParamMeta,
    WeightSource,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from executor.engines import device
from executor.engines.protocols import ChannelSpec
from executor.samples import Transfer
from executor.weight_transfer.control import Control
from executor.weight_transfer.packing import GatheredWeights, Load
from rlhfsim.errors import RlhfsimError

INIT, UPDATE, FINISH = "init_weight_transfer_engine", "update_weights", "finish_weight_update"
LOOK_S = 1.0
"""Between two looks at whether the other side failed, while vLLM's collectives run."""


class BucketSource(WeightSource):
    """What vLLM reads of the trainer: full weights by name; a collective of its ranks."""

    weights: GatheredWeights
    _metadata: list[ParamMeta] | None = None

    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes and shapes of all weights; the first call gathers them once."""
        if self._metadata is None:
            self._metadata = [
                ParamMeta(name, tensor.dtype, tuple(tensor.shape))
                for bucket in self.weights
                for name, tensor in bucket
            ]
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self.weights:
            # all ranks have gathered before any of it is sent: a gather that waits for a rank inside of the
            # other group would run into the watchdog (trl#7103)
            if dist.is_initialized():
                dist.barrier()
            for name, tensor in bucket:
                # vLLM packs on streams of its own; the checksum waited for the gather's
                device.keep_for_stream(tensor)
                yield name, tensor

    def buffer(self, bucket: int) -> int:
        """Bytes of a buffer: `bucket`, or of all tensors where they are fewer; of the largest at least."""
        sizes = [m.dtype.itemsize * torch.Size(m.shape).numel() for m in self.metadata()]
        return max([0, min(bucket, sum(sizes)), *sizes])


@dataclass
class StoreClient:
    """vLLM's calls to the rollout, each answered by every receiver of the channel."""

    spec: ChannelSpec
    control: Control
    prefix: str = ""
    calls: int = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """How the bytes will come."""
        self._call(INIT, init_info)

    def start_weight_update(self) -> None:
        """Nothing: receivers begin with the first tensor."""

    def update_weights(self, update_info: Any) -> None:
        """Some weights; returns when they are loaded."""
        self._call(UPDATE, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Nothing follows."""
        self._call(FINISH, None)

    def _call(self, method: str, info: Any) -> None:
        key = f"{self.prefix}call/{self.calls}"
        self.calls += 1
        self.control.put(key, [method, info])
        answers = [f"{key}/{i}" for i in range(self.spec.receivers)]
        self.control.wait(answers, f"the receivers to answer {method}")
        self.control.forget([key, *answers])


class NativeSender:
    """The sending end at one rank of the trainer; all ranks take part in what vLLM does (`Follower`)."""

    def __init__(self, spec: ChannelSpec, control: Control | None, rank: int = 0) -> None:
        self.spec, self.control = spec, control
        self.rank = rank
        self.source = BucketSource()
        self.client: Any = StoreClient(spec, control) if control is not None else None
        self.engine: Any = None

    def send(self, prefix: str, version: int, weights: GatheredWeights) -> int:
        """Move everything; the number of calls that it took."""
        self.source.weights = weights
        if self.client is None:
            self._run()
            return 0
        self.client.prefix, self.client.calls = prefix, 0
        self._within_limit()
        return int(self.client.calls)

    def _within_limit(self) -> None:
        """Run in a thread that can be given up: NCCL's calls have no time limit (trl#6797)."""
        assert self.control is not None
        failed: list[BaseException] = []
        own = device.own()

        def run() -> None:
            try:
                if own.type != "cpu":
                    torch.accelerator.set_device_index(own)
                self._run()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, name="send-weights", daemon=True)
        thread.start()
        deadline = time.monotonic() + self.spec.timeout_s
        while thread.is_alive():
            thread.join(LOOK_S)
            if failed:
                break
            if (reported := self.control.failure()) is not None:
                raise reported
            if time.monotonic() > deadline and thread.is_alive():
                raise RlhfsimError(
                    "weight-sync-timeout",
                    f"channel {self.spec.name!r} ({self.spec.native}): not done in {self.spec.timeout_s:g} s",
                    help="check that trainer and rollout reach each other, or raise limits.sync_s",
                )
        if failed:
            raise failed[0]

    @torch.no_grad()
    def _run(self) -> None:
        if self.engine is None:
            self.engine = WeightTransferTrainerFactory.trainer_init(
                self._init_info(), client=self.client, source=self.source
            )
        self.engine.send_weights()

    def _init_info(self) -> IPCTrainerInitInfo | NCCLTrainerInitInfo:
        """A sending rank is the first one of its channel; a packed buffer holds the largest tensor."""
        size = self.source.buffer(self.spec.bucket_bytes)
        if self.spec.native == "ipc":
            return IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=size, rank=self.rank)
        with socket.socket() as free:
            free.bind((self.spec.host, 0))
            port = int(free.getsockname()[1])
        return NCCLTrainerInitInfo(
            master_address=self.spec.host,
            master_port=port,
            world_size=1 + self.spec.receivers,
            packed_buffer_size_bytes=size,
            rank=self.rank,
        )

    def finish(self, version: int) -> None:
        """Nothing is kept between transfers but the group."""

    def close(self) -> None:
        """Leave the group."""
        if self.engine is not None:
            self.engine.shutdown()
        self.engine = None


class Follower(NativeSender):
    """A rank of the trainer that gathers and joins vLLM's collectives, and has no receivers."""

    def __init__(self, spec: ChannelSpec, rank: int) -> None:
        super().__init__(spec, None, max(rank, 1))

    def send(self, weights: GatheredWeights, version: int) -> Transfer | None:  # type: ignore[override]
        """Take part."""
        super().send("", version, weights)
        return None


class NativeReceiver:
    """The end at one engine worker; its own engine of vLLM receives."""

    def __init__(self, worker: Any, spec: ChannelSpec, control: Control, index: int) -> None:
        self.control, self.index = control, index
        config = WeightTransferConfig(backend=str(spec.native))
        self.ipc = spec.native == "ipc"
        self.engine = WeightTransferEngineFactory.create_engine(
            config, worker.vllm_config, worker.device, worker.model_runner.get_model()
        )

    def receive(self, prefix: str, load: Load) -> int:
        """Do what the sender calls, until it is finished; the number of calls."""
        # takes the place of the model: what would be loaded, some weights at a time, goes to `load`
        model: Any = SimpleNamespace(load_weights=lambda weights: load(list(weights)))
        self.engine.set_weight_update_target(model, self.engine.model_config)
        calls, method = 0, ""
        try:
            while method != FINISH:
                key = f"{prefix}call/{calls}"
                method, info = self.control.take(key, "the sender's next weights")
                self._act(method, info)
                self.control.put(f"{key}/{self.index}", True)
                calls += 1
        finally:
            self.engine.reset_weight_update_target()
        return calls

    def _act(self, method: str, info: Any) -> None:
        if method == INIT:
            if "rank_offset" in info:  # vLLM counts the workers of one engine; here they are of several
                info["rank_offset"] += self.index - self.engine.parallel_config.rank
            self.engine.init_transfer_engine(self.engine.parse_init_info(info))
        elif method == UPDATE:
            self.engine.update_weights(info)
        elif self.ipc:
            self.engine.shutdown()  # unmaps the trainer's buffer, so that its memory can be training's

    def close(self) -> None:
        """Leave the group."""
        self.engine.shutdown()
