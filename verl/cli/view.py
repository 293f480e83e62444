"""``verl view``: a page on this machine that shows a run's samples token by token, beside its curves."""

from __future__ import annotations

import base64
import errno
import hashlib
import ipaddress
import json
import re
import socket
import socketserver
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from verl.cli.viewer import Viewer
from verl.config.errors import RequestError


def view(run: Path, host: str, port: int) -> None:
    """Serve the page until Ctrl-C."""
    with Server(run, host, port) as server:
        for line in server.viewer.problems():
            print(f"verl: {line}", file=sys.stderr)
        print(f"{run}: {server.url}  (Ctrl-C ends)", flush=True)
        if not server.local:
            print(f"warning: there is no password; whoever reaches {host} can read the samples", file=sys.stderr)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


class Server(ThreadingHTTPServer):
    """One run's page. Raises `RequestError` for a folder that is no run's and an address that can't be had."""

    daemon_threads = True

    def __init__(self, run: Path, host: str = "127.0.0.1", port: int = 0) -> None:
        self.viewer, self.host = Viewer(run), host
        self.page = resources.files("verl.cli").joinpath("view.html").read_bytes()
        self.policy = "; ".join(["default-src 'none'", "connect-src 'self'", "img-src data:", *_own(self.page)])
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise RequestError(
                    f"port {port} of {host} is taken: name another with --port; 0 is any free one"
                ) from error
            raise RequestError(f"can't listen on port {port} of {host}: {error.strerror}") from error

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # without the look-up of a name, which may take seconds

    @property
    def local(self) -> bool:
        """Whether only this machine reaches it."""
        return ipaddress.ip_address(self.server_address[0]).is_loopback  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):  # a browser that went away
            super().handle_error(request, client_address)


def _own(page: bytes) -> Iterator[str]:
    """Of the page's script and style, the hashes by which a browser knows them."""
    for tag in ("script", "style"):
        match = re.search(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
        assert match is not None
        digest = base64.b64encode(hashlib.sha256(match[1]).digest()).decode()
        yield f"{tag}-src 'sha256-{digest}'"
    yield "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class _Handler(BaseHTTPRequestHandler):
    """GET only; another site's page can neither ask through a name of its own nor read what comes back."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        if not self._is_ours(self.headers.get("Host", "")):
            self.send_error(403, "unknown Host: open the page by the address that verl view printed")
            return
        where = urlsplit(self.path)
        viewer = self.server.viewer
        if where.path == "/":
            self._answer(200, "text/html; charset=utf-8", self.server.page)
            return
        questions: dict[str, Callable[..., dict[str, Any]]] = {
            "/state": viewer.state, "/rows": viewer.rows, "/row": viewer.row
        }  # fmt: skip
        if where.path not in questions:
            self.send_error(404, "no such page")
            return
        try:
            found = questions[where.path](**dict(parse_qsl(where.query, errors="surrogatepass")))
            body = json.dumps(found, allow_nan=False).encode()
        except LookupError as error:
            self.send_error(404, str(error.args[0]))
        except (TypeError, ValueError) as error:
            self.send_error(400, str(error))
        else:
            self._answer(200, "application/json", body)

    def _is_ours(self, host: str) -> bool:
        """Whether a name leads here by itself; a stranger's may have been pointed at this address."""
        name = re.sub(r":\d+$", "", host.lower()).strip("[]")
        ours = {"localhost", self.server.host.lower(), self.connection.getsockname()[0]}
        return name in ours or (not self.server.local and name == socket.gethostname().lower())

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": self.server.policy,
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.close_connection = True
        self._answer(code, "text/plain; charset=utf-8", f"{message or code}\n".encode(errors="replace"))

    def version_string(self) -> str:
        return "verl"

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal stays quiet."""
