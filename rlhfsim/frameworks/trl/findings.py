"""What TRL refuses at start, or does otherwise than its arguments suggest.

trl/trainer/grpo_config.py and trl/generation/vllm_generation.py (1.16.0).
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhfsim.frameworks.configuration.described import RunDescription
from rlhfsim.frameworks.configuration.findings import Finding, without_engine
from rlhfsim.frameworks.configuration.settings import FrameworkSettings

STAGES = (
    "deepspeed_config.zero_stage",
    "zero_stage",
    "zero_optimization.stage",
    "deepspeed.zero_optimization.stage",
)
"""Keys of the ZeRO stage: accelerate's, a command's, DeepSpeed's own file, and a dictionary in a script."""
MODES = ("colocate", "server")


def findings(s: FrameworkSettings, run: RunDescription) -> Iterator[Finding]:
    """What stands out in the arguments."""
    if run.algorithm == "ppo":
        return
    if run.samples < 2:
        yield Finding(
            what="a group needs two responses at least: TRL refuses one",
            keys=("num_generations",),
            remedy="num_generations=8",
            stops=True,
        )
    whole = run.gpus * run.layout.micro_batch * max(1, _micro_batches(s))
    if whole % run.samples:
        yield Finding(
            what=f"a generation of {whole:,} samples ({run.gpus} processes x {run.layout.micro_batch} x "
            f"{_micro_batches(s)} micro-batches) holds no whole groups of {run.samples}: TRL refuses it",
            keys=("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps"),
            remedy="a multiple of num_generations",
            stops=True,
        )
    mode = s.find("vllm_mode")
    if mode is not None and mode not in MODES:
        yield Finding(
            what=f"vllm_mode {mode!r} passes the parser and is refused at start",
            keys=("vllm_mode",),
            remedy="vllm_mode=colocate",
            stops=True,
        )
    if not s.flag("use_vllm"):
        yield without_engine(("use_vllm",), "use_vllm=True")
    named = s.find("deepspeed")
    if isinstance(named, str) and s.find(*STAGES) is None:
        yield Finding(
            what=f"ZeRO stage {run.layout.zero} is taken from the name {named}, which is not among the files",
            keys=("deepspeed",),
        )


def _micro_batches(s: FrameworkSettings) -> int:
    """Of a process between two generations."""
    given = s.find("steps_per_generation") or s.find("gradient_accumulation_steps")
    return int(given) if isinstance(given, int) else 1
