"""``ServerEngine`` with a real ``vllm serve`` on loopback. VERL_TEST_VLLM names the Python that has vLLM."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.rollout_contract import ask, assert_stopped, collect, logprobs_of, requests
from tests.tiny import EOS, f_bpe, save
from verl.config.errors import RequestError
from verl.models.decoder import adapter_tensors
from verl.models.naming import own_tensors
from verl.rollout.base import Response, Sampling
from verl.rollout.vllm_server import ServerEngine

PYTHON = os.environ.get("VERL_TEST_VLLM", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="VERL_TEST_VLLM does not name a Python with vLLM"),
    pytest.mark.timeout(900),
]
SAMPLED = Sampling(temperature=0.9, max_new_tokens=12, seed=3)


def llama(seed: int) -> LlamaForCausalLM:
    """As ``f_llama`` with tied embeddings, in sizes that vLLM's kernels have."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=1, eos_token_id=EOS, pad_token_id=0,
    )  # fmt: skip
    lm = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(3)
    return lm.eval()


class Vllm:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        env = os.environ | {
            "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        options = (
            f"--host 127.0.0.1 --port {self.port} --served-model-name tiny --dtype float32 --max-model-len 256 "
            "--max-num-seqs 64 --enforce-eager --logprobs-mode processed_logprobs --enable-lora --max-lora-rank 8"
        )
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.folder), *options.split()]
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        end = time.monotonic() + 400
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urlopen(self.url + "/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.5)
        self.stop()
        pytest.fail("vllm serve did not start:\n" + (self.folder / "server.log").read_text()[-3000:])

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    folder = tmp_path_factory.mktemp("tiny")
    save(folder, llama(0), f_bpe())
    leaks = {"temperature": 0.1, "top_k": 1, "repetition_penalty": 1.9, "eos_token_id": [EOS, 5, 6, 7, 8]}
    (folder / "generation_config.json").write_text(json.dumps(leaks))
    server = Vllm(folder)
    yield server
    server.stop()


@pytest.fixture
def engines(server: Vllm) -> Iterator[Any]:
    made: list[ServerEngine] = []

    def make(eos: frozenset[int] = frozenset({EOS}), **options: Any) -> ServerEngine:
        made.append(ServerEngine([server.url], eos, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def right(lm: PreTrainedModel, answers: dict[str, Response], sampling: Sampling, eos: frozenset[int]) -> None:
    assert answers.keys() == {r.row_id for r in requests()}
    for r in requests():
        answer = answers[r.row_id]
        expected = logprobs_of(lm, r.prompt_ids, answer.ids, 1.0 if sampling.greedy else sampling.temperature)
        if sampling.top_k:
            least = expected.topk(sampling.top_k).values[:, -1:]
            expected = expected.masked_fill(expected < least, float("-inf")).log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=2e-4, rtol=0)
        ended = answer.ids[-1] in eos
        assert not set(answer.ids[:-1]) & eos
        assert answer.finish_reason == ("stop" if ended else "length")
        assert ended or len(answer.ids) == sampling.max_new_tokens


@pytest.mark.parametrize("eos", [frozenset(), frozenset({EOS}), frozenset(range(0, 32, 6))], ids=["none", "one", "six"])
@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"greedy": True}], ids=["all", "k", "greedy"])
def test_rows_are_the_models(engines: Any, options: dict[str, Any], eos: frozenset[int]) -> None:
    """Nothing of its generation configuration; whole weights in place of the first ones, prefix cache included."""
    sampling = Sampling(temperature=0.9, max_new_tokens=12, seed=3, **options)
    engine = engines(eos)
    for version, seed in enumerate((0, 1, 0)):
        engine.load(own_tensors(llama(seed)), version)
        right(llama(seed), ask(engine, requests(), sampling), sampling, eos)


def test_batching_changes_no_token(engines: Any) -> None:
    wide, narrow = (ask(engines(max_rows=n), requests(samples=8), SAMPLED) for n in (64, 2))
    assert {i: r.ids for i, r in wide.items()} == {i: r.ids for i, r in narrow.items()}
    assert len({r.ids for r in wide.values()}) == 32


def test_stop_texts(engines: Any) -> None:
    tokenizer = f_bpe()
    whole = ask(engines(frozenset()), requests(samples=8), Sampling(max_new_tokens=24))
    got = ask(engines(frozenset()), requests(samples=8), Sampling(max_new_tokens=24, stop=("ab", "c:")))
    assert_stopped(whole, got, tokenizer)


def test_abort_and_refusals(engines: Any) -> None:
    engine = engines(frozenset())

    async def run() -> dict[str, Response]:
        task = asyncio.create_task(collect(engine, requests(), Sampling(max_new_tokens=200)))
        await asyncio.sleep(0.2)
        engine.abort(["p0/0"])
        return await task

    rows = asyncio.run(run())
    assert rows.pop("p0/0").finish_reason == "abort" and {len(r.ids) for r in rows.values()} == {200}
    with pytest.raises(RequestError, match=r"row p0/0: .* answered 400: .*out of vocabulary"):
        ask(engine, requests(((3, 99),), samples=1), SAMPLED)
    with pytest.raises(RequestError, match=r"row p0/0: 3 prompt tokens .* 256 positions"):
        ask(engine, requests(), Sampling(max_new_tokens=254))


def adapted(seed: int) -> Any:
    torch.manual_seed(seed)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    policy = get_peft_model(copy.deepcopy(llama(0)), lora)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.4)
    return policy.eval()


def test_weights_and_adapters_lost_in_a_restart_are_given_again(engines: Any, server: Vllm) -> None:
    policies = [adapted(1), adapted(2)]
    of_adapters, of_weights = engines(adapter=policies[0].peft_config["default"].to_dict()), engines()
    of_weights.load(own_tensors(llama(0)), 1)
    for version, policy in enumerate(policies):
        of_adapters.load(adapter_tensors(policy).items(), version)
        right(policy, ask(of_adapters, requests(), SAMPLED), SAMPLED, frozenset({EOS}))
        with urlopen(server.url + "/v1/models") as models:
            assert len(json.load(models)["data"]) == 2  # the base and the newest
    server.stop()
    server.start()
    right(policies[1], ask(of_adapters, requests(), SAMPLED), SAMPLED, frozenset({EOS}))
    of_weights.load(own_tensors(llama(1)), 2)
    server.stop()
    server.start()
    right(llama(1), ask(of_weights, requests(), SAMPLED), SAMPLED, frozenset({EOS}))
