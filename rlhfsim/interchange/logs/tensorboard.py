"""Scalars from TensorBoard event files, through the message types of tensorboardX.

An event file is a row of records: length (8 bytes), its checksum (4), an Event message, its checksum (4).
A record whose end is missing, or whose length does not match its checksum, ends the file: a job that is
killed leaves such a one. Source of the format: tensorflow/core/lib/io/record_writer.h,
tensorflow/core/util/event.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.extras import need
from rlhfsim.interchange.logs.records import Log, Record
from rlhfsim.specs.loading import read_bytes

MARK = "tfevents"
"""What the names of event files hold."""
MAX_BYTES = 2 * 2**30
"""Larger files are refused."""
_FLOAT, _DOUBLE = 1, 2
"""DataType of tensors that hold scalars (tensorflow/core/framework/types.proto)."""


def read_events(path: Path) -> Log:
    """The scalars of one event file by step.

    Raises:
        RlhfsimError: tensorboardX is not installed, or the file is no event file or cannot be read.
    """
    content = read_bytes(path, MAX_BYTES)
    records, end = scalars(content, path)
    if content and not end:
        raise RlhfsimError(
            "not-an-event-file",
            "no whole record of TensorBoard is in this file",
            place=Place(file=str(path)),
            help="is the copy complete?",
        )
    lost = len(content) - end
    notes = (f"{path.name}: the last {lost} bytes are no whole record",) if lost else ()
    return Log(records=records, notes=notes)


def scalars(content: bytes, path: Path) -> tuple[tuple[Record, ...], int]:
    """The scalars of whole messages by step, and where the last of them ends.

    Raises:
        RlhfsimError: tensorboardX is not installed.
    """
    event_type, undecodable = _event_type(path)
    by_step: dict[int, dict[str, float]] = {}
    end = 0
    for message, after in _messages(content):
        try:
            event = event_type.FromString(message)
        except undecodable:  # bytes were lost in the middle
            break
        end = after
        for value in event.summary.value:
            scalar = _scalar(value)
            if scalar is not None:
                by_step.setdefault(int(event.step), {})[value.tag] = scalar
    return tuple(Record(step=s, values=v) for s, v in sorted(by_step.items())), end


def _event_type(path: Path) -> tuple[Any, type[Exception]]:
    """The message, and the error of bytes that are none."""
    need("tensorboardX", purpose=f"{path} of TensorBoard", otherwise="or give JSON lines or the console log")
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.event_pb2 import Event

    return Event, DecodeError


def _messages(content: bytes) -> Iterator[tuple[bytes, int]]:
    """Every whole record's message and where the record ends.

    Of the two checksums only that of the length is checked: in Python the other costs seconds a run, and
    a message that lost bytes does not decode.
    """
    from tensorboardX.record_writer import masked_crc32c

    at = 0
    while at + 12 <= len(content):
        length, checksum = struct.unpack_from("<QI", content, at)
        after = at + 16 + length
        if after > len(content) or masked_crc32c(content[at : at + 8]) != checksum:
            return
        yield content[at + 12 : after - 4], after
        at = after


def _scalar(value: Any) -> float | None:
    """A scalar, in either of the forms that TensorBoard has; None for text, images and histograms."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    tensor = value.tensor
    if not value.HasField("tensor") or any(d.size != 1 for d in tensor.tensor_shape.dim):
        return None
    if tensor.dtype == _FLOAT:
        return float(tensor.float_val[0]) if tensor.float_val else _unpacked("<f", tensor.tensor_content)
    if tensor.dtype == _DOUBLE:
        return float(tensor.double_val[0]) if tensor.double_val else _unpacked("<d", tensor.tensor_content)
    return None


def _unpacked(form: str, content: bytes) -> float | None:
    return float(struct.unpack(form, content)[0]) if len(content) == struct.calcsize(form) else None
