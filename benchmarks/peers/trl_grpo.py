"""The peer's side of ``vs_trl_cpu.py`` and ``vs_trl_gpu.py``: TRL's GRPOTrainer on the rows it is given. Runs in TRL's
own environment.

python trl_grpo.py MODEL ROWS.jsonl STEPS OUT.json SETTINGS     (JSON: reward, dtype, config: GRPOConfig's arguments)
"""

import json
import re
import sys
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def addition(completions, answer, **_):
    scores = []
    for completion, gold in zip(completions, answer, strict=True):
        found = re.findall(r"-?\d+", completion[0]["content"])
        scores.append(float(bool(found) and int(found[-1]) == int(gold)))
    return scores


def letters(completions, **_):
    return [len(set(completion)) / 100 for completion in completions]


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


def main(name, rows, steps, out, settings):
    settings = json.loads(settings)
    with open(rows) as file:
        data = [json.loads(line) for line in file]
    if settings["reward"] == "addition":
        data = [{"prompt": [{"role": "user", "content": r["prompt"]}], "answer": r["answer"]} for r in data]
    dataset = Dataset.from_list(data)
    clock = Clock()
    config = GRPOConfig(
        output_dir="/tmp/trl_out",
        temperature=1.0,
        beta=0.0,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=int(steps),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        **settings["config"],
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, settings["dtype"])),
        processing_class=AutoTokenizer.from_pretrained(name),
        reward_funcs={"addition": addition, "letters": letters}[settings["reward"]],
        args=config,
        train_dataset=dataset,
        callbacks=[clock],
    )
    trainer.train()
    peak = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    with open(out, "w") as file:
        json.dump({"seconds": clock.seconds, "reward": clock.rewards, "peak": [peak]}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
