"""A reward head fitted on preference pairs: a linear score of the frozen starting policy's last hidden state.

Bradley-Terry: minimise ``-log sigmoid(r(chosen) - r(rejected))``. Only the head is fitted, so hidden states are
computed once and the fit itself takes a moment. For a reward model of its own, train one and name its folder.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.config.errors import RequestError
from verl.config.model import RewardModelConfig
from verl.data.loader import PreferenceDataset
from verl.models.factory import load_tokenizer
from verl.models.stored import incomplete, read
from verl.rewards.base import RewardRow
from verl.rewards.model import RewardModelScorer

HELD_OUT = 10  # one pair in ten checks the fit
RIDGE = 1e-2  # weight of the squared norm, on features of unit variance


@dataclass(frozen=True)
class HeadFit:
    """Shares of pairs whose chosen answer scores higher."""

    folder: Path
    pairs: int
    accuracy: float  # on fitted pairs
    held_out_accuracy: float | None  # None with fewer than HELD_OUT pairs


def fit_reward_head(policy: Any, data: PreferenceDataset, folder: Path, device: torch.device) -> HeadFit:
    """Fit a head on ``policy`` (a name, a folder or a loaded causal LM) and save a reward model into ``folder``.

    The folder loads as any Hugging Face reward model. Raises ``RequestError`` for an architecture without a
    sequence-classification form.
    """
    model = _with_new_head(policy)
    tokenizer = load_tokenizer(policy)
    head = model.score
    model.score = nn.Identity()
    scorer = RewardModelScorer(RewardModelConfig(model_name_or_path=model), device, tokenizer)
    sides = [[_row(row, side, i) for i, row in enumerate(data)] for side in ("chosen", "rejected")]
    chosen, rejected = (scorer.pooled(rows) for rows in sides)
    fitted = torch.arange(len(chosen)) % HELD_OUT != HELD_OUT - 1
    difference = chosen - rejected
    weight = _fit(difference[fitted])
    head.weight.data.copy_(weight[None])
    model.score = head.to(device)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    right = (difference @ weight > 0).double()
    held = right[~fitted].mean().item() if (~fitted).any() else None
    return HeadFit(folder, len(chosen), right[fitted].mean().item(), held)


def _fit(difference: Tensor) -> Tensor:
    """``[D]`` weights of the ridge logistic fit to ``difference [N, D]``, by L-BFGS (convex: one answer)."""
    scale = difference.square().mean(0).sqrt().clamp(min=1e-6)
    x = difference / scale
    w = torch.zeros(x.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.softplus(-(x @ w)).mean() + RIDGE * w.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return w.detach() / scale


def _with_new_head(policy: Any) -> Any:
    """The policy's backbone with a new one-number head; a loaded module is copied, not changed."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config: Any = copy.deepcopy(policy.config) if isinstance(policy, nn.Module) else AutoConfig.from_pretrained(policy)
    config.num_labels = 1
    try:
        if isinstance(policy, nn.Module):
            model = AutoModelForSequenceClassification.from_config(config)
            model.base_model.load_state_dict(policy.base_model.state_dict())  # type: ignore[union-attr]
            return model
        model, absent, rest = read(AutoModelForSequenceClassification, policy, config)
        if absent := [name for name in absent if not name.startswith("score.")]:
            raise incomplete(policy, model, absent, rest)
        return model
    except ValueError as error:
        raise RequestError(f"no reward head can be put on {type(config).__name__}: {error}") from error


def _row(row: dict[str, Any], side: str, number: int) -> RewardRow:
    return RewardRow(str(number), str(number), "", _text(row[side]), (), (), "stop", {"prompt": row["prompt"]})


def _text(completion: str | Sequence[dict[str, str]]) -> str:
    return completion if isinstance(completion, str) else "\n".join(turn["content"] for turn in completion)
