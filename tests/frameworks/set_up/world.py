"""A described world: as many ranks as a configuration asks for, of which one process is the first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def world(ranks: int, each: int) -> Iterator[None]:
    """Rank 0 of `ranks` processes, `each` of them a node; collectives return at once."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    places = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": each, "RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": 1}
    told = {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in places.items()}
    with patch.dict(os.environ, told):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            yield
        finally:
            dist.destroy_process_group()
