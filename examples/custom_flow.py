"""A flow of one's own: a policy, its reference, and two rewards that are mixed by weight.

``python examples/custom_flow.py [POLICY [REWARD_MODEL]]``: hub names or folders; tiny random models stand for them.
"""

import sys

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast

from verl import Actor, Data, DataFlow, Reference, RewardModel, RLTrainer, Rollout


def tiny(kind):
    alphabet = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    folder = f"runs/tiny/{kind.__name__}"
    kind(GPT2Config(vocab_size=257, n_embd=48, n_layer=2, eos_token_id=0, num_labels=1)).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    return folder


def brevity(response):
    return -len(response) / 100


policy, judge, *_ = [*sys.argv[1:], None, None]
actor, reference = Actor(model=policy or tiny(GPT2LMHeadModel), name="policy"), Reference()
helpful = RewardModel(model=judge or tiny(GPT2ForSequenceClassification), name="helpful")
brief = RewardModel(reward_fn=brevity, name="brief", weight=0.2)
rollout = Rollout(weights=actor)
flow = DataFlow(Data()).collect(rollout.generate, helpful.score, brief.score)
flow.run(actor.logprobs, reference.logprobs).run(actor.advantages).run(actor.update).publish(actor, to=rollout)
print(flow.describe())
with RLTrainer(flow=flow, rollout_batch_size=16, max_response_length=16, init_kl_coef=0.05, total_steps=3) as run:
    for _ in range(3):
        metrics = run.step()
        print({name: metrics[name] for name in ("reward/mean", "reward/helpful", "reward/brief", "kl/mean")})
