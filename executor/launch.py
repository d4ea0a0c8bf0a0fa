"""plan.json -> verified cluster -> running iterations -> trace: the one way into the executor.

Nothing is started before plan, settings, model and data are checked.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from executor import refusals, resume
from executor.algorithms import custom
from executor.coordination import cluster, forks, run_folder
from executor.coordination.contents import contents
from executor.coordination.sample_log import SampleLog
from executor.coordination.tracing import coordination_overhead
from executor.coordination.tracking import check_libraries
from executor.engines.fake import Fakes
from executor.engines.vllm import start
from executor.evaluation import Evaluator
from executor.resolve import Job, environment, located, model_config, model_folder, preloaded
from executor.restart_loop import RestartLoop, weights_folder
from executor.rewards.ahead import EarlyRules, RuleRewards
from executor.rewards.rules import Plain, Scorer
from executor.run import Ended, Run, RunListener, TraceWatch
from executor.samples import Sample, Scored
from executor.settings import Answers, Custom, Data, RewardRule, Say, Settings
from executor.tasks import lengths
from executor.tasks.files import FileSource
from executor.tasks.prompter import TaskPrompter
from executor.tasks.sources import open_source
from executor.tasks.text import ByteText, Text, shown
from executor.weight_transfer.shared_memory import sweep
from rlhfsim.frozen import frozen
from rlhfsim.plan import Plan

DRY_ITERATIONS = 2


@frozen
class LaunchOptions:
    """How a run is started."""

    out: Path
    """Folder of the run."""
    address: str | None = None
    """A running Ray cluster; None: one is started on this machine."""
    resume: bool = False
    """Go on with the run in the folder; where there is none, start it."""
    change: frozenset[str] = frozenset()
    """Parts of the inputs (`amendments.CHANGEABLE`) that may differ from those of the run that goes on."""
    dry_run: bool = False
    dry_step_s: float = 1.0
    """Seconds of a dry run's fake step."""
    self_check: bool = True
    smallest_change: Callable[[Plan], str | None] | None = None
    """Asks the planner what would make a plan fit; the executor does not import it."""
    watch: TraceWatch | None = None
    """Who looks at the trace every few iterations."""


@frozen
class FinishedRun:
    """A run that reached its end."""

    ended: Ended
    files: run_folder.RunFiles
    restarts: tuple[str, ...]
    """What failed and was started again."""

    @property
    def overhead(self) -> float | None:
        """Share of the wall time in which no engine works, the mean over the steps after the first."""
        shares = list(coordination_overhead(self.ended.trace).values())
        counted = shares[1:] or shares
        return sum(counted) / len(counted) if counted else None


def launch(plan: Plan, settings: Settings, options: LaunchOptions, listener: RunListener) -> FinishedRun:
    """Run the plan.

    Raises:
        RlhfsimError: bad input before anything starts; or the run stopped, with what to do.
    """
    settings = located(plan, settings)
    if options.dry_run:
        settings = replace(settings, iterations=DRY_ITERATIONS)
    check_libraries(settings.tracking)
    dry_step_s = options.dry_step_s if options.dry_run else None
    job, prompter = prepare(
        plan, settings, dry_step_s=dry_step_s, address=options.address, say=listener.phase
    )
    job, asked = evaluation_prompter(job, prompter, listener.phase)
    named = contents(job, (prompter.source, asked.source))
    with (
        run_folder.occupy(options.out.absolute(), resume=options.resume) as files,
        _logged(files),
        _forks(job, options, files.logs / "forks.log"),
    ):
        checkpoint = None
        if options.resume and run_folder.holds_something(files):
            checkpoint = resume.checkpoint_of(files, job, named, options.change, listener.phase)
        else:
            resume.write_inputs(files, job, named)
        if checkpoint is not None and checkpoint.progress.iteration >= settings.iterations:
            listener.phase(f"the run in {files.root} has done its {checkpoint.progress.iteration} iterations")
            return FinishedRun(ended=resume.ended_before(files, job, checkpoint), files=files, restarts=())
        sweep(str(weights_folder(files)))
        with contextlib.ExitStack() as open_scorers:
            scorer = open_scorers.enter_context(Scorer(_local(job, job.rules)))
            _probe(scorer, job, prompter)
            own, scores = settings.evaluation.rewards, scorer
            if own is not None:
                scores = open_scorers.enter_context(Scorer(_local(job, own)))
                _probe(scores, job, asked, held_out=True)
            run = Run(
                job=job,
                files=files,
                prompter=prompter,
                rules=_rules(scorer, prompter) if job.fakes is None else _Alternating(),
                evaluator=_evaluator(job, asked, _rules(scores, asked)),
                samples=SampleLog(
                    files.samples,
                    prompter.text.decode,
                    number=settings.tracking.samples,
                    every=settings.tracking.samples_every,
                ),
                contents=named,
                listener=listener,
                watch=options.watch,
            )
            loop = RestartLoop(
                run=run,
                address=options.address,
                self_check=options.self_check,
                smallest_change=options.smallest_change,
            )
            ended = loop.until_the_end(checkpoint)
            return FinishedRun(ended=ended, files=files, restarts=tuple(loop.failures))


