"""The restart loop of a run: when a part fails, everything is taken down and started again from the newest whole
checkpoint, a bounded number of times. Whatever ends a run, the checkpoint to go on from is named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from executor.coordination import checkpoints, cluster
from executor.coordination.failures import PartFailed
from executor.coordination.out_of_memory import is_out_of_memory, out_of_memory
from executor.coordination.run_folder import RunFiles
from executor.coordination.worker_groups import Rules
from executor.resolve import Job, environment
from executor.run import Ended, Listener, Run, TraceWatch
from executor.tasks.prompter import TaskPrompter
from executor.weight_transfer.shared_memory import sweep
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RestartLoop:
    """What every life of a run has in common."""

    job: Job
    files: RunFiles
    prompter: TaskPrompter
    rules: Rules
    listener: Listener
    address: str | None
    self_check: bool
    smallest_change: Callable[[Plan], str | None] | None
    watch: TraceWatch | None = None

    def run(self, found: checkpoints.Checkpoint | None) -> tuple[Ended, tuple[str, ...]]:
        """The life that reaches the end, and the failures that ended those before it.

        Raises:
            RlhfsimError: the run stopped, with what to do.
            KeyboardInterrupt: after everything has ended.
        """
        failures: list[str] = []
        while True:
            try:
                return self._once(
                    found, check_first=self.self_check and not failures and found is None
                ), tuple(failures)
            except PartFailed as failure:
                self._stop_if_memory_ran_out(failure)
                failures.append(str(failure))
                found = checkpoints.newest(self.files.checkpoints)
                self._stop_if_too_many(failure, len(failures), found)
            except RlhfsimError as error:
                raise self._stopped(error, failures) from error
            except (KeyboardInterrupt, SystemExit):
                self.listener.phase(f"interrupted; {_words(checkpoints.newest(self.files.checkpoints))}")
                raise
            finally:
                _sweep(self.files)

    def _once(self, found: checkpoints.Checkpoint | None, *, check_first: bool) -> Ended:
        limit = self.job.settings.limits.start_s
        with cluster.joined(
            self.job.plan, self.address, environment(self.job), limit, self.files.logs
        ) as reservation:
            run = Run(
                job=self.job,
                files=self.files,
                reservation=reservation,
                prompter=self.prompter,
                rules=self.rules,
                listener=self.listener,
                resume_from=found,
                check_first=check_first,
                watch=self.watch,
            )
            return run.execute()

    def _stop_if_too_many(
        self, failure: PartFailed, times: int, found: checkpoints.Checkpoint | None
    ) -> None:
        retries = self.job.settings.limits.retries
        if times > retries:
            count = f" ({times} times)" if times > 1 else ""
            raise RlhfsimError(
                "run-failed", f"{failure}{count}", help=f"read {self.files.logs}; {_words(found)}"
            ) from failure
        logger.warning("a life ended", exc_info=failure)
        start = f"the checkpoint after iteration {found.progress.iteration}" if found else "the beginning"
        self.listener.phase(f"{failure}; restart {times} of {retries} from {start}")

    def _stop_if_memory_ran_out(self, failure: PartFailed) -> None:
        """The same plan would run out again: say what it holds and what would fit."""
        if not is_out_of_memory(failure):
            return
        ask, plan = self.smallest_change, self.job.plan
        finding = out_of_memory(plan, failure.call, failure.part, (lambda: ask(plan)) if ask else None)
        raise RlhfsimError(finding.code, finding.what, help=finding.advice) from failure

    def _stopped(self, error: RlhfsimError, failures: list[str]) -> RlhfsimError:
        """Of a run that cannot go on: what failed before, and where to go on."""
        found = checkpoints.newest(self.files.checkpoints)
        if failures:
            return RlhfsimError(
                error.code,
                f"{failures[-1]}; it cannot start again: {error.message}",
                place=error.place,
                help="; ".join(text for text in (error.help, _words(found)) if text),
            )
        if found is not None:
            self.listener.phase(f"stopped; {_words(found)}")
        return error


def _words(found: checkpoints.Checkpoint | None) -> str:
    """Where a run goes on."""
    if found is None:
        return "there is no checkpoint yet (checkpoints.every sets how often one is saved)"
    return f"resume with --resume: the checkpoint after iteration {found.progress.iteration} is whole"


def _sweep(files: RunFiles) -> None:
    """What killed senders left in the shared memory of this host."""
    for path in sweep(str(weights_folder(files))):
        logger.info("removed %s, which a killed process left behind", path)


def weights_folder(files: RunFiles) -> Path:
    """Folder after which shared-memory files of the run's weight channels are named."""
    return files.scratch / "weights"
