"""A reward server on this machine, for tests of the rule ``http``."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], tuple[int, Any]]  # the request -> status, and JSON or raw bytes


class Server(ThreadingHTTPServer):
    """Answers every POST by ``answer``; keeps what was asked."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/score"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        self.server.headers.append(dict(self.headers))
        status, answer = self.server.answer(asked)
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            if status // 100 == 3:
                self.send_header("Location", self.server.url)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[Server]:
    with Server(answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(5)


def scores(*values: Any) -> Answer:
    """Always the same scores."""
    return lambda asked: (200, {"scores": list(values)})


def lengths(asked: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"scores": [len(row["response"]) for row in asked["rows"]]}
