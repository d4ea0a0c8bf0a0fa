"""The layers of docs/architecture.md, walked: every import points down, no cycle, nothing unlisted."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlhfsim.extras import EXTRAS

ROOT = Path(__file__).resolve().parent.parent
LAYERS = [
    {"rlhfsim.frozen"},
    {"rlhfsim.errors"},
    {
        "rlhfsim.units",
        "rlhfsim.resources",
        "rlhfsim.outputs",
        "rlhfsim.provenance",
        "rlhfsim.extras",
        "rlhfsim.elementwise",
        "rlhfsim.finding",
    },
    {"rlhfsim.cache", "rlhfsim.ray_token"},
    {"rlhfsim.specs"},
    {"rlhfsim.choice"},
    {"rlhfsim.plan"},
    {"rlhfsim.verdict"},
    {"rlhfsim.trace", "rlhfsim.run_folder"},
    {"rlhfsim.kernels"},
    {"rlhfsim.memory"},
    {"rlhfsim.weight_sync"},
    {"rlhfsim.rollout", "rlhfsim.training"},
    {"rlhfsim.step"},
    {"rlhfsim.simulation"},
    {"rlhfsim.search"},
    {"rlhfsim.interchange"},
    {"rlhfsim.calibration"},
    {"rlhfsim.what_if"},
    {"rlhfsim.validation"},
    {"rlhfsim.present"},
    {"rlhfsim.api"},
    {"rlhfsim.desk"},
    {"rlhfsim.cli"},
    {"rlhfsim.__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
EXECUTOR_MAY = {
    "rlhfsim.frozen",
    "rlhfsim.errors",
    "rlhfsim.units",
    "rlhfsim.outputs",
    "rlhfsim.cache",
    "rlhfsim.ray_token",
    "rlhfsim.provenance",
    "rlhfsim.extras",
    "rlhfsim.specs",
    "rlhfsim.plan",
    "rlhfsim.trace",
    "rlhfsim.run_folder",
}
EXECUTOR_LAYERS = [
    {"executor.samples", "executor.settings", "executor.targets"},
    {"executor.sample_files"},
    {"executor.algorithms", "executor.rewards", "executor.tasks", "executor.limits"},
    {"executor.engines.protocols", "executor.sockets", "executor.machine"},
    {"executor.environments"},
    {"executor.weight_transfer"},
    {"executor.engines"},
    {"executor.microbench"},
    {"executor.resolve", "executor.ranks"},
    {"executor.refusals"},
    {"executor.dry_run", "executor.check_machine"},
    {"executor.coordination"},
    {"executor.selfcheck", "executor.evaluation"},
    {"executor.run"},
    {"executor.restart_loop", "executor.resume"},
    {"executor.launch"},
    {"executor.syncs"},
    {"executor.trainers"},
]
ASKS_THE_PLANNER = "executor.trainers"
"""The one module of the executor that may import the planner: a process that works on a GPU never does."""
EXECUTOR_RANK = {name: rank for rank, names in enumerate(EXECUTOR_LAYERS) for name in names}
THIRD_PARTY = {  # library -> the only places that may import it
    "numpy": {"rlhfsim", "executor"},
    "pydantic": {
        "rlhfsim.specs",
        "rlhfsim.choice",
        "rlhfsim.plan",
        "rlhfsim.trace",
        "rlhfsim.what_if",
        "executor.settings",
    },
    "yaml": {
        "rlhfsim.specs",
        "rlhfsim.interchange",
        "rlhfsim.validation",
        "rlhfsim.calibration",
        "executor.coordination",
    },
    "click": {"rlhfsim.cli"},
    "rich": {"rlhfsim.present"},
    "pandas": {"rlhfsim.validation", "rlhfsim.calibration", "rlhfsim.what_if"},
    "simpy": {"rlhfsim.simulation"},
    "plotly": {"rlhfsim.present"},
    "dash": {"rlhfsim.desk"},
    "flask": {"rlhfsim.desk"},
    "werkzeug": {"rlhfsim.desk"},
    "jinja2": {"rlhfsim.present"},
    "markupsafe": {"rlhfsim.present"},
    "scipy": {"rlhfsim.calibration", "rlhfsim.what_if"},
    "pyarrow": {"rlhfsim.calibration", "rlhfsim.what_if", "executor.tasks"},
    "tensorboardX": {"rlhfsim.interchange"},
    "google": {"rlhfsim.interchange"},
    "torch": {
        "executor.algorithms",
        "executor.engines",
        "executor.engines.protocols",
        "executor.weight_transfer",
        "executor.microbench",
        "executor.tasks",
    },
    "transformers": {"executor.engines", "executor.microbench", "executor.tasks"},
    "deepspeed": {"executor.engines"},
    "vllm": {"executor.engines"},
    "peft": {"executor.engines"},
    "accelerate": {"executor.engines"},
    "bitsandbytes": {"executor.engines"},
    "safetensors": {"executor.engines", "executor.weight_transfer"},
    "blake3": {"executor.weight_transfer"},
    "packaging": {"executor.engines"},
    "ray": {"executor.coordination", "executor.run", "executor.restart_loop", "rlhfsim.what_if"},
    "psutil": {"executor.engines", "executor.coordination"},
    "datasets": {"executor.tasks"},
    "huggingface_hub": {"executor.tasks"},
    "tokenizers": {"executor.tasks"},
}


def _modules() -> dict[str, Path]:
    found = {}
    for top in ("rlhfsim", "executor"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            base = node.module or ""
            names += [
                f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names
            ]
    return names


def _layer(module: str) -> str:
    if module == "executor.engines.protocols":  # what algorithms and engines agree on
        return module
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize("module", MODULES)
def test_every_import_points_down_the_layers(module: str) -> None:
    for name in _imports(MODULES[module]):
        top = name.split(".")[0]
        if top == "rlhfsim" and module.startswith("executor") and module != ASKS_THE_PLANNER:
            assert _layer(name) in EXECUTOR_MAY, f"{module} imports {name}"
        elif top == "executor":
            assert module.startswith(("executor", "rlhfsim.cli")), f"{module} imports {name}"
            _assert_below_in_executor(module, name)
        elif top == "rlhfsim" and module not in ("rlhfsim", ASKS_THE_PLANNER):
            assert _layer(name) in RANK, f"{name} is in no layer"
            same = _layer(name) == _layer(module)
            assert same or RANK[_layer(name)] < RANK[_layer(module)], (
                f"{module} imports {name}, which is not below it"
            )


@pytest.mark.parametrize("module", MODULES)
def test_third_party_libraries_stay_in_their_layer(module: str) -> None:
    for name in _imports(MODULES[module]):
        top = name.split(".")[0]
        if top in ("rlhfsim", "executor") or top in sys.stdlib_module_names:
            continue
        assert top in THIRD_PARTY, f"{module} imports unlisted {top}"
        allowed = THIRD_PARTY[top]
        assert {top_of(module), _layer(module)} & allowed, f"{module} must not import {top}"


def test_every_third_party_library_is_in_the_base_install_or_in_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {re.split(r"[<>=]", line)[0] for line in project["dependencies"]}
    base |= {"yaml", "markupsafe"}  # of pyyaml and of jinja2
    assert set(THIRD_PARTY) - base <= {name for names in EXTRAS.values() for name in names}


def top_of(module: str) -> str:
    return module.split(".")[0]


def _assert_below_in_executor(module: str, name: str) -> None:
    if not module.startswith("executor.") or _layer(name) == "executor":
        return
    mine, theirs = _layer(module), _layer(name)
    assert theirs in EXECUTOR_RANK, f"{name} is in no layer of the executor"
    assert mine == theirs or EXECUTOR_RANK[theirs] < EXECUTOR_RANK[mine], (
        f"{module} imports {name}, which is not below it"
    )


def test_every_module_is_in_a_layer() -> None:
    unlisted = [m for m in MODULES if m != "rlhfsim" and m.startswith("rlhfsim.") and _layer(m) not in RANK]
    assert not unlisted


def test_modules_have_no_cycle() -> None:
    graph = {m: {n for n in _imports(p) if n in MODULES and n != m} for m, p in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail, module])
        if module not in done:
            for name in graph[module]:
                visit(name, (*trail, module))
            done.add(module)

    for module in MODULES:
        if module != "rlhfsim":  # the package re-exports its API
            visit(module, ())


MAX_DEPTH = 29
"""Modules on the longest way down the imports. Lower it where a layer goes."""


def test_no_way_down_the_imports_is_longer_than_it_was() -> None:
    graph = {m: {n for n in _imports(p) if n in MODULES and n != m} for m, p in MODULES.items()}
    ways: dict[str, list[str]] = {}

    def longest(module: str) -> list[str]:
        if module not in ways:
            below = max((longest(name) for name in graph[module]), key=len, default=[])
            ways[module] = [module, *below]
        return ways[module]

    way = max((longest(module) for module in MODULES if module != "rlhfsim"), key=len)
    assert len(way) <= MAX_DEPTH, " -> ".join(way)


def test_design_starts_without_libraries_that_only_other_commands_need() -> None:
    code = "import sys, rlhfsim.cli.design; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "numpy" in loaded
    assert not {"scipy", "pandas", "plotly", "pyarrow", "ray", "torch", "jinja2"} & set(loaded)
