"""Two steps of a loop of one's own on fixed rows, in one process or on ranks of their own."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.forks import FORKS
from tests.tiny import f_llama
from verl.runtime.hybrid_engine import HybridEngine, RemoteCritic

ROWS = torch.randint(3, 30, (4, 9), generator=torch.Generator().manual_seed(0))


def play(actor: Any, critic: Any, rows: Sequence[int], interval: int = 1) -> dict[str, Any]:
    """What the rank saw: losses, values, weights afterwards, reports."""
    config = {"reshard_interval": interval, "incremental": False}
    engine = HybridEngine(f_llama(), actor, critic, config, critic_lr=1e-2)
    policy, value = engine.actor_model, engine.critic_model
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    told: dict[str, Any] = {"values": [], "reports": [], "remote": isinstance(value, RemoteCritic)}
    ids = ROWS[list(rows)]
    for _ in range(2):
        values = value(ids)
        logprobs = policy(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = -logprobs.mean() + (values - ids / 10).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told["values"].append(values.detach())
        told["reports"].append(engine.step())
    policy.generate(ids[:, :4], max_new_tokens=3)
    told["versions"] = [r.version for r in policy.responses]
    if interval == 1:
        policy.prove()
    told["weights"] = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in policy.lm.named_parameters()
    }
    told["generating"] = {n: p.detach().clone() for n, p in policy.engine.policy.lm.named_parameters()}
    engine.close()
    return told


def on_ranks(n: int, actor: Any, critic: Any, shares: Sequence[Sequence[int]]) -> list[Any]:
    """``play`` of each of the actor's ranks."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(n):
            here, there = FORKS.Pipe()
            share = shares[rank] if rank < len(shares) else ()
            process = FORKS.Process(target=_rank, args=(rank, n, folder, there, actor, critic, share), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        told = [pickle.loads(pipe.recv_bytes()) if pipe.poll(120) else "no answer" for pipe in pipes[: len(shares)]]
        for process in processes:
            process.join(20)
        assert [process.exitcode for process in processes] == [0] * n
    return told


def _rank(rank: int, n: int, folder: str, pipe: Any, actor: Any, critic: Any, share: Sequence[int]) -> None:
    os.environ["WORLD_SIZE"] = str(n)
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=n, timeout=timedelta(seconds=60))
    pipe.send_bytes(pickle.dumps(play(actor, critic, share)))  # tensors as they are, not as shared memory
