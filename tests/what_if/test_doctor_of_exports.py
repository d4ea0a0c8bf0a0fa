"""The doctor reads of a launch that `rlhfsim export` wrote the plan that was exported."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rlhfsim.api import cluster_of
from rlhfsim.cli.main import cli
from rlhfsim.errors import RlhfsimError
from rlhfsim.interchange.configuration.recognise import read_configuration
from rlhfsim.interchange.export import AS_READ, Exported, export, exporters
from rlhfsim.memory.ledger import LIKELY
from rlhfsim.plan import Plan
from rlhfsim.search.layouts import role_layouts
from rlhfsim.search.options import role_variants, rollout_variants
from rlhfsim.search.rollout_layouts import rollout_layouts
from rlhfsim.specs.frameworks.runs import framework
from rlhfsim.specs.frameworks.says import value_of
from rlhfsim.specs.model.presets import resolve_model
from rlhfsim.specs.placement.placement import Placement, ResourcePool, RolePlacement, Schedule
from rlhfsim.specs.workload.lengths import LogNormal, stats
from rlhfsim.what_if.doctor.case import Case, Judged, judged
from rlhfsim.what_if.doctor.diagnosis import unread_keys
from rlhfsim.what_if.estimate import PricedPlacement, planned, priced_placement, step_of
from tests.frameworks.test_round_trip import differences, question

FAST, LONG = 12, 143
"""Plans of a framework; 143 of seven are 1,000."""
NEVER_DRAINS: dict[str, Any] = {"staleness": 2, "partial_rollout": True}
SCHEDULES: tuple[dict[str, Any], ...] = ({}, {"staleness": 1}, NEVER_DRAINS)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A plan that a framework can be told."""

    plan: Plan
    priced: PricedPlacement
    exported: Exported


def told(name: str, count: int, first_seed: int = 0) -> Iterator[Drawn]:
    """Plans that a framework can be told, drawn from its space, whether they fit or not."""
    for seed in itertools.count(first_seed):
        if not count:
            return
        priced = exported = None
        with suppress(RlhfsimError):  # what it does not run
            priced = drawn(name, seed)
        if priced is None:
            continue
        plan = planned(priced, step_of(priced), None)
        with suppress(RlhfsimError):  # what it cannot be told
            exported = export(plan, name, frozenset())
        if exported is not None:
            yield Drawn(plan=plan, priced=priced, exported=exported)
            count -= 1


def plans(name: str, count: int, first_seed: int = 0) -> Iterator[Plan]:
    """Those plans alone."""
    return (each.plan for each in told(name, count, first_seed))


