"""A loopback port that takes rows as JSON and appends them to a file."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from verl.config.errors import DataError

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # another Host header means that a page's own name was pointed at this machine
MOST_BYTES = 8 * 2**20  # of one body
PATIENCE = 10.0  # seconds for one request


class Refused(Exception):
    """A request that can't be taken: its status and the reason; nothing was written."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Endpoint:
    """``POST /`` with an object or a list of objects appends them to ``file``, all or none, and answers once they last.

    ``refuse(row, number)`` says why a row can't be used, or None. ``news`` is set after each accepted request. Bound
    to 127.0.0.1 only; bodies must be ``application/json``, which a web page can't send to another origin unasked.
    DataError when the port or the file can't be opened.
    """

    def __init__(
        self, port: int, file: Path, refuse: Callable[[Mapping[str, Any], int], str | None], news: threading.Event
    ) -> None:
        self._file, self._refuse, self._news = file, refuse, news
        self._writing = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            timeout = PATIENCE

            def do_POST(self) -> None:
                endpoint._answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                log.debug("%s: " + format, endpoint.address, *args)

        class Server(ThreadingTCPServer):
            allow_reuse_address, daemon_threads = True, True

            def handle_error(self, request: Any, client_address: Any) -> None:
                log.debug("a request from %s broke off", client_address, exc_info=True)

        try:
            file.open("ab").close()
            folder = os.open(file.parent, os.O_RDONLY)
            os.fsync(folder)  # the file's name lasts too
            os.close(folder)
            self._server = Server((HOST, port), Handler)
        except OSError as error:
            raise DataError(f"live source: {file} or port {port} can't be opened: {error}") from error
        self.address = f"http://{HOST}:{self._server.server_address[1]}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name=f"live source {self.address}", daemon=True
        )
        self._thread.start()
        log.info("rows can be posted to %s", self.address)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        body: dict[str, Any]
        try:
            rows = self._rows(request)
            with self._writing:
                append(self._file, rows)
            self._news.set()
            status, body = HTTPStatus.OK, {"accepted": len(rows)}
        except Refused as refused:
            status, body = refused.status, {"error": str(refused)}
        content = json.dumps(body).encode() + b"\n"
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    def _rows(self, request: BaseHTTPRequestHandler) -> Sequence[Mapping[str, Any]]:
        if request.headers.get("Host", HOST).partition(":")[0] not in NAMES:
            raise Refused(HTTPStatus.FORBIDDEN, f"the host must be {' or '.join(NAMES)}")
        if request.path != "/":
            raise Refused(HTTPStatus.NOT_FOUND, "rows are posted to /")
        if request.headers.get_content_type() != "application/json":
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the Content-Type must be application/json")
        length = request.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "the Content-Length is missing")
        if int(length) > MOST_BYTES:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {MOST_BYTES} bytes")
        body = request.rfile.read(int(length))
        if len(body) < int(length):
            raise Refused(HTTPStatus.BAD_REQUEST, f"the body ends after {len(body)} of {length} bytes")
        try:
            rows = json.loads(body, parse_constant=_refuse_constant)
            json.dumps(rows, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, halves of characters
            raise Refused(HTTPStatus.BAD_REQUEST, f"not JSON: {error}") from error
        rows = rows if isinstance(rows, list) else [rows]
        for number, row in enumerate(rows):
            if not isinstance(row, dict):
                raise Refused(HTTPStatus.BAD_REQUEST, f"row {number} is a {type(row).__name__}, not an object")
            if (reason := self._refuse(row, number)) is not None:
                raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, reason)
        return rows


def is_object(text: bytes) -> bool:
    """Whether a line without its end is whole all the same: no JSON object begins with another one."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:  # also what is no UTF-8
        return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def append(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add lines to ``file`` and bring them to the disk, all or none; ``Refused`` says why not."""
    data = b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError as error:
        raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, f"the file can't be opened: {error}") from error
    size, written = os.fstat(descriptor).st_size, 0
    try:
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            tail = os.pread(descriptor, MOST_BYTES, max(0, size - MOST_BYTES)).rpartition(b"\n")[2]
            if not is_object(tail):  # another writer is in the middle of a line
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"{file} ends with half a line; try again later")
            data = b"\n" + data
        while written < len(data):
            written += os.write(descriptor, data[written:])
        os.fsync(descriptor)
    except OSError as error:
        if os.fstat(descriptor).st_size == size + written:  # nobody else wrote meanwhile
            os.ftruncate(descriptor, size)
        raise Refused(HTTPStatus.INSUFFICIENT_STORAGE, f"the rows can't be written: {error}") from error
    finally:
        os.close(descriptor)
