"""`rlhfsim launch`: a plan becomes a running job; the executor does the work, this tells what happens."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlhfsim.cli import completion
from rlhfsim.cli.params import (
    FILE,
    FOLDER,
    Several,
    Told,
    Whole,
    Words,
    bad_option,
    command,
    flag,
    is_typed,
    json_option,
    on_command_line,
    option,
)
from rlhfsim.cli.planned import profile_notes
from rlhfsim.cli.run_settings import settings_of
from rlhfsim.errors import RlhfsimError
from rlhfsim.extras import need
from rlhfsim.plan import Plan, is_as_priced, read_plan
from rlhfsim.present.answers import check_machine as machine_view
from rlhfsim.present.answers import launch as launch_view
from rlhfsim.present.terminal.console import console
from rlhfsim.present.terminal.launch import Screen
from rlhfsim.present.terminal.page import blocks, parts
from rlhfsim.run_folder import CHANGEABLE
from rlhfsim.specs.frameworks.runs import OWN, framework
from rlhfsim.specs.hardware.hardware import Cluster
from rlhfsim.specs.hardware.profiles import node_group
from rlhfsim.specs.loading import parse_json, read_text
from rlhfsim.specs.placement.scaling import Replaced, replaced, scaled_placement, scaled_workload
from rlhfsim.trace import read_trace
from rlhfsim.what_if.estimate import estimate
from rlhfsim.what_if.memory_peaks import memory_peaks
from rlhfsim.what_if.plan_files import cluster_of, estimate_file
from rlhfsim.what_if.remedies import remedy

if TYPE_CHECKING:
    from executor.check_machine import NodeChecks
    from executor.coordination.amendments import Inputs
    from executor.settings import Settings

CORE = "cpu_core"
"""Profile of a slot on a machine without GPUs."""
EDITED = (
    "note: this plan was edited after it was priced; time limits follow the old prediction: "
    "rlhfsim estimate FILE --out NEW"
)
DRY = ("ray", "tokenizers")
TRAINING = (*DRY, "torch", "transformers", "deepspeed")
"""Libraries that a real run imports; the planner needs none of them."""
STACK = (*TRAINING, "vllm")
"""Those of a run that generates."""
_GROUP = re.compile(r"^\s*(\d{1,6})\s*x\s*(\d{1,6})\s*x\s*(\S.*)$")
EPILOG = """\b
Examples:
  rlhfsim launch plan.json --model ./qwen2.5-7b --settings run.yaml
  rlhfsim launch plan.json --dry-run --assume-cluster 8x8xh100
  rlhfsim launch plan.json --dry-run --address auto
  rlhfsim launch openrlhf --scale 4
  rlhfsim launch plan.json --model ./qwen2.5-7b --settings run.yaml --out runs/a --resume
  rlhfsim launch --resume runs/a --iterations 500
