"""Valid files of every format, small, and the commands that read them."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet
import yaml
from tensorboardX import SummaryWriter

from executor.coordination import checkpoints
from lab.planted import planted_trace
from rlhfsim import resources
from rlhfsim.api import estimate_file, whatif
from rlhfsim.cli.export import predicted, vendors_of
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.export import export, exporters
from rlhfsim.interchange.logs.framework import framework_named, framework_names
from rlhfsim.plan import Plan, plan_text
from rlhfsim.specs.hardware.profiles import load_profile, profile_yaml
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.workload.workload import Reward, Rules
from rlhfsim.trace import dumps
from tests.frameworks.log_forms import console_log, logged
from tests.what_if.small_scenarios import small

ROOT = Path(__file__).resolve().parents[2]
HERE = "@HERE@"
"""In a command or a file: the folder of the case."""
SYSTEM = """\
title: "a <b>system</b>"
source: made up
framework: rlhfsim
cluster: {node_groups: [{gpu: "@GPU@", gpus: 4, gpus_per_node: 4, price: 2 USD/h}], oversubscription: 2}
workload:
  algorithm: ppo
  model: "@MODEL@"
  critic: same
  prompts: 16
  samples: 2
  epochs: 1
  mini_batches: 2
  oversampling: 0.25
  reward: {model: same}
  prompt_len: {kind: fixed, value: 256}
  response_len: @LENGTHS@
placement:
  backend: deepspeed
  pools: [{name: all, gpus: 4}]
  rollout: {pool: all, sleep: 0, layout: {tp: 1, dp: 4, memory_utilization: 0.3}}
  actor: {pool: all, layout: {dp: 4, zero: 3, micro_batch: 2}}
  critic: {pool: all, layout: {dp: 4, zero: 3, micro_batch: 2}}
  reference: {pool: all, layout: {dp: 4, zero: 3}}
  reward: {pool: all, layout: {dp: 4, zero: 3}}
  weight_path: host
"""
"""A scenario; GPU, model and lengths may be files."""
WHATIF = """\
title: small
question: what if
assumptions: [none]
base:
  cluster: {node_groups: [{gpu: h100, gpus: 2}]}
  workload:
    algorithm: grpo
    model: 0.5b
    prompts: 16
    samples: 2
    reward: {rules: {}}
    prompt_len: {kind: truncated, mean: 300, std: 50, max: 512}
    response_len: {kind: lognormal, mean: 500, sigma: 0.8, max: 2048}
  request: {backend: deepspeed, allow: [async], fix: {actor: {tp: "<=2"}}, max_staleness: 1}
  run: {curve: "@HERE@/curve.csv", target: 0.5, faults: {restart: 10 min, checkpoint: 60 s, mtbf: 5000 h, source: guess}}
points:
  - {name: twice, set: {cluster.node_groups.0.gpus: 2x}}
  - {name: cheap, set: {cluster.node_groups.0.price: 1 USD/h}}
grid: {workload.prompts: [8, 16], workload.response_len.mean: [400, 800]}
break_even:
  - {question: when, vary: cluster.node_groups.0.price, between: [1 USD/h, 5 USD/h], of: cost_of_run, point: twice, against: base}
tornado: {vary: {workload.response_len.mean: [400, 600]}}
"""
PRICES = """\
h100_sxm:
  on-demand: {value: 2.5 USD/h, low: 2 USD/h, high: 3 USD/h, date: "2026-05", source: a page}
  spot: 1.5 USD/h
a100_sxm: {reserved: 1 USD/h}
"""
SETTINGS = """\
data: {task: arithmetic, difficulty: 2, shuffle: true}
rewards: [{kind: answer, weight: 1.0, timeout_s: 5}]
algorithm: {clip_low: 0.2, gamma: 1.0, kl_coefficient: 0.01}
optimizer: {learning_rate: 1.0e-5, betas: [0.9, 0.95], warmup_steps: 3}
sampling: {temperature: 1.0, top_p: 1.0, max_tokens: 64}
checkpoints: {every: 5, keep: 2}
evaluation: {problems: 10, every: 2}
iterations: 4
"""
ALL_SETTINGS = """\
data: {task: arithmetic, difficulty: 2, shuffle: false, max_prompt_tokens: 64, held_out: 0.3, on_long: drop}
rewards:
  - {kind: judge, weight: 0.5, retries: 1, on_error: drop, judge: {url: "http://127.0.0.1:1/v1", model: m,
     prompt: "{prompt} {response}", range: [0, 10], temperature: 0.5, max_tokens: 16, concurrency: 4}}
  - {kind: code, memory_bytes: 1.0e+8, modules: [numpy], timeout_s: 2}
  - {kind: format, pattern: "<a>.*</a>"}
