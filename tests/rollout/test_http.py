"""Engines over HTTP keep the contract and survive what servers do, against stand-ins that compute on a tiny model."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from tests.rollout.stand_in import SglangStandIn, StandIn, VllmStandIn
from tests.rollout_contract import RolloutContract, ask, collect, logprobs_of, requests
from tests.tiny import EOS, f_bpe, f_gpt2, f_llama
from verl.config.errors import RequestError, RunError
from verl.models.decoder import adapter_tensors
from verl.models.naming import aliases, own_tensors
from verl.rollout.base import Response, Sampling
from verl.rollout.http import HttpEngine
from verl.rollout.sglang import SglangEngine
from verl.rollout.vllm_server import ServerEngine

KINDS: dict[str, tuple[type[HttpEngine], type[StandIn]]] = {
    "vllm": (ServerEngine, VllmStandIn),
    "sglang": (SglangEngine, SglangStandIn),
}
PLAIN = Sampling(max_new_tokens=12, seed=1)


class Bench:
    """Makes servers and engines, and ends them after the test."""

    def __init__(self, kind: str) -> None:
        self.engine_of, self.server_of = KINDS[kind]
        self.made: list[Any] = []

    def server(self, lm: PreTrainedModel, **options: Any) -> Any:
        server = self.server_of(copy.deepcopy(lm), **options)
        self.made.append(server)
        return server

    def engine(self, *servers: StandIn, eos: frozenset[int] = frozenset({EOS}), **options: Any) -> Any:
        engine = self.engine_of([s.url for s in servers], eos, **({"retries": 8, "timeout": 20.0} | options))
        self.made.append(engine)
        return engine

    def close(self) -> None:
        for thing in reversed(self.made):
            (thing.close if isinstance(thing, HttpEngine) else thing.stop)()


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(request.param)
    yield bench
    bench.close()


@pytest.fixture
def vllm() -> Iterator[Bench]:
    bench = Bench("vllm")
    yield bench
    bench.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.rollout.http.BACK_OFF", 0.05)
    monkeypatch.setattr("verl.rollout.vllm_server.WATCH", 0.01)


class Contract(RolloutContract):
    ordered = False
    greedy_temperature = 1.0
    draws = 150
    long = 40  # a token takes milliseconds
    kind = ""

    @pytest.fixture(autouse=True)
    def benches(self) -> Iterator[None]:
        self.bench = Bench(self.kind)
        yield
        self.bench.close()

    def make(self, lm, eos=frozenset({EOS}), max_rows=64, tokenizer=None) -> HttpEngine:
        return self.bench.engine(self.bench.server(lm, tokenizer=tokenizer), eos=eos, max_rows=max_rows)

    def load(self, engine: HttpEngine, lm: PreTrainedModel, version: int) -> None:  # type: ignore[override]
        engine.load(own_tensors(lm), version)


class TestVllm(Contract):
    kind = "vllm"


class TestSglang(Contract):
    kind = "sglang"
    truncates = False


def right(lm: PreTrainedModel, answers: dict[str, Response], sampling: Sampling = PLAIN) -> None:
    """Every row once, whole, from ``lm``."""
    assert answers.keys() == {r.row_id for r in requests()}
    for r in requests():
        answer = answers[r.row_id]
        expected = logprobs_of(lm, r.prompt_ids, answer.ids, sampling.temperature)
        chosen = expected.gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=5e-5, rtol=0)
        assert answer.finish_reason == ("stop" if answer.ids[-1] == EOS else "length")


def during(engine: HttpEngine, sampling: Sampling, seconds: float, what: Any) -> dict[str, Response]:
    """The rows, with ``what`` done in another thread while they are sampled."""

    async def run() -> dict[str, Response]:
        async def meanwhile() -> None:
            await asyncio.sleep(seconds)
            await asyncio.to_thread(what)

        answers, _ = await asyncio.gather(collect(engine, requests(), sampling), meanwhile())
        return answers

    return asyncio.run(run())


def test_every_option_is_sent(bench: Bench) -> None:
    """The stand-ins' defaults, as from a generation configuration, would change every row."""
    lm = f_llama()
    server = bench.server(lm, own_eos=frozenset())
    right(lm, ask(bench.engine(server), requests(), PLAIN))
    seeds = {str(b.get("seed") or b["sampling_params"]["sampling_seed"]) for b in server.asked}
    assert len(seeds) == len(server.asked) == len(requests())


