"""Data sets by their name on the Hugging Face hub: from this machine's cache or the network.

Nothing here waits for a network that is not: the hub is asked for a connection first, for a few seconds.
"""

from __future__ import annotations

import re
import socket
import threading
import urllib.parse
import urllib.request
from typing import Any, cast

from executor.settings import Data
from rlhfsim.errors import Place, RlhfsimError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
CONNECT_S = 5.0
"""Most that a connection to the hub may take."""


def is_name(path: str) -> bool:
    """Whether a path that is not there looks like OWNER/NAME."""
    return _NAME.fullmatch(path) is not None and not path.endswith((".jsonl", ".json", ".parquet", ".csv"))


def load(data: Data) -> Any:
    """The split of a data set on the hub, as a `datasets.Dataset`.

    Raises:
        RlhfsimError: no network and not in the cache; no such data set, subset or split.
    """
    import datasets
    from huggingface_hub import constants

    library, known = cast(Any, datasets), cast(Any, constants)
    online = not known.HF_HUB_OFFLINE and reachable(str(known.ENDPOINT))
    before = library.config.HF_HUB_OFFLINE, known.HF_HUB_OFFLINE
    try:
        if not online:
            library.config.HF_HUB_OFFLINE = known.HF_HUB_OFFLINE = True
        return library.load_dataset(data.path, data.subset, split=data.split)
    except Exception as error:  # the libraries raise many kinds
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = reason if online else "it is not in this machine's cache, and the hub cannot be reached"
        raise RlhfsimError(
            "data-hub",
            f"data set {data.path!r} cannot be read: {what}",
            place=Place(file=str(data.path)),
            help="name a file or folder with data.path (datasets: save_to_disk), or download it where there "
            "is a network; data.split and data.subset choose a part",
        ) from None
    finally:
        library.config.HF_HUB_OFFLINE, known.HF_HUB_OFFLINE = before


def reachable(endpoint: str) -> bool:
    """Whether a connection to the hub, or to the proxy before it, opens within `CONNECT_S`."""
    address = urllib.parse.urlsplit(urllib.request.getproxies().get("https", endpoint))
    opened = threading.Event()

    def connect() -> None:
        port = address.port or (80 if address.scheme == "http" else 443)
        try:
            socket.create_connection((address.hostname or "", port), CONNECT_S).close()
        except OSError:
            return
        opened.set()

    # names are looked up without a limit of their own
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    return opened.is_set()
