"""Answers of many commands kept as files, so that two states of the code can be compared with `diff -r`.

    python -m lab.answers --out before        # in one checkout
    python -m lab.answers --out after         # in another
    diff -r -x .cache before after

What differs without a change of the code: timings, names of folders, hashes of the code in what-ifs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

QUESTIONS = """
design --gpus 64 --model 70b
design --gpus 8 --model 8b --algorithm grpo --prompts 64 --samples 8
design --gpus 16 --model 8b
design --gpus 1 --model 0.5b --algorithm grpo --prompts 16 --samples 4
design --gpus 2 --model qwen2.5-1.5b --algorithm rloo --prompts 16 --samples 4
design --gpus 16 --model 8b --gains
design --gpus 16 --model 8b --pareto
design --gpus 16 --model 8b --why-not disaggregated
design --gpus 16 --model 8b --why-not async
design --gpus 16 --model 8b --backend megatron --algorithm grpo --prompts 128 --samples 8
design --gpus 16 --model 8b --backend fsdp2 --algorithm grpo --prompts 128 --samples 8
design --gpus 32 --model 32b --algorithm grpo --prompts 128 --samples 8 --allow async --max-staleness 2
design --gpus 32 --model 32b --algorithm grpo --prompts 128 --samples 8 --gpu h200
design --gpus 32 --model 32b --algorithm grpo --prompts 128 --samples 8 --gpu a100-80
design --gpus 16 --model 14b --response-len lognormal:mean=4000,max=16384 --algorithm grpo --prompts 64 --samples 8
design --gpus 64 --model 70b --objective cost
design --gpus 8 --model 8b --objective memory --algorithm grpo --prompts 32 --samples 4
design --gpus 16 --model 8b --algorithm dpo
design --gpus 16 --model 8b --algorithm kto
design --gpus 16 --model 8b --algorithm reinforce++
design --gpus 8 --model 70b
design --gpus 1 --model 70b
design --gpus 16 --model 8b --architecture disaggregated
design --gpus 16 --model 8b --architecture naive
design --gpus 16 --model 8b --architecture smart
design --gpus 16 --model 8b --weight-path broadcast
design --gpus 24 --model 8b --forbid offload
design --gpus 16 --model 8b --fix actor.tp=4
design --gpus 16 --model 8b --require 'step_time<60s'
design --gpus 8 --gpu l40s --model 8b --algorithm grpo --prompts 64 --samples 8
design --gpus 8 --gpu b200 --model 8b --algorithm grpo --prompts 64 --samples 8
design --gpus 16 --model olmoe-1b-7b --algorithm grpo --prompts 64 --samples 8
design --gpus 32 --model qwen3-30b-a3b --backend megatron --algorithm grpo --prompts 64 --samples 8
design --gpus 16 --model 8b --prompts 512 --samples 1 --response-len 512
design --gpus 16 --model 8b --max-oom 0.2
design --gpus 64 --model 32b --backend megatron --algorithm grpo --prompts 128 --samples 8 --allow async,rollout-logprobs --max-staleness 1
size --model 8b --gpu h100,h200 --require 'step_time<60s' --algorithm grpo --prompts 64 --samples 8
estimate --gpus 64 --model 70b --architecture hybrid --backend megatron --actor tp=8,pp=2
estimate verl
estimate openrlhf
estimate slime
estimate trl
estimate deepspeed-chat
memory verl
memory plan-0.json
sync --model 70b --from tp=8,dp=2 --to tp=8
sync --model 8b --from dp=8 --to tp=2
simulate verl
simulate openrlhf
simulate plan-1.json --seed 1
simulate plan-11.json
validate
gpus
gpus h100
models
models llama-3.1-8b
launch plan-1.json --dry-run
launch deepspeed-chat --scale 2 --dry-run
launch openrlhf --scale 2 --dry-run
diff plan-1.json plan-2.json
whatif h100-to-b200
whatif spot-prices
"""
LIMIT_S = 300


def main() -> None:
    """Run every question, as text and as JSON, in the folder; questions read plans of those before them."""
    parser = argparse.ArgumentParser(description="Answers of many commands, kept as files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="questions that contain this text")
    arguments = parser.parse_args()
    folder: Path = arguments.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for index, question in enumerate(QUESTIONS.strip().splitlines()):
        if arguments.only in question:
            shutil.rmtree(folder / "runs", ignore_errors=True)
            code = ask(folder, index, shlex.split(question))
            print(f"{index:>2} {question}: exit code {code}", flush=True)


def ask(folder: Path, index: int, words: list[str]) -> int:
    """Run one command in its forms and keep what it says; its exit code."""
    plan = ["--out", f"plan-{index}.json"] if words[0] == "design" else []
    forms: list[list[str]] = [[]] if words[0] == "launch" else [[], ["--json"]]
    python_path = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {
        "COLUMNS": "100",
        "XDG_CACHE_HOME": str(folder / ".cache"),
        "PYTHONPATH": python_path,
    }
    code = 0
    for form in forms:
        done = subprocess.run(
            [sys.executable, "-m", "rlhfsim.cli.main", *words, *plan, *form],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        name = f"{index:02d}-{words[0]}{'-json' if form else ''}.txt"
        text = f"{done.stdout}\n--- stderr\n{done.stderr}\nexit {done.returncode}\n"
        (folder / name).write_text(f"$ rlhfsim {shlex.join([*words, *form])}\n{text}", encoding="utf-8")
        code = done.returncode
    return code


if __name__ == "__main__":
    main()
