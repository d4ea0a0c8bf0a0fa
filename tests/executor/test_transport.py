"""Both ends of a weight channel, sender and receivers as threads of one process."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planted_weights import Weights, some_weights
from safetensors.torch import save_file
from torch import Tensor

from executor.engines.protocols import ChannelSpec
from executor.samples import Transfer
from executor.weight_transfer.channel import Patched, Receiver, Sender, Snapshot
from executor.weight_transfer.packing import GatheredWeights, Named, as_bytes
from executor.weight_transfer.shared_memory import SHARED, prefix, sweep
from rlhfsim.errors import RlhfsimError

TRANSPORTS = ("broadcast", "ipc", "host", "disk")


def channel(transport: str, folder: Path, **changes: object) -> ChannelSpec:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spec = ChannelSpec(
        name=f"to-{transport}",
        transport=transport,  # type: ignore[arg-type]
        host="127.0.0.1",
        port=port,
        receivers=2,
        folder=str(folder),
        bucket_bytes=4096,
        timeout_s=60,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def gathered(weights: Weights) -> GatheredWeights:
    """As the training engine gives them: two tensors at a time, with an empty bucket among them."""

    def gather() -> Iterator[Weights]:
        yield []
        for start in range(0, len(weights), 2):
            yield weights[start : start + 2]

    return GatheredWeights(gather)


def shared_files(folder: Path) -> list[str]:
    """Those of one run's channels; other runs on this machine have theirs in the same place."""
    return [path.name for path in SHARED.glob(f"{prefix(str(folder))}*")]


