"""A job that runs, watched: what it says for the first time at every look.

After five whole steps, and whenever their number has doubled, it says how the run compares with its plan, or
with what the doctor says of its configuration; what is wrong is said once a cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rlhfsim.calibration.watching.causes import Cause, causes
from rlhfsim.calibration.watching.standing import Baseline, Standing, standing
from rlhfsim.errors import RlhfsimError
from rlhfsim.frozen import frozen
from rlhfsim.interchange.logs.files import find
from rlhfsim.interchange.logs.following import LogFollower
from rlhfsim.interchange.logs.framework import Framework, framework_named, framework_names
from rlhfsim.interchange.logs.imported import Choices, Imported, LoggedStep, run_of, steps_of
from rlhfsim.interchange.logs.records import Log
from rlhfsim.interchange.logs.said import said_of
from rlhfsim.interchange.rlhfsim.metrics import executor_of
from rlhfsim.plan import Plan, read_plan
from rlhfsim.run_folder import METRICS, PLAN, inputs_folder
from rlhfsim.specs.hardware.profiles import load_profile
from rlhfsim.what_if.doctor.of_run import baseline_of_log, baseline_of_plan

FIRST = 5
"""Whole steps after which a run is judged."""
AHEAD = 100
"""Steps that are looked ahead where nobody says how many the run has."""


@frozen
class Notice:
    """Something that a watch says in addition to figures."""

    kind: Literal["waiting", "note", "restart"]
    text: str


@frozen
class Judgement:
    """How the run compares with its plan."""

    framework: Framework
    baseline: Baseline | None
    """None: the run does not say enough."""
    found: Standing


Event = Notice | Judgement | Cause


class JobWatch:
    """A job that runs, or a log that is there."""

    def __init__(
        self,
        path: Path,
        *,
        plan: Plan | None = None,
        framework: str | None = None,
        choices: Choices | None = None,
        steps: int | None = None,
    ) -> None:
        """`plan`: what it is held against, None: what the doctor says; `steps`: those of the whole run."""
        self.path, self._plan, self._steps = path, plan, steps
        self._named, self._choices = framework, choices or Choices()
        self._follower: LogFollower | None = None
        self._baseline: Baseline | None = None
        self._run: Imported | None = None
        self._asked = False
        self._told: set[str] = set()
        self._newest, self._came_at, self._restarts, self._due = -1, 0.0, 0, FIRST
        self.found: Standing | None = None
        """The newest judgement."""

    @property
    def ended(self) -> bool:
        """Whether the run has made all of its steps."""
        return self._steps is not None and self._newest >= self._steps

    def look(self, now_s: float, *, last: bool = False) -> Iterator[Event]:
        """What is new; `last`: nothing is waited for, all that is there counts.

        Raises:
            RlhfsimError: a log that nothing here can read.
        """
        follower = self._following()
        if not follower.look():
            yield from self._once(Notice(kind="waiting", text=f"{self.path}: there is no log yet"))
            return
        for note in follower.notes:
            yield from self._once(Notice(kind="note", text=note))
        framework, log = follower.framework, follower.log(all_of_them=last)
        if framework is None or follower.steps is None:
            yield from self._once(Notice(kind="waiting", text=f"{self.path}: no step has ended yet"))
            return
        yield from self._begun_again(follower.steps.restarts)
        steps = self._whole(log, framework, follower.steps.restarts)
        yield from self._judge(steps, log, framework, now_s, last=last)

    def _following(self) -> LogFollower:
        """Follower of the log; in a folder of our own executor the metrics alone are followed."""
        own = (self.path / PLAN).is_file() and not (self.path / "import.json").is_file()
        if self._follower is None or (own and self._follower.path == self.path):
            self._follower = LogFollower(self.path / METRICS if own else self.path, self._frameworks)
            if own:
                self._plan = self._plan or read_plan(inputs_folder(self.path) / PLAN)
        return self._follower

    def _frameworks(self, path: Path) -> Sequence[Framework]:
        if path != self.path and self._plan is not None:
            return [executor_of(self._plan)]
        return [framework_named(n) for n in ([self._named] if self._named else framework_names())]

    def _once(self, event: Notice | Cause) -> Iterator[Event]:
        key = event.code if isinstance(event, Cause) else event.text
        if key not in self._told:
            self._told.add(key)
            yield event

    def _begun_again(self, restarts: Sequence[int]) -> Iterator[Notice]:
        for step in restarts[self._restarts :]:
            yield Notice(kind="restart", text=f"the run began again at step {step:,}: judged anew from there")
            self._newest, self._due = step - 1, FIRST
            self.found = None
        self._restarts = len(restarts)

    def _whole(self, log: Log, framework: Framework, restarts: Sequence[int]) -> tuple[LoggedStep, ...]:
        """Whole steps since the run began (again)."""
        begun = restarts[-1] if restarts else 0
        log = replace(log, records=tuple(r for r in log.records if r.step >= begun))
        each = framework.group(self._run.settings) if self._run else 1
        try:
            return steps_of(self.path, log, framework, each)[0]
        except RlhfsimError:  # none is whole
            return ()

    def _judge(
        self, steps: Sequence[LoggedStep], log: Log, framework: Framework, now_s: float, *, last: bool
    ) -> Iterator[Event]:
        if not steps:
            return
        if steps[-1].logged > self._newest:
            self._newest, self._came_at = steps[-1].logged, now_s
        elif not last:
            if self.found is not None:
                self.found = replace(self.found, quiet_s=now_s - self._came_at)
                yield from self._new_causes(self.found)
            return
        if len(steps) < FIRST and not last:
            return
        yield from self._held_against(log, framework)
        self.found = standing(
            steps,
            framework,
            self._baseline,
            cap=self._cap(),
            capacity=load_profile(self._choices.gpu).memory.value if self._choices.gpu else None,
            ahead=max(1, self._steps - self._newest) if self._steps else AHEAD,
        )
        if last or len(steps) >= self._due:
            self._due = 2 * len(steps)
            yield Judgement(framework=framework, baseline=self._baseline, found=self.found)
        yield from self._new_causes(self.found)

    def _new_causes(self, found: Standing) -> Iterator[Event]:
        for cause in causes(found):
            yield from self._once(cause)

    def _held_against(self, log: Log, framework: Framework) -> Iterator[Event]:
        """What the run is held against, found once."""
        if self._asked:
            return
        self._asked = True
        if self._plan is not None:
            self._baseline = baseline_of_plan(self._plan, framework, log, PLAN)
            return
        head = self._following().head
        try:
            said = said_of(head, find(self.path), self._choices.configs)
            self._run = run_of(self.path, framework, said, head, log, self._choices)
            self._baseline = baseline_of_log(self._run)
        except RlhfsimError as error:
            text = f"not compared with a prediction: {error.message}" + (
                f"; {error.help}" if error.help else ""
            )
            yield Notice(kind="note", text=text)

    def _cap(self) -> float | None:
        """Tokens at which responses are cut; a plan of one length has no limit of its own."""
        if self._run is not None:
            return self._run.max_response
        lengths = self._plan.workload.response_len if self._plan else None
        return None if lengths is None or lengths.kind == "fixed" else lengths.maximum
