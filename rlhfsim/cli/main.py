"""The `rlhfsim` command: finds sub-commands lazily, so that `--help` answers at once."""

from __future__ import annotations

import gc
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from rlhfsim.errors import RlhfsimError
from rlhfsim.extras import not_installed

INTERNAL_ERROR = 70
"""Exit code of a bug in rlhfsim (EX_SOFTWARE)."""
INTERRUPTED = 130
COMMANDS = {
    "design": "Choose architecture and layouts for a cluster and a model.",
    "desk": "Move a question in the browser and watch the answer.",
    "size": "Find the fewest or cheapest GPUs that meet targets.",
    "choose": "Compare kinds of GPUs, sizes and backends on one table.",
    "buy": "Which GPUs to buy, reserve and rent for a mix of jobs over years.",
    "pool": "Schedule several jobs on one cluster: next to each other, in sequence, in turn.",
    "whatif": "Design again under changes: fewer GPUs, other prices, longer responses.",
    "estimate": "Price one plan: time by phase, memory, money, energy.",
    "simulate": "Run one plan step by step: waiting, shared links, queues, failures.",
    "launch": "Run a plan as a real RLHF job on Ray, DeepSpeed and vLLM.",
    "check-machine": "Check driver, GPUs, network, limits and disk before a run.",
    "demo": "See it all on this machine: design, run, compare; three minutes.",
    "doctor": "Judge a run's own configuration: does it fit, which keys to change.",
    "watch": "Follow a job that runs: against its plan, when memory runs out.",
    "export": "Write a plan as the launch of verl or another framework.",
    "compare": "Set a run against its plan: phases, memory, where the gap comes from.",
    "report": "Write a plan, a what-if or a run as one page that works offline.",
    "diff": "Show what changed between two plans, or a plan and a run.",
    "import-run": "Read a run of another framework from its logs.",
    "calibrate": "Fit a profile to executed runs; writes a new profile.",
    "memory": "Show what fills GPU memory, phase by phase.",
    "sync": "Compare every way to move weights from training to rollout.",
    "validate": "Score the predictions against measurements, published or your own.",
    "profile": "Measure this machine and write its profile.",
    "frameworks": "List what each framework runs, and how that is known.",
    "gpus": "List the hardware profiles.",
    "prices": "List what a GPU-hour costs, and where that is known from.",
    "models": "List the model presets.",
}
"""Sub-command -> one line of help; the code is `rlhfsim.cli.<command>`, `-` written `_`."""

STARTS_OTHERS = ("launch", "demo")
"""Commands whose processes run other people's code too."""


class LazyGroup(click.Group):
    """A click group that imports a command's module only when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of a newcomer's path."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command, imported."""
        if name not in COMMANDS:
            return None
        module = name.replace("-", "_")
        command = getattr(importlib.import_module(f"rlhfsim.cli.{module}"), module)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """As click does; Ctrl-C is said by `main` alone, in one line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.Abort from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Help lines without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="rlhfsim")
def cli() -> None:
    """Design RLHF systems: what fits, how fast it runs, what it costs, and how sure that is.

    Exit codes: 0 done, 1 no plan fits (or a check failed), 2 bad input.
    """


def main() -> None:
    """Entry point: bad input becomes one clear message and exit code 2, Ctrl-C one line."""
    gc.disable()  # the process is short and its objects few: collecting them costs a tenth of its time
    with _interrupts() as interrupted:
        code = _run(interrupted)
    sys.exit(code)


def _run(interrupted: Callable[[], bool]) -> int:
    """The command; its exit code."""
    try:
        prepare()
        code = cli.main(standalone_mode=False)
        sys.stdout.flush()
    except RlhfsimError as error:
        return _say(str(error), 2)
    except click.ClickException as error:
        error.show()
        return 2
    except click.exceptions.Abort:
        return _say("interrupted", INTERRUPTED)
    except OSError as error:  # of the machine: a full disk, a folder that is gone
        what = (error.strerror or type(error).__name__).lower()
        return _say(f"error[system]: {what}{f': {error.filename}' * (error.filename is not None)}", 2)
    except Exception as error:
        if interrupted():  # a library made something else of it
            return _say("interrupted", INTERRUPTED)
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            missing = not_installed([error.name.partition(".")[0]], purpose="this command")
            if missing is not None:
                return _say(str(missing), 2)
        traceback.print_exc()  # our own bug: kept apart from exit code 1, "nothing fits"
        return INTERNAL_ERROR
    return code if isinstance(code, int) else 0


def _say(text: str, code: int) -> int:
    click.echo(text, err=True)
    return code


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C ends a search with the best answer that it has; else it raises KeyboardInterrupt.

    Where Python would drop that (a finaliser), the process ends at once.
    """
    pressed: list[int] = []

    def stop(signum: int, frame: object) -> None:
        clock = sys.modules.get("rlhfsim.search.clock")
        if clock is not None and clock.ask_to_end():
            return  # the search answers with what it has
        pressed.append(signum)
        raise KeyboardInterrupt

    def dropped(what: sys.UnraisableHookArgs) -> None:
        if what.exc_type is KeyboardInterrupt:
            _say("interrupted", INTERRUPTED)
            os._exit(INTERRUPTED)
        hook(what)

    hook, before = sys.unraisablehook, signal.getsignal(signal.SIGINT)
    sys.unraisablehook = dropped
    _import_command()
    if before is not signal.SIG_IGN:  # as in what a script starts with `&`
        signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: bool(pressed)
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, before)


def _import_command() -> None:
    """Import the module of the command while Ctrl-C still ends the process at once; errors come later.

    Pydantic would look for plugins in every installed package; where only our own code runs there are none.
    """
    name = next((word for word in sys.argv[1:] if word in COMMANDS), None)
    if name is not None:
        if name not in STARTS_OTHERS:
            os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
        with suppress(Exception):
            cli.get_command(click.Context(cli), name)


# --- the surroundings of a command, which may be missing: standard streams, the working folder ---------


class _Stream(io.FileIO):
    """A standard stream whose reader may leave: the rest is dropped, and the command ends as it would."""

    def write(self, data: Any, /) -> int:
        """As a file does; what is full raises once, so that nothing more is said when Python ends."""
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            self._drop()
            return memoryview(data).nbytes
        except OSError:
            self._drop()
            raise

    def _drop(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


def prepare() -> None:
    """Standard streams that outlive their readers.

    Raises:
        RlhfsimError: standard output is closed, or the working folder is gone.
    """
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, f"__{name}__") is None]
    for _ in closed:
        os.open(os.devnull, os.O_RDWR)  # takes the lowest number: no file of ours may become a stream
    if "stderr" in closed:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115  # open until the process ends
    if "stdout" in closed:
        raise RlhfsimError("closed-output", "standard output is closed")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _tolerant(stream))
    try:
        os.getcwd()
    except OSError as error:
        raise RlhfsimError("no-working-folder", "the working folder no longer exists") from error


def _tolerant(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    with suppress(OSError):
        stream.flush()
    raw = _Stream(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
    )


if __name__ == "__main__":
    main()