def test_a_server_that_restarts_while_rows_are_under_way(bench: Bench) -> None:
    lm = f_llama()
    server = bench.server(lm)
    engine = bench.engine(server, eos=frozenset())
    whole = ask(engine, requests(), Sampling(max_new_tokens=40))
    server.pace = 0.01
    server.asked.clear()

    def restart() -> None:
        server.stop()
        time.sleep(0.3)
        server.start()

    answers = during(engine, Sampling(max_new_tokens=40), 0.2, restart)
    assert {i: r.ids for i, r in answers.items()} == {i: r.ids for i, r in whole.items()}
    assert len(server.asked) > len(requests())


def test_weights_lost_in_a_restart_are_given_again(bench: Bench) -> None:
    """While rows are under way, and between calls, when nobody notices."""
    old, new = f_llama(seed=0), f_llama(seed=1)
    server = bench.server(old)
    engine = bench.engine(server)
    engine.load(own_tensors(new), 3)
    assert server.loads == 1
    right(new, ask(engine, requests(), PLAIN))
    server.restart()
    answers = ask(engine, requests(), PLAIN)
    right(new, answers)
    assert server.loads == 2 and {r.version for r in answers.values()} == {3}
    server.pace = 0.01
    right(new, during(engine, PLAIN, 0.05, server.restart))
    assert server.loads == 3


def test_overload_is_waited_out(bench: Bench) -> None:
    lm = f_llama()
    server = bench.server(lm)
    server.faults.extend([(503, "busy"), (429, "slow down"), (500, "oops"), (503, "busy")])
    right(lm, ask(bench.engine(server), requests(), PLAIN))
    assert server.served == len(requests()) + 4


