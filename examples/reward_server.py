"""A reward model, or any rewards, as a service that several runs share.

    python examples/reward_server.py rewards.yaml --port 8123
    verl train a.yaml 'reward_fn={name: http, url: "http://127.0.0.1:8123/"}'

``rewards.yaml`` holds the reward keys of a configuration, such as ``reward_model_config: {model_name_or_path: ...}``
(docs/rewards.md). Only this machine reaches the port; put a proxy with a token before it to serve others.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from verl.config.load import load_config
from verl.rewards.base import RewardRow, build_rewards

MOST_BYTES = 64 * 2**20  # of one request


def row_of(told: dict) -> RewardRow:
    """A row as the rule ``http`` sends it. Its tokens stay with the run: a reward that reads them fails here."""
    fields = told["fields"] | {"prompt": told["prompt"]}
    return RewardRow(
        told["id"], told["prompt_id"], told["prompt_text"], told["response"], None, None, told["finish_reason"], fields
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="YAML file with reward keys")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    rewards = build_rewards(load_config(args.config, partial=True), torch.device(args.device))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            try:
                if length > MOST_BYTES:
                    raise ValueError(f"a request has at most {MOST_BYTES} bytes")
                rows = [row_of(row) for row in json.loads(self.rfile.read(length))["rows"]]
                status, answer = 200, {"scores": rewards.score(rows).totals}
            except (ValueError, KeyError, TypeError) as error:  # not what the rule sends
                status, answer = 400, {"error": repr(error)}
            except Exception as error:  # the run decides (reward_failure) after it has tried again
                status, answer = 500, {"error": str(error)}
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with rewards, ThreadingHTTPServer(("127.0.0.1", args.port), Handler) as server:
        print(f"scores rows at http://127.0.0.1:{server.server_address[1]}/", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
