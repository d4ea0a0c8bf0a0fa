"""The token file of Ray, by which who has it runs code in a cluster: readable by its owner alone."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from rlhfsim.errors import RlhfsimError

_PRIVATE = 0o600
_BYTES = 32
"""As many as Ray draws."""


def keep_private(*, make: bool) -> None:
    """Take the rights of others off the token file; `make`: write one where there is none, before Ray does.

    Ray writes it with the rights of the umask, which lets every user of the machine read it.

    Raises:
        RlhfsimError: others can read it and that cannot be changed.
    """
    if "RAY_AUTH_TOKEN" in os.environ:
        return
    given = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(given) if given else Path.home() / ".ray" / "auth_token"
    try:
        if make and not path.exists() and os.environ.get("RAY_AUTH_MODE", "token").lower() == "token":
            _write(path)
        elif path.exists() and stat.S_IMODE(path.stat().st_mode) & ~_PRIVATE:
            path.chmod(_PRIVATE)
    except OSError as error:
        raise RlhfsimError(
            "ray-token",
            f"Ray's token cannot be kept from others: {(error.strerror or 'error').lower()}",
            place=path,
            help="make the file yours with mode 600, or name another with RAY_AUTH_TOKEN_PATH",
        ) from error


def _write(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        file = os.open(path, flags, _PRIVATE)
    except FileExistsError:  # another process was faster
        return
    with os.fdopen(file, "w") as opened:
        opened.write(secrets.token_hex(_BYTES))
