"""The CUDA packages of requirements/gpu.lock, installed and tried on a machine without a GPU.

    python -m lab.cuda_install --venv DIR                 # 9 GB of disk; needs uv, nm and gcc
    python -m lab.cuda_install --venv DIR --python 3.12

Every module of executor/ and the parts of the engines are imported, the first time without a driver, then with
one that answers every call with "no device": kernels then load and vLLM's CUDA platform registers. Engine
arguments, DeepSpeed's configurations and the process groups of 40 drawn plans are read by these packages.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from typing import Any

import click

import executor
from executor import dry_run
from executor.settings import Settings
from rlhfsim.api import cluster_of, design
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
PLANS = 40
EXTRA = {"executor.rewards.expressions": "math_verify"}
"""Module -> package of an extra that it asks for."""
ENGINES = (
    *("vllm.platforms.cuda", "vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm._flashmla_C"),
    *("vllm.cumem_allocator", "vllm.vllm_flash_attn", "vllm.v1.worker.gpu_worker"),
    *("vllm.v1.worker.gpu.model_runner", "vllm.v1.attention.backends.flash_attn"),
    *("vllm.v1.attention.backends.flashinfer", "vllm.distributed.weight_transfer.ipc_engine"),
    *("vllm.distributed.weight_transfer.nccl_engine", "flashinfer", "triton", "cutlass", "tilelang"),
    *("deepspeed", "deepspeed.ops.adam.cpu_adam", "ray", "pynvml"),
)
NEED_A_DRIVER = {
    *("vllm.platforms.cuda", "vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm._flashmla_C"),
    *("vllm.cumem_allocator", "vllm.vllm_flash_attn"),
}
"""What loads only where a libcuda.so.1 is."""
NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE."""


@click.command()
@click.option("--venv", type=click.Path(path_type=Path), help="where the packages go, or are")
@click.option("--python", default="3.11", show_default=True)
@click.option("--inside", is_flag=True, hidden=True)
def main(venv: Path | None, python: str, inside: bool) -> None:
    """Exit code 1 where something that needs no GPU fails."""
    if inside:
        json.dump(_tried(), sys.stdout)
        return
    if venv is None:
        raise click.UsageError("give --venv")
    program = venv.resolve() / "bin" / "python"
    if not program.exists():
        _run("uv", "venv", "--python", python, str(venv))
        lock = ROOT / "requirements" / "gpu.lock"
        _run("uv", "pip", "install", "--python", str(program), "--require-hashes", "-r", str(lock))
    faults = _faults("no driver", _ask(program, None), NEED_A_DRIVER, judged=False)
    stub = driver_without_device(venv.resolve())
    faults += _faults("a driver without a device", _ask(program, stub), set(), judged=True)
    print(*faults or ["all as expected"], sep="\n")
    sys.exit(1 if faults else 0)


def driver_without_device(venv: Path) -> Path:
    """Folder of a libcuda.so.1 with all that vLLM's libraries take from it."""
    [vllm] = venv.glob("lib/python*/site-packages/vllm")
    libraries = [str(path) for path in sorted(vllm.rglob("*.so"))]
    symbols = subprocess.run(["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True)
    names = sorted({*re.findall(r"\b(cu[A-Z]\w+)", symbols.stdout), "cuInit"})
    folder = venv / "driver"
    folder.mkdir(exist_ok=True)
    source = folder / "libcuda.c"
    source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in names))
    library = folder / "libcuda.so.1"
    _run("gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source))
    return folder


def _ask(program: Path, driver: Path | None) -> dict[str, dict[str, str]]:
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | ({"LD_LIBRARY_PATH": str(driver)} if driver else {})
    command = [str(program), "-m", "lab.cuda_install", "--inside"]
    ran = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, dict[str, str]] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def _tried() -> dict[str, dict[str, str]]:
    """By subject what failed, and why; inside of the environment."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
    modules = [found.name for found in pkgutil.walk_packages(executor.__path__, "executor.")]
    tried = {"executor": _imports(modules), "engines": _imports(ENGINES), "plans": dict(_refused())}
    sys.stdout = answers
    return tried


def _imports(names: Iterable[str]) -> dict[str, str]:
    failed = {}
    for name in names:
        try:
            import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:200]
    return failed


def _refused() -> Iterator[tuple[str, str]]:
    """Plans that do not pass the dry run, by hash; each library is asked once about all of them."""
    plans, asked = _plans(), defaultdict[dry_run.Library, list[Any]](list)
    for plan in plans:
        dry_run.check(plan, Settings(), cluster_of(plan), lambda name, requests: asked[name].extend(requests))
    said = {name: dry_run.ask(name, requests) for name, requests in asked.items()}
    answers = {name: iter(every) for name, every in said.items() if every is not None}

    def judge(name: dry_run.Library, requests: Sequence[Any]) -> list[Any] | None:
        return [*islice(answers[name], len(requests))] if name in answers else None

    for plan in plans:
        try:
            lines = dry_run.check(plan, Settings(), cluster_of(plan), judge)
        except RlhfsimError as error:
            yield plan.input_hash, f"{error.code}: {error.message}"
            continue
        if dry_run.NOT_INSTALLED in lines.values():
            yield plan.input_hash, "not judged"


def _plans() -> list[Plan]:
    from tests.executor.drawn_questions import question

    plans: dict[str, Plan] = {}
    for seed in count():
        answer = design(question(seed), explain=False)
        shown = (answer.chosen, answer.best, *answer.runners_up)
        plans |= {plan.input_hash: plan for plan in shown if plan is not None}
        if len(plans) >= PLANS:
            return list(plans.values())[:PLANS]
    raise AssertionError


def _faults(place: str, tried: dict[str, dict[str, str]], expected: set[str], *, judged: bool) -> list[str]:
    for subject, failed in tried.items():
        print(f"{place}: {subject}: {len(failed)} failed")
        for name, error in failed.items():
            print(f"    {name}: {error}")
    failed = tried["executor"] | tried["engines"] | (tried["plans"] if judged else {})
    missing = {name for name, package in EXTRA.items() if package in failed.get(name, "")}
    return [f"{place}: {name}: {error}" for name, error in failed.items() if name not in expected | missing]


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
