"""A search tool: <search>words</search> in a turn is answered with the best passages of local text files.

Passages are paragraphs, ranked by BM25 (Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework",
eq. 3.15; the idf with 1 added, so that it is positive):

    score = sum over words of the query  idf(w) f (k1 + 1) / (f + k1 (1 - b + b length / mean length))
    idf(w) = log(1 + (N - n + 0.5) / (n + 0.5))          f of w in the passage, n of N passages with w

A turn without a query is the final one. The tool gives no reward.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from executor.environments.protocol import AgentEnvironment, Observed, between

K1, B = 1.2, 0.75
_QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)
_WORD = re.compile(r"\w+")


class Passages:
    """An inverted index of paragraphs."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)
        counts = [Counter(_words(text)) for text in texts]
        for number, words in enumerate(counts):
            for word, count in words.items():
                self._postings[word].append((number, count))
        lengths = [sum(words.values()) for words in counts]
        mean = sum(lengths) / max(1, len(lengths)) or 1.0
        self._norms = [K1 * (1 - B + B * length / mean) for length in lengths]

    def best(self, query: str, count: int) -> list[str]:
        """Up to `count` passages with a word of the query, the best first; equal ones in their order."""
        scores: dict[int, float] = defaultdict(float)
        for word in set(_words(query)):
            holding = self._postings.get(word, [])
            idf = math.log(1 + (len(self.texts) - len(holding) + 0.5) / (len(holding) + 0.5))
            for number, times in holding:
                scores[number] += idf * times * (K1 + 1) / (times + self._norms[number])
        return [self.texts[n] for n in sorted(scores, key=lambda n: (-scores[n], n))[:count]]


@cache
def _passages(folder: str) -> Passages:
    """Passages of all .txt and .md files of a folder and those in it."""
    files = sorted(p for p in Path(folder).rglob("*") if p.suffix in (".txt", ".md"))
    paragraphs = [p for f in files for p in re.split(r"\n\s*\n", f.read_text(errors="replace"))]
    found = [" ".join(p.split()) for p in paragraphs if p.strip()]
    if not found:
        raise ValueError(f"no .txt or .md files with text in {folder!r}")
    return Passages(found)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


class SearchTool(AgentEnvironment):
    """Finds passages."""

    def __init__(self, folder: str, results: float = 3, characters: float = 500) -> None:
        """`folder` of the files; `results` of a search, each of at most so many `characters`."""
        self._results = int(between("results", results, 1, 1000))
        self._characters = int(between("characters", characters, 1, 1e6))
        self._passages = _passages(folder)

    async def step(self, response: str) -> Observed:
        """The passages for the last query of `response`."""
        queries = _QUERY.findall(response)
        if not queries:
            return Observed(done=True)
        found = [text[: self._characters] for text in self._passages.best(queries[-1], self._results)]
        lines = [f"{number}. {text}" for number, text in enumerate(found, 1)] or ["nothing found"]
        return Observed(text="\n<results>\n" + "\n".join(lines) + "\n</results>\n")
