"""Whether every process of a run is alive, checked in parallel with whatever the run does.

A part that dies is noticed within seconds, also one that has nothing to do at that time, and it is named
rather than the neighbour whose collective broke first.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from executor.coordination.cluster import node_is_gone
from executor.coordination.failures import PartFailed, collect, died, node_lost

EVERY_S = 1.0
"""Between two looks."""
BLAME_S = 5.0
"""Ray needs a second or two to see that a process is gone."""


class Watch:
    """Asks every actor for a sign of life; one that is busy answers later, one that is dead fails."""

    def __init__(self, actors: Callable[[], Mapping[str, Any]], died: Callable[[], None]) -> None:
        """`actors` gives the present ones by part name; `died` is called once, when one is found dead."""
        self._actors = actors
        self._died = died
        self._asked: dict[str, tuple[Any, Any]] = {}
        self.homes: dict[str, str] = {}
        """Ray node of every part that has answered."""
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="watch", daemon=True)
        self.failure: PartFailed | None = None
        """The part that was found dead first."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def note(self, file: Path, limit_s: float) -> None:
        """Which process is which part, for people who look for one; and which node each is on."""
        actors = self._actors()
        places = collect([a.whereabouts.remote() for a in actors.values()], list(actors), "start", limit_s)
        self.homes |= {part: node for part, (_, node) in zip(actors, places, strict=True)}
        file.write_text(json.dumps({p: pid for p, (pid, _) in zip(actors, places, strict=True)}, indent=1))

    def stop(self) -> None:
        """End; processes may go from now on."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def blame(self, suspect: str = "") -> PartFailed | None:
        """The dead part, once Ray had time to notice; None: all answer or are busy. `suspect` was first."""
        if suspect in self.homes and node_is_gone(self.homes[suspect]):
            self.failure = self.failure or node_lost(suspect, self.homes[suspect])
        deadline, quiet = time.monotonic() + BLAME_S, 0
        while self.failure is None and time.monotonic() < deadline and not self._stop.is_set():
            quiet = quiet + 1 if self._look() == 0 else 0
            if quiet == 2:  # whoever answers twice has answered after the failure
                break
            time.sleep(0.1)
        return self.failure

    def _work(self) -> None:
        while not self._stop.wait(EVERY_S):
            self._look()
            if self.failure is not None:
                self._died()
                return

    def _look(self) -> int:
        """Ask those that are not asked yet, read what has come; how many have not answered."""
        with self._lock, contextlib.suppress(RayError):
            if self.failure is not None or not ray.is_initialized():
                return 0
            present = dict(self._actors())
            self._asked = {
                part: asked for part, asked in self._asked.items() if present.get(part) is asked[0]
            }
            for part in present.keys() - self._asked.keys():
                self._asked[part] = (present[part], present[part].whereabouts.remote())
            waiting = {ref: part for part, (_, ref) in self._asked.items()}
            ready, busy = (
                ray.wait(list(waiting), num_returns=len(waiting), timeout=0.2) if waiting else ([], [])
            )
            silent = [ref for ref in ready if not self._read(waiting[ref], ref)]
            return len(busy) + len(silent)
        return 0

    def _read(self, part: str, ref: Any) -> bool:
        """Whether the part answered; one that Ray cannot reach is asked again, unless its node is gone."""
        actor, _ = self._asked.pop(part)
        try:
            _, self.homes[part] = ray.get(ref, timeout=EVERY_S)
        except RayActorError as error:
            if self._actors().get(part) is not actor:  # ended on purpose meanwhile
                return True
            node = self.homes.get(part)
            if node is not None and node_is_gone(node):
                self.failure = self.failure or node_lost(part, node)
            elif not isinstance(error, ActorUnavailableError):
                self.failure = self.failure or died(part, error)
            return False
        return True
