"""When a part of a run fails, everything is taken down and starts again from the newest whole checkpoint.

A bounded number of times; whatever ends a run, the checkpoint to go on from is named.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from executor.coordination import checkpoints, cluster
from executor.coordination.failures import PartFailed
from executor.coordination.gpu_faults import fault_of, said, stop_of
from executor.coordination.out_of_memory import is_out_of_memory, out_of_memory
from executor.coordination.run_folder import RunFiles
from executor.resolve import environment
from executor.run import Ended, Run
from executor.weight_transfer.shared_memory import sweep
from rlhfsim.errors import RlhfsimError
from rlhfsim.plan import Plan

SYSTEM_HELP = (
    "free space on the disk of the run's folder, or mount it again; then the same line with --resume"
)
logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RestartLoop:
    """Attempts at a run until one reaches the end."""

    run: Run
    address: str | None
    self_check: bool
    smallest_change: Callable[[Plan], str | None] | None
    failures: list[str] = field(default_factory=list)
    """What ended the attempts so far."""

    def until_the_end(self, newest: checkpoints.Checkpoint | None) -> Ended:
        """The attempt that reaches the last iteration, the first from the checkpoint `newest`.

        Raises:
            RlhfsimError: the run stopped, with what to do.
            KeyboardInterrupt: after everything has ended.
        """
        run = self.run
        while True:
            try:
                return self._attempt(newest)
            except PartFailed as failure:
                self._stop_if_memory_ran_out(failure)
                fault = fault_of(failure)
                if fault is not None and fault.again:  # the same plan meets it again
                    raise stop_of(failure, fault) from failure
                self.failures.append(str(failure))
                newest = checkpoints.newest(run.files.checkpoints)
                self._stop_if_too_many(failure, newest)
            except RlhfsimError as error:
                raise self._stopped(error) from error
            except OSError as error:  # of the machine: a full disk, a folder that is gone
                where = f": {error.filename}" if error.filename is not None else ""
                what = f"{(error.strerror or type(error).__name__).lower()}{where}"
                raise self._stopped(RlhfsimError("system", what, help=SYSTEM_HELP)) from error
            except (KeyboardInterrupt, SystemExit):
                run.listener.phase(f"interrupted; {_words(checkpoints.newest(run.files.checkpoints))}")
                raise
            finally:
                for path in sweep(str(weights_folder(run.files))):
                    logger.info("removed %s, which a killed process left behind", path)

    def _attempt(self, newest: checkpoints.Checkpoint | None) -> Ended:
        job, check_first = self.run.job, self.self_check and not self.failures and newest is None
        limit = job.limits.start
        with cluster.joined(job.plan, self.address, environment(job), limit, self.run.files.logs) as slots:
            return self.run.execute(slots, newest, check_first=check_first)

    def _stop_if_too_many(self, failure: PartFailed, newest: checkpoints.Checkpoint | None) -> None:
        times, retries = len(self.failures), self.run.job.settings.limits.retries
        if times > retries:
            count, fault = f" ({times} times)" if times > 1 else "", fault_of(failure)
            raise RlhfsimError(
                "run-failed",
                f"{failure}{count}{f': {fault.cause}' if fault else ''}",
                help=f"{f'{fault.remedy}; ' if fault else ''}read {self.run.files.logs}; {_words(newest)}",
            ) from failure
        logger.warning("an attempt ended", exc_info=failure)
        start = f"the checkpoint after iteration {newest.progress.iteration}" if newest else "the beginning"
        self.run.listener.phase(f"{failure}; restart {times} of {retries} from {start}")

    def _stop_if_memory_ran_out(self, failure: PartFailed) -> None:
        """The same plan would run out again: say what it holds and what would fit."""
        if not is_out_of_memory(failure):
            return
        ask, plan = self.smallest_change, self.run.job.plan
        change, held = (lambda: ask(plan)) if ask else None, self.run.held.get(failure.part)
        finding = out_of_memory(plan, failure.call, failure.part, change, held, said(failure))
        raise RlhfsimError(finding.code, finding.what, help=finding.advice) from failure

    def _stopped(self, error: RlhfsimError) -> RlhfsimError:
        """Error of a run that cannot go on: what failed before, and where to go on."""
        newest = checkpoints.newest(self.run.files.checkpoints)
        if self.failures:
            return RlhfsimError(
                error.code,
                f"{self.failures[-1]}; it cannot start again: {error.message}",
                place=error.place,
                help="; ".join(text for text in (error.help, _words(newest)) if text),
            )
        if newest is not None:
            self.run.listener.phase(f"stopped; {_words(newest)}")
        return error


def _words(newest: checkpoints.Checkpoint | None) -> str:
    """Where a run goes on."""
    if newest is None:
        return "there is no checkpoint yet (checkpoints.every sets how often one is saved)"
    return f"resume with --resume: the checkpoint after iteration {newest.progress.iteration} is whole"


def weights_folder(files: RunFiles) -> Path:
    """Folder after which shared-memory files of the run's weight channels are named."""
    return files.scratch / "weights"
