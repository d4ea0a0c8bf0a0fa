"""Names of a run's files in the shared memory of a host, so that a launcher can remove what a killed run left."""

from __future__ import annotations

import hashlib
from pathlib import Path

SHARED = Path("/dev/shm")


def sweep(folder: str) -> list[Path]:
    """Remove the shared-memory files of every channel with this scratch folder; what was removed."""
    left = sorted(SHARED.glob(f"{prefix(folder)}*"))
    for path in left:
        path.unlink(missing_ok=True)
    return left


def prefix(folder: str) -> str:
    """How the files of a scratch folder begin."""
    run = hashlib.blake2b(str(Path(folder).resolve()).encode(), digest_size=6).hexdigest()
    return f"rlhfsim-{run}-"