def test_a_row_that_a_server_ended_is_asked_for_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an answer is no row: nobody here aborted it."""
    lm = f_llama()
    server = bench.server(lm)
    whole, asked = server._tokens, iter(range(1000))

    def cut(*arguments: Any) -> Any:
        answer = whole(*arguments)
        return (*(part[:1] for part in answer[:3]), "abort", None) if next(asked) % 4 == 1 else answer

    monkeypatch.setattr(server, "_tokens", cut)
    right(lm, ask(bench.engine(server), requests(), PLAIN))


def test_one_of_two_servers_is_dead(bench: Bench) -> None:
    lm = f_llama()
    alive, dead = bench.server(lm), bench.server(lm)
    dead.stop()
    engine = bench.engine(dead, alive, retries=3)
    right(lm, ask(engine, requests(), PLAIN))
    with pytest.raises(RunError, match=rf"not everywhere: {dead.url} can't be reached"):
        engine.load(own_tensors(f_llama(seed=1)), 1)
    with pytest.raises(RunError, match="version 1 failed"):
        ask(engine, requests(), PLAIN)
    dead.start()
    engine.load(own_tensors(f_llama(seed=1)), 2)
    right(f_llama(seed=1), ask(engine, requests(), PLAIN))


def test_rows_go_to_the_least_loaded(bench: Bench) -> None:
    slow, fast = bench.server(f_llama()), bench.server(f_llama())
    slow.pace, fast.pace = 0.1, 0.002
    answers = ask(
        bench.engine(slow, fast, eos=frozenset(), max_rows=4), requests(samples=8), Sampling(max_new_tokens=8)
    )
    assert len(answers) == slow.served + fast.served == 32
    assert 2 <= slow.served < fast.served and slow.most + fast.most <= 4 + 1  # a place is taken as one leaves


def test_a_dead_server_ends_the_call_with_row_and_address(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    server = bench.server(f_llama())
    engine = bench.engine(server, retries=2)
    ask(engine, requests(), PLAIN)
    server.stop()
    assert not caplog.messages
    with pytest.raises(RunError, match=rf"{server.url} can't be reached: ConnectError.*3 attempts"):
        ask(engine, requests(), PLAIN)
    (told,) = caplog.messages  # when the wait begins, and once
    assert told.startswith(f"{server.url} can't be reached") and told.endswith("trying again for about 0.15 s")
    with pytest.raises(RunError, match="not everywhere"):
        engine.load(own_tensors(f_llama(seed=1)), 1)
    assert len(caplog.messages) == 2


def test_a_server_that_never_answered_is_a_wrong_request(bench: Bench) -> None:
    server = bench.server(f_llama())
    server.stop()
    engine = bench.engine(server, retries=1)
    with pytest.raises(RequestError, match=rf"{server.url} can't be reached.*correct rollout.url"):
        ask(engine, requests(), PLAIN)
    with pytest.raises(RequestError, match=rf"^{server.url} can't be reached.*correct rollout.url"):
        engine.load(own_tensors(f_llama(seed=1)), 1)


def test_a_slow_server_is_waited_for_and_a_hung_one_is_not(bench: Bench) -> None:
    server = bench.server(f_llama())
    server.pace = 0.03
    ask(bench.engine(server, timeout=5.0), requests(), PLAIN)
    server.pace = 1.0
    with pytest.raises(RunError, match=r"row p\d/\d: .* did not answer in time.*2 attempts"):
        ask(bench.engine(server, eos=frozenset(), timeout=0.3, retries=1), requests(), PLAIN)


def test_a_refused_row_is_named_with_the_servers_words(bench: Bench) -> None:
    server = bench.server(f_llama())
    asked = requests(((3, 4), (5, 99)), samples=1)
    with pytest.raises(RequestError, match=r"row p1/0: .* answered 400: Token id 99 is out of vocabulary"):
        ask(bench.engine(server), asked, PLAIN)


def test_ends_that_are_none_here_are_refused(bench: Bench) -> None:
    server = bench.server(f_llama(), own_eos=frozenset(range(32)))
    if bench.engine_of is ServerEngine:  # it can say which ids end
        right(f_llama(), ask(bench.engine(server), requests(), PLAIN))
    else:
        with pytest.raises(RequestError, match="ends nothing here"):
            ask(bench.engine(server), requests(), PLAIN)


@pytest.mark.parametrize("mode", ["raw", "temperature"])
@pytest.mark.parametrize("options", [{"temperature": 0.8}, {"top_p": 0.9}, {"top_k": 4}], ids=["t", "p", "k"])
def test_logprobs_of_another_distribution_are_refused(bench: Bench, mode: str, options: dict[str, Any]) -> None:
    server = bench.server(f_llama(), mode=mode)
    engine = bench.engine(server)
    sampling = Sampling(max_new_tokens=4, **options)
    if mode == "temperature" and "temperature" in options:
        right(f_llama(), ask(engine, requests(), sampling), sampling)
        return
    flag = "--logprobs-mode processed_logprobs" if bench.engine_of is ServerEngine else "SGLang"
    with pytest.raises(RequestError, match=flag):
        ask(engine, requests(), sampling)
    assert len(server.asked) == 3  # the probe
    right(f_llama(), ask(engine, requests(), PLAIN))


def test_a_load_that_fails_at_one_server_stops_all(bench: Bench) -> None:
    new = f_llama(seed=1)
    good, bad = bench.server(f_llama()), bench.server(f_llama())
    bad.refuses_weights = "disk on fire"
    engine = bench.engine(good, bad)
    with pytest.raises(RunError, match=rf"{bad.url}.*disk on fire"):
        engine.load(own_tensors(new), 1)
    with pytest.raises(RunError, match="no whole weights"):
        ask(engine, requests(), PLAIN)
    bad.refuses_weights = ""
    engine.load(own_tensors(new), 2)
    right(new, ask(engine, requests(), PLAIN))


def test_the_key_is_sent_and_never_shown(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = bench.server(f_llama(), key="s3cret")
    right(f_llama(), ask(bench.engine(server, api_key="s3cret"), requests(), PLAIN))
    with pytest.raises(RequestError, match="401") as caught:
        ask(bench.engine(server, api_key="wr0ng"), requests(), PLAIN)
    assert "***" in str(caught.value)
    for text in (caplog.text, str(caught.value), repr(caught.value.__cause__)):
        assert "s3cret" not in text and "wr0ng" not in text
    with pytest.raises(RequestError, match="without a password") as caught:
        bench.engine_of(["http://me:s3cret@127.0.0.1:1"], frozenset())
    assert "s3cret" not in str(caught.value)


def test_a_caller_that_leaves_frees_the_server(bench: Bench) -> None:
    server = bench.server(f_llama())
    server.pace = 0.01
    engine = bench.engine(server, eos=frozenset())

    async def run() -> None:
        task = asyncio.create_task(collect(engine, requests(), Sampling(max_new_tokens=400)))
        while server.under < len(requests()):
            await asyncio.sleep(0.01)
        task.cancel()
        for _ in range(100):
            await asyncio.sleep(0.02)
            if not server.under:
                return

    asyncio.run(run())
    assert server.under == 0 and server.cut == len(requests())


def test_an_abort_between_two_rows_first_steps(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that exist and haven't run yet: a task cancelled then would end without a word."""
    engine = bench.engine(bench.server(f_llama()))
    check, aborted = engine._check, requests()[1].row_id

    async def checked(*arguments: Any) -> None:
        await check(*arguments)
        asyncio.get_running_loop().call_soon(engine._abort, {aborted})  # before the rows' first steps

    monkeypatch.setattr(engine, "_check", checked)
    answers = asyncio.run(asyncio.wait_for(collect(engine, requests(), PLAIN), 60))
    assert {i for i, row in answers.items() if row.finish_reason == "abort"} == {aborted}


