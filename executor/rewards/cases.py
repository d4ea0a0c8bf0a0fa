"""Cases of unittest in a problem's tests: run where the tests only define them, counted whoever runs them.

`unittest.main()` and `if __name__ == "__main__"` find nothing in a process that serves another purpose. So
cases that nobody has run by the end of the tests are run then, and a failure that a runner only prints fails
the tests. Standard library only.
"""

from __future__ import annotations

import unittest
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def counted(space: Mapping[str, Any]) -> Iterator[None]:
    """Around the execution of the tests in `space`.

    Raises:
        AssertionError: a case failed, whoever ran it.
    """
    results: list[unittest.TestResult] = []
    run, main = unittest.TestCase.run, unittest.main

    def noted(case: unittest.TestCase, result: unittest.TestResult | None = None) -> unittest.TestResult:
        results.append(case.defaultTestResult() if result is None else result)
        run(case, results[-1])
        return results[-1]

    unittest.TestCase.run = noted  # type: ignore[method-assign, assignment]
    unittest.main = lambda *_, **__: None  # type: ignore[assignment]
    try:
        yield
        if not results:
            results.append(_run(space))
    finally:
        unittest.TestCase.run, unittest.main = run, main  # type: ignore[method-assign]
    for result in results:
        if not result.wasSuccessful():
            said = [text for _, text in result.failures + result.errors] or ["an unexpected success"]
            raise AssertionError(said[0].strip().splitlines()[-1].removeprefix("AssertionError: "))


def _run(space: Mapping[str, Any]) -> unittest.TestResult:
    result = unittest.TestResult()
    load = unittest.defaultTestLoader.loadTestsFromTestCase
    kinds = [
        kind for kind in space.values() if isinstance(kind, type) and issubclass(kind, unittest.TestCase)
    ]
    unittest.TestSuite(load(kind) for kind in kinds if kind.__module__ == "tests").run(result)
    return result
