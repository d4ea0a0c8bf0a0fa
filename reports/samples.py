"""The committed samples of `rlhfsim report`; `python reports/samples.py [NAME ...]` writes them again.

Plans are designed anew with the shipped profiles, the what-if is a shipped scenario, the run is that of
`rlhfsim demo` in `reports/demo_run`. Same code, same bytes, where every search ends before its time limit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from rlhfsim.calibration.comparison.side_by_side import read
from rlhfsim.present.answers.compare import run_page
from rlhfsim.present.answers.tree import Page
from rlhfsim.present.answers.whatif import whatif_page
from rlhfsim.present.basis import basis
from rlhfsim.present.html.page import write
from rlhfsim.present.pages.plan import plan_page
from rlhfsim.search.request import Request
from rlhfsim.specs.hardware.profiles import parse_cluster
from rlhfsim.specs.placement.backends import Backend
from rlhfsim.specs.workload.lengths import LogNormal
from rlhfsim.specs.workload.workload import Reward, Rules, Workload
from rlhfsim.what_if.design import design
from rlhfsim.what_if.scenarios.answer import whatif
from rlhfsim.what_if.scenarios.designs import Designs
from rlhfsim.what_if.scenarios.workers import local
from rlhfsim.what_if.sizing import other_sizes

HERE = Path(__file__).parent
RUN = Path("reports/demo_run")
"""Relative: paths stand in its plan as they were given, from the root of the repository."""
SIZE_LIMIT_S = 600.0
"""Longest search of the other sizes: none comes near it, so that samples do not depend on the machine."""


def planned(gpus: int, workload: Workload, backend: Backend = "deepspeed") -> Page:
    """The page of the best plan."""
    plan = design(Request(cluster=parse_cluster(gpus), workload=workload, backend=backend)).told
    assert plan is not None, "every sample fits"
    return plan_page(plan, sizes=other_sizes(plan, basis(plan).cluster, limit_s=SIZE_LIMIT_S))


def reasoning() -> Workload:
    """GRPO with verifiable rewards and long responses that vary."""
    return Workload(
        algorithm="grpo",
        model="deepseek-v3",
        prompts=512,
        samples=16,
        response_len=LogNormal(mean=4000, sigma=0.8, max=16384),
        reward=Reward(rules=Rules(seconds_per_sample=0.005)),
    )


SAMPLES: dict[str, Callable[[], Page]] = {
    "plan_7b_8": lambda: planned(8, Workload(model="7b")),
    "plan_70b_64": lambda: planned(64, Workload(model="70b")),
    "plan_405b_512": lambda: planned(512, Workload(model="405b")),
    "plan_deepseek_v3_2048": lambda: planned(2048, reasoning(), "megatron"),
    "whatif_h100_to_b200": lambda: whatif_page(whatif("h100-to-b200", Designs(local())), file="whatif.json"),
    "run_demo": lambda: run_page(read(RUN), commands=f"rlhfsim demo --out {RUN}\nrlhfsim report {RUN}"),
}
"""Name of the file -> its page."""


def main(names: list[str]) -> None:
    """Write the named samples, or all."""
    os.chdir(HERE.parent)
    for name in names or SAMPLES:
        write(HERE / f"{name}.html", SAMPLES[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
