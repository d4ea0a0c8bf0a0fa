"""What listens while a job of ours runs: shown by `launch --dry-run`, held to a real run by its tests."""

from __future__ import annotations

from rlhfsim.frozen import frozen


@frozen
class Listener:
    """Servers of one kind."""

    server: str
    where: str
    """Addresses that they listen at."""
    admits: str
    """Who is let in, and what fences them."""


LISTENERS = (
    Listener(
        server="weight channels",
        where="their node's address; the loopback where launch starts the cluster",
        admits="messages with a code of the channel's secret; nothing is unpickled",
    ),
    Listener(
        server="rendezvous of training",
        where="their node's address; the loopback where launch starts the cluster",
        admits="anybody who reaches the port",
    ),
    Listener(
        server="GCS, raylets, workers and driver of Ray",
        where="all interfaces",
        admits="with Ray's token where launch starts the cluster; before joining one: RAY_AUTH_MODE=token",
    ),
    Listener(
        server="NCCL, gloo, vLLM",
        where="the interfaces of NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, VLLM_HOST_IP; the loopback as above",
        admits="anybody who reaches the port",
    ),
)
FENCE = "keep everybody but the nodes of the job off their network (SECURITY.md)"


def listening() -> dict[str, str]:
    """Kind of server -> where it listens and who is let in; then how to fence them."""
    return {f"{x.server} listen": f"at {x.where}; {x.admits}" for x in LISTENERS} | {"fence": FENCE}
