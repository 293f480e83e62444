"""HTTP servers on loopback that follow the documented APIs of vLLM and SGLang, over a tiny model that really computes.

They keep what makes those servers hard to use: a prefix cache that outlives new weights until it is reset, a head that
stays when tied weights come without it, defaults from a generation configuration, weights lost in a restart.
"""

from __future__ import annotations

import copy
import json
import random
import select
import socket
import threading
import time
from collections import deque
from contextlib import nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from verl.rollout.base import Sampling
from verl.rollout.sampling import choose, uniforms


class Problem(Exception):
    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class StandIn:
    """A server that can be stopped, started anew on its port (weights as at first) and made to misbehave.

    Args:
        mode: which logprobs it tells: "processed" (temperature, top_k, top_p), "temperature" or "raw".
        own_eos: ids at which the model ends rows by itself.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        mode: str = "processed",
        key: str | None = None,
        own_eos: frozenset[int] = frozenset(),
    ) -> None:
        self.first, self.tokenizer, self.mode, self.key, self.own_eos = lm, tokenizer, mode, key, own_eos
        self.longest = lm.config.max_position_embeddings
        self.faults: deque[tuple[int, str]] = deque()  # (status, words) of the next answers to rows
        self.refuses_weights = ""  # words
        self.pace = 0.0  # seconds a token takes at least
        self.asked: list[dict[str, Any]] = []  # bodies of rows
        self.served = self.cut = self.loads = self.most = 0  # rows answered, rows left by their caller; most at once
        self.paths: list[str] = []
        self.compute = threading.RLock()
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.lm = copy.deepcopy(self.first)
        self.prefixes: dict[tuple[str, tuple[int, ...]], tuple[DynamicCache, torch.Tensor]] = {}
        self.adapters: dict[str, str] = {}
        self.version, self.began, self.under = "default", time.time(), 0
        self.open: set[socket.socket] = set()
        handler = type("Handler", (_Handler,), {"stand_in": self})
        self.http = self._listen(handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def _listen(self, handler: Any) -> ThreadingHTTPServer:
        """On a port that no connection of another program takes while the server is away: they get higher ones. Tests
        beside this one must not draw the same, whatever seed they set."""
        taken: OSError | None = None
        for port in [self.port] * 100 if self.port else random.SystemRandom().sample(range(20000, 30000), 100):
            try:
                return ThreadingHTTPServer(("127.0.0.1", port), handler)
            except OSError as error:
                taken = error
                time.sleep(0.05 if self.port else 0)
        raise RuntimeError(f"port {self.port or '20000 to 30000'} is taken") from taken

    def stop(self) -> None:
        """As a process that dies: connections break."""
        self.http.shutdown()
        self.http.server_close()
        for connection in list(self.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def restart(self) -> None:
        self.stop()
        self.start()

    # What it computes.

    def tokens(self, *arguments: Any) -> tuple[list[int], list[float], list[float], str, int | None]:
        """Whole rows in turn, where no pace is set: threads that take turns at each token cost ten times as much."""
        with nullcontext() if self.pace else self.compute:
            return self._tokens(*arguments)

    def _tokens(
        self, prompt: list[int], sampling: Sampling, seed: int, ends: set[int], adapter: str, gone: Any
    ) -> tuple[list[int], list[float], list[float], str, int | None]:
        """Ids, their logprobs, the largest logprob at each position, the reason, the id that ended the row."""
        if not prompt or max(prompt) >= self.lm.config.vocab_size or min(prompt) < 0:
            raise Problem(400, f"Token id {max(prompt, default=None)} is out of vocabulary")
        if len(prompt) + sampling.max_new_tokens > self.longest:
            raise Problem(400, f"This model's maximum context length is {self.longest} tokens")
        lm = self.lm
        if (adapter, tuple(prompt)) not in self.prefixes:
            with self.compute:
                self._switch(adapter)
                out = lm(torch.tensor([prompt]), past_key_values=DynamicCache(), use_cache=True)
                self.prefixes[adapter, tuple(prompt)] = (out.past_key_values, out.logits[:, -1].float())
        past, logits = self.prefixes[adapter, tuple(prompt)]
        ids: list[int] = []
        logprobs: list[float] = []
        largest: list[float] = []
        while True:
            key = torch.tensor([seed])
            raw = logits.log_softmax(-1)[0]
            hot = (logits / sampling.temperature).log_softmax(-1)[0]
            chosen, logprob = choose(logits.clone(), uniforms(key, torch.tensor([len(ids)])), sampling)
            ids.append(int(chosen))
            told = {"processed": None, "temperature": hot, "raw": raw}[self.mode]
            logprobs.append(float(logprob) if told is None else float(told[ids[-1]]))
            if told is None:
                kept = hot.topk(sampling.top_k).values if sampling.top_k else hot
                told = kept - kept.logsumexp(0)
            largest.append(float(told.max()))
            if ids[-1] in ends:
                return ids, logprobs, largest, "stop", ids[-1]
            if sampling.stop:
                assert self.tokenizer is not None
                if any(text in self.tokenizer.decode(ids) for text in sampling.stop):
                    return ids, logprobs, largest, "stop", None
            if len(ids) == sampling.max_new_tokens:
                return ids, logprobs, largest, "length", None
            if gone():
                return ids, logprobs, largest, "abort", None
            if self.pace:
                time.sleep(self.pace)
            with self.compute:
                past = copy.deepcopy(past) if len(ids) == 1 else past
                self._switch(adapter)
                out = lm(torch.tensor([ids[-1:]]), past_key_values=past, use_cache=True)
            logits = out.logits[:, -1].float()

    def _switch(self, adapter: str) -> None:
        pass

    def reload(self, folder: str) -> None:
        """Whole weights from a folder, in place, by name; what is missing stays."""
        self.loads += 1
        if self.refuses_weights:
            raise ValueError(self.refuses_weights)
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise ValueError(f"no weights in {folder}")
        own = self.lm.state_dict()
        with self.compute, torch.no_grad():
            for file in files:
                for name, tensor in load_file(file).items():
                    if name not in own or own[name].shape != tensor.shape:
                        raise ValueError(f"{name} {tuple(tensor.shape)} does not fit")
                    own[name].copy_(tensor)

    # What it says.

    def answer(self, method: str, path: str, body: Any, gone: Any) -> Any:
        """JSON, or text, or a ``Problem``."""
        raise NotImplementedError

    def models(self) -> Any:
        card = {"id": "tiny", "object": "model", "max_model_len": self.longest}
        return {"object": "list", "data": [card, *({"id": name, "parent": "tiny"} for name in self.adapters)]}

    def row(self, body: Any) -> None:
        """To be called for each row, before it is computed."""
        self.asked.append(body)
        if self.faults:
            raise Problem(*self.faults.popleft())


class VllmStandIn(StandIn):
    """``vllm serve``; ``dev``: VLLM_SERVER_DEV_MODE=1, ``lora``: --enable-lora with runtime updating."""

    def __init__(self, lm: PreTrainedModel, *, dev: bool = True, lora: bool = False, **options: Any) -> None:
        self.dev, self.lora = dev, lora
        super().__init__(lm, **options)

    def start(self) -> None:
        self.peft: Any = None
        super().start()
        head = self.lm.get_output_embeddings()
        if self.lm.config.tie_word_embeddings:  # a copy, as after packing
            head.weight = torch.nn.Parameter(head.weight.detach().clone())

    def answer(self, method: str, path: str, body: Any, gone: Any) -> Any:
        match method, path.partition("?")[0]:
            case "GET", "/v1/models":
                return self.models()
            case "GET", "/metrics":
                return f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {self.began!r}\n"
            case "POST", "/v1/completions":
                return self.completion(body, gone)
            case "POST", "/collective_rpc" if self.dev:
                assert body["method"] == "reload_weights"
                try:
                    self.reload(body["kwargs"]["weights_path"])
                except ValueError as error:
                    raise Problem(500, f"Call to collective_rpc method failed: {error}") from None
                return {"results": [None]}
            case "POST", "/reset_prefix_cache" if self.dev:
                self.prefixes = {}
                return {"success": True}
            case "POST", "/v1/load_lora_adapter" if self.lora:
                return self.load_adapter(body["lora_name"], body["lora_path"])
            case "POST", "/v1/unload_lora_adapter" if self.lora:
                if self.adapters.pop(body["lora_name"], None) is None:
                    raise Problem(404, "The lora adapter cannot be found.")
                return "Success"
        raise Problem(404, "Not Found")

    def completion(self, body: Any, gone: Any) -> Any:
        self.row(body)
        if body["model"] != "tiny" and body["model"] not in self.adapters:
            raise Problem(404, f"The model `{body['model']}` does not exist.")
        if not 0 <= body.get("temperature", 0.3) <= 2:  # the generation configuration's, as all the defaults here
            raise Problem(400, "temperature must be in [0, 2]")
        assert body.get("min_p", 0.1) == 0 and body.get("repetition_penalty", 1.3) == 1
        assert body.get("presence_penalty", 0.0) == body.get("frequency_penalty", 0.0) == 0 and not body["watermarking"]
        heat = body.get("temperature", 0.3)
        sampling = Sampling(
            temperature=heat or 1.0,
            greedy=not heat,
            top_p=body.get("top_p", 0.5),
            top_k=max(0, body.get("top_k", 3)),
            max_new_tokens=body.get("max_tokens", 16),
            stop=tuple(body.get("stop", ())),
        )
        ends = set(body.get("stop_token_ids", ())) | (set() if body.get("ignore_eos") else set(self.own_eos))
        adapter = "" if body["model"] == "tiny" else body["model"]
        seed = body.get("seed", 0)
        ids, logprobs, largest, reason, _ = self.tokens(body["prompt"], sampling, seed, ends, adapter, gone)
        told = {
            "tokens": [f"token_id:{token}" for token in ids],
            "token_logprobs": logprobs,
            "top_logprobs": [{"token_id:0": x} for x in largest],
        }
        choice = {"index": 0, "text": "", "logprobs": told, "finish_reason": reason}
        return {"choices": [choice | ({"token_ids": ids} if body.get("return_token_ids") else {})]}

    def load_adapter(self, name: str, folder: str) -> str:
        self.loads += 1
        if self.refuses_weights:
            raise Problem(500, self.refuses_weights)
        if name in self.adapters:
            raise Problem(400, f"The lora adapter '{name}' has already been loaded.")
        from peft import PeftModel

        with self.compute:
            if self.peft is None:
                self.peft = PeftModel.from_pretrained(self.lm, folder, adapter_name=name)
            else:
                self.peft.load_adapter(folder, adapter_name=name)
            self.peft.eval()
        self.adapters[name] = folder
        return "Success"

    def _switch(self, adapter: str) -> None:
        if self.peft is not None:
            (self.peft.base_model.enable_adapter_layers if adapter else self.peft.base_model.disable_adapter_layers)()
            if adapter:
                self.peft.set_adapter(adapter)


class SglangStandIn(StandIn):
    """``sglang.launch_server`` with deterministic inference."""

    def __init__(self, lm: PreTrainedModel, *, mode: str = "temperature", **options: Any) -> None:
        self.aborted: set[str] = set()
        super().__init__(lm, mode=mode, **options)

    def answer(self, method: str, path: str, body: Any, gone: Any) -> Any:
        match method, path:
            case "GET", "/v1/models":
                return self.models()
            case "GET", "/health":
                return ""
            case "POST", "/generate":
                return self.generation(body, gone)
            case "POST", "/update_weights_from_disk":
                try:
                    self.reload(body["model_path"])
                except ValueError as error:
                    raise Problem(400, json.dumps({"success": False, "message": f"Failed: {error}"})) from None
                if body.get("flush_cache", True):
                    self.prefixes = {}
                self.version = body.get("weight_version") or self.version
                return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
            case "POST", "/flush_cache":
                self.prefixes = {}
                return "Cache flushed."
            case "POST", "/abort_request":
                self.aborted.add(body["rid"])
                return ""
        raise Problem(404, "Not Found")

    def generation(self, body: Any, gone: Any) -> Any:
        self.row(body)
        given = body["sampling_params"]
        heat, top_k = given.get("temperature", 0.3), given.get("top_k", 3)
        if not heat:
            heat, top_k = 1.0, 1
        sampling = Sampling(
            temperature=heat,
            greedy=top_k == 1,
            top_p=given.get("top_p", 0.5),
            top_k=max(0, top_k),
            max_new_tokens=given.get("max_new_tokens", 128),
            stop=tuple(given.get("stop") or ()),
        )
        assert given.get("min_p") == given.get("presence_penalty") == given.get("frequency_penalty") == 0
        assert given.get("repetition_penalty") == 1
        ends = set() if given.get("ignore_eos") else set(given.get("stop_token_ids") or ()) | set(self.own_eos)
        seed = given.get("sampling_seed", 0)
        left = lambda: gone() or body["rid"] in self.aborted  # noqa: E731
        ids, logprobs, largest, reason, end = self.tokens(body["input_ids"], sampling, seed, ends, "", left)
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": reason} | ({} if end is None else {"matched": end}),
            "weight_version": self.version,
            "output_token_logprobs": [[x, token, None] for x, token in zip(logprobs, ids, strict=True)],
        }
        if body.get("top_logprobs_num"):
            meta["output_top_logprobs"] = [[[x, 0, None]] for x in largest]
        return {"text": "", "output_ids": ids, "meta_info": meta}


class _Handler(BaseHTTPRequestHandler):
    stand_in: StandIn
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.began = self.stand_in.began  # of the process that took this connection
        self.stand_in.open.add(self.connection)

    def finish(self) -> None:
        self.stand_in.open.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def do_GET(self) -> None:
        self.reply("GET")

    def do_POST(self) -> None:
        self.reply("POST")

    def gone(self) -> bool:
        """Whether the caller closed the connection (or this process is no more)."""
        try:
            ready, _, _ = select.select([self.connection], [], [], 0)
            return bool(ready) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):
            return True

    def reply(self, method: str) -> None:
        owner = self.stand_in
        owner.paths.append(self.path)
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        row = self.path in ("/v1/completions", "/generate")
        owner.under += row
        owner.most = max(owner.most, owner.under)
        try:
            if owner.key is not None and self.headers.get("Authorization") != f"Bearer {owner.key}":
                raise Problem(401, f"Unauthorized: {self.headers.get('Authorization')}")
            with torch.no_grad():
                status, found = 200, owner.answer(method, self.path, json.loads(raw) if raw else None, self.gone)
        except Problem as problem:
            status, found = problem.status, {"error": {"message": str(problem), "code": problem.status}}
        finally:
            owner.under -= row
        if self.gone() or self.began != owner.began:
            owner.cut += row
            self.close_connection = True
            return
        owner.served += row
        data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
        kind = "text/plain" if isinstance(found, str) else "application/json"
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
        try:
            self.wfile.write(head.encode() + data)
        except OSError:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass
