"""G04: a row's log-probabilities don't depend on what is computed beside it. Padding doesn't exist on this path."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.tiny import f_gpt2, f_llama
from verl.batch import Batch, Ragged
from verl.config.model import ModelConfig, OptimizerConfig
from verl.engines.fsdp import FsdpEngine
from verl.models.factory import load_model
from verl.models.policy import Policy


@pytest.mark.parametrize("make", [f_gpt2, f_llama])
def test_g04_a_row_is_scored_alike_alone_and_beside_others(make):
    """The row [5, 6, 7, 8, 9]: by the plain model, packed alone, and packed after and before longer rows."""
    plain = make()
    engine = FsdpEngine(
        Policy(load_model(ModelConfig(model_name_or_path=copy.deepcopy(plain)), "cpu", torch.float32)),
        OptimizerConfig(),
    )

    def score(rows, groups):
        batch = Batch([str(i) for i in range(len(rows))])
        batch["prompt_ids"] = Ragged.from_rows([r[:2] if r[0] == 5 else r[:9] for r in rows])
        batch["response_ids"] = Ragged.from_rows([r[2:] if r[0] == 5 else r[9:] for r in rows])
        batch["group"] = torch.tensor(groups)
        out = engine.forward(batch, [list(range(len(rows)))], frozenset({"logprobs"}), 1.0)["logprobs"]
        return list(out.rows())[[r[0] for r in rows].index(5)]

    row, long = [5, 6, 7, 8, 9], list(range(6, 22))
    logits = plain(torch.tensor([row])).logits[0, 1:-1]
    truth = logits.log_softmax(-1).gather(1, torch.tensor(row[2:])[:, None])[:, 0]
    for rows, groups in (([row], [0]), ([long, row], [0, 1]), ([row, long, [*long[:9], 3]], [0, 1, 1])):
        torch.testing.assert_close(score(rows, groups), truth, atol=1e-5, rtol=0)
