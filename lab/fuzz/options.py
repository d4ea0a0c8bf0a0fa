"""Command lines with one or two options that are wrong, absurd, doubled or missing."""

from __future__ import annotations

import shlex
from random import Random

import click

from lab.fuzz.mutations import NUMBERS, WORDS, Raw
from lab.fuzz.seeds import HERE
from rlhfsim.cli.main import cli

QUESTION = "--model 0.5b --algorithm grpo --prompts 16 --samples 2 --rules seconds_per_sample=5ms"
BASES: dict[str, str] = {
    "design": f"--gpus 2 {QUESTION} --out {HERE}/new.json",
    "size": f"--max-gpus 4 {QUESTION} --require step_time<100s",
    "choose": f"--gpus 1..2 {QUESTION}",
    "estimate": f"--gpus 2 {QUESTION}",
    "memory": f"--gpus 2 {QUESTION}",
    "whatif": f"{HERE}/whatif.yaml --no-cache --jobs 1",
    "simulate": f"{HERE}/system.yaml --iterations 1",
    "launch": f"{HERE}/plan.json --dry-run --assume-cluster 1x4xh100",
    "doctor": "'python3 -m verl.trainer.main_ppo trainer.nnodes=1 data.train_batch_size=64' --gpu h100",
    "export": f"{HERE}/plan.json --to openrlhf --out {HERE}/new",
    "compare": f"{HERE}/run",
    "report": f"{HERE}/plan.json --no-sizes --out {HERE}/new.html",
    "diff": f"{HERE}/plan.json {HERE}/plan.json",
    "import-run": f"{HERE}/job.log --framework openrlhf --gpu h100 --prompt-len 300 --out {HERE}/new",
    "calibrate": f"{HERE}/run",
    "sync": "--model 0.5b --from tp=1 --to tp=1",
    "validate": f"{HERE}/memory.csv",
    "frameworks": "",
    "gpus": "h100",
    "prices": "h100",
    "models": "7b",
    "demo": f"--out {HERE}/new",
    "desk": "--ask 'gpus=2&model=0.5b&algorithm=grpo&prompts=16&samples=2'",
    "profile measure": f"--out {HERE}/new.yaml",
}
"""Command -> arguments that work, each quick."""
NEVER = {"--open", "--help", "--dry-run"}
"""Options that open a browser or end at once; launch keeps its dry run."""
OUTPUTS = {"--out", "--csv", "--parquet", "--trace", "--report", "--cache"}
FILES = (
    *("@HERE@/plan.json", "@HERE@/system.yaml", "@HERE@/whatif.yaml", "@HERE@/curve.csv", "@HERE@/run"),
    *("@HERE@/job.log", "@HERE@/memory.csv", "@HERE@/run.yaml", "@HERE@/config.json"),
    *("@HERE@/prices.yaml", "@HERE@/launch.sh", "@HERE@/run/trace.json", "@HERE@/run/metrics.jsonl"),
)
"""Files that are whole, of another kind than the option wants."""
QUERIES = (
    *(
        "gpus=2&gpus=3",
        "&&",
        "a=b",
        "more=--fix%20actor.tp=8",
        "more='",
        "gpus",
        "%ff=%00",
        "tab=choose&rivals=x",
    ),
    *(
        "gpus=-1&model=70b",
        "gpus=1e9&model=x",
        "more=--out%20x.json",
        "allow=async,async",
        "?gpus=2",
        "gpus=٣",
    ),
)
PATHS = (
    "@HERE@/no/such/new",
    "@HERE@",
    "@HERE@/plan.json/x",
    "@HERE@/loop",
    "",
    "\x00",
    "@HERE@/" + "n" * 300,
)
FORMS = (
    *("actor.tp=2", "rollout.tp=<=4", "actor.tp=x", "rewards=1", "tp=0", "tp=-1,dp=2", "tp=2,tp=2", "dp=1e9"),
    *("tp=4,pp=2,dp=8,ep=3", "mean=1,sigma=-1", "lognormal:mean=1e300,sigma=9,max=8", "fixed:value=0"),
    *("lognormal:mean=2000,sigma=0.8,max=8192", "empirical:file=/dev/zero", "empirical:file=.", "1..1000000"),
    *(
        "8..2",
        "..",
        "step_time<0",
        "step_time>1e300 s",
        "cost_of_run<x",
        "oom<2",
        "0.5:1e9",
        "1:1:1",
        "async",
    ),
    *("method=eagle,draft_tokens=-1,acceptance=2", "kept=0", "kept=0.5,gen_prompts=-3", "1e9x8xh100", "8x8x"),
    *("cluster.node_groups.0.gpus=1e9", "workload.prompts=true", "a=b=c", "=", "actor=tp8,zero1;rollout=tp4"),
    *(
        "optimizer.learning_rate=yess",
        "rewards.0.kind=x",
        "0.0.0",
        "99.99",
        "trainer.nnodes=1e99",
        "10%",
        "1000 h",
    ),
)


def line(rng: Random) -> list[str]:
    """A command with strange options; `@HERE@` stands for the folder of the case."""
    name = rng.choice(list(BASES))
    words = shlex.split(BASES[name])
    command: click.Command | None = cli
    for word in name.split():
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)
    assert command is not None
    params = [p for p in command.params if p.opts[0] not in NEVER]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        words = _changed(words, rng.choice(params), rng)
    return [*name.split(), *words]


def _changed(words: list[str], param: click.Parameter, rng: Random) -> list[str]:
    if isinstance(param, click.Argument):
        given = [i for i, word in enumerate(words) if not word.startswith("-")][:1]
        return [*words[: given[0]], _value(rng), *words[given[0] + 1 :]] if given else [*words, _value(rng)]
    option = param.opts[0]
    if getattr(param, "is_flag", False):
        return [*words, option]
    value = _value(rng)
    if option in OUTPUTS:
        value = rng.choice((*PATHS, *FILES))
    elif option == "--ask" and rng.random() < 0.5:
        value = (
            f"{words[words.index(option) + 1]}&{rng.choice(QUERIES)}"
            if option in words
            else rng.choice(QUERIES)
        )
    if option in words and rng.random() < 0.7:
        at = words.index(option)
        return (
            words[:at] + words[at + 2 :]
            if rng.random() < 0.2
            else [*words[: at + 1], value, *words[at + 2 :]]
        )
    return [*words, option, value] if rng.random() < 0.95 else [*words, option]


def _value(rng: Random) -> str:
    value = rng.choice(rng.choice((NUMBERS, WORDS, FORMS, FORMS, PATHS, FILES)))
    return value.text if isinstance(value, Raw) else str(value)
