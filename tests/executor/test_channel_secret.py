"""Who reaches the port of a weight channel: reads nothing into it, runs nothing in it."""

from __future__ import annotations

import base64
import os
import pickle
import socket
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from executor.engines import training
from executor.engines.protocols import ChannelSpec
from executor.sockets import listener
from executor.weight_transfer.control import Control, seal, unseal
from rlhfsim.errors import RlhfsimError

STORAGE = type(torch.empty(1)._typed_storage())
TENSOR = (torch.Tensor, torch.Size([3, 4]), (4, 1), 0, STORAGE, torch.bfloat16)
HANDLE = (*TENSOR, torch.device("cuda", 1), b"\x00\xffhandle", 96, 0, False, b"counter", 2, b"event", True)
"""What torch.multiprocessing.reductions.reduce_tensor gives for a tensor on a GPU; it names the typed storage."""


class Planted:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def spec(tmp_path: Path) -> ChannelSpec:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    fields: dict[str, Any] = {"receivers": 1, "folder": str(tmp_path), "bucket_bytes": 64, "timeout_s": 5.0}
    return ChannelSpec(name="c", transport="ipc", host="127.0.0.1", port=port, **fields)


def test_an_ipc_handle_arrives_as_it_was_sent() -> None:
    update = {"names": ["w"], "shapes": [[3, 4]], "ipc_handles": {"GPU-1": HANDLE}, "packed": None}
    arrived = unseal("ab" * 32, "0/call/1", seal("ab" * 32, "0/call/1", update).encode())
    assert arrived == update
    assert isinstance(arrived["ipc_handles"]["GPU-1"], tuple)
    with pytest.raises(StopIteration):
        seal("ab" * 32, "k", {"function": os.PathLike})


def test_only_the_ends_of_a_channel_are_heard(spec: ChannelSpec) -> None:
    sender, receiver = Control(spec, master=True), Control(spec, master=False)
    sender.put("0/begin", 7)
    assert receiver.take("0/begin", "it") == 7
    stranger = dist.TCPStore(spec.host, spec.port, None, False, timedelta(seconds=5))  # type: ignore[attr-defined]
    forged = {
        "of another secret": seal(replace(spec, secret="cd" * 32).secret, "1/begin", 8),
        "of another key": sender.store.get("0/begin").decode(),
        "empty": "",
        "JSON": '"ok"',
    }
    for words, message in forged.items():
        stranger.set("1/begin", message)
        with pytest.raises(RlhfsimError) as caught:
            receiver.take("1/begin", "it")
        assert caught.value.code == "weight-sync-forged", words
    stranger.set("failed", "!")
    with pytest.raises(RlhfsimError, match="failed of a weight channel"):
        sender.failure()
    assert spec.secret not in repr(spec)


def test_a_planted_pickle_runs_nothing_at_the_rollout(spec: ChannelSpec, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from types import SimpleNamespace

    from executor.engines.vllm.transfer import NativeReceiver

    receiver = object.__new__(NativeReceiver)
    receiver.control, receiver.index, receiver.ipc = Control(spec, master=True), 0, True
    receiver.engine = SimpleNamespace(  # type: ignore[assignment]
        set_weight_update_target=lambda *_: None, reset_weight_update_target=lambda: None, model_config=None
    )
    stranger = dist.TCPStore(spec.host, spec.port, None, False, timedelta(seconds=5))  # type: ignore[attr-defined]
    bomb = pickle.dumps(Planted(tmp_path / "owned"))
    text = base64.b64encode(bomb).decode()
    for message in (text, f'["update_weights", "{text}"]'):
        stranger.set("0/call/0", message)
        with pytest.raises(RlhfsimError, match="not written by an end of this run"):
            receiver.receive("0/", lambda tensors: None)
    assert not (tmp_path / "owned").exists()


def test_servers_of_a_run_listen_at_one_address(spec: ChannelSpec) -> None:
    control, group = Control(spec, master=True), training.rendezvous("127.0.0.1", 1)
    with listener("127.0.0.1", 0) as other:
        ports = {spec.port, int(group.port), int(other.getsockname()[1])}
        found = {
            c.laddr.ip
            for c in psutil.Process().net_connections()
            if c.status == "LISTEN" and c.laddr.port in ports
        }
    control.close()
    assert found == {"127.0.0.1"}