def prepare(
    plan: Plan,
    settings: Settings,
    *,
    dry_step_s: float | None = None,
    address: str | None = None,
    say: Say = lambda text: None,
) -> tuple[Job, TaskPrompter]:
    """Check everything that can be checked without starting anything.

    `dry_step_s`: a dry run, whose fake step takes so long; its model need not be here. `say` is told of
    the data.

    Raises:
        RlhfsimError: plan, settings, model, tokenizer or data cannot be run.
    """
    model = model_folder(plan, settings)
    absent = dry_step_s is not None and not Path(model).is_dir()
    if not absent:
        refusals.check_model(model)
    text = ByteText() if absent else Text(model, chat=settings.data.chat_template)
    fakes = None
    if dry_step_s is not None:  # predicted, scaled so that the step takes as long
        scale = dry_step_s / max(plan.prediction.step_s, 1e-9)
        seconds = {phase.name: phase.seconds * scale for phase in plan.prediction.phases}
        fakes = Fakes(seconds=seconds, ledger=plan.prediction.ledger)
    job = Job(
        plan=plan,
        settings=settings,
        model=model,
        gpu=cluster.has_gpus(address, settings.variables),
        max_prompt=1,
        fakes=fakes,
    )
    refusals.check(job)
    refusals.check_rewards(job)
    refusals.check_reference(job)
    refusals.check_environment(job)
    job = replace(job, plan=custom.priced(plan, settings.custom))
    if settings.custom != Custom():
        from executor.algorithms import probe  # needs torch

        probe.check(settings, plan)
    if job.settings.reward_head == "drawn" and job.plan.workload.has_reward_model:
        say("reward_head: drawn: where its folder has none, the reward model's head is drawn: noise")
    source = open_source(
        settings.data, plan.workload.algorithm, settings.seed, answers=_answers(job), say=say
    )
    prompter = TaskPrompter(
        source=source,
        text=text,
        workload=plan.workload,
        sampling=settings.sampling,
        max_tokens=job.max_tokens,
        seed=settings.seed,
        environment=settings.environment,
    )
    config = {} if absent else model_config(job.model)
    if not absent:
        refusals.check_shape(job, config)
    longest = _longest_prompt(job, prompter, settings.data, config, say)
    job = replace(job, max_prompt=longest)
    if not absent:
        refusals.check_length(job, config)
        refusals.check_family(job, config)
    return job, prompter


def _answers(job: Job) -> Answers:
    """Whether rewards use the answers of the run's data."""
    workload, evaluation = job.plan.workload, job.settings.evaluation
    rules = job.rules if workload.reward.rules is not None else ()
    if evaluation.problems and evaluation.data is None:
        rules += evaluation.rewards or job.rules
    return _used_answers(job, rules)


def _used_answers(job: Job, rules: Sequence[RewardRule]) -> Answers:
    """The most that one of the rules, or the environment, asks for."""
    asked = {rule.answers for rule in rules} if job.plan.workload.generates else set()
    if "required" in asked:
        return "required"
    return "read" if "read" in asked or job.settings.environment is not None else "unused"


