"""Runs untrusted code and its tests; called in the sandbox's child only.

The verdict comes from the same process as the code, with a token that the worker made: an early exit, a signal
or a printed "passed" earns nothing. Code that searches the interpreter's frames for the token could still forge
it; tests by input and output (see executor/rewards/rules.py) are compared outside and cannot be forged.
"""

from __future__ import annotations

import traceback
from typing import Any

_MAX_ERROR = 2000


def run_program(job: dict[str, Any]) -> dict[str, str]:
    """Run the code, then its tests in the same namespace; in the child."""
    space: dict[str, Any] = {"__name__": "solution" if job["tests"] else "__main__"}
    try:
        exec(compile(job["code"], "<code>", "exec"), space)
    except SystemExit as exit:
        if exit.code not in (None, 0) or job["tests"]:
            return {"status": "error", "error": f"exit with {exit.code!r}"}
    except MemoryError:
        return {"status": "memory", "error": "MemoryError"}
    except BaseException as error:
        return {"status": "error", "error": _short(error)}
    try:
        exec(compile(job["tests"], "<tests>", "exec"), space)
    except MemoryError:
        return {"status": "memory", "error": "MemoryError"}
    except BaseException as error:
        return {"status": "failed", "error": _short(error)}
    return {"status": "passed", "error": ""}


def _short(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()[-_MAX_ERROR:]
