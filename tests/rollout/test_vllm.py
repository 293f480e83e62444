"""The vLLM engine keeps the contract, with a real vLLM on a CPU or, where there is one, a GPU; and what only it
promises."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.rollout.vllm_starts import quick
from tests.rollout_contract import PROMPTS, RolloutContract, ask, collect, logprobs_of, requests
from tests.tiny import BOS, EOS, PAD, _built
from verl.config.errors import RequestError, RunError
from verl.models.decoder import adapter_tensors
from verl.models.naming import own_tensors
from verl.rollout.base import Request, Sampling
from verl.rollout.vllm import OWN, VllmEngine

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

GPU = torch.cuda.is_available()
CLOSE = 1e-4 if GPU else 1e-5  # of log-probabilities
BLOCK = 16 if GPU else 128  # tokens of the cache's unit
ADAPTED = torch.bfloat16 if GPU else torch.float32  # vLLM has no kernels for adapters in fp32 on a GPU
SETTINGS: dict[str, Any] = {"device": "cuda:0" if GPU else "cpu"}
OPTIONS: dict[str, Any] = {
    "enforce_eager": True, "gpu_memory_utilization": 0.05, "attention_backend": "TRITON_ATTN",
    "enable_sleep_mode": False,
} if GPU else {}  # fmt: skip
if GPU:
    OWN.pop("enable_sleep_mode")  # vLLM sleeps in the first engine of a process only
os.environ["TRITON_F32_DEFAULT"] = "ieee"
ROWS = 128
IDS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}


def llama(seed: int = 0, *, kv_heads: int = 1, tied: bool = False) -> PreTrainedModel:
    """F-llama with heads of 32, the smallest that vLLM computes on a CPU. Always of one key-value head: each
    architecture is an engine of its own."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=tied, **IDS,
    )  # fmt: skip
    return _built(LlamaForCausalLM, config, seed)


def gpt2(seed: int = 0) -> PreTrainedModel:
    config = GPT2Config(vocab_size=32, n_layer=2, n_embd=64, n_head=2, n_positions=32, **IDS)
    return _built(GPT2LMHeadModel, config, seed)


class Engines:
    """One engine at a time, as vLLM has it; kept while the architecture stays the same."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kind: Any = None
        self.engine: VllmEngine | None = None

    def of(self, lm: PreTrainedModel, **arguments: Any) -> VllmEngine:
        kind = (lm.config.to_json_string(), repr(arguments))
        if self.engine is None or kind != self.kind:
            self.close()
            lm.save_pretrained(self.folder)
            leaks = {"temperature": 0.1, "top_k": 1, "repetition_penalty": 3.0, "eos_token_id": list(range(3, 32))}
            (self.folder / "generation_config.json").write_text(json.dumps(leaks))  # for every test of this file
            settings = SETTINGS | {
                "dtype": torch.float32, "max_rows": ROWS, "max_tokens": lm.config.max_position_embeddings,
            }  # fmt: skip
            settings |= arguments | {"options": OPTIONS | arguments.get("options", {})}
            with quick():
                self.engine, self.kind = VllmEngine(str(self.folder), frozenset(), None, **settings), kind
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            with quick():
                self.engine.close()
        self.engine = None


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("model"))
    yield made
    made.close()


def engine_of(engines: Engines, lm: PreTrainedModel, eos=frozenset({EOS}), max_rows=64, tokenizer=None) -> VllmEngine:
    """As fresh: vLLM's own bound is set, because a start takes seconds."""
    engine = engines.of(lm)
    engine.eos, engine.tokenizer = eos, tokenizer
    engine._llm.engine_core.engine_core.scheduler.max_num_active_reqs = max_rows
    engine.load(own_tensors(lm), 0)
    return engine


def errors(lm: PreTrainedModel, answers: dict[str, Any], asked: list[Request]) -> Tensor:
    """Of every log-probability, against a plain forward."""
    found = []
    for r in asked:
        ids = answers[r.row_id].ids
        chosen = logprobs_of(lm, r.prompt_ids, ids).gather(1, torch.tensor(ids)[:, None])[:, 0]
        found.append((torch.tensor(answers[r.row_id].logprobs) - chosen).abs())
    return torch.cat(found)


def worst(lm: PreTrainedModel, answers: dict[str, Any], asked: list[Request]) -> float:
    return errors(lm, answers, asked).max().item()


class TestContract(RolloutContract):
    llama = staticmethod(llama)
    gpt2 = staticmethod(gpt2)
    close = CLOSE
    draws = 1000
    long = 40

    @pytest.fixture(autouse=True)
    def _shared(self, engines: Engines) -> None:
        self.engines = engines

    def make(self, lm, eos=frozenset({EOS}), max_rows=64, tokenizer=None) -> VllmEngine:
        return engine_of(self.engines, lm, eos, max_rows, tokenizer)

    def load(self, engine, lm, version) -> None:  # type: ignore[override]
        engine.load(own_tensors(lm), version)