def test_weights_lie_in_one_folder_that_goes_with_the_engine(bench: Bench, tmp_path: Path) -> None:
    engine = bench.engine(bench.server(f_llama()), folder=str(tmp_path))
    for version in (1, 2):
        engine.load(own_tensors(f_llama()), version)
        assert [f.name for f in tmp_path.glob("*/*/*")] == ["model-00000.safetensors"]
    engine.close()
    engine.close()
    assert not list(tmp_path.iterdir())
    assert "verl-http" not in [t.name for t in threading.enumerate() if t is engine._thread]


def test_a_folder_for_weights_that_is_none(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    engine = bench.engine(bench.server(f_llama()), folder=str(tmp_path / "file"))
    with pytest.raises(RequestError, match=r"^rollout.weights_dir: can't write to .*file: Not a directory"):
        engine.load(own_tensors(f_llama()), 1)


def test_weights_are_written_in_parts(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each tensor may be gone when the next is taken."""
    monkeypatch.setattr("verl.rollout.http.SHARD", 10_000)
    new = f_llama(seed=1)
    engine = bench.engine(bench.server(f_llama()), folder=str(tmp_path))

    def fleeting() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in own_tensors(new):
            buffer = tensor.clone()
            yield name, buffer
            buffer.zero_()

    engine.load(fleeting(), 1)
    assert len(list(tmp_path.glob("*/*/*.safetensors"))) > 3
    right(new, ask(engine, requests(), PLAIN))


def test_tied_weights_bring_their_head(vllm: Bench) -> None:
    """vLLM keeps the old one otherwise."""
    old, new = f_llama(seed=0, tied=True), f_llama(seed=1, tied=True)
    engine = vllm.engine(vllm.server(old))
    engine.load(own_tensors(new), 1)
    right(new, ask(engine, requests(), PLAIN))


def test_tied_weights_come_under_all_their_names(vllm: Bench) -> None:
    """Whatever the model calls them."""
    old, new = f_gpt2(seed=0), f_gpt2(seed=1)
    engine = vllm.engine(vllm.server(old), tied=aliases(old))
    engine.load(own_tensors(new), 1)
    sampling = Sampling(max_new_tokens=8)
    right(new, ask(engine, requests(), sampling), sampling)


def adapted(lm: PreTrainedModel, seed: int) -> Any:
    torch.manual_seed(seed)
    peft = get_peft_model(
        copy.deepcopy(lm), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.7)
    return peft.eval()


def test_adapters(vllm: Bench) -> None:
    """Each version has a name of its own; a server that restarted gets it again; the old one goes."""
    base = f_llama()
    first, second = adapted(base, 1), adapted(base, 2)
    servers = [vllm.server(base, dev=False, lora=True) for _ in range(2)]
    engine = vllm.engine(*servers, adapter=first.peft_config["default"].to_dict())
    right(base, ask(engine, requests(), PLAIN))
    for version, policy in ((1, first), (2, second), (3, first)):
        engine.load(adapter_tensors(policy).items(), version)
        right(policy, ask(engine, requests(), PLAIN))
        assert all(len(s.adapters) == 1 for s in servers)
    for server in servers:
        server.restart()
    right(first, ask(engine, requests(), PLAIN))
    engine.close()
    assert not any(s.adapters for s in servers)


@pytest.mark.parametrize("adapter", [None, {"r": 4}], ids=["whole", "adapter"])
def test_a_server_that_takes_no_weights(vllm: Bench, adapter: dict[str, Any] | None) -> None:
    engine = vllm.engine(vllm.server(f_llama(), dev=False), adapter=adapter)
    with pytest.raises(RequestError) as caught:
        engine.load(own_tensors(f_llama()), 1)
    for way in ("VLLM_SERVER_DEV_MODE=1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
        assert way in str(caught.value)


def test_stop_texts_go_to_the_server(bench: Bench) -> None:
    server = bench.server(f_llama(), tokenizer=f_bpe())
    ask(bench.engine(server), requests(), Sampling(max_new_tokens=4, stop=("ab",)))
    assert {tuple((b.get("sampling_params") or b)["stop"]) for b in server.asked} == {("ab",)}


def test_bad_arguments() -> None:
    for urls in ([], ["http://a", "http://a"], ["a:80"], ["ftp://a"]):
        with pytest.raises(RequestError):
            ServerEngine(urls, frozenset())
    with pytest.raises(RequestError, match="max_rows"):
        SglangEngine(["http://a"], frozenset(), max_rows=0)
