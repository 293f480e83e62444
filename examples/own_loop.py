"""A training loop of one's own: actor-critic over a policy that generates and trains, and a critic beside it.

``python examples/own_loop.py [MODEL [ACTOR_DEVICES [CRITIC_DEVICES]]]``, such as ``models/smollm2 0 0`` on one GPU.
With several devices each: ``torchrun --nproc-per-node=4 examples/own_loop.py models/smollm2 0,1 2,3``.
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from verl import HybridEngine

STEPS, PROMPTS, SAMPLES, LENGTH = 40, 8, 4, 12


def devices(text):
    return [int(part) for part in text.split(",")] if text[0].isdigit() else text.split(",")


def tiny():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=48, n_layer=2, n_head=4, eos_token_id=0))


def reward(ids):
    """Even tokens are good."""
    return sum(i % 2 == 0 for i in ids) / LENGTH


model, actor_devices, critic_devices = [*sys.argv[1:], *[None, "cpu", "cpu"][len(sys.argv) - 1 :]]
engine = HybridEngine(
    model=model or tiny(),
    actor_devices=devices(actor_devices),
    critic_devices=devices(critic_devices),
    hybrid_config={"reshard_interval": 1},
    critic_lr=1e-3,
)
actor, critic = engine.actor_model, engine.critic_model
optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-6 if model else 3e-3)
prompts = torch.arange(1, 1 + PROMPTS * 4, device=actor.device).view(PROMPTS, 4)
for step in range(STEPS):
    rows = actor.generate(prompts, max_new_tokens=LENGTH, num_return_sequences=SAMPLES)
    lengths = torch.tensor([len(r.ids) for r in actor.responses], device=rows.device)
    mask = torch.arange(rows.shape[1] - 4, device=rows.device) < lengths[:, None]  # of response tokens
    seen = torch.cat([torch.ones_like(rows[:, :4]), mask.long()], 1)
    returns = torch.tensor([reward(r.ids) for r in actor.responses], device=rows.device)[:, None]
    values = critic(rows, seen)[:, 3:-1]  # before each response token
    logits = actor(input_ids=rows, attention_mask=seen).logits[:, 3:-1]
    logprobs = logits.log_softmax(-1).gather(-1, rows[:, 4:, None])[..., 0]
    loss = -((returns - values.detach()) * logprobs * mask).sum() / mask.sum()
    (loss + ((returns - values).square() * mask).sum() / mask.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    report = engine.step()
    if step % 10 == 9 or step == STEPS - 1:
        print(
            f"step {report.step}: reward {returns.mean():.3f}, version {report.version}, {report.bytes} bytes published"
        )
engine.close()