def received(receiver: Receiver, version: int, pause_s: float = 0.0) -> tuple[Weights, Transfer]:
    """Copies of what came, and the transfer; a load takes `pause_s`."""
    got: Weights = []

    def load(tensors: Sequence[Named]) -> None:
        time.sleep(pause_s)
        got.extend((name, tensor.clone()) for name, tensor in tensors)

    return got, receiver.receive(version, load)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_receiver_gets_the_same_weights_in_order_twice(transport: str, tmp_path: Path) -> None:
    spec = channel(transport, tmp_path)
    sender = Sender(spec)
    receivers = [Receiver(spec, index) for index in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for version in (1, 2):
            weights = some_weights(version)
            ends = [pool.submit(received, receiver, version) for receiver in receivers]
            sent = sender.send(gathered(weights), version)
            for end in ends:
                got, transfer = end.result(60)
                assert [name for name, _ in got] == [name for name, _ in weights]
                for (_, ours), (_, theirs) in zip(weights, got, strict=True):
                    assert ours.dtype == theirs.dtype
                    assert torch.equal(ours, theirs)
                assert (transfer.checksum, transfer.bytes) == (sent.checksum, sent.bytes)
                assert transfer.buckets == sent.buckets
    sender.close()
    assert shared_files(tmp_path) == []


@pytest.mark.parametrize("transport", ["broadcast", "disk"])
def test_only_changed_elements_travel_and_every_bit_arrives(transport: str, tmp_path: Path) -> None:
    spec = channel(transport, tmp_path, changes_only=True)
    weights = some_weights(seed=1)
    whole = sum(t.numel() * t.element_size() for _, t in weights)
    sender, receivers = Sender(spec), [Receiver(spec, index) for index in range(2)]
    large = max((t for _, t in weights), key=Tensor.numel)
    with ThreadPoolExecutor(2) as pool:
        for version, changed in ((1, None), (2, [0, 5]), (3, [])):
            if changed:
                large.view(-1)[changed] = torch.tensor([-0.0, float("nan")], dtype=large.dtype)
            ends = [pool.submit(received, receiver, version) for receiver in receivers]
            sent = sender.send(gathered(weights), version)
            for got, transfer in (end.result() for end in ends):
                assert [name for name, _ in got] == [name for name, _ in weights]
                pairs = zip(got, weights, strict=True)
                assert all(torch.equal(as_bytes(a), as_bytes(b)) for (_, a), (_, b) in pairs)
                assert (transfer.bytes, transfer.checksum) == (sent.bytes, sent.checksum)
            elements = 0 if changed is None else len(changed)
            expected = whole if changed is None else elements * (large.element_size() + 4)
            assert sent.bytes == expected
    sender.close()


def test_a_tensor_of_which_most_changed_travels_whole() -> None:
    snapshot, patched = Snapshot(), Patched()
    old, new = torch.zeros(4, dtype=torch.bfloat16), torch.tensor([1.0, 2, 0, 0]).bfloat16()
    assert [name for name, _ in patched.applied(snapshot.changes([("w", old)]))] == ["w"]
    parts = snapshot.changes([("w", new)])
    assert [name for name, _ in parts] == ["w"], "2 x (2 + 4) bytes are more than 4 x 2"
    assert torch.equal(patched.applied(parts)[0][1], new)
    one = snapshot.changes([("w", torch.tensor([1.0, 2, 3, 0]).bfloat16())])
    assert [name for name, _ in one] == ["w#positions", "w#values"]
    assert patched.applied(one[:1]) == [], "the values come in the next bucket"
    assert patched.applied(one[1:])[0][1].tolist() == [1, 2, 3, 0]


def test_checksum_does_not_depend_on_the_transport_but_on_every_byte(tmp_path: Path) -> None:
    sums = {transport: _send_once(transport, tmp_path, some_weights()) for transport in TRANSPORTS}
    assert len(set(sums.values())) == 1
    changed = some_weights()
    changed[0][1][17, 3] += 1e-6
    assert _send_once("broadcast", tmp_path, changed) != sums["broadcast"]
    renamed = [("other", changed[0][1]), *changed[1:]]
    assert _send_once("broadcast", tmp_path, renamed) != _send_once("host", tmp_path, changed)


def _send_once(transport: str, folder: Path, weights: Weights) -> str:
    spec = channel(transport, folder, receivers=1)
    sender, receiver = Sender(spec), Receiver(spec, 0)
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(received, receiver, 7)
        sent = sender.send(gathered(weights), 7)
        end.result(60)
    sender.close()
    return sent.checksum


def test_shared_buffer_is_not_written_again_before_its_readers_are_done(tmp_path: Path) -> None:
    spec = channel("ipc", tmp_path, receivers=1)
    sender, receiver = Sender(spec), Receiver(spec, 0)
    weights = [(f"w{i}", torch.full((1024,), float(i))) for i in range(12)]

    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(received, receiver, 1, 0.01)
        sender.send(gathered(weights), 1)
        got = end.result(60)[0]
    assert all(torch.equal(tensor, weights[i][1]) for i, (_, tensor) in enumerate(got))
    sender.close()


def test_disk_keeps_only_the_newest_whole_version_and_nothing_after_close(tmp_path: Path) -> None:
    spec = channel("disk", tmp_path, receivers=1)
    sender, receiver = Sender(spec), Receiver(spec, 0)
    with ThreadPoolExecutor(1) as pool:
        for version in (3, 4):
            end = pool.submit(received, receiver, version)
            sender.send(gathered(some_weights()), version)
            end.result(60)
    folder = tmp_path / spec.name
    assert [path.name for path in folder.iterdir()] == ["weights-4"]
    sender.close()
    assert not folder.exists()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_absent_receiver_is_named_in_time_and_the_other_ranks_are_not_left_waiting(
    transport: str, tmp_path: Path
) -> None:
    sender = Sender(channel(transport, tmp_path, receivers=1, timeout_s=0.3))
    rounds = []

    def gather() -> Iterator[Weights]:
        yield some_weights()
        rounds.append("ended")

    start = time.monotonic()
    with pytest.raises(RlhfsimError, match="receiver 0 of 1 to take part") as caught:
        sender.send(GatheredWeights(gather), 1)
    assert caught.value.code == "weight-sync-timeout"
    assert time.monotonic() - start < 15
    assert rounds == ["ended"], "the collective behind the buckets was not finished"
    assert shared_files(tmp_path) == []


def test_receiver_says_when_no_sender_hosts_the_store(tmp_path: Path) -> None:
    receiver = Receiver(channel("broadcast", tmp_path, timeout_s=0.5), 0)
    with pytest.raises(RlhfsimError, match="cannot reach the store"):
        received(receiver, 1)


def test_sender_that_closes_ends_the_receivers_wait(tmp_path: Path) -> None:
    spec = channel("broadcast", tmp_path, receivers=1)
    sender, receiver = Sender(spec), Receiver(spec, 0)
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(received, receiver, 1)
        time.sleep(0.3)
        sender.close()
        with pytest.raises(
            RlhfsimError, match=r"lost while waiting for the (sender to begin version 1|other side)"
        ):
            end.result(5)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_receiver_that_stops_in_the_middle_stops_the_sender_at_once(transport: str, tmp_path: Path) -> None:
    spec = channel(transport, tmp_path, receivers=1)
    sender, receiver = Sender(spec), Receiver(spec, 0)
    weights = [(f"w{i}", torch.zeros(1024)) for i in range(12)]

    def break_off(_: object) -> None:
        raise KeyError("no such layer")

    start = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(receiver.receive, 1, break_off)
        with pytest.raises(RlhfsimError) as caught:
            sender.send(gathered(weights), 1)
        assert isinstance(end.exception(20), KeyError)
    assert caught.value.code == "weight-sync-failed"
    assert "receiver 0: KeyError: 'no such layer'" in caught.value.message
    assert time.monotonic() - start < 5
    assert shared_files(tmp_path) == []
    sender.close()


def test_failure_of_the_gather_reaches_the_receivers(tmp_path: Path) -> None:
    spec = channel("broadcast", tmp_path, receivers=1)
    sender, receiver = Sender(spec), Receiver(spec, 0)

    def breaks() -> Iterator[Weights]:
        yield some_weights()[:1]
        raise MemoryError("gather ran out of memory")

    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(received, receiver, 1)
        with pytest.raises(MemoryError):
            sender.send(GatheredWeights(breaks), 1)
        with pytest.raises(RlhfsimError, match="gather ran out of memory"):
            end.result(60)


def test_wrong_version_is_refused_by_both_ends(tmp_path: Path) -> None:
    spec = channel("host", tmp_path, receivers=1)
    sender, receiver = Sender(spec), Receiver(spec, 0)
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(received, receiver, 2)
        with pytest.raises(RlhfsimError, match="expects version 2, the sender sends 1"):
            sender.send(gathered(some_weights()), 1)
        with pytest.raises(RlhfsimError) as caught:
            end.result(60)
    assert caught.value.code == "weight-sync-version"


def test_corrupted_bytes_are_found_by_the_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = channel("ipc", tmp_path, receivers=1)
    sender, receiver = Sender(spec), Receiver(spec, 0)

    def corrupted() -> None:
        route = receiver._connected()[1]
        fetch = route._fetch  # type: ignore[attr-defined]

        def flipped(*args: object) -> Tensor:
            flat: Tensor = fetch(*args)
            flat[5] ^= 1
            return flat

        monkeypatch.setattr(route, "_fetch", flipped)
        received(receiver, 1)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(corrupted)
        with pytest.raises(RlhfsimError) as caught:
            sender.send(gathered(some_weights()), 1)
    assert caught.value.code == "weight-sync-checksum"


def test_killed_sender_leaves_an_error_at_the_receiver_and_a_file_that_sweep_removes(tmp_path: Path) -> None:
    spec = channel("ipc", tmp_path, receivers=1, timeout_s=60)
    script = (
        "import sys, time, torch\n"
        "from dataclasses import replace\n"
        "from executor.engines.protocols import ChannelSpec\n"
        "from executor.weight_transfer.channel import Sender\n"
        "from executor.weight_transfer.packing import GatheredWeights\n"
        f"sender = Sender(replace({spec!r}, secret={spec.secret!r}))\n"
        "print('listening', flush=True)\n"
        "def buckets():\n"
        "    for i in range(100):\n"
        "        print(i, flush=True)\n"
        "        yield [(f'w{i}', torch.zeros(900))]\n"
        "        time.sleep(0.05)\n"
        "sender.send(GatheredWeights(buckets), 1)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "listening"
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(received, Receiver(spec, 0), 1)
        while child.stdout.readline().strip() != "5":
            pass
        child.kill()
        child.wait(10)
        with pytest.raises(RlhfsimError) as caught:
            end.result(50)
    assert caught.value.code == "weight-sync-failed"
    sweep(spec.folder)
    assert shared_files(tmp_path) == []


def test_channel_can_be_opened_again_on_the_same_port(tmp_path: Path) -> None:
    spec = channel("broadcast", tmp_path, receivers=1)
    for _ in range(2):
        sender, receiver = Sender(spec), Receiver(spec, 0)
        with ThreadPoolExecutor(1) as pool:
            end = pool.submit(received, receiver, 1)
            sender.send(gathered(some_weights()), 1)
            assert len(end.result(60)[0]) == 7
        receiver.close()
        sender.close()


@pytest.mark.parametrize("transport", ["broadcast", "ipc"])
def test_adapters_are_merged_into_the_base_and_siblings_come_along(transport: str, tmp_path: Path) -> None:
    base = {
        f"layers.{i}.{name}.weight": torch.randn(6, 4)
        for i in range(2)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
    }
    save_file(base, tmp_path / "model.safetensors")
    a, b = torch.randn(2, 4), torch.randn(6, 2)
    name = "layers.1.self_attn.q_proj.weight"
    spec = channel(
        transport, tmp_path, receivers=1, adapters_only=True, base_model=str(tmp_path), lora_scale=0.5
    )
    sender, receiver = Sender(spec), Receiver(spec, 0)
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(received, receiver, 1)
        adapters = [(f"{name}.lora_A", a), (f"{name}.lora_B", b)]
        sent = sender.send(gathered(adapters), 1)
        got = dict(end.result(60)[0])
    sender.close()
    assert sent.bytes == 4 * (a.numel() + b.numel())
    assert set(got) == {other for other in base if other.startswith("layers.1.self_attn.")}
    assert torch.allclose(got[name], base[name] + 0.5 * b @ a, atol=1e-6)
    assert torch.equal(got["layers.1.self_attn.k_proj.weight"], base["layers.1.self_attn.k_proj.weight"])