def drawn(name: str, seed: int) -> PricedPlacement:
    """One placement of a small question: layouts of the framework's space, shared or two pools."""
    rng, asked = random.Random(f"doctor {name} {seed}"), question(name, seed)
    prompts = LogNormal(mean=rng.choice((150, 400)), sigma=rng.choice((0.3, 0.8)), max=512)
    work = replace(asked.workload, prompt_len=prompts)
    gpus = sum(group.gpus for group in asked.cluster.node_groups)
    apart = gpus // 2 if rng.random() < 0.4 else 0
    model, group = resolve_model(work.model), asked.cluster.node_groups[0]
    space = role_layouts(asked, "actor", model, gpus - apart, group.gpus_per_node)
    shapes = [shape.layouts for shape in space.shapes]
    rollouts = rollout_layouts(asked, model, apart or gpus, group, shares=not apart)
    if not shapes or not rollouts:
        raise RlhfsimError("nothing-to-draw", "no layout fills the GPUs", help="")
    pools = [ResourcePool(name="train", gpus=gpus - apart)]
    pools += [ResourcePool(name="rollout", start=gpus - apart, gpus=apart)] if apart else []
    layout, says = rng.choice(rng.choice(shapes)), framework(name).says
    present = {"critic": work.has_critic, "reference": work.has_reference, "reward": work.has_reward_model}
    group_of_actor = ["actor", *(role for role, there in present.items() if there)]
    group_of_actor += [] if apart else ["rollout"]

    def placed(role: str) -> RolePlacement:
        shares = says.shares(role, group_of_actor)
        hosted = framework(name).rules(asked.backend, role, work).hosted  # as the space has it
        own = replace(layout, offload_params="cpu") if hosted else layout
        beside = role == "reference"
        ways = list(role_variants(asked, role, own, beside_actor=beside, shares=shares))
        return replace(rng.choice(ways), pool="train")

    adapters = work.lora is not None and (asked.backend in says.adapters_alone or rng.random() < 0.5)
    engine = list(rollout_variants(asked, rng.choice(rollouts), adapters=adapters, shares=not apart))
    placement = Placement(
        pools=tuple(pools),
        actor=placed("actor"),
        **{role: placed(role) for role, there in present.items() if there},
        rollout=replace(rng.choice(engine), pool=pools[-1].name, **({"sleep": 0} if apart else {})),
        weight_path="lora" if adapters else "broadcast" if apart else "ipc",
        backend=asked.backend,
        schedule=Schedule(**(rng.choice(SCHEDULES) if apart else {})),
    )
    runs = framework(name).of(work)
    lacks = runs.lacks_schedule(placement.schedule)
    lacks = lacks or (None if apart else runs.lacks_path(placement.weight_path, "same GPU"))
    if lacks is not None:  # what an export would say, before anything is priced
        raise RlhfsimError("not-run-by-framework", lacks.what, help="")
    roles = {n: r for n, r in placement.roles.items() if isinstance(r, RolePlacement)}
    same = all(
        len({value_of(same.aspect, roles[role], asked.backend) for role in same.roles if role in roles}) <= 1
        for same in says.same
    )
    groups = [group_of_actor, *([["rollout"]] if apart else [])]
    if not (same and says.when(placement.schedule, work, apart=bool(apart))):
        raise RlhfsimError("not-said", "the framework has one key for what differs", help="")
    if not says.together(groups, placement.schedule):
        raise RlhfsimError("not-said", "the framework cannot say who shares GPUs", help="")
    return priced_placement(placement, work, replace(asked.cluster, framework=name))


def doctored(
    plan: Plan, name: str, folder: Path, exported: Exported | None = None
) -> tuple[Case, Judged, int]:
    """What the doctor is told of an export, its verdict, and the exit code of its command."""
    folder.mkdir()
    for file, text in (exported or export(plan, name, frozenset())).files.items():
        (folder / file).write_text(text)
    configuration, settings = read_configuration([folder], {})
    case = Case(configuration=configuration, settings=settings, gpu=plan.hardware[0].profile)
    found = judged(case.under({}), None)
    stops = any(f.stops for f in configuration.findings(found.described.settings, found.described.run))
    return case, found, int(stops or not found.fits)


def check(asked: Drawn, name: str, folder: Path) -> bool:
    """The same layouts, batch, lengths, step and verdict, but for what is named; whether nothing is."""
    plan, exported = asked.plan, asked.exported
    case, found, code = doctored(plan, name, folder, exported)
    unsaid = exported.written.unsaid
    assumed = list(case.assumed(found.described))
    assert not [sentence for sentence in assumed if "${MODEL}" in sentence], "it is in the comments"
    for each in unsaid:
        assert any(each.what in sentence for sentence in assumed)
        assert not each.instead.endswith(AS_READ), "a row names what no key says"
    named = {field for u in unsaid for field in u.of}
    specs = found.described.specs
    assert [u.key for u in unread_keys(case, found) if u.kind in ("no such key", "may change")] == []
    lines = {line.split(": ")[0]: line for line in differences(plan, specs.workload, specs.placement)}
    assert [x for field, x in lines.items() if field not in named] == []
    if lines:
        return False
    assert found.step_s == pytest.approx(plan.prediction.step_s, rel=0.01)
    assert cluster_of(plan) == asked.priced.setting.cluster
    memory = asked.priced.memory
    assert found.fits == (memory.fits and memory.probability_out_of_memory < LIKELY)
    assert code == 1 - found.fits
    return True