"""


@command(EPILOG)
@click.argument("file", shell_complete=completion.systems)
@option(
    "--settings settings_file",
    FILE,
    "Data, rewards, loss constants, learning rates: docs/executor.md.",
    metavar="RUN.yaml",
)
@option(
    "--set pairs",
    Words("KEY=VALUE"),
    "One setting, as in optimizer.learning_rate=1e-5; repeatable.",
    multiple=True,
)
@option(
    "--model",
    Words("FOLDER"),
    "Weights and tokenizer of the policy; default: the path in the plan, a tiny model with --scale.",
)
@option("--iterations", Whole(1, 10**9), "Iterations of the run.")
@option("--out", FOLDER, "Folder of the run.", default=Path("runs/latest"))
@option("--address", None, "A running Ray cluster; default: one is started here.")
@option(
    "--scale",
    Whole(1, 64),
    "Shrink the plan to about so many slots of this machine, with a tiny model.",
    metavar="SLOTS",
)
@flag("--dry-run", "Check plan against cluster, show placement and memory, start fake engines, stop.")
@option(
    "--assume-cluster",
    Words("CLUSTER"),
    "With --dry-run: check the plan against this cluster instead, without starting anything; "
    "nodes x GPUs x kind, as in 8x8xh100 or 4x8xh100+2x8xh20.",
    metavar="NODESxGPUSxKIND",
)
@flag(
    "--resume",
    "Go on from the newest whole checkpoint in --out, with the plan and settings that are there; start where "
    "there is none. FILE may be the folder itself.",
)
@option(
    "--change",
    Several("part of a run", CHANGEABLE),
    "With --resume: what may differ from the run so far (data, model, plan, rewards, settings); recorded.",
    default="",
)
@option(
    "--recalibrate-every",
    Whole(2, 10**6),
    "Every N iterations fit the profile to this run and say whether another plan would now be better; "
    "the run keeps its plan.",
    metavar="N",
)
@flag("--no-self-check", "Skip the first minute's check.")
@json_option
def launch(
    file: str, out: Path, scale: int | None, dry_run: bool, as_json: bool, **given: Any
) -> Told | None:
    """Run FILE (a plan.json, a scenario, or a shipped system) as a real RLHF job."""
    if given["assume_cluster"] is not None:
        return check_described(file, dry_run=dry_run, scale=scale, **given)
    need(*(DRY if dry_run and not scale else TRAINING), purpose="a real run")
    from executor.coordination.amendments import recorded
    from executor.launch import LaunchOptions

    with on_command_line():
        out = run_folder(file, out, scale, **given)
        before = recorded(out) if given["resume"] else None
        plan, changes = plan_of(file, out, scale, before)
        if plan.workload.generates and not dry_run:
            need(*STACK, purpose="a real run")
        settings = settings_of(
            given["settings_file"],
            given["pairs"],
            before.settings if before else None,
            model=given["model"] or (str(tiny_folder(out)) if scale else None),
            reward_head="drawn" if scale and not given["model"] else None,  # the tiny model has none
            iterations=given["iterations"],
        )
    options = LaunchOptions(
        out=out,
        address=given["address"],
        resume=given["resume"],
        change=given["change"],
        dry_run=dry_run,
        self_check=not given["no_self_check"],
        smallest_change=smallest_change,
    )
    run(
        plan,
        settings,
        options,
        as_json=as_json,
        notes=profile_notes(file) if not scale and not Path(file).is_dir() else (),
        changes=changes,
        recalibrate_every=given["recalibrate_every"],
    )
    return None


def run(
    plan: Plan,
    settings: Settings,
    options: Any,
    *,
    as_json: bool,
    notes: tuple[str, ...] = (),
    changes: tuple[Replaced, ...] = (),
    recalibrate_every: int | None = None,
) -> None:
    """Launch and report; `changes`: what a small run has otherwise than its file. SIGTERM ends it with 143 at
    any moment, while the report is written too.

    Raises:
        RlhfsimError: bad input, or the run stopped.
    """
    from executor.coordination.saving import ended_by_sigterm

    with ended_by_sigterm():
        from executor.launch import launch as start
        from executor.run import TraceWatch
        from rlhfsim.cli.replan import Replan, profile_line

        screen = console(stderr=as_json)
        listener = Screen(screen)
        about = launch_view.before(plan, dry_run=options.dry_run, told=notes, changes=changes)
        for line in blocks([*about], screen.width):
            screen.print(line)
        if changes:
            make_tiny(options.out)
        replan = Replan(plan, options.out.name) if recalibrate_every and not options.dry_run else None
        if replan is not None and recalibrate_every:
            options = replace(options, watch=TraceWatch(every=recalibrate_every, look=replan.look))
        machine = look(plan, settings, options.out, options.address) if options.dry_run else []
        for line in parts(machine_view.page(machine, tables=False)) if machine else ():
            screen.print(line)
        outcome = start(plan, settings, options, listener)
        plan = read_plan(outcome.files.plan)  # with what own parts declare
        report = launch_view.result(plan, outcome, dry_run=options.dry_run)
        if machine:
            report |= {"machine": machine_view.node_data(machine)}
        if changes:
            report |= {"replaced": launch_view.replaced_data(changes)}
        if replan is not None:
            written = replan.write(options.out)
            report |= {"calibrated_profile": str(written) if written else None}
            screen.print(profile_line(written))
        if as_json:
            click.echo(json.dumps({"schema": launch_view.SCHEMA, **report}, indent=2))
            return
        for line in ("", *blocks([*launch_view.after(report)], screen.width)):
            screen.print(line)
        if not options.dry_run:
            from rlhfsim.present.chrome_trace import chrome_path, write_chrome

            write_chrome(chrome_path(outcome.files.trace), read_trace(outcome.files.trace))


def look(plan: Plan | None, settings: Settings, out: Path, address: str | None) -> list[NodeChecks]:
    """What this machine, or every node of the cluster at `address`, offers to a run.

    Raises:
        RlhfsimError: no cluster there.
    """
    from executor.check_machine import question, this_machine

    asked = question(plan, settings, out)
    if address is None:
        return [this_machine(asked)]
    need("ray", purpose="a cluster")
    from executor.coordination.machines import check_nodes

    return check_nodes(address, asked, plan)


def check_described(
    file: str, *, assume_cluster: str, dry_run: bool, scale: int | None, **given: Any
) -> Told:
    """A dry run on a described cluster: nothing is started.

    Raises:
        RlhfsimError: what a launch there would fail at.
    """
    from executor.dry_run import check

    if not dry_run or scale:
        raise bad_option(
            "--assume-cluster describes the cluster of a dry run at full size",
            "add --dry-run and leave out --scale",
        )
    with on_command_line():
        plan, cluster = read(file), described_cluster(assume_cluster)
        settings = settings_of(
            given["settings_file"], given["pairs"], model=given["model"], iterations=given["iterations"]
        )
    checked = check(plan, settings, cluster)
    peaks = memory_peaks(plan.placement, plan.workload, cluster_of(plan))
    return Told(launch_view.described_page(checked["cluster"], checked, peaks))


def described_cluster(text: str) -> Cluster:
    """`8x8xh100+2x8xa100`: nodes, GPUs of each, their kind.

    Raises:
        RlhfsimError: another form, or an unknown kind.
    """
    groups = []
    for part in text.split("+"):
        match = _GROUP.match(part.strip())
        if match is None:
            raise bad_option(
                f"--assume-cluster: {part[:60]!r} is not NODESxGPUSxKIND", "as in 8x8xh100: rlhfsim gpus"
            )
        nodes, gpus, kind = match.groups()
        groups.append(node_group(kind, nodes=int(nodes), gpus_per_node=int(gpus)))
    return Cluster(node_groups=tuple(groups))


def smallest_change(plan: Plan) -> str | None:
    """What would make a plan fit, asked of the planner."""
    return remedy(plan.placement, plan.workload, cluster_of(plan))


# --- inputs -------------------------------------------------------------------------------------------


def run_folder(file: str, out: Path, scale: int | None, **given: Any) -> Path:
    """The folder of the run: FILE where that is the folder of a run that goes on, else --out.

    Raises:
        RlhfsimError: options that do not go together.
    """
    if given["change"] and not given["resume"]:
        raise bad_option("--change is about a run that goes on", "add --resume")
    if not (given["resume"] and Path(file).is_dir()):
        return out
    if is_typed("out") and out.absolute() != Path(file).absolute():
        raise bad_option("--out is another folder than the run to resume", "leave out --out")
    if scale:
        raise bad_option("--scale shrinks a plan, and the run to resume has its own", "leave out --scale")
    return Path(file)


def plan_of(
    file: str, out: Path, scale: int | None, before: Inputs | None
) -> tuple[Plan, tuple[Replaced, ...]]:
    """The plan to run (exactly that of the run `before` where it is the same), and what a small one replaces.

    Raises:
        RlhfsimError: no plan, or no run in the folder that FILE is.
    """
    if before is not None and Path(file).is_dir():
        return before.plan, ()
    if Path(file).is_dir():
        raise RlhfsimError(
            "nothing-to-resume",
            "there is no run in this folder (no plan.json and settings.yaml)",
            place=file,
            help="start one: rlhfsim launch PLAN --out FOLDER",
        )
    plan, changes = scaled(file, scale, out) if scale else (read(file), ())
    same = before is not None and before.plan.to_dict() == plan.to_dict()
    return before.plan if before is not None and same else plan, changes


def read(file: str) -> Plan:
    """A plan as written, with a note where it was edited, or a scenario planned now."""
    if Path(file).suffix != ".json":
        return estimate_file(file)
    plan = read_plan(Path(file))
    if not is_as_priced(parse_json(read_text(Path(file)), file).data):
        click.echo(EDITED, err=True)
    return plan


def scaled(file: str, slots: int, out: Path) -> tuple[Plan, tuple[Replaced, ...]]:
    """The plan made small, priced on the cores of this machine, and everything that it then has otherwise."""
    from executor.tasks import tiny

    plan = read(file)
    shapes = tiny_folder(out) / "config.json"
    if not shapes.exists():
        tiny.config(tiny_folder(out))
    placement = scaled_placement(plan.placement, slots, framework(OWN).trainers)
    workload = scaled_workload(plan.workload, str(shapes))
    gpus = sum(pool.gpus for pool in placement.pools)
    cluster = Cluster(node_groups=(node_group(CORE, gpus, gpus_per_node=gpus),))
    devices = Replaced(
        field="devices", before=_devices(plan), now=f"{gpus} CPU ranks", why="it runs on this machine"
    )
    formats = Replaced(field="training precision", before="bf16", now="fp32", why="CPUs train in FP32")
    changes = replaced((plan.placement, plan.workload), (placement, workload))
    return estimate(placement, workload, cluster), (devices, formats, *changes)


def _devices(plan: Plan) -> str:
    return " + ".join(f"{h.gpus} x {h.profile}" for h in plan.hardware)


def tiny_folder(out: Path) -> Path:
    """Where the tiny model of a scaled run lies: next to the run's folder."""
    return out.parent / f"{out.name}-model"


def make_tiny(out: Path) -> None:
    """Build the tiny model unless it is there."""
    from executor.tasks import tiny

    if not (tiny_folder(out) / "model.safetensors").exists():
        tiny.build(tiny_folder(out))
