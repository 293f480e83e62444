"""vLLM in this process, beside the trainer: the ``RolloutEngine`` for policies too large to decode on their own.

vLLM schedules and computes logits; the tokens are chosen by ``sampling.choose``, as in the native engine. It runs
inside vLLM as a logits processor that leaves one finite value in each row: at the chosen token, its log-probability.
Greedy sampling then takes that token and, in mode ``processed_logits``, reports that value. So the noise is a function
of (seed, prompt, sample, position), and nothing of vLLM's own sampler and generation configuration is left.

One thread, ``thread``, does all that touches vLLM, in turns of at most ``TURN`` seconds: whoever trains on the same
device may put work between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import functools
import gc
import itertools
import json
import math
import mmap
import os
import random
import tempfile
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import distributed_c10d
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.config.errors import RequestError, RunError
from verl.models.adapters import unscaled
from verl.models.decoder import Decoder
from verl.models.factory import outline
from verl.models.naming import aliases, check_fit
from verl.rollout.base import FinishReason, Request, Response, Sampling, checked
from verl.rollout.sampling import choose, noise_key, uniforms
from verl.rollout.stop import StopTexts

T = TypeVar("T")

TURN = 0.25  # seconds
BUCKET = 256 << 20  # bytes of weights handed over at a time
BLOCK = 128  # tokens: vLLM's unit of the cache on a CPU
CPU_CACHE = 4 << 30  # bytes
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has adapter kernels for
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other runner samples in kernels of its own
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
}
DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # it warns of what is set on purpose
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles for two minutes, for a sampler that isn't used
}
OWN = {  # what verl sets, and where it comes from
    "model": "model_name_or_path",
    "tokenizer": "model_name_or_path",
    "dtype": "dtype",
    "seed": "seed",
    "trust_remote_code": "trust_remote_code",
    "max_num_seqs": "max_rows",
    "max_model_len": "the prompt's and the response's length",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "one engine per device",
    "data_parallel_size": "one engine per device",
    "distributed_executor_backend": "one engine per device",
    "enable_lora": "the policy's adapter",
    "max_loras": "the policy's adapter",
    "max_lora_rank": "the policy's adapter",
    "load_format": "weights come from the trainer",
    "enable_prefix_caching": "always on",
    "enable_sleep_mode": "on where there is a GPU",
    "skip_tokenizer_init": "prompts come as tokens",
    "generation_config": "the sampling settings are verl's",
    "override_generation_config": "the sampling settings are verl's",
    "logits_processors": "tokens are chosen by verl",
    "logprobs_mode": "tokens are chosen by verl",
    "max_logprobs": "tokens are chosen by verl",
    "speculative_config": "tokens are chosen by verl",
    "disable_log_stats": "log_level",
}


@dataclass(eq=False)
class _Call:
    """One ``generate``: its rows, and where their responses go (or the exception that ended them)."""

    sampling: Sampling
    loop: asyncio.AbstractEventLoop
    stop: StopTexts | None
    results: asyncio.Queue[Response | BaseException] = field(default_factory=asyncio.Queue)
    rows: list[_Row] = field(default_factory=list)

    def put(self, result: Response | BaseException) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits
            self.loop.call_soon_threadsafe(self.results.put_nowait, result)


@dataclass(eq=False)
class _Row:
    call: _Call
    request: Request
    key: int
    asked: float
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    aborted: bool = False  # set by the event loop's thread, read by the computing one

    def response(self, reason: FinishReason, version: int) -> Response:
        return Response(
            row_id=self.request.row_id,
            ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            finish_reason=reason,
            version=version,
            seconds=time.monotonic() - self.asked,
        )


class VllmEngine:
    """A ``RolloutEngine`` on vLLM. Nothing can be generated before the first ``load``.

    Args:
        model: folder or hub name. Without ``adapter`` only its configuration is read; with it, the base's weights too.
        eos: every id that ends a response.
        tokenizer: needed for stop texts only.
        device: where it computes; an index says which GPU.
        dtype: of the weights that generate, ``bf16`` or ``fp32``.
        max_rows: most rows decoded side by side.
        max_tokens: most tokens of a prompt with its response.
        seed: of vLLM itself; the noise of a row comes from ``Sampling.seed``.
        tensor_parallel_size: devices that share the model; above 1 vLLM starts a process for each, which gets its
            part of new weights through main memory.
        gpus: above 1, the numbers of the GPUs, as the machine gives them; the first is ``device``.
        adapter: peft's ``LoraConfig`` as a dictionary where the policy has an adapter: ``load`` then takes its tensors.
        options: more of vLLM's ``EngineArgs``, by name.

    Raises:
        RequestError: vLLM isn't there, an option is unknown or verl's own, or vLLM can't serve this model so.
        RunError: this process has one already; vLLM's state is the process's.
    """

    _one: ClassVar[threading.Lock] = threading.Lock()  # held while there is one

    def __init__(
        self,
        model: str,
        eos: frozenset[int],
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        max_rows: int,
        max_tokens: int,
        seed: int = 0,
        tensor_parallel_size: int = 1,
        gpus: Sequence[str] = (),
        adapter: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if max_rows < 1:
            raise RequestError(f"max_rows is {max_rows}, must be at least 1")
        self.model, self.eos, self.tokenizer, self.max_tokens = model, eos, tokenizer, max_tokens
        self.device = torch.device(device)
        self._gpus, self._far = tuple(gpus), tensor_parallel_size > 1  # far: vLLM's workers are other processes
        self._lm, self._expected, self.adapter = _expected(model, adapter, trust_remote_code)
        self._tied = aliases(self._lm)
        self.vocabulary = self._lm.config.get_text_config().vocab_size
        self.version = 0
        self._broken = "none have been loaded"  # why there are no whole weights
        self._dead = ""  # why no more weights can be taken
        self._closed = self._asleep = False
        limit = getattr(self._lm.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and max_tokens > limit:
            raise RequestError(f"prompt and response may have {max_tokens} tokens, the model has {limit} positions")
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # of rows on their way from _waiting to _rows
        self._waiting: list[_Call] = []
        self._rows: dict[str, _Row] = {}  # what vLLM works on, by its request ids; the computing thread's
        self._driver: asyncio.Task[None] | None = None
        self._lora: Any = None  # the adapter's LoRARequest
        self._world = SimpleNamespace(
            default_pg=None, pg_map={}, pg_names={}, pg_group_ranks={}, pg_backend_config={}, tags_to_pg={},
            pg_to_tag={}, pg_coalesce_state={}, comms=[], group_count=1 << 20,
        )  # fmt: skip
        settings: dict[str, Any] = {
            "model": model,
            "dtype": {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}[dtype],
            "seed": seed,
            "trust_remote_code": trust_remote_code,
            "max_num_seqs": max_rows,
            "max_model_len": max_tokens,
            "tensor_parallel_size": tensor_parallel_size,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "enable_prefix_caching": True,
            "logits_processors": [f"{__name__}:Chooser"],
            "logprobs_mode": "processed_logits",
            "disable_log_stats": True,
            "load_format": "dummy" if adapter is None else "auto",
        }
        if self.adapter is not None:
            rank = max([self.adapter["r"], *(self.adapter.get("rank_pattern") or {}).values()])
            if rank > RANKS[-1]:
                raise RequestError(f"vLLM takes adapters up to rank {RANKS[-1]}, this one has {rank}")
            settings |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(r for r in RANKS if r >= rank)}
        if self._far:
            settings["distributed_executor_backend"] = "mp"
        if self.device.type == "cpu":
            settings |= {"enforce_eager": True, "kv_cache_memory_bytes": self._cache_bytes(dtype, max_rows)}
        else:
            settings |= {"enable_sleep_mode": True, "gpu_memory_utilization": 0.5}  # the rest is the trainer's
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="verl-vllm")
        self._ident = self.thread.submit(threading.get_ident).result()
        try:
            self._do(self._start, settings, dict(options or {}))
        except BaseException:
            self.thread.shutdown()
            raise

    # -- the contract ----------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Response]:
        """See ``RolloutEngine``. Rows join those being decoded as soon as there is room."""
        self._check(requests, sampling)
        if not requests:
            return
        stop = StopTexts(self.tokenizer, sampling.stop) if self.tokenizer is not None and sampling.stop else None
        call, now = _Call(sampling, asyncio.get_running_loop(), stop), time.monotonic()
        call.rows = [_Row(call, r, noise_key(sampling.seed, r.prompt_id, r.sample), now) for r in requests]
        with self._lock:
            self._waiting.append(call)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            for _ in requests:
                result = await call.results.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:  # a caller that stops early leaves no work behind
            for row in call.rows:
                row.aborted = True

    def abort(self, row_ids: Iterable[str]) -> None:
        """See ``RolloutEngine``; unknown ids are ignored, as their rows may have just ended."""
        wanted = set(row_ids)
        with self._lock:
            rows = [*self._rows.values(), *(row for call in self._waiting for row in call.rows)]
        for row in rows:
            row.aborted |= row.request.row_id in wanted

    def load(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See ``RolloutEngine``. In a call from another thread, ``tensors`` are drawn in the engine's."""
        if self._dead:
            raise RunError(self._dead)
        self._do(self._load, tensors, version)

    def sleep(self) -> None:
        """On a GPU the weights go to main memory and the cache of keys and values goes; on a CPU nothing happens."""
        if self.device.type != "cpu" and not self._asleep:
            self._do(self._sleep)

    def wake(self) -> None:
        if self._asleep:
            self._do(self._wake)

    def close(self) -> None:
        """End vLLM and its thread; callers that still wait get a ``RunError``."""
        if not self._closed:
            self._closed, self._dead = True, "the engine is closed"
            try:
                self._do(self._end)
            finally:
                self.thread.shutdown(wait=threading.get_ident() != self._ident)
                self._one.release()

    # -- generation ------------------------------------------------------------------------------------------------

    def _check(self, requests: Sequence[Request], sampling: Sampling) -> None:
        if self._dead:
            raise RunError(self._dead)
        if self._broken:
            raise RunError(f"the engine has no whole weights: {self._broken}")
        if self._asleep:
            raise RunError("the engine sleeps: wake comes before generate")
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop texts need the engine's tokenizer")
        for r in checked(requests):
            n = len(r.prompt_ids)
            if n + sampling.max_new_tokens > self.max_tokens:
                raise RequestError(
                    f"row {r.row_id}: {n} prompt tokens and max_new_tokens {sampling.max_new_tokens} make "
                    f"{n + sampling.max_new_tokens}, the engine was made for {self.max_tokens} tokens"
                )
            if not 0 <= min(r.prompt_ids) <= max(r.prompt_ids) < self.vocabulary:
                raise RequestError(f"row {r.row_id}: the prompt has ids outside the vocabulary of {self.vocabulary}")

    async def _drive(self) -> None:
        """Turn after turn in the computing thread, until no row is left."""
        loop = asyncio.get_running_loop()
        try:
            while self._waiting or self._rows:
                await loop.run_in_executor(self.thread, self._turn)
        except RuntimeError as error:  # the thread is gone
            self._fail(RunError(str(error)))
        finally:  # cancelled: callers may still wait; the rows go in the next turn, or with the next call's
            if self._waiting or self._rows:
                with self._lock:
                    left, self._waiting = self._waiting, []
                    rows = list(self._rows.values())
                for row in rows:
                    row.aborted = True
                for call in {row.call for row in rows} | set(left):
                    call.put(RunError("generation was cancelled"))

    def _turn(self) -> None:
        """In the computing thread: steps of vLLM until all rows have ended or the turn is over."""
        end = time.monotonic() + TURN
        try:
            with self._eager():
                while self._admit() and time.monotonic() < end:
                    for output in self._llm.step():
                        self._extend(output)
        except BaseException as error:
            told = error
            if not isinstance(told, RunError):
                self._dead = f"vLLM failed with {type(error).__name__}: {error}"
                told = RunError(self._dead)
                told.__cause__ = error
            self._fail(told)

    def _eager(self) -> contextlib.AbstractContextManager[Any]:
        """On a CPU nothing is compiled: what gains little there costs seconds at the first token."""
        eager = self.device.type == "cpu"
        return torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext()

    def _admit(self) -> bool:
        """Hand over what waits, take out what was aborted; whether rows are left."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        with self._lock:
            new = {str(next(self._numbers)): row for call in self._waiting for row in call.rows}
            self._rows |= new
            self._waiting = []
        for number, row in new.items():
            if row.aborted:
                continue
            params = SamplingParams(
                temperature=0,
                logprobs=0,
                max_tokens=row.call.sampling.max_new_tokens,
                stop_token_ids=sorted(self.eos),
                ignore_eos=True,  # the ids above are all
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args={"verl": (row.key, row.call.sampling)},
            )
            prompt = {"prompt_token_ids": list(row.request.prompt_ids)}
            self._llm.add_request(number, prompt, params, lora_request=self._lora)
        aborted = [number for number, row in self._rows.items() if row.aborted]
        self._llm.abort_request(aborted)
        for number in aborted:
            self._leave(number, "abort")
        return bool(self._rows)

    def _extend(self, output: Any) -> None:
        """Append what vLLM sampled for one row and see whether it has ended."""
        row = self._rows.get(output.request_id)
        if row is None:  # it ended by a stop text while its next token was under way
            return
        part = output.outputs[0]
        for token, scores in zip(part.token_ids, part.logprobs or (), strict=True):
            logprob = scores[token].logprob
            if not math.isfinite(logprob):
                raise RunError(
                    f"row {row.request.row_id}: the model's logits are not finite at response token {len(row.ids)}"
                )
            row.ids.append(token)
            row.logprobs.append(logprob)
            if row.call.stop is not None and row.call.stop.ends(row.ids):
                self._llm.abort_request([output.request_id])
                self._leave(output.request_id, "stop")
                return
        if output.finished:
            if part.finish_reason not in ("stop", "length"):
                raise RunError(f"row {row.request.row_id}: vLLM ended it with {part.finish_reason!r}")
            self._leave(output.request_id, part.finish_reason)

    def _leave(self, number: str, reason: FinishReason) -> None:
        row = self._rows.pop(number)
        row.call.put(row.response(reason, self.version))

    def _fail(self, error: RunError) -> None:
        """Every caller gets ``error``; vLLM drops all rows."""
        with self._lock:
            calls, self._waiting = set(self._waiting), []
            rows, self._rows = self._rows, {}
        for call in calls | {row.call for row in rows.values()}:
            call.put(error)
        try:
            self._llm.abort_request(list(rows))
        except Exception as second:
            self._dead = self._dead or f"vLLM failed with {type(second).__name__}: {second}"

    # -- weights ---------------------------------------------------------------------------------------------------

    def _load(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._idle()
        self._broken = f"loading version {version} failed"
        if self._asleep:
            self._wake()
        try:
            if self.adapter is None:
                self._load_model(tensors)
            else:
                self._load_adapter(tensors, version)
            if not self._llm.reset_prefix_cache():
                raise RunError("vLLM didn't drop the keys and values of the old weights")
        except RunError:
            raise
        except Exception as error:
            raise RunError(f"vLLM didn't take version {version}: {type(error).__name__}: {error}") from error
        self._broken, self.version = "", version

    def _idle(self) -> None:
        """``RunError`` while responses are pending."""
        if self._waiting or self._admit():  # aborted rows go
            raise RunError("responses are pending: weights stay as they are, and where they are, until the last one")

    def _sleep(self) -> None:
        self._idle()
        self._llm.reset_prefix_cache()
        self._llm.sleep(level=1)
        self._asleep = True

    def _wake(self) -> None:
        self._llm.wake_up()
        self._asleep = False

    def _load_model(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Into vLLM's model, in buckets; every tensor of the model must come once and have its shape."""
        seen: dict[str, Tensor] = {}
        bucket = _Far(self._llm) if self._far else _Near(self._llm, self.device)
        self._llm.collective_rpc(_begin)
        try:
            for name, tensor in tensors:
                check_fit({name: self._expected[name]} if name in self._expected else {}, {name: tensor})
                if name in seen:
                    raise RunError(f"{name} came twice")
                seen[name] = torch.empty_like(tensor, device="meta")
                bucket.put((name, *self._tied.get(name, ())), tensor.detach())
            check_fit(self._expected, seen)
            bucket.empty()
        finally:  # else the next load would find half of this one
            left = self._llm.collective_rpc(_finish)
        if left := sorted({name for names in left for name in names}):
            raise RunError(f"vLLM has parameters that no tensor went to: {', '.join(left[:8])}")

    def _load_adapter(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """As a file, which is all that vLLM reads adapters from; it is gone afterwards."""
        from vllm.lora.request import LoRARequest

        assert self.adapter is not None
        settings, tensors = unscaled(self.adapter, tensors)
        kept = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
        check_fit(self._expected, kept)
        if self._lora is not None:
            self._llm.remove_lora(self._lora.lora_int_id)
            self._lora = None
        number = next(self._numbers)
        memory = Path("/dev/shm")
        with tempfile.TemporaryDirectory(prefix="verl-adapter-", dir=memory if memory.is_dir() else None) as folder:
            save_file(kept, Path(folder) / "adapter_model.safetensors")
            (Path(folder) / "adapter_config.json").write_text(json.dumps(settings, default=sorted))
            lora = LoRARequest(f"verl-{number}", number, folder)
            if not self._llm.add_lora(lora):
                raise RunError(f"vLLM didn't take the adapter of version {version}")
        self._lora = lora

    # -- start and end ---------------------------------------------------------------------------------------------

    def _do(self, work: Callable[..., T], *args: Any) -> T:
        """``work(*args)`` in the computing thread, from wherever this is called."""
        if threading.get_ident() == self._ident:
            return work(*args)
        return self.thread.submit(work, *args).result()

    def _start(self, settings: dict[str, Any], options: dict[str, Any]) -> None:
        os.environ.update({name: value for name, value in DEFAULTS.items() if name not in os.environ})
        os.environ.update(ENVIRONMENT)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with _unchanged(self.device), self._apart():
            if self._far:
                os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has threads
                os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else each wants a NUMA node
                os.environ |= {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus)} if self._gpus else {}
            try:
                import vllm
                from vllm import EngineArgs
                from vllm.platforms import current_platform
                from vllm.v1.engine.llm_engine import LLMEngine
            except ImportError as error:
                raise RequestError(
                    f"the engine vllm needs the package vllm: pip install 'verl[vllm]' ({error})"
                ) from error
            known = {f.name for f in dataclasses.fields(EngineArgs)}
            for name in options:
                if name in OWN:
                    raise RequestError(f"vLLM's option {name} is not for setting here: {OWN[name]}")
                if name not in known:
                    near = difflib.get_close_matches(name, sorted(known), 1)
                    raise RequestError(
                        f"vLLM {vllm.__version__} has no option {name}" + (f"; did you mean {near[0]}?" if near else "")
                    )
            if current_platform.device_type != self.device.type:
                raise RequestError(f"this vLLM computes on {current_platform.device_type}, not on {self.device.type}")
            if not self._one.acquire(blocking=False):
                raise RunError("this process has a vLLM engine already: close it first")
            try:
                config = EngineArgs(**settings | options).create_engine_config()
                if self.device.index is not None and not self._far:
                    config.device_config.device = self.device
                self._llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
                if finalizer := getattr(self._llm.engine_core, "_finalizer", None):
                    finalizer.atexit = False  # where close was forgotten, the process's end is enough
            except BaseException as error:
                self._one.release()
                if isinstance(error, (ValueError, NotImplementedError)):
                    raise RequestError(f"vLLM can't serve {self.model}: {error}") from error
                raise

    def _end(self) -> None:
        self._fail(RunError("the engine was closed"))
        others = torch.distributed.is_initialized()
        with self._apart():
            if others:  # destroying a default group unregisters the groups of every world in the process
                self._world.default_pg = None
            self._llm.engine_core.shutdown()
            self._llm.renderer.shutdown()
        del self._llm
        if self.device.type == "cuda":  # its memory is the trainer's now
            gc.collect()
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """vLLM makes a ``torch.distributed`` world of its own, which must not be this process's."""
        ours, distributed_c10d._world = distributed_c10d._world, self._world  # type: ignore[assignment]
        try:
            yield
        finally:
            distributed_c10d._world = ours

    def _cache_bytes(self, dtype: torch.dtype, rows: int) -> int:
        """On a CPU: keys and values of ``rows`` rows of full length, at most ``CPU_CACHE``, at least one row's."""
        config = self._lm.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token = 2 * config.num_hidden_layers * heads * size * dtype.itemsize
        row = -(-self.max_tokens // BLOCK) * BLOCK * token
        return max(min(rows * row, CPU_CACHE), row) + BLOCK * token


class _Near:
    """Weights on their way to a model in this process."""

    def __init__(self, llm: Any, device: torch.device) -> None:
        self._llm, self._device = llm, device
        self._held: list[tuple[str, Tensor]] = []
        self._bytes = 0

    def put(self, names: Sequence[str], tensor: Tensor) -> None:
        """One tensor, which may be gone afterwards, under all its names."""
        own = tensor.to(self._device, copy=True)  # vLLM keeps it until its layer is complete
        self._held += [(name, own) for name in names]
        self._bytes += own.nbytes
        if self._bytes >= BUCKET:
            self.empty()

    def empty(self) -> None:
        self._llm.collective_rpc(_take, args=(self._held,))
        self._held, self._bytes = [], 0


class _Far:
    """Weights on their way to processes of this machine, through memory that all see. It goes with its last user."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._file = os.fdopen(os.memfd_create("verl-weights"), "r+b")
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._held: list[tuple[str, int, torch.Size, torch.dtype]] = []
        self._bytes = 0

    def put(self, names: Sequence[str], tensor: Tensor) -> None:
        size = tensor.nbytes
        if self._held and self._bytes + size > BUCKET:
            self.empty()
        if self._bytes + size > len(self._memory):
            self._file.truncate(most := max(BUCKET, size))
            self._memory = torch.frombuffer(mmap.mmap(self._file.fileno(), most), dtype=torch.uint8)
        self._held += [(name, self._bytes, tensor.shape, tensor.dtype) for name in names]
        self._memory[self._bytes : self._bytes + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._bytes += -(-size // 64) * 64

    def empty(self) -> None:
        path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        self._llm.collective_rpc(_take_shared, args=(path, len(self._memory), self._held))
        self._held, self._bytes = [], 0


def _expected(
    model: str, adapter: Mapping[str, Any] | None, trust_remote_code: bool
) -> tuple[PreTrainedModel, dict[str, Tensor], dict[str, Any] | None]:
    """The model without weights, the tensors that ``load`` takes, and the adapter's settings as a file has them."""
    lm: Any = outline(model, trust_remote_code)
    if adapter is None:
        return lm, dict(Decoder(lm).shards()), None
    from peft import LoraConfig, get_peft_model

    names = {f.name for f in dataclasses.fields(LoraConfig) if f.init}
    settings = LoraConfig(**{k: v for k, v in adapter.items() if k in names} | {"init_lora_weights": True})
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        adapted = get_peft_model(lm, settings, autocast_adapter_dtype=False)
    resolved = adapted.peft_config["default"].to_dict()
    return lm, dict(Decoder(adapted).shards()), resolved | {"init_lora_weights": adapter.get("init_lora_weights", True)}


@contextlib.contextmanager
def _unchanged(device: torch.device) -> Iterator[None]:
    """vLLM's start sets variables for processes it starts, seeds every generator and fixes the number of threads."""
    environment, threads = dict(os.environ), torch.set_num_threads
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_num_threads = threads
        for name in os.environ.keys() | environment.keys():
            if not name.startswith("VLLM_"):  # those are read later, too
                if name in environment:
                    os.environ[name] = environment[name]
                else:
                    del os.environ[name]


# -- in vLLM's workers -------------------------------------------------------------------------------------------------


def _begin(worker: Any) -> None:
    """Ready the model for new weights."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    model = worker.model_runner.get_model()
    worker.model_runner.verl_left = {name for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)


def _take(worker: Any, tensors: list[tuple[str, Tensor]]) -> None:
    """Some of the new weights; which rank needs what of them is vLLM's business."""
    from vllm.config import set_current_vllm_config

    runner = worker.model_runner
    with torch.no_grad(), set_current_vllm_config(runner.vllm_config):
        taken = runner.get_model().load_weights(tensors)
    runner.verl_left = set() if taken is None else runner.verl_left - taken  # None: this model doesn't say


def _take_shared(worker: Any, path: str, size: int, listed: Sequence[tuple[str, int, torch.Size, torch.dtype]]) -> None:
    """The same from ``size`` bytes of shared memory, where each tensor begins at its number."""
    memory = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    tensors = []
    for name, at, shape, dtype in listed:
        there = memory[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        tensors.append((name, there.to(worker.device, copy=True)))
    _take(worker, tensors)


def _finish(worker: Any) -> set[str]:
    """Put the new weights to use; the parameters that got none."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    runner = worker.model_runner
    with torch.no_grad(), set_current_vllm_config(runner.vllm_config):
        finalize_layerwise_reload(runner.get_model(), runner.model_config)
    return runner.verl_left


class _Chooser:
    """Chooses every row's token; see the module. vLLM's contract for logits processors."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, tuple[int, Sampling, list[int]]] = {}  # by place: noise key, settings, tokens so far

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for place in batch_update.removed:
            self.rows.pop(place, None)
        for place, params, _, tokens in batch_update.added:
            key, sampling = params.extra_args["verl"]
            alike = replace(sampling, seed=0, max_new_tokens=1)  # rows that differ in these are chosen together
            self.rows[place] = key, alike, tokens
        for a, b, direction in batch_update.moved:
            at_a, at_b = self.rows.pop(a, None), self.rows.pop(b, None)
            if at_a is not None:
                self.rows[b] = at_a
            if at_b is not None and direction.name == "SWAP":
                self.rows[a] = at_b

    def apply(self, logits: Tensor) -> Tensor:
        """``logits [N, V]`` float32, changed in place."""
        alike: dict[Sampling, list[int]] = {}
        for place, (_, sampling, _) in sorted(self.rows.items()):
            alike.setdefault(sampling, []).append(place)
        for sampling, places in alike.items():
            at = torch.tensor(places, device=logits.device)
            keys = torch.tensor([self.rows[place][0] for place in places], device=logits.device)
            positions = torch.tensor([len(self.rows[place][2]) for place in places], device=logits.device)
            ids, logprobs = choose(logits[at], uniforms(keys, positions), sampling)
            logits[at] = float("-inf")
            logits[at, ids] = logprobs.nan_to_num(nan=float("inf"))  # the largest, and not finite
        return logits


def __getattr__(name: str) -> Any:
    """``Chooser``, by whose name vLLM's workers find it: made when asked for, as it derives from a class of vLLM's."""
    if name == "Chooser":
        return _chooser()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _chooser() -> type:
    from vllm.v1.sample.logits_processor import LogitsProcessor

    return type("Chooser", (_Chooser, LogitsProcessor), {})