def evaluation_prompter(job: Job, prompter: TaskPrompter, say: Say) -> tuple[Job, TaskPrompter]:
    """Where problems of evaluations come from; the job knows their longest prompt.

    Raises:
        RlhfsimError: a data set of its own that cannot be used, or no problem is held out.
    """
    asked, workload = job.settings.evaluation, job.plan.workload
    own, mine = asked.data, replace(prompter, _open={})
    if own is not None and asked.problems:
        if own.path and own.held_out is None:
            own = replace(own, held_out=1.0)
        answers = _used_answers(job, asked.rewards or job.rules)
        say("evaluation on data of its own:")
        mine.source = open_source(
            own, workload.algorithm, job.settings.seed, answers=answers, training=False, say=say
        )
        if isinstance(mine.text, Text):
            mine.text = Text(job.model, chat=own.chat_template)
        config = model_config(job.model) if isinstance(mine.text, Text) else {}
        mine.max_prompt = None
        longest = _longest_prompt(job, mine, own, config, say)
        job = replace(job, max_prompt=max(job.max_prompt, longest))
        refusals.check_length(job, config)
    if asked.problems:
        _evaluator(job, mine, _Alternating()).check()
    return job, mine


def _evaluator(job: Job, prompter: TaskPrompter, rules: RuleRewards) -> Evaluator:
    return Evaluator(
        prompter=prompter,
        rules=rules if job.fakes is None else _Alternating(),
        workload=job.plan.workload,
        settings=job.settings,
    )


def _longest_prompt(job: Job, prompter: TaskPrompter, data: Data, config: Mapping[str, Any], say: Say) -> int:
    """Tokens; prompts of a file that are too long are no longer in the prompter's data, or are cut by it."""
    if not isinstance(prompter.source, FileSource):
        return prompter.longest_prompt(job.settings.iterations)
    positions = config.get("max_position_embeddings")
    room = None if positions is None else int(positions) - job.max_tokens
    found = lengths.fit(prompter.source, prompter.text, data, room, say)
    say(f"data: {prompter.source.shares()}")
    if data.on_long == "truncate":
        prompter.max_prompt = found.limit
    say(found.words(data.on_long))
    return found.longest


def _local(job: Job, rules: Sequence[RewardRule]) -> list[RewardRule]:
    """The rules; those of a dry run without its remote judges, which cost money."""
    return [rule for rule in rules if job.fakes is None or rule.kind != "judge"]


def _probe(scorer: Scorer, job: Job, prompter: TaskPrompter, *, held_out: bool = False) -> None:
    """Every rule on two problems of the data, answered rightly: one that cannot run is known at the start."""
    workload = job.plan.workload
    if job.fakes is None and workload.generates and (held_out or workload.reward.rules is not None):
        problems = prompter.source.held_out(2) if held_out else prompter.source.batch(0, 2)
        scorer.probe([(shown(p.prompt), p.answer, p.answer, p.meta) for p in problems])


def _rules(scorer: Scorer, prompter: TaskPrompter) -> RuleRewards:
    """Rule rewards of samples, begun while others are decoded."""

    def texts(samples: Sequence[Sample]) -> list[Plain]:
        prompts = {id(s.prompt): s.prompt for s in samples}  # shared by the samples of a group
        asked = dict(zip(prompts, prompter.text.decode(list(prompts.values())), strict=True))
        answers = prompter.text.decode([s.response[s.sampled] for s in samples])  # not its environment's
        return [
            (asked[id(s.prompt)], text, s.answer, s.meta or {}, s.id)
            for s, text in zip(samples, answers, strict=True)
        ]

    return EarlyRules(scorer, texts, prompter.preview)


class _Alternating(RuleRewards):
    """Rewards of a dry run: those of every group differ."""

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        return [Scored(total=float(s.id % 2), by_rule={}) for s in samples]


def _forks(job: Job, options: LaunchOptions, log: Path) -> contextlib.AbstractContextManager[None]:
    """Processes of a run on the CPUs of this machine are forks of one that has imported their libraries."""
    if options.address is not None or job.gpu or job.fakes is not None:
        return contextlib.nullcontext()
    return forks.of_run(preloaded(job), start.environment("cpu") | environment(job), log)


@contextlib.contextmanager
def _logged(files: run_folder.RunFiles) -> Iterator[None]:
    """What libraries and this program log goes to a file; the screen shows what the listener is told."""
    handler = logging.FileHandler(files.logs / "driver.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
