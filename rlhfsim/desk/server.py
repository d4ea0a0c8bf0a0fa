"""The web server of the page: for this machine alone unless asked otherwise, without a foreign name.

A page of another site that resolves its own name to this machine (DNS rebinding) sends its name in the
Host header: only names of this machine are answered. What another site sends on its own is refused too.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Callable
from functools import partial
from importlib import resources
from types import TracebackType

from dash import Dash
from flask import Response, abort, request
from werkzeug.serving import make_server

from rlhfsim.desk.choose import choose_panel, connect_choose, tabs
from rlhfsim.desk.comparisons import DeskComparison, ReadCandidates, compare
from rlhfsim.desk.documents import DocumentTask, answer_documents, connect_documents, documents_panel
from rlhfsim.desk.files import ReadDocuments
from rlhfsim.desk.page import Fields, connect, layout
from rlhfsim.desk.pasted import MAX_REQUEST_BYTES, connect_pasted, pasted_panel
from rlhfsim.desk.searches import Read, Searches
from rlhfsim.desk.state import query
from rlhfsim.desk.tasks import PageTasks
from rlhfsim.errors import RlhfsimError
from rlhfsim.present.html.page import style
from rlhfsim.present.html.theme import LIGHT

POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; frame-ancestors 'none'; "
    "form-action 'none'"
)
"""Dash starts its page by scripts of its own inside it."""


class Server:
    """The page and its searches, from `with` to its end."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        fields: Fields,
        read: Read,
        candidates: ReadCandidates,
        documents: ReadDocuments,
        start: str,
        files: bool = False,
    ) -> None:
        """`read`: see `Searches`; `candidates`, `documents`: see there; `start`: asked without an address.

        `files`: what is pasted may name models of this machine.
        """
        self._searches = Searches(read)
        self._comparisons = PageTasks[DeskComparison]("comparison")
        self._documents = PageTasks[DocumentTask]("search")
        app = Dash("rlhfsim.desk", title="rlhfsim desk", update_title="", serve_locally=True)
        app.index_string = _index(app.index_string)
        app.layout = layout(fields, start, tabs(), [choose_panel(fields), pasted_panel(), documents_panel()])
        connect(app, fields, lambda question: read(query(question)), self._searches)
        connect_choose(app, self._comparisons, partial(partial, compare, candidates))
        connect_pasted(app, files=files)
        connect_documents(app, self._documents, partial(partial, answer_documents, documents))
        app.server.config["MAX_CONTENT_LENGTH"] = MAX_REQUEST_BYTES
        _guard(app, names(host))
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        try:
            self._server = make_server(host, port, app.server, threaded=True)
        except (OSError, SystemExit) as error:
            self._searches.close()
            raise RlhfsimError(
                "port-taken",
                f"port {port} of {host} cannot be used",
                help="give another --port, or 0 for a free one",
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._server.port}/"

    def __enter__(self) -> Server:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """All end."""
        self._server.server_close()
        self._comparisons.close()
        self._documents.close()
        self._searches.close()

    def run(self) -> None:
        """Answer until Ctrl-C or `stop`."""
        try:
            self._server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            return

    def stop(self) -> None:
        """From another thread: `run` returns."""
        self._server.shutdown()


def names(host: str) -> Callable[[str], bool]:
    """Which names of a Host header mean this machine; any address too where every network is listened to."""
    own = {"localhost", host}
    address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    if not address.is_loopback:
        own |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    def known(name: str) -> bool:
        return name in own or (address.is_unspecified and _is_address(name))

    return known


def _is_address(name: str) -> bool:
    """No name that a foreign server could resolve."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _guard(app: Dash, known: Callable[[str], bool]) -> None:
    def refuse() -> None:
        host = request.host.rsplit(":", 1)[0] if not request.host.endswith("]") else request.host
        if not known(host.strip("[]").lower()):
            abort(403, "this name is not one of this machine")
        if request.method != "GET" and request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            abort(403, "another site cannot ask here")

    def close(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    app.server.before_request(refuse)
    app.server.after_request(close)


def _index(page: str) -> str:
    """Dash's page with our style, light or dark as the reader's system is; figures stay light."""
    own = (resources.files("rlhfsim.desk") / "desk.css").read_text(encoding="utf-8")
    css = f"{style()}\n.plot {{ background: {LIGHT['bg']}; }}\n{own}"
    return page.replace("{%css%}", f"{{%css%}}<style>{css}</style>").replace("<html>", '<html lang="en">')
