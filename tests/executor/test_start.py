"""What the processes of a run import, when, and what they leave out."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor.coordination.worker import uncollected
from lab.schedules.cluster import Cluster, Handle, Ref
from lab.schedules.schedule import case_of
from lab.schedules.submission import submit
from lab.schedules.world import World


def test_all_processes_import_their_libraries_before_the_first_engine_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, call = list[tuple[int, str]](), Cluster.call

    def recorded(cluster: Cluster, handle: Handle, method: str, args: Sequence[Any]) -> Ref:
        asked.append((handle.number, method))
        return call(cluster, handle, method, args)

    monkeypatch.setattr(Cluster, "call", recorded)
    assert submit(case_of("grpo", tmp_path), World(np.random.default_rng(0))).how == "done"
    methods = [method for _, method in asked]
    before = asked[: methods.index("rendezvous")]
    assert {number for number, method in before if method == "prepare"} == {number for number, _ in asked}
    assert "build" not in methods[: methods.index("rendezvous")]


def test_no_garbage_is_looked_for_while_a_process_starts() -> None:
    gc.enable()  # commands of other tests leave it off
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.slow
@pytest.mark.long
def test_a_training_rank_imports_no_compiler() -> None:
    """Torch's, for an optimizer of DeepSpeed that nobody asked for: a second of each start."""
    pytest.importorskip("deepspeed")
    code = (
        "import sys, torch\n"
        "import torch.distributed as dist\n"
        "from executor.engines.deepspeed import process_groups\n"
        "from deepspeed.runtime.zero.utils import is_zero_supported_optimizer as supported\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "process_groups.join()\n"
        "assert supported(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]))\n"
        "assert 'deepspeed.runtime.zero.muon.muon_optimizer' in sys.modules\n"
        "print('torch._inductor.compile_fx' in sys.modules)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ended.stdout.split()[-1:] == ["False"], ended.stderr[-2000:]
