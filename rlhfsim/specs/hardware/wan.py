"""A wide-area link: how nodes of a second region reach those that train."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.specs.loading import checked
from rlhfsim.specs.quantities import BytesPerSecond, Ratio, Seconds

MAX_RTT_S = 10.0
"""A longer round trip is a slip: 60 written for 60 ms."""
MAX_STREAMS = 65_536
"""Ports of one address."""


@checked
@frozen
class WanLink:
    """A link between two regions, as its provider sells it or as it was measured."""

    rtt: Annotated[Seconds, Field(gt=0, le=MAX_RTT_S)]
    """Round trip between the regions."""
    bandwidth: Annotated[BytesPerSecond, Field(ge=1e3, le=1e15)] | None = None
    """Rate of the link, one direction."""
    loss: Annotated[Ratio, Field(ge=0, le=0.2)] = 0.0
    """Share of the packets that is lost."""
    streams: Annotated[int, Field(ge=1, le=MAX_STREAMS)] = 16
    """TCP connections that carry one transfer. NCCL opens NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD of
    them: 2 x 8 where it sees AWS, at most 64 (NVIDIA NCCL user guide, environment variables)."""
    goodput: Annotated[BytesPerSecond, Field(ge=1e3, le=1e15)] | None = None
    """What a transfer was seen to reach, in place of bandwidth, loss and streams."""

    def __post_init__(self) -> None:
        """Check that its rate is said once."""
        if (self.bandwidth is None) == (self.goodput is None):
            said = "says neither bandwidth nor goodput" if self.goodput is None else "says its rate twice"
            raise RlhfsimError(
                "wan-rate",
                f"the link between the regions {said}",
                help="give bandwidth (with loss and streams), or a goodput that was measured",
            )
        if self.goodput is not None and self.loss:
            raise RlhfsimError(
                "wan-rate",
                "a goodput that was measured holds the loss already",
                help="leave loss out, or give bandwidth in place of goodput",
            )
