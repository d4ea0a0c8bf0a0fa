"""The simulated machine: one generator of random numbers, one clock, and the faults that wait for their turn."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Kind = Literal[
    "kill", "power", "sigterm", "worker", "node", "hang", "raise", "full", "slow", "clock", "reward"
]
KINDS: tuple[Kind, ...] = (
    "kill",
    "power",
    "sigterm",
    "worker",
    "node",
    "hang",
    "raise",
    "full",
    "slow",
    "clock",
    "reward",
)
OPERATION_S = 0.01
JUMP_S, STUCK_S = 86_400.0, 20_000.0
"""Most that a clock is set by; how long a disk hangs."""


class Killed(BaseException):
    """The driver is gone: by SIGKILL, or with its node."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens, and at which operation of a submission."""

    kind: Kind
    at: int


@dataclass(slots=True)
class World:
    """What all simulated parts share during one submission."""

    rng: np.random.Generator
    faults: list[Fault] = field(default_factory=list)
    now_s: float = 1e6
    """Seconds of the clock that nobody sets."""
    set_s: float = 0.0
    """By which the wall clock was set."""
    operations: int = 0
    dead: bool = False
    """The driver was killed: nothing it does has an effect any more."""
    happened: Counter[str] = field(default_factory=Counter)
    wrong: str = ""
    """What did not hold, and cannot be raised where it is seen: there it would be a fault of a process."""
    act: dict[str, Callable[[], None]] = field(default_factory=dict)
    """Kind of fault -> what it does; parts enter theirs."""

    def operation(self) -> None:
        """One operation of the simulated world: time passes, and what is due happens."""
        if self.dead:
            raise Killed
        self.operations += 1
        self.now_s += OPERATION_S
        due = [fault for fault in self.faults if fault.at <= self.operations]
        self.faults = [fault for fault in self.faults if fault.at > self.operations]
        for fault in due:
            self.happened[fault.kind] += 1
            self._do(fault.kind)

    def _do(self, kind: Kind) -> None:
        match kind:
            case "kill" | "power":
                self.die()
            case "sigterm":
                if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                    self.die()
                signal.raise_signal(signal.SIGTERM)
            case "slow":
                self.now_s += STUCK_S
            case "clock":
                self.set_s += self.rng.uniform(-JUMP_S, JUMP_S)
            case _:
                self.act[kind]()

    def die(self) -> None:
        """End the driver here and now."""
        self.dead = True
        raise Killed

    # --- in the place of the module `time` --------------------------------------------------------

    def time(self) -> float:
        """Seconds of the wall clock, which may be set."""
        return self.now_s + self.set_s

    def monotonic(self) -> float:
        """Seconds of the other one."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
        self.operation()
