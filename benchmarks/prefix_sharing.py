"""What it saves to compute a group's prompt once: one optimizer step with prompts shared beside one without.

    python benchmarks/prefix_sharing.py [--response 128] [--ratios 1 4] [--group 8] [--rounds 5]

Through the training engine itself, on a small random Llama, with gradient checkpointing and AdamW. Both ways take turns
in one process and one thread; times are of its processor use, so neighbours on the machine disturb them little. The
gradients of both ways are compared, too: their norms have to be the same.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from verl.batch import Batch, Ragged
from verl.config.model import ModelConfig, OptimizerConfig
from verl.engines.fsdp import FsdpEngine
from verl.models.factory import load_model
from verl.models.policy import Policy

WANT = frozenset({"logprobs"})


def engine(positions: int) -> FsdpEngine:
    """Around 13 million parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=positions,
    )  # fmt: skip
    lm = load_model(ModelConfig(model_name_or_path=LlamaForCausalLM(config)), "cpu", torch.float32)
    return FsdpEngine(Policy(lm), OptimizerConfig(lr=0.0), gradient_checkpointing=True)


def rows(prompt: int, response: int, group: int, groups: int = 2) -> Batch:
    """``groups`` prompts with ``group`` responses each."""
    g = torch.Generator().manual_seed(prompt)
    prompts = [torch.randint(4096, (prompt,), generator=g) for _ in range(groups)]
    batch = Batch([str(i) for i in range(groups * group)])
    batch["prompt_ids"] = Ragged.from_rows([p for p in prompts for _ in range(group)])
    batch["response_ids"] = Ragged.from_rows(
        [torch.randint(4096, (response,), generator=g) for _ in range(groups * group)]
    )
    tokens = groups * group * response
    batch["response_mask"] = batch.ragged("response_ids").with_values(torch.ones(tokens, dtype=torch.bool))
    batch["weight"] = batch.ragged("response_ids").with_values(torch.randn(tokens, generator=g))
    batch["group"] = torch.arange(groups).repeat_interleave(group)
    return batch


def loss(outputs: dict[str, Tensor], micro: Batch) -> tuple[Tensor, dict[str, float]]:
    weight = micro.ragged("weight").values
    return -(outputs["logprobs"] * weight).mean(), {}


def seconds(e: FsdpEngine, batch: Batch, group: int) -> tuple[float, float]:
    """Processor time of one step of one micro-batch per group, and its gradient norm."""
    cut = [list(range(at, at + group)) for at in range(0, len(batch), group)]
    start = time.process_time()
    report = e.update(batch, cut, loss, WANT, 1.0)
    return time.process_time() - start, report.grad_norm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--response", type=int, default=128, help="tokens of each response")
    parser.add_argument("--ratios", type=int, nargs="+", default=[1, 4], help="prompt tokens per response token")
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    parser.add_argument("--rounds", type=int, default=5, help="after a first one that doesn't count")
    args = parser.parse_args()
    torch.set_num_threads(1)
    e = engine(args.response * (max(args.ratios) + 1))
    print("| prompt:response | tokens computed | shared, s | not shared, s | times faster |")
    print("|---|---|---|---|---|")
    for ratio in args.ratios:
        prompt = ratio * args.response
        shared = rows(prompt, args.response, args.group)
        single = Batch(shared.ids, {name: column for name, column in shared.columns.items() if name != "group"})
        times: dict[str, list[float]] = {"shared": [], "single": []}
        for number in range(args.rounds + 1):
            found = {"shared": seconds(e, shared, args.group), "single": seconds(e, single, args.group)}
            a, b = (norm for _, norm in found.values())
            assert abs(a - b) < 1e-4 * b, f"gradient norms {a} and {b}"
            for name, (taken, _) in found.items():
                times[name] += [taken] if number else []
        once, each = (statistics.median(taken) for taken in times.values())
        tokens = (
            len(single) * (prompt + args.response),
            len(single) // args.group * prompt + len(single) * args.response,
        )
        print(
            f"| {ratio}:1 | {tokens[1]:,} of {tokens[0]:,} | {once:.2f} | {each:.2f} | {each / once:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
