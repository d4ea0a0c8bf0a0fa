"""How a run goes on: what its folder says, what may differ from it, and from which checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

from executor.coordination import amendments, checkpoints, run_folder
from executor.coordination.run_folder import RunFiles
from executor.coordination.tracking import MetricsFile
from executor.engines.deepspeed.config import ds_config
from executor.engines.fsdp2.config import fsdp2_config
from executor.engines.training import library
from executor.resolve import Job, engine_specs, located, rollout_spec
from executor.run import Ended
from executor.settings import Say
from rlhfsim.provenance import installed_version
from rlhfsim.run_folder import inputs_folder
from rlhfsim.trace import Trace, read_trace, write_trace


def checkpoint_of(
    files: RunFiles, job: Job, contents: Mapping[str, str], change: Collection[str], say: Say
) -> checkpoints.Checkpoint | None:
    """The checkpoint from which a run that was begun goes on, its changes recorded; None: it has none.

    Raises:
        RlhfsimError: inputs that differ and were not to be changed, or a checkpoint of other ranks.
    """
    before = amendments.recorded(files.root)
    assert before is not None, "checked when the folder was taken"
    before = replace(before, settings=located(before.plan, before.settings))
    now = amendments.Inputs(plan=job.plan, settings=job.settings, contents=contents)
    found, amended = amendments.changes(before, now), inputs_folder(files.root) != files.root
    if job.fakes is not None:  # a dry run has another length
        found = [one for one in found if one.part != amendments.LENGTH]
    amendments.check_allowed(found, change, files.root)
    newest = checkpoints.newest(files.checkpoints)
    if newest is None:
        say("the run in this folder has no whole checkpoint: it begins again")
    else:
        identity = checkpoints.identity(job.plan, run_folder.settings_hash(job.settings))
        checkpoints.check_resumable(newest, identity, other_plan=bool(change) or amended)
    if found and job.fakes is None:
        folder = amendments.next_folder(files.root)
        write_inputs(RunFiles(folder), job, contents)
        done = newest.progress.iteration if newest else 0
        say(f"changed, recorded in {amendments.record(folder, found, done)}:")
        for one in found:
            say(f"  {one.part}: {', '.join(one.what)}")
    return newest


def ended_before(files: RunFiles, job: Job, newest: checkpoints.Checkpoint) -> Ended:
    """A run that had reached its end before."""
    run_folder.link(files.model, newest.folder / "actor")  # a kill may have come before it
    done = newest.progress
    MetricsFile(files.metrics, done.iteration, done.metrics).close()  # a power failure may have taken lines
    if not files.trace.is_file():
        empty = Trace(
            source="measured",
            rlhfsim_version=installed_version("rlhfsim"),
            plan_hash=job.plan.input_hash,
            steps=newest.progress.iteration,
            spans=(),
        )
        write_trace(files.trace, empty)
    return Ended(trace=read_trace(files.trace), rows=newest.progress.metrics, evaluations={})


def write_inputs(files: RunFiles, job: Job, contents: Mapping[str, str]) -> None:
    """The emitted configuration of a run, next to its results."""
    vllm = asdict(rollout_spec(job)) if job.plan.workload.generates else {}
    run_folder.write_inputs(
        files,
        plan=job.plan,
        settings=job.settings,
        contents=contents,
        trainers=trainer_configs(job),
        vllm=vllm,
    )


def trainer_configs(job: Job) -> dict[str, dict[str, dict[str, Any]]]:
    """Training library -> role -> what it is given."""
    specs = engine_specs(job)
    deepspeed = {
        role: ds_config(spec.layout, spec.optimizer, spec.precision, cuda=job.gpu, gradients=spec.gradients)
        for role, spec in specs.items()
        if spec.optimizer is not None and spec.backend == "deepspeed"
    }
    fsdp2 = {r: fsdp2_config(s, cuda=job.gpu) for r, s in specs.items() if library(s) == "FSDP2"}
    return {"deepspeed": deepspeed, "fsdp2": fsdp2}
