"""`rlhfsim profile`: what is known about this machine; `measure` runs the micro-benchmarks."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from rlhfsim.cli.params import FILE, Command, Told, Words, flag, json_option, on_command_line, option
from rlhfsim.errors import RlhfsimError
from rlhfsim.extras import need
from rlhfsim.present.answers import profile as profile_view
from rlhfsim.present.terminal.console import Display, console, styled
from rlhfsim.specs.hardware.measured import Measured, MissingProbe

DEFAULT = Path("hardware_profiles/local.yaml")
"""In the user's own folder of profiles, so that `--gpu local` finds it."""
INTERRUPTED = 130
EPILOG = """\b
Examples:
  rlhfsim profile measure
  rlhfsim profile measure --quick --only gemm,decode --out today.yaml
  rlhfsim design --gpu local --gpus 2 --model path/to/config.json
"""


class ProbeProgress:
    """One line a probe."""

    def __init__(self, screen: Display) -> None:
        self.screen = screen

    def started(self, probe: Any, number: int, total: int) -> None:
        """Which probe runs."""
        self.screen.print(f"[{number}/{total}] {probe.name}: {probe.title} ...", end="")

    def ended(
        self, probe: Any, found: Sequence[Measured], missing: MissingProbe | None, seconds: float
    ) -> None:
        """What happened to it; the reason of a failure is printed below the table."""
        said = f" {seconds:.1f} s" + ("" if missing is None else ", not measured")
        self.screen.print(styled(said, style="dim" if missing is None else "yellow"))


@click.group(epilog=EPILOG)
def profile() -> None:
    """Know this machine: measure it, and design with what was measured."""


@profile.command(cls=Command, epilog=EPILOG)
@option("--out", FILE, "The new profile; an existing file is never overwritten.", default=DEFAULT)
@option(
    "--only",
    Words("NAME,..."),
    "Only these: gemm, attention, memory, collectives, storage, optimizer, train, decode, start, sleep.",
)
@flag("--quick", "Fewer sizes and repeats: about a minute, wider intervals.")
@json_option
def measure(out: Path, only: str | None, quick: bool, as_json: bool) -> Told | int:
    """Run short micro-benchmarks here and write a profile from them.

    A few minutes, alone on the machine. Interrupted, it leaves neither a file nor a process.
    """
    need("torch", purpose="measuring this machine")  # without others their probes fail by name
    from executor.microbench.run import measure as run
    from rlhfsim.calibration.micro_benchmarks.profile import measured_profile
    from rlhfsim.calibration.profile_writer import write_text

    screen = console(stderr=as_json)
    with on_command_line():
        probes = chosen(only)
        check_out(out)
    try:
        with terminated_as_interrupt():
            session = run(probes, ProbeProgress(screen), quick=quick)
    except KeyboardInterrupt:
        click.echo("interrupted: nothing was written, and no process is left", err=True)
        return INTERRUPTED
    fitted = measured_profile(session, out.stem)
    if not fitted.changes:
        raise RlhfsimError(
            "nothing-measured",
            "no probe had a result, so there is no profile to write",
            help="see above why each failed",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, fitted.text)
    return Told(profile_view.page(session, fitted, out, default=out == DEFAULT))


def chosen(only: str | None) -> list[Any]:
    """The probes by name, in their own order.

    Raises:
        RlhfsimError: an unknown name.
    """
    from executor.microbench.probes import BY_NAME, PROBES

    if only is None:
        return list(PROBES)
    names = [name.strip() for name in only.split(",") if name.strip()]
    for name in names:
        if name not in BY_NAME:
            raise RlhfsimError(
                "unknown-probe", f"unknown probe {name!r}", help=f"known: {', '.join(BY_NAME)}"
            )
    return [probe for probe in PROBES if probe.name in names]


def check_out(out: Path) -> None:
    """Refuse before minutes are spent on a file that cannot be written.

    Raises:
        RlhfsimError: the file exists, or its name is taken.
    """
    from rlhfsim.calibration.profile_writer import check_new

    try:
        check_new(out)
    except RlhfsimError as error:
        if error.code not in ("file-exists", "name-taken"):
            raise
        raise error.with_help(f"measure into another file: --out {free(out)}") from error


def free(out: Path) -> Path:
    """The first of local2.yaml, local3.yaml, ... that is not there."""
    return next(
        path
        for number in range(2, 10_000)
        if not (path := out.with_name(f"{out.stem}{number}{out.suffix or '.yaml'}")).exists()
    )


@contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the benchmarks as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
