"""One Ray cluster and one tiny model for all real runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.coordination import forks

SLOTS = 8
os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: other tests would starve the engines


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a process from which ranks and Ray workers are forked."""
    import fork_server

    with fork_server.serving(str(tmp_path_factory.mktemp("forks") / "socket")) as address:
        os.environ[forks.VARIABLE] = address
        yield address


@pytest.fixture(scope="session")
def ray_address(fork_server: str) -> Iterator[str]:
    """A cluster of one node with slots; more than there are cores, so they are shared."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": 4,
        "resources": {"slot": SLOTS},
        "object_store_memory": 256 * 2**20,
        "include_dashboard": False,
        "include_log_monitor": False,  # a launch reads its workers' logs itself
        "no_monitor": True,  # no node is added
        "setup_worker_path": forks.__file__,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and tokenizer."""
    from executor.tasks import tiny

    return tiny.build(tmp_path_factory.mktemp("models") / "tiny", layers=2)


@pytest.fixture(scope="session")
def survivor(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, ray_address: str) -> Path:
    """Folder of a run that nothing interrupted: what interrupted ones are compared with."""
    import runs
    import survival

    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    runs.run(survival.plan(tiny_model), survival.settings(tiny_model), folder, ray_address)
    return folder
