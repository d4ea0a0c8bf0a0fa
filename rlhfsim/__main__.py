"""The `rlhfsim` script and `python -m rlhfsim`: Ctrl-C is one line even while Python imports."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130


def stop(signum: int, frame: object) -> None:
    """End at once: nothing runs yet, and an exception in the middle of an import may be lost."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def main() -> None:
    """The command, from the first import to the last flush."""
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it runs in the background
    if heard:
        signal.signal(signal.SIGINT, stop)
    from rlhfsim.cli.main import main as run

    try:
        run()
    finally:
        if heard:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done


if __name__ == "__main__":
    main()
