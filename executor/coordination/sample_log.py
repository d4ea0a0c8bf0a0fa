"""Samples as people read them: samples.jsonl, and what trackers and the report of a run show of it.

Each line: step, part (training or evaluation), prompt, response, answer, reward, rewards (each rule),
prompt_tokens, response_tokens, finish; of conversations `environment`: turns, seconds, observed (what it
said, in order), fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from executor.samples import Sample, Tokens
from rlhfsim.outputs import write_atomically

Line = Mapping[str, Any]
MOST_CHARACTERS = 4000
"""Most characters of a prompt or response in a line."""


@dataclass(frozen=True, slots=True)
class SampleLog:
    """samples.jsonl of a run."""

    path: Path
    decode: Callable[[list[Tokens]], list[str]]
    number: int
    """Samples that are written."""
    every: int
    """After so many iterations; 0: never."""

    def due(self, done: int) -> bool:
        """After `done` iterations."""
        return self.every > 0 and (done == 1 or done % self.every == 0)

    def restart(self, first_step: int) -> None:
        """Remove lines of `first_step` and later: a resumed run writes them again."""
        if self.path.exists():
            kept = [line for line in read(self.path) if line["step"] < first_step]
            write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def add(self, part: str, step: int, samples: Sequence[Sample]) -> list[Line]:
        """Lines of some samples, spread over the batch; they are in the file."""
        places = np.unique(np.linspace(0, len(samples) - 1, min(self.number, len(samples))).astype(int))
        chosen = [samples[int(place)] for place in places] if samples else []
        prompts = self.decode([s.prompt for s in chosen])
        responses = self.decode([s.response for s in chosen])
        lines: list[Line] = [
            {**_line(part, step, *texts), **self._environment(texts[0])}
            for texts in zip(chosen, prompts, responses, strict=True)
        ]
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        return lines

    def _environment(self, sample: Sample) -> Line:
        talk = sample.conversation
        if talk is None:
            return {}
        told = np.flatnonzero(~sample.sampled)
        runs = np.split(told, np.flatnonzero(np.diff(told) > 1) + 1) if len(told) else []
        observed = self.decode([sample.response[places] for places in runs])
        return {
            "environment": {
                "turns": talk.turns,
                "seconds": talk.seconds,
                "observed": [text[:MOST_CHARACTERS] for text in observed],
                "fault": None if talk.fault is None else f"{talk.fault.kind}: {talk.fault.what}",
            }
        }


def _line(part: str, step: int, sample: Sample, prompt: str, response: str) -> Line:
    return {
        "step": step,
        "part": part,
        "prompt": prompt[-MOST_CHARACTERS:],
        "response": response[:MOST_CHARACTERS],
        "answer": sample.answer[:MOST_CHARACTERS],
        "reward": sample.reward if sample.reward is None or np.isfinite(sample.reward) else None,
        "rewards": {k: float(v) for k, v in (sample.rewards or {}).items() if np.isfinite(v)},
        "prompt_tokens": len(sample.prompt),
        "response_tokens": sample.num_tokens,
        "finish": sample.finish,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """Lines of a samples.jsonl; what a kill cut off is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
            lines.append(line | {"step": int(line["step"])})
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            continue
    return lines
