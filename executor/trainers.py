"""A run in a few lines of Python, with the plan, settings and launch of the command: `GRPO(...).run()`.

The one module of the executor that asks the planner: a process that only works on a GPU never imports it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from executor.coordination.cluster import local_gpus
from executor.launch import FinishedRun, LaunchOptions, launch
from executor.run import RunListener
from executor.settings import Data, RewardRule, Settings
from rlhfsim.api import design
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan, read_plan
from rlhfsim.present.terminal.console import console
from rlhfsim.present.terminal.launch import Screen
from rlhfsim.search.request import Request
from rlhfsim.specs.frameworks.runs import OWN
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.loading import convert, parse_yaml
from rlhfsim.specs.workload.workload import GROUPED, ONLINE, Workload

Reward = RewardRule | str | Callable[..., float]
"""A rule; its kind or `module:function`; a function of a module."""
CORE, MAX_CORES = "cpu_core", 4
"""Profile of a slot on a machine without GPUs, and how many are taken."""
PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 8, 512, 256


class PlannedRun:
    """A run of one algorithm on one model, planned for this machine unless a plan is given."""

    def __init__(  # noqa: PLR0913  a run in one call, as docs/executor.md has it
        self,
        algorithm: str,
        model: str | Path,
        data: str | Path | Data = Data(),  # noqa: B008  frozen
        rewards: Sequence[Reward] | Reward = (),
        *,
        plan: Plan | str | Path | None = None,
        workload: dict[str, Any] | None = None,
        gpu: str | None = None,
        gpus: int | None = None,
        out: str | Path = "runs/latest",
        **settings: Any,
    ) -> None:
        """`data`: a path, a name on the hub, `module:function`, or `Data`; `rewards`: rules; `workload`:
        fields of the plan's workload (prompts, samples, ...); `gpu`, `gpus`: kind and number, by default the
        cores of this machine; `plan`: a plan or its file instead; `settings`: fields of `Settings`.

        Raises:
            RlhfsimError: a reward that no other process can import, or a setting that is none.
        """
        given = [rewards] if isinstance(rewards, str | RewardRule) or callable(rewards) else rewards
        rules = tuple(map(_rule, given))
        source = data if isinstance(data, Data) else Data(path=str(data))
        fields = {"model": str(model), "data": source, **settings} | ({"rewards": rules} if rules else {})
        plain = {name: _plain(value) for name, value in fields.items()}
        self.settings = convert(Settings, parse_yaml("{}", "settings"), plain)
        self.algorithm, self.out, self._given = algorithm, Path(out), plan
        self._workload, self._gpu, self._gpus = workload or {}, gpu, gpus

    @cached_property
    def plan(self) -> Plan:
        """The plan that was given, or the best one for this machine.

        Raises:
            RlhfsimError: the model or workload cannot be planned, or nothing fits.
        """
        if self._given is not None:
            return self._given if isinstance(self._given, Plan) else read_plan(Path(self._given))
        if self._gpu is None and local_gpus():
            raise RlhfsimError(
                "gpu-kind", "this machine has GPUs: say which", help='gpu="h100" (rlhfsim gpus)'
            )
        count = self._gpus or local_gpus() or min(MAX_CORES, len(os.sched_getaffinity(0)))
        each = count if self._gpu is None else None
        cluster = Cluster(node_groups=(node_group(self._gpu or CORE, count, gpus_per_node=each),))
        asked = Request(workload=self._planned_workload(), cluster=cluster, framework=OWN)
        answer = design(asked, explain=False)
        if answer.chosen is None:
            raise RlhfsimError(
                "nothing-fits", "no plan fits this machine", help="rlhfsim design says why, and what would"
            )
        return answer.chosen

    def run(
        self, *, resume: bool = False, listener: RunListener | None = None, **options: Any
    ) -> FinishedRun:
        """Run it. `listener` is told what happens, by default the screen; `options`: of `LaunchOptions`.

        Raises:
            RlhfsimError: bad input before anything starts; or the run stopped, with what to do.
        """
        wanted = LaunchOptions(out=self.out, resume=resume, **options)
        return launch(self.plan, self.settings, wanted, listener or Screen(console()))

    def _planned_workload(self) -> Workload:
        """Defaults, then what the settings say, then what was given for the plan."""
        response = self.settings.sampling.max_tokens or RESPONSE_TOKENS
        fields: dict[str, Any] = {
            "algorithm": self.algorithm,
            "model": str(Path(str(self.settings.model)) / "config.json"),
            "prompts": PROMPTS,
            "samples": SAMPLES if self.algorithm in GROUPED else 1,
            "packing": self._gpu is not None,
            "prompt_len": {"kind": "fixed", "value": PROMPT_TOKENS},
            "response_len": {"kind": "fixed", "value": response},
        }
        if self.algorithm in ONLINE:
            folder = self.settings.reward_model
            fields["reward"] = {"rules": {}} | ({"model": f"{folder}/config.json"} if folder else {})
        return convert(Workload, parse_yaml("{}", "workload"), fields | self._workload)


def _plain(value: Any) -> Any:
    """Objects of `executor.settings` as what a file would say."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _rule(given: Reward) -> RewardRule:
    """The rule that is meant.

    Raises:
        RlhfsimError: a function that a worker process cannot import.
    """
    if isinstance(given, RewardRule):
        return given
    if isinstance(given, str):
        named = {"kind": "function", "target": given} if ":" in given else {"kind": given}
        return convert(RewardRule, parse_yaml("{}", "rewards"), named)
    module, name = given.__module__, getattr(given, "__qualname__", "<object>")
    if module == "__main__" or "<" in name:
        raise RlhfsimError(
            "reward-target",
            f"the reward {name} is in {module}: processes that score cannot import it",
            help="put it into a module of its own, as a plain function: from my_rewards import score",
        )
    return RewardRule(kind="function", target=f"{module}:{name}")


PPO = partial(PlannedRun, "ppo")
GRPO = partial(PlannedRun, "grpo")
DrGRPO = partial(PlannedRun, "dr-grpo")
DAPO = partial(PlannedRun, "dapo")
GSPO = partial(PlannedRun, "gspo")
CISPO = partial(PlannedRun, "cispo")
RLOO = partial(PlannedRun, "rloo")
ReinforcePlusPlus = partial(PlannedRun, "reinforce++")
DPO = partial(PlannedRun, "dpo")
KTO = partial(PlannedRun, "kto")
SFT = partial(PlannedRun, "sft")
RewardModel = partial(PlannedRun, "reward_model")