reward_model_weight: 0.5
algorithm: {policy_loss: null, clip_low: 0.2, clip_high: 0.3, value_clip: 0.2, gamma: 0.99, lam: 0.9,
  kl_estimator: k2, kl_in: reward, entropy_coefficient: 0.01, entropy_control: clip_cov, covariance_share: 0.01,
  covariance_bounds: [1, 5], covariance_kl: 1, correction: masked, correction_cap: 2, correction_level: sequence,
  reward_scale: 2, reward_clip: 5, length_penalty: 0.1, overlong_tokens: 16, overlong_penalty: 1, beta: 0.1,
  aggregation: token}
optimizer: {learning_rate: 1.0e-5, eps: 1.0e-8, weight_decay: 0.1, max_grad_norm: 1, schedule: cosine}
critic_optimizer: {learning_rate: 1.0e-4}
sampling: {temperature: 0.8, top_p: 1, max_tokens: 32}
checkpoints: {every: 2, keep: 3, best: true, background: false}
evaluation: {problems: 10, every: 2, samples: 4, temperature: 0.7, data: {task: logic, difficulty: 1}}
tracking: {tensorboard: true, samples: 4, samples_every: 5}
limits: {start_s: 60, call_s: 60, sync_s: 60, collective_s: 90, retries: 1}
environment: {kind: python, options: {wall_s: 2}, turns: 3, turn_tokens: 16, timeout_s: 5, concurrency: 8}
precision: fp32
bucket_bytes: 1000000
logprob_tolerance: 0.05
seed: 3
variables: {NCCL_DEBUG: WARN}
iterations: 4
"""
PRINT_NO_CONFIGURATION = ("areal", "trl")
"""Frameworks whose logs do not begin with their configuration."""
DOCUMENTS = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".csv": "csv", ".jsonl": "jsonl"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Files that belong together, and what reads them."""

    name: str
    files: Mapping[str, bytes]
    """Name -> content, placeholders unfilled."""
    mutated: tuple[str, ...]
    """Which of them are spoiled, one a case."""
    commands: tuple[tuple[str, ...], ...]
    """Commands, one of them a case."""
    sealed: str = ""
    """Folder whose manifest is written after a file in it was spoiled."""

    @property
    def family(self) -> str:
        """Subjects of one kind: the forms of a table, the logs of all frameworks."""
        return self.name.partition("-")[0]

    def kind(self, file: str) -> str:
        """How the file is changed."""
        if "tfevents" in file:
            return "events"
        if Path(file).suffix in (".parquet", ".gz"):
            return "bytes"
        return DOCUMENTS.get(Path(file).suffix, "lines")


def system(gpu: str = "h100", model: str = "0.5b", lengths: str = "{kind: fixed, value: 500}") -> str:
    """The scenario with its files."""
    return SYSTEM.replace("@GPU@", gpu).replace("@MODEL@", model).replace("@LENGTHS@", lengths)


def subjects(scratch: Path) -> tuple[Subject, ...]:
    """All of them; `scratch` is an empty folder for what is written on the way."""
    return (*_specs(), *_plans(scratch), *_tables(), *_frameworks(scratch))


def _subject(name: str, files: Mapping[str, str | bytes], *commands: str, mutated: str = "") -> Subject:
    content = {f: text.encode() if isinstance(text, str) else text for f, text in files.items()}
    return Subject(
        name=name,
        files=content,
        mutated=tuple(mutated.split() or content),
        commands=tuple(tuple(command.split()) for command in commands),
    )