@pytest.mark.parametrize("name", exporters())
def test_the_doctor_reads_an_export_as_the_plan_that_it_was(name: str, tmp_path: Path) -> None:
    whole = [check(each, name, tmp_path / str(i)) for i, each in enumerate(told(name, FAST))]
    assert len(whole) == FAST
    assert any(whole)


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize("name", exporters())
def test_the_doctor_reads_every_export_as_the_plan_that_it_was(name: str, tmp_path: Path) -> None:
    drawn = enumerate(told(name, LONG, first_seed=1000))
    whole = [check(each, name, tmp_path / str(i)) for i, each in drawn]
    assert len(whole) == LONG
    assert any(whole)


# --- the command --------------------------------------------------------------------------------------------

FOREIGN = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=${MODEL} data.train_files=$FILES "
FOREIGN += "actor_rollout_ref.actor.use_dynamic_bsz=True"
SKYRL = "python -m skyrl.train.entrypoints.main_base trainer.policy.model.path=$MODEL "
SKYRL += "trainer.placement.policy_num_gpus_per_node=8 generator.inference_engine.num_engines=8"


def doctor(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(
        cli, ["doctor", *arguments, "--gpu", "h100"], env={"MODEL": None, **environment}
    )


@pytest.mark.parametrize("text", [FOREIGN, SKYRL], ids=["verl", "skyrl, which has a default"])
def test_a_model_in_a_variable_that_nobody_sets_is_asked_for_by_the_option(text: str) -> None:
    found = doctor(text)
    assert isinstance(found.exception, RlhfsimError)
    assert found.exception.code == "not-enough-said"
    assert "${MODEL} is not set" in str(found.exception)
    assert "--model NAME" in (found.exception.help or "")


@pytest.mark.parametrize(
    ("option", "environment"), [(["--model", "qwen2.5-7b"], {}), ([], {"MODEL": "qwen2.5-7b"})]
)
def test_the_option_or_the_shell_names_the_model(option: list[str], environment: dict[str, str]) -> None:
    found = doctor(FOREIGN, *option, **environment)
    assert found.exit_code in (0, 1), found.output
    assert "of qwen2.5-7b on 8 x H100" in found.output
    assert ("MODEL=qwen2.5-7b, as this shell has it" in found.output) == bool(environment)


def test_the_option_wins_over_the_files() -> None:
    found = doctor(FOREIGN.replace("${MODEL}", "Qwen/Qwen2.5-7B"), "--model", "qwen2.5-1.5b")
    assert "of qwen2.5-1.5b on" in found.output
    unknown = doctor(FOREIGN, "--model", "runs/step_58")
    assert "--model is 'runs/step_58', whose shape is not known" in str(unknown.exception)


def test_lengths_of_the_plan_follow_limits_that_were_edited(tmp_path: Path) -> None:
    plan = next(plans("verl", 1))
    case, found, _ = doctored(plan, "verl", tmp_path / "run")
    shorter = case.under({"data.max_prompt_length": 200, "data.max_response_length": 300})
    assert (shorter.run.max_prompt, shorter.run.max_response) == (200, 300)
    assert shorter.specs.workload.prompt_len.maximum == 200
    assert shorter.specs.workload.response_len.maximum == 300
    assert found.described.specs.workload.prompt_len == plan.workload.prompt_len
    said = replace(case, prompt_tokens=100.0).under({}).specs.workload
    assert stats(said.prompt_len).mean == pytest.approx(100, rel=0.01)


def test_a_comment_that_somebody_broke_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "launch.sh").write_text(f"#!/bin/bash\n# rlhfsim: plan.seed = {{\n{FOREIGN}\n")
    found = doctor(str(tmp_path / "launch.sh"))
    assert isinstance(found.exception, RlhfsimError)
    assert (found.exception.code, found.exception.place.line) == ("malformed-comment", 2)
