"""The peer's side of ``vs_trl_cpu.py``: TRL's GRPOTrainer on the rows it is given. Runs in TRL's own environment.

python trl_grpo.py MODEL ROWS.jsonl STEPS OUT.json
"""

import json
import re
import sys
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS, GROUP, LENGTH = 12, 4, 12  # the demo's step


def reward(completions, answer, **_):
    scores = []
    for completion, gold in zip(completions, answer, strict=True):
        found = re.findall(r"-?\d+", completion[0]["content"])
        scores.append(float(bool(found) and int(found[-1]) == int(gold)))
    return scores


class Clock(TrainerCallback):
    def __init__(self):
        self.seconds, self.rewards = [], []

    def on_step_begin(self, *_, **__):
        self.start = time.perf_counter()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.perf_counter() - self.start)

    def on_log(self, args, state, control, logs=None, **__):
        if logs and "reward" in logs:
            self.rewards.append(float(logs["reward"]))


def main(name, rows, steps, out):
    with open(rows) as file:
        data = [json.loads(line) for line in file]
    dataset = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": r["prompt"]}], "answer": r["answer"]} for r in data]
    )
    clock = Clock()
    config = GRPOConfig(
        output_dir="/tmp/trl_out",
        per_device_train_batch_size=PROMPTS * GROUP,
        gradient_accumulation_steps=1,
        num_generations=GROUP,
        max_completion_length=LENGTH,
        temperature=1.0,
        beta=0.0,
        learning_rate=4e-5,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        max_steps=int(steps),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(name),
        reward_funcs=reward,
        args=config,
        train_dataset=dataset,
        callbacks=[clock],
    )
    trainer.train()
    with open(out, "w") as file:
        json.dump({"seconds": clock.seconds, "reward": clock.rewards}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
