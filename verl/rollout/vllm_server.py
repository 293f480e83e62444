"""Generation by servers that speak OpenAI's completions API: vLLM's, which answers with token ids.

Weights go to a server in one of two ways: whole ones through a folder that it reads (vLLM's developer mode), or an
adapter's through its runtime loading, under a new name each time.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from verl.config.errors import RequestError, RunError
from verl.models.adapters import unscaled
from verl.rollout.base import Sampling
from verl.rollout.http import REASONS, Failed, HttpEngine, Refused, Row, Sampled, Server, as_saved, common, probe

WATCH = 0.2  # least seconds between two looks at a server's process
START = re.compile(r"^process_start_time_seconds (\S+)", re.MULTILINE)


@dataclass
class _Watch:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    began: float = 0.0  # the last look
    process: str = ""


class ServerEngine(HttpEngine):
    """A ``RolloutEngine`` on vLLM servers; ``HttpEngine`` tells of the arguments.

    A row's seed comes from (seed, prompt, sample), so a server draws the same tokens however it batches, up to its
    rounding. With a temperature, ``top_p`` or ``top_k`` the server must run with ``--logprobs-mode
    processed_logprobs``, which is tried out before the first row.

    Args:
        adapter: the LoRA's configuration (peft's, as a dict) where ``load`` gets an adapter's tensors. Until the
            first ``load`` the base generates, which a fresh adapter equals.
        tied: other names of tied tensors, by the one that ``load`` brings.
    """

    def __init__(
        self, *args: Any, adapter: dict[str, Any] | None = None, tied: Mapping[str, Sequence[str]] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **options)
        self.tied = {"model.embed_tokens.weight": ("lm_head.weight",)} if tied is None else tied
        self.adapter, self._run = adapter, uuid.uuid4().hex[:8]
        self._watches = {server: _Watch() for server in self.servers}

    def body(self, server: Server, row: Row, sampling: Sampling) -> tuple[str, dict[str, Any]]:
        return "/v1/completions", common(sampling, self.eos) | {
            "model": server.mark if self.adapter is not None and server.mark else server.model,
            "prompt": list(row.request.prompt_ids),
            "max_tokens": sampling.max_new_tokens,
            "min_tokens": 0,
            "seed": row.key & (1 << 63) - 1,
            "watermarking": False,
            "ignore_eos": True,  # the model's own; those in force are
            "include_stop_str_in_output": True,
            "logprobs": 0,  # of the sampled token only
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "echo": False,
            "stream": False,
        }

    def read(self, answer: Any, sampling: Sampling) -> Sampled:
        choice = answer["choices"][0]
        told = choice["logprobs"] or {"tokens": [], "token_logprobs": []}
        ids = choice.get("token_ids")
        if ids is None:  # before vLLM 0.10.2
            ids = [int(token.removeprefix("token_id:")) for token in told["tokens"]]
        return tuple(ids), tuple(map(float, told["token_logprobs"])), REASONS[choice["finish_reason"]]

    async def likeliest(self, server: Server, sampling: Sampling) -> float:
        path, body = self.body(server, probe(), sampling)
        # the base's: an adapter may be lost
        answer = await self.call(server, "POST", path, body | {"logprobs": 1, "model": server.model})
        return max(answer["choices"][0]["logprobs"]["top_logprobs"][0].values())

    def untold(self, what: str) -> str:
        return "start it with --logprobs-mode processed_logprobs, or sample with temperature 1, top_p 1 and top_k 0"

    def files(self, folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self.adapter is None:
            return super().files(folder, _with_aliases(tensors, self.tied))
        settings, tensors = unscaled(self.adapter, tensors)
        save_file({name: as_saved(tensor) for name, tensor in tensors}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(settings, default=_plain))

    async def install(self, server: Server) -> None:
        if self.adapter is None:
            before = await self._process(server)
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self.kept)}}
            await self._take(server, "/collective_rpc", reload)
            done = await self._take(server, "/reset_prefix_cache?reset_running_requests=true")
            if isinstance(done, dict) and done.get("success") is False:
                raise Failed(f"{server.url} can't reset its prefix cache")
            server.mark = await self._process(server)
            if server.mark != before:
                raise Failed(f"{server.url} was restarted while it took new weights")
            return
        name, old = f"verl-{self._run}-{self._loads}", server.mark
        served = await self._served(server)
        if name not in served:
            await self._take(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(self.kept)})
            served = await self._served(server)
            if name not in served:
                raise RunError(f"{server.url} does not list the adapter {name} after it was loaded")
        server.mark = name
        if old in served and old != name:
            await self._take(server, "/v1/unload_lora_adapter", {"lora_name": old})

    async def holds(self, server: Server, answer: Any) -> bool:
        if self.kept is None:
            return True
        if self.adapter is not None:  # a name is of one version only
            return not (isinstance(answer, Refused) and answer.status == 404)
        return isinstance(answer, Refused) or await self._process(server) == server.mark

    async def forget(self, server: Server) -> None:
        if self.adapter is not None and server.mark:
            await self.call(server, "POST", "/v1/unload_lora_adapter", {"lora_name": server.mark})

    async def _served(self, server: Server) -> set[str]:
        return {card["id"] for card in (await self.call(server, "GET", "/v1/models"))["data"]}

    async def _take(self, server: Server, path: str, body: Any = None) -> Any:
        try:
            return await self.call(server, "POST", path, body)
        except Refused as error:
            if error.status not in (404, 405):
                raise RunError(f"{server.url} did not take the weights: {path} {error}") from None
        except Failed as error:
            if error.status != 500:
                raise
            raise RunError(f"the weights were not taken: {error}; restart the server before the next load") from None
        raise RequestError(
            f"{server.url} can't take new weights ({path.partition('?')[0]} is not there). Start it with "
            f"VLLM_SERVER_DEV_MODE=1 and let it read {self.kept} (whole weights); or train a LoRA policy and start it "
            "with --enable-lora, --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        )

    async def _process(self, server: Server) -> str:
        """When the server's process began, by a look that began after this call: one look serves all who wait."""
        called, watch = time.monotonic(), self._watches[server]
        async with watch.lock:
            if watch.began < called:
                await asyncio.sleep(max(0.0, watch.began + WATCH - time.monotonic()))
                watch.began = time.monotonic()
                try:
                    found = START.search(str(await self.call(server, "GET", "/metrics")))
                except Refused as error:
                    raise RequestError(f"{server.url}/metrics {error}") from None
                if found is None:
                    raise RequestError(
                        f"{server.url}/metrics has no process_start_time_seconds, by which a restart is noticed: "
                        "run one API server process for each url"
                    )
                watch.process = found[1]
            return watch.process


def _with_aliases(
    tensors: Iterable[tuple[str, Tensor]], tied: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, Tensor]]:
    """vLLM keeps a copy of a tied tensor unless the new one comes under all its names."""
    came, more = set[str](), dict[str, Tensor]()
    for name, tensor in tensors:
        came.add(name)
        if name in tied:
            more |= dict.fromkeys(tied[name], as_saved(tensor))
        yield name, tensor
    for name, tensor in more.items():
        if name not in came:  # it isn't tied
            yield name, tensor


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
