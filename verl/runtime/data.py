"""The run's own prompts, opened by the controller to draw from and by the hosts to look drawn rows up."""

from __future__ import annotations

from typing import Any

from verl.config.run import RunConfig
from verl.data.loader import PromptDataset


def source_options(cfg: RunConfig) -> dict[str, Any]:
    """How the training data is read, whatever kind of rows it has."""
    told = cfg.bad_rows if "bad_rows" in cfg.model_fields_set else None  # None: the data set's own
    return {"columns": cfg.columns, "cache_dir": cfg.dataset_cache_dir, "bad_rows": told}


def training_prompts(cfg: RunConfig) -> PromptDataset:
    return PromptDataset.of(cfg.dataset, **source_options(cfg))