LONG = tuple(3 + i % 29 for i in range(300))  # tokens


def test_more_rows_than_anything_else_runs_at_once(engines: Engines) -> None:
    """128 prompts side by side, each with noise of its own: the same tokens as in small batches in another order."""
    lm = llama(seed=3)
    asked = [Request(f"{i}/{k}", f"{i}", (3 + i % 29, 3 + i // 29, 5), k) for i in range(128) for k in range(2)]
    sampling = Sampling(max_new_tokens=6, seed=4)
    wide = ask(engine_of(engines, lm, max_rows=ROWS), asked, sampling)
    narrow = ask(engine_of(engines, lm, max_rows=16), asked[::-1], sampling)
    assert {i: r.ids for i, r in wide.items()} == {i: r.ids for i, r in narrow.items()}
    assert worst(lm, wide, asked) < CLOSE
    assert len({r.ids for r in wide.values()}) > 200


def test_calls_of_different_sampling_are_computed_together(engines: Engines) -> None:
    """A short call that comes later ends while the long one is still decoding, and neither changes the other."""
    lm = llama()
    engine = engine_of(engines, lm, eos=frozenset())
    long, greedy = Sampling(max_new_tokens=80, seed=1), Sampling(max_new_tokens=4, greedy=True)
    alone = ask(engine, requests(), long), ask(engine, requests(), greedy)
    ends: list[str] = []

    async def call(name: str, sampling: Sampling, after: float) -> dict[str, Any]:
        await asyncio.sleep(after)
        answers = await collect(engine, requests(), sampling)
        ends.append(name)
        return answers

    async def both() -> list[dict[str, Any]]:
        return await asyncio.gather(call("long", long, 0), call("greedy", greedy, 0.05))

    for together, apart in zip(asyncio.run(both()), alone, strict=True):
        assert {i: r.ids for i, r in together.items()} == {i: r.ids for i, r in apart.items()}
    assert ends == ["greedy", "long"]


def test_the_thread_takes_turns(engines: Engines) -> None:
    """What the trainer puts on the engine's thread is done before a long generation ends."""
    engine = engine_of(engines, llama(), eos=frozenset())

    async def run() -> bool:
        task = asyncio.create_task(collect(engine, requests(), Sampling(max_new_tokens=400)))
        await asyncio.sleep(0.05)
        done = await asyncio.wrap_future(engine.thread.submit(lambda: not task.done()))
        engine.abort([r.row_id for r in requests()])
        return done and not task.done() and len(await task) == len(requests())

    assert asyncio.run(run())


def test_the_prefix_cache_is_used_and_never_stale(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(engines, llama(seed=0), eos=frozenset())
    cached: list[int] = []
    extend = engine._extend
    monkeypatch.setattr(engine, "_extend", lambda output: (cached.append(output.num_cached_tokens), extend(output)))
    asked, sampling = requests([LONG], samples=4), Sampling(max_new_tokens=3)
    whole = (len(LONG) - 1) // BLOCK * BLOCK
    for seed in (0, 1):
        lm = llama(seed=seed)
        engine.load(own_tensors(lm), seed)
        for hits in ({0, whole}, {whole}):  # of a group the first row fills the cache, in a second call nobody does
            cached.clear()
            assert worst(lm, ask(engine, asked, sampling), asked) < CLOSE
            assert set(cached) == hits


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {n: t for n, t in tensors.items() if n != name}


def test_a_failed_load_is_told_and_the_next_one_is_whole(engines: Engines) -> None:
    old, new = llama(seed=5), llama(seed=6)
    engine, tensors = engine_of(engines, old), dict(own_tensors(new))
    name = "model.layers.1.mlp.down_proj.weight"

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(tensors.items())[:5]
        raise OSError("the sender is gone")

    for faulty, match in (
        (without(tensors, name).items(), rf"1 tensors .*{name} is missing"),
        ((tensors | {"stray.weight": torch.ones(2)}).items(), "stray.weight is unknown"),
        ((tensors | {name: torch.ones(2)}).items(), rf"{name} has shape \(2,\), not \(64, 64\)"),
        ([*tensors.items()] * 2, "came twice"),
        (broken(), "OSError: the sender is gone"),
    ):
        with pytest.raises(RunError, match=match):
            engine.load(iter(faulty), 1)
        with pytest.raises(RunError, match="no whole weights: loading version 1 failed"):
            ask(engine, requests(), Sampling(max_new_tokens=1))
        engine.load(own_tensors(old), 2)
        assert worst(old, ask(engine, requests(), Sampling(max_new_tokens=5)), requests()) < CLOSE


def test_a_tensor_may_be_gone_when_the_next_is_taken(engines: Engines) -> None:
    old, new = llama(seed=7), llama(seed=8)
    engine = engine_of(engines, old)

    def passing() -> Iterator[tuple[str, Tensor]]:
        buffer = torch.empty(max(t.numel() for t in new.parameters()))
        for name, tensor in own_tensors(new):
            yield name, buffer[: tensor.numel()].view_as(tensor).copy_(tensor)
            buffer.fill_(float("nan"))

    engine.load(passing(), 1)
    assert worst(new, ask(engine, requests(), Sampling(max_new_tokens=5)), requests()) < CLOSE


def test_weights_stay_while_responses_are_pending(engines: Engines) -> None:
    lm = llama()
    engine = engine_of(engines, lm, eos=frozenset())

    async def run() -> int:
        task = asyncio.create_task(collect(engine, requests(), Sampling(max_new_tokens=500)))
        await asyncio.sleep(0.05)
        with pytest.raises(RunError, match="pending"):
            await asyncio.to_thread(engine.load, own_tensors(lm), 1)
        return len(await task)

    assert asyncio.run(run()) == len(requests())

    async def cancelled() -> None:
        task = asyncio.create_task(collect(engine, requests(), Sampling(max_new_tokens=500)))
        await asyncio.sleep(0.05)
        task.cancel()

    asyncio.run(cancelled())  # its loop is gone, and the rows' driver with it
    engine.load(own_tensors(lm), 3)
    assert ask(engine, requests(samples=1), Sampling(max_new_tokens=2))["p0/0"].version == 3


def test_logits_that_are_not_finite(engines: Engines) -> None:
    lm = llama()
    engine, bad = engine_of(engines, lm), llama()
    with torch.no_grad():
        bad.get_output_embeddings().weight[5] = float("nan")
    engine.load(own_tensors(bad), 1)

    async def run() -> list[Any]:
        calls = (collect(engine, requests()[i::2], Sampling(max_new_tokens=4)) for i in range(2))
        return await asyncio.gather(*calls, return_exceptions=True)

    for error in asyncio.run(run()):
        assert isinstance(error, RunError) and "row p0/0" in str(error) and "not finite" in str(error)
    engine.load(own_tensors(lm), 2)
    assert worst(lm, ask(engine, requests(), Sampling(max_new_tokens=4)), requests()) < CLOSE


def test_what_is_refused(engines: Engines) -> None:
    engine = engine_of(engines, llama())
    with pytest.raises(RequestError, match=r"row p0/0: the prompt has ids outside the vocabulary of 32"):
        ask(engine, requests([(3, 32)]), Sampling(max_new_tokens=1))
    with pytest.raises(RequestError, match="p0/0 is requested twice"):
        ask(engine, requests(samples=1) * 2, Sampling(max_new_tokens=1))
    with pytest.raises(RequestError, match="tokenizer"):
        ask(engine, requests(), Sampling(max_new_tokens=1, stop=("x",)))
    assert ask(engine, [], Sampling()) == {}
    for arguments, error, match in (
        ({"options": {"max_num_batched_token": 64}}, RequestError, "no option max_num_batched_token; did you mean max"),
        ({"options": {"dtype": "half"}}, RequestError, "option dtype is not for setting here"),
        ({"max_tokens": 513}, RequestError, "513 tokens, the model has 512 positions"),
        ({}, RunError, "has a vLLM engine already"),
    ):  # fmt: skip
        settings = SETTINGS | {"dtype": torch.float32, "max_rows": 4, "max_tokens": 64}
        with pytest.raises(error, match=match):
            VllmEngine(str(engines.folder), frozenset(), None, **settings | arguments)
    assert len(ask(engine, requests(), Sampling(max_new_tokens=1))) == len(requests())


def test_tied_embeddings_and_biases(engines: Engines) -> None:
    """Qwen 2's; the head changes with the embedding. Nothing is generated before the first load."""

    def qwen(seed: int) -> PreTrainedModel:
        config = Qwen2Config(
            vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True, **IDS,
        )  # fmt: skip
        return _built(Qwen2ForCausalLM, config, seed)

    engine = engines.of(qwen(0))
    with pytest.raises(RunError, match="none have been loaded"):
        ask(engine, requests(), Sampling(max_new_tokens=1))
    for version in (0, 1):
        lm = qwen(version)
        assert "lm_head.weight" not in dict(own_tensors(lm))
        engine.load(own_tensors(lm), version)
        assert worst(lm, ask(engine, requests(), Sampling(max_new_tokens=8)), requests()) < CLOSE


ADAPTED_CLOSE = 1.0 if GPU else 1e-4  # bf16: torch's own forward is up to 0.6 from fp32 here; the base is 5 away
ADAPTER = LoraConfig(
    task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules="all-linear", rank_pattern={"up_proj": 8},
    alpha_pattern={"o_proj": 12},
)  # fmt: skip


def lora(seed: int) -> Any:
    lm = get_peft_model(llama(seed=9), copy.deepcopy(ADAPTER), autocast_adapter_dtype=False)
    with torch.no_grad():
        torch.manual_seed(seed)
        for tensor in adapter_tensors(lm).values():
            tensor.normal_(std=0.1)
    return lm.eval()


def small_cache_engine(engines: Engines) -> VllmEngine:
    """With an adapter, and room for the keys and values of a few rows only: 9 blocks of 128 tokens."""
    block = 128 * 2 * 2 * 32 * ADAPTED.itemsize
    options = {"kv_cache_memory_bytes": 9 * block}
    return engines.of(llama(seed=9), adapter=ADAPTER.to_dict(), options=options, dtype=ADAPTED)


def test_adapters(engines: Engines) -> None:
    """They alone are loaded, each version in place of the one before; the base comes from its folder."""
    engine = small_cache_engine(engines)
    asked, sampling = requests([*PROMPTS, LONG]), Sampling(max_new_tokens=8)
    with pytest.raises(RunError, match="none have been loaded"):
        ask(engine, asked, sampling)
    for version in (1, 2):
        lm = lora(version)
        engine.load(adapter_tensors(lm).items(), version)
        answers = ask(engine, asked, sampling)
        assert {r.version for r in answers.values()} == {version}
        assert worst(lm, answers, asked) < ADAPTED_CLOSE
        assert errors(lm, answers, asked).mean() < ADAPTED_CLOSE / 10
        assert engine._llm.list_loras() == {engine._lora.lora_int_id}
        with lm.disable_adapter():
            assert worst(lm, answers, asked) > 0.1 + 2 * ADAPTED_CLOSE
    name = next(iter(adapter_tensors(lm)))
    with pytest.raises(RunError, match=f"{name} is missing"):
        engine.load(without(adapter_tensors(lm), name).items(), 3)
    with pytest.raises(RunError, match="loading version 3 failed"):
        ask(engine, asked, sampling)
    engine.load(adapter_tensors(lm).items(), 4)
    assert worst(lm, ask(engine, asked, sampling), asked) < ADAPTED_CLOSE


def test_rows_that_lose_their_place_go_on_where_they_were(engines: Engines) -> None:
    """vLLM takes rows out when the cache is full and computes them anew later; noise counts a row's own tokens."""
    engine, lm = small_cache_engine(engines), lora(1)
    engine.load(adapter_tensors(lm).items(), 1)
    prompts = [tuple(3 + (i + k) % 29 for i in range(110 + k)) for k in range(8)]
    asked, sampling = requests(prompts, samples=1), Sampling(max_new_tokens=40, seed=3)
    scheduler = engine._llm.engine_core.engine_core.scheduler
    taken_out: list[str] = []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *rest, **more: (
        taken_out.append(request),
        preempt(request, *rest, **more),
    )
    crowded = ask(engine, asked, sampling)
    assert taken_out
    taken_out.clear()
    roomy = ask(engine, asked[:4], sampling) | ask(engine, asked[4:], sampling)
    assert not taken_out
    assert {i: r.ids for i, r in crowded.items()} == {i: r.ids for i, r in roomy.items()}
    assert worst(lm, crowded, asked) < (1 if GPU else 1e-3)  # the adapter and weights times 3 make errors grow


def test_the_process_stays_as_it_was(engines: Engines, tmp_path: Path) -> None:
    """Its generators, variables, world of torch.distributed and threads; after close nothing is left."""
    engines.close()
    lm = llama()
    lm.save_pretrained(tmp_path)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        states = torch.get_rng_state(), random.getstate(), torch.get_num_threads()
        variables = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        children, threads = psutil.Process().children(recursive=True), set(threading.enumerate())
        with quick():
            engine = VllmEngine(
                str(tmp_path), frozenset(), None, **SETTINGS, options=OPTIONS, dtype=torch.float32, max_rows=4,
                max_tokens=64,
            )  # fmt: skip
        engine.load(own_tensors(lm), 0)
        assert len(ask(engine, requests(), Sampling(max_new_tokens=3))) == len(requests())
        assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
        torch.set_num_threads(2)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(states[2])
        assert {n: v for n, v in os.environ.items() if not n.startswith("VLLM_")} == variables
        engine.close()
        engine.close()
        with pytest.raises(RunError, match="closed"):
            ask(engine, requests(), Sampling(max_new_tokens=3))
        with pytest.raises(RunError, match="closed"):
            engine.load(own_tensors(lm), 1)
        assert psutil.Process().children(recursive=True) == children and set(threading.enumerate()) <= threads
        for each in (None, group):
            dist.all_reduce(total := torch.ones(2), group=each)
            assert total.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()
    assert not dist.is_initialized()