def _specs() -> Iterator[Subject]:
    estimated = (f"estimate {HERE}/system.yaml", f"estimate {HERE}/system.yaml --json")
    more = (f"memory {HERE}/system.yaml", f"simulate {HERE}/system.yaml --iterations 1")
    yield _subject("scenario", {"system.yaml": system()}, *estimated, *estimated, *more)
    shipped = resources.shipped("hardware_profiles") / "h100_sxm.yaml"
    for name, text in (
        ("profile", shipped.read_text()),
        ("whole-profile", profile_yaml(load_profile("h100"))),
    ):
        files = {"gpu.yaml": text, "system.yaml": system(gpu=f"{HERE}/gpu.yaml")}
        sync = f"sync --model 0.5b --gpu {HERE}/gpu.yaml --from tp=2,dp=2 --to tp=2"
        yield _subject(name, files, f"gpus {HERE}/gpu.yaml", sync, *estimated, mutated="gpu.yaml")
    own = "extends: h100_sxm\nname: own\ntitle: Own\nprice: {value: 2, low: 1, high: 3, date: 2026-05, source: me}\n"
    yield _subject("own-profile", {"gpu.yaml": own}, f"gpus {HERE}/gpu.yaml", mutated="gpu.yaml")
    files = {"config.json": json.dumps(_config()), "system.yaml": system(model=f"{HERE}/config.json")}
    model = (f"models {HERE}/config.json", f"sync --model {HERE}/config.json --from tp=1 --to tp=1")
    yield _subject("model", files, *model, estimated[0], mutated="config.json")
    files = {
        "lengths.txt": "".join(f"{n}\n" for n in range(100, 2000, 37)),
        "system.yaml": system(lengths=f"{{kind: empirical, file: '{HERE}/lengths.txt'}}"),
    }
    yield _subject("lengths", files, *estimated, more[1], mutated="lengths.txt")
    yield _subject("prices", {"prices.yaml": PRICES}, f"prices --file {HERE}/prices.yaml")
    curve = "step,reward\n" + "".join(f"{i * 10},{i / 10}\n" for i in range(10))
    answer = f"whatif {HERE}/whatif.yaml --no-cache --jobs 1"
    yield _subject("whatif", {"whatif.yaml": WHATIF, "curve.csv": curve}, answer)


def _config() -> dict[str, Any]:
    shape = resolve_model("0.5b")
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": shape.hidden,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }


def _plan(scratch: Path) -> Plan:
    path = scratch / "system.yaml"
    path.write_text(system().replace("  oversampling: 0.25\n", ""))
    return estimate_file(path)


def _plans(scratch: Path) -> Iterator[Subject]:
    plan = _plan(scratch)
    text = plan_text(plan)
    runs = {f"export {HERE}/plan.json --to {name} --out {HERE}/new" for name in exporters()}
    dry = f"launch {HERE}/plan.json --dry-run --assume-cluster 1x4xh100 --json"
    read = (
        *(
            f"estimate {HERE}/plan.json",
            f"memory {HERE}/plan.json",
            f"diff {HERE}/plan.json {HERE}/good.json",
        ),
        *(f"simulate {HERE}/plan.json --iterations 1 --trace {HERE}/new.json", dry),
        f"report {HERE}/plan.json --no-sizes --out {HERE}/new.html",
    )
    files = {"plan.json": text, "good.json": text}
    yield _subject("plan", files, *read, *sorted(runs)[:2], mutated="plan.json")
    older = (ROOT / "tests/data/plan_version_1.json").read_text()
    yield _subject("older-plan", {"plan.json": older, "good.json": text}, *read, mutated="plan.json")
    settings = {"run.yaml": SETTINGS, "plan.json": text}
    whole = {**settings, "run.yaml": ALL_SETTINGS}
    yield _subject("settings-whole", whole, f"{dry} --settings {HERE}/run.yaml", mutated="run.yaml")
    yield _subject("settings", settings, f"{dry} --settings {HERE}/run.yaml", mutated="run.yaml")
    trace = planted_trace(plan, load_profile("h100"), {}, np.random.default_rng(0), steps=3)
    rows = "".join(json.dumps({"step": i, "step_s": 1.5, "reward_mean": 0.5}) + "\n" for i in range(3))
    run = {
        "run/plan.json": text,
        "run/trace.json": dumps(replace(trace, source="measured")),
        "run/metrics.jsonl": rows,
    }
    run["run/environment.json"] = json.dumps({"gpu": "NVIDIA H100", "torch": "2.8"})
    looked = (
        *(f"compare {HERE}/run", f"diff {HERE}/run/plan.json {HERE}/run", f"calibrate {HERE}/run"),
        f"compare {HERE}/run --trace {HERE}/new.json",
        *(f"report {HERE}/run --out {HERE}/new.html",) * 1,
    )
    yield _subject("run", run, *looked[:4], *looked)
    yield from _what_ifs(scratch)
    yield from _launches(plan, scratch)


