"""Bytes per second of every weight transport between two processes of this machine.

    python lab/benchmarks/transport_speed.py [--gib 1] [--bucket-mib 64] [--repeats 3]

The receiver reads every tensor once (its checksum) and drops it; the model is random and gathered for nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
from tempfile import TemporaryDirectory

import torch

from executor.engines.protocols import ChannelSpec
from executor.weight_transfer.channel import Receiver, Sender
from executor.weight_transfer.packing import GatheredWeights, Named
from rlhfsim.specs.placement.weight_paths import Transport
from rlhfsim.units import GIB, MIB

TRANSPORTS: tuple[Transport, ...] = ("ipc", "broadcast", "host", "disk")
TENSOR = int(8 * MIB)
"""Bytes of a tensor."""


def receive(spec: ChannelSpec, repeats: int) -> None:
    """The receiving process."""
    torch.set_num_threads(1)
    receiver = Receiver(spec, 0)
    for version in range(repeats + 1):
        receiver.receive(version, lambda tensors: None)
    receiver.close()


def seconds(transport: Transport, buckets: list[list[Named]], bucket_bytes: int, repeats: int) -> list[float]:
    """Seconds of each transfer at the sending end; the first one, which sets things up, is left out."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    with TemporaryDirectory() as folder:
        spec = ChannelSpec(
            name=f"speed-{transport}",
            transport=transport,
            host="127.0.0.1",
            port=port,
            receivers=1,
            folder=folder,
            bucket_bytes=bucket_bytes,
        )
        other = multiprocessing.get_context("spawn").Process(target=receive, args=(spec, repeats))
        sender = Sender(spec)
        other.start()
        weights = GatheredWeights(lambda: iter(buckets), on_host=True)
        times = [sender.send(weights, version).seconds for version in range(repeats + 1)]
        other.join()
        sender.close()
    return times[1:]


def main() -> None:
    """Print a line a transport."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    count, each = int(options.gib * GIB) // TENSOR, max(1, int(options.bucket_mib * MIB) // TENSOR)
    named = [(f"w{i}", torch.randn(TENSOR // 4)) for i in range(count)]
    buckets = [named[i : i + each] for i in range(0, count, each)]
    for transport in TRANSPORTS:
        times = seconds(transport, buckets, int(options.bucket_mib * MIB), options.repeats)
        rates = [count * TENSOR / second / 1e9 for second in times]
        print(f"{transport:10s} {statistics.median(rates):.2f} GB/s (best {max(rates):.2f})", flush=True)


if __name__ == "__main__":
    main()
