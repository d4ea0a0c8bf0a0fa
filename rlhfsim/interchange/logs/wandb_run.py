"""A run of Weights & Biases by its address: its history, configuration and console as files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rlhfsim.errors import Place, RlhfsimError
from rlhfsim.extras import need

ADDRESS = re.compile(r"https?://[^/\s]+/([\w.-]+)/([\w.-]+)/runs/([\w-]+)(?:[/?#]\S*)?")
"""`https://wandb.ai/ENTITY/PROJECT/runs/ID`, also of one's own server (WANDB_BASE_URL says which)."""
HISTORY, CONFIG = "history.jsonl", "config.json"
WHOLE = ("output.log", "wandb-metadata.json")
"""Files of a run that say what it runs, and on what."""


class WandbRun:
    """A run on a server, copied into a folder."""

    def __init__(self, address: str, folder: Path) -> None:
        """Asks the server for it; its copy is a folder of its own in `folder`.

        Raises:
            RlhfsimError: the address is of no run, wandb is not installed, or the server does not answer.
        """
        match = ADDRESS.fullmatch(address)
        place = Place(file=address)
        if match is None:
            raise RlhfsimError(
                "no-run-address",
                "this is not the address of a run of Weights & Biases",
                place=place,
                help="as in https://wandb.ai/ENTITY/PROJECT/runs/ID; other logs are given as files",
            )
        need("wandb", purpose="a run by its address", otherwise="or export its history as CSV or JSON")
        self.folder = folder / match[3]
        self.folder.mkdir()
        self._address, self._next = address, 0
        self._run: Any = self._asked(lambda: import_module("wandb").Api().run("/".join(match.groups())))
        config = self._asked(lambda: dict(self._run.config))
        (self.folder / CONFIG).write_text(json.dumps(config, default=str))
        for name in WHOLE:
            self._asked(partial(self._download, name))
        self.update()

    def update(self) -> None:
        """Rows that the history has gained, at the end of its copy.

        Raises:
            RlhfsimError: the server does not answer.
        """
        rows = self._asked(lambda: [*self._run.scan_history(min_step=self._next)])
        with (self.folder / HISTORY).open("a") as file:
            file.writelines(json.dumps(row, default=str) + "\n" for row in rows)
        self._next = max([self._next, *(int(row["_step"]) + 1 for row in rows if "_step" in row)])

    def _download(self, name: str) -> None:
        for file in self._run.files():
            if file.name == name:
                file.download(root=str(self.folder), replace=True)

    def _asked(self, question: Callable[[], Any]) -> Any:
        """The answer of the server; whatever goes wrong there is one error."""
        try:
            return question()
        except Exception as error:
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            raise RlhfsimError(
                "run-not-reached",
                f"Weights & Biases does not give the run: {reason}",
                place=Place(file=self._address),
                help="check the address, the network and WANDB_API_KEY; or export its history as CSV or JSON",
            ) from error