def _what_ifs(scratch: Path) -> Iterator[Subject]:
    """An answer, and the designs that it kept."""
    document = small(points=[{"name": "longer", "set": {"workload.response_len.mean": "2x"}}])
    answer = json.dumps(whatif(document, jobs=1, cache=scratch / "kept").to_dict())
    page = f"report {HERE}/whatif.json --out {HERE}/new.html"
    yield _subject("whatif-answer", {"whatif.json": answer}, page)
    kept = {f"kept/{path.name}": path.read_bytes() for path in sorted((scratch / "kept").glob("*.json"))}
    again = f"whatif {HERE}/small.yaml --cache {HERE}/kept --jobs 1"
    files = {"small.yaml": yaml.safe_dump(document), **kept}
    yield _subject("kept-designs", files, again, mutated=" ".join(kept))


def _launches(planned: Plan, scratch: Path) -> Iterator[Subject]:
    """What a launch reads beside its plan: a model folder, data in every form, checkpoints."""
    rules = Reward(rules=Rules(seconds_per_sample=0.005))
    plan = replace(planned, workload=replace(planned.workload, reward=rules))
    text = plan_text(plan)
    dry = f"launch {HERE}/plan.json --dry-run"
    files = {"plan.json": text, "model/config.json": json.dumps(_config())}
    assumed = f"{dry} --assume-cluster 1x4xh100 --model {HERE}/model"
    started = f"{dry} --out {HERE}/new"
    yield _subject(
        "model-folder", files, assumed, f"{started} --model {HERE}/model", mutated="model/config.json"
    )
    for name, content in _data().items():
        settings = f"data: {{path: {HERE}/{name}}}\niterations: 4\n"
        files = {"plan.json": text, "run.yaml": settings, name: content}
        yield _subject(f"data-{name}", files, f"{started} --settings {HERE}/run.yaml", mutated=name)
    files = {"plan.json": text, "run.yaml": SETTINGS}
    yield _subject("settings-started", files, f"{started} --settings {HERE}/run.yaml", mutated="run.yaml")
    yield from _resumed(plan, scratch)


def _data() -> dict[str, str | bytes]:
    rows = [{"prompt": f"what is {i} + {i}?", "answer": str(2 * i)} for i in range(40)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    return {
        "data.jsonl": lines,
        "data.json": json.dumps(rows),
        "data.csv": "prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in rows),
        "data.jsonl.gz": gzip.compress(lines.encode()),
        "data.parquet": table.getvalue(),
    }


def _resumed(plan: Plan, scratch: Path) -> Iterator[Subject]:
    """A run that goes on from its checkpoint, the manifest written after the state was spoiled, or as it is."""
    owner = checkpoints.identity(plan, "settings")
    progress = checkpoints.RunProgress(
        iteration=2,
        weight_version=2,
        data_position={"step": 2},
        rng={"prompts": np.random.default_rng(0).bit_generator.state},
        metrics=({"step": 0, "reward_mean": 0.5}, {"step": 1, "reward_mean": 0.6}),
        score=0.5,
    )

    def write(folder: Path) -> None:
        for role, shape in owner.world.items():
            (folder / role).mkdir(exist_ok=True)
            for rank in range(shape["ranks"]):
                (folder / role / f"rank{rank}").write_text("weights")

    place = checkpoints.begin(scratch / "checkpoints", progress, owner, write, 1)().folder
    inner = f"run/checkpoints/{place.name}"
    files: dict[str, str | bytes] = {
        f"{inner}/{path.relative_to(place)}": path.read_bytes() for path in place.rglob("*") if path.is_file()
    }
    files |= {"run/plan.json": plan_text(plan), "run/settings.yaml": "iterations: 9\n"}
    files |= {"run/.lock": "", "run/logs/driver.log": "", "run/scratch/none": ""}
    again = f"launch {HERE}/run/plan.json --dry-run --resume --out {HERE}/run"
    state, manifest = f"{inner}/state.json", f"{inner}/manifest.json"
    yield replace(_subject("resume", files, again, mutated=state), sealed=inner)
    yield _subject("resume-manifest", files, again, mutated=f"{manifest} run/settings.yaml")


def _tables() -> Iterator[Subject]:
    folder = ROOT / "lab/scoreboard/data"
    for name in ("training", "memory", "inference", "rlhf", "weight_sync", "oom_cases", "comm_compute"):
        head = "".join((folder / f"{name}.csv").read_text().splitlines(keepends=True)[:6])
        scored = f"validate {HERE}/{name}.csv --out {HERE}/new.csv"
        yield _subject(f"rows-{name}", {f"{name}.csv": head}, f"validate {HERE}/{name}.csv", scored)


# --- frameworks -----------------------------------------------------------------------------------


def _frameworks(scratch: Path) -> Iterator[Subject]:
    for name in exporters():
        plan, files, settings = exported(name)
        judged = f"doctor {HERE}/{_start(files)} --gpu h100 --framework {name}"
        yield _subject(f"doctor-{name}", files, judged)
        if name in framework_names():
            yield from _logs(name, plan, files, settings)


def exported(name: str) -> tuple[Plan, dict[str, str], dict[str, Any]]:
    """The first recipe of a framework that can be exported to it: plan, files and settings."""
    recipes = resources.shipped("scenarios") / "recipes"
    for recipe in sorted(recipes.glob(f"{name}-*.yaml")):
        plan = estimate_file(recipe)
        with suppress(RlhfsimError):
            found = export(plan, name, vendors_of(plan), predicted)
            settings = {k.lstrip("+-"): v for k, v in found.written.values.items()}
            texts = {f: text for f, text in found.files.items() if f != "README.md"}
            return plan, {f: _filled(text, plan.workload.model) for f, text in texts.items()}, settings
    raise AssertionError(f"no recipe of {name} can be exported")


def _filled(text: str, model: str) -> str:
    """A script whose variables are set."""
    named = re.findall(r'^: "\$\{(\w+):', text, re.MULTILINE)
    exports = "".join(f"export {name}={model}\n" for name in named)
    return text.replace("set -euo pipefail\n", f"set -euo pipefail\n{exports}")


def _start(files: Mapping[str, str]) -> str:
    return next(f for f in ("launch.sh", *files) if f in files)


def _logs(name: str, plan: Plan, files: Mapping[str, str], settings: Mapping[str, Any]) -> Iterator[Subject]:
    """What a framework prints, the same numbers as event files and as JSON lines, and a folder of all."""
    filled = {k: plan.workload.model if str(v).startswith("${") else v for k, v in settings.items()}
    trace = planted_trace(plan, load_profile("h100"), {}, np.random.default_rng(0), steps=3)
    rows = list(logged(framework_named(name), plan, trace))
    log = "history.jsonl" if name == "trl" else "job.log"
    printed = console_log(name, filled, plan, trace)
    config = f"--config {HERE}/{_start(files)}"
    told = f"--framework {name} --gpu h100 --prompt-len 300 --out {HERE}/new"
    words = f"import-run {HERE}/{log} {told} {config if name in PRINT_NO_CONFIGURATION else ''}"
    yield _subject(f"log-{name}", {log: printed, **files}, words, mutated=log)
    events, history = "run/events.out.tfevents.1", "run/trainer_state.json"
    state = {"log_history": [{"step": i + 1, **row} for i, row in enumerate(rows)]}
    forms = {
        events: _events(rows),
        history: json.dumps(state),
        "run/metrics.jsonl": "".join(
            json.dumps({"step": i, "data": row}) + "\n" for i, row in enumerate(rows)
        ),
    }
    for form, content in forms.items():
        words = f"import-run {HERE}/run {told} {config}"
        yield _subject(f"{Path(form).suffix[1:]}-{name}", {form: content, **files}, words, mutated=form)
    yield _subject(
        f"folder-{name}",
        {f"run/{log}": printed, **forms, **files},
        f"import-run {HERE}/run {told} {config}",
        f"calibrate {HERE}/run",
    )


def _events(rows: Sequence[Mapping[str, float]]) -> bytes:
    with TemporaryDirectory() as folder:
        writer = SummaryWriter(folder)
        for step, row in enumerate(rows):
            for metric, value in row.items():
                writer.add_scalar(metric, value, step)
        writer.close()
        return next(Path(folder).iterdir()).read_bytes()
