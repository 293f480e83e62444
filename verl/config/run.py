"""The whole run: one YAML file. Batch words are those of docs/batch-words.md."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from verl.config.algorithm import AlgorithmConfig
from verl.config.engine import CheckpointConfig, ClusterConfig, EvalConfig, RolloutConfig
from verl.config.model import CriticConfig, ModelConfig, RewardModelConfig, Section


class RunConfig(Section):
    """Every key of a configuration file. ``None`` means "derived", and ``load`` fills it in."""

    # what to train, on what, for what
    actor_model_config: ModelConfig = Field(default_factory=ModelConfig)
    critic_model_config: CriticConfig | None = None
    reward_model_config: RewardModelConfig | None = None
    reward_fn: Any = None  # "module:function", a rule's name, a list of them, or (from Python) callables
    reward_weights: list[float] | None = None  # one per reward; the reward model's is the last; default 1 each
    reward_timeout: float | None = Field(60.0, gt=0)  # seconds for one row
    reward_failure: Literal["error", "drop", "default"] = "error"  # when a reward raises, times out or gives NaN
    reward_default: float = 0.0  # the value of reward_failure: default
    dataset: Any = None  # file, folder, hub name, {name: arithmetic, ...}, or (from Python) a data set
    columns: dict[str, str] = Field(default_factory=dict)  # ours: theirs, e.g. {prompt: question}
    dataset_cache_dir: str | None = None
    streaming: bool = False
    shuffle: bool = True
    algorithm: AlgorithmConfig

    # batch words: rows, see docs/batch-words.md
    rollout_batch_size: int = Field(64, ge=1)
    train_batch_size: int | None = Field(None, ge=1)  # default: rollout_batch_size
    mini_batch_size: int | None = Field(None, ge=1)  # default: micro x accumulation, else train_batch_size
    micro_batch_size: int | None = Field(None, ge=1)  # default: the largest divisor of the mini-batch up to 16
    gradient_accumulation_steps: int | None = Field(None, ge=1)
    max_tokens_per_micro_batch: int | None = Field(None, ge=1)
    group_size: int | None = Field(None, ge=1)  # samples per prompt; default 1 for ppo, 8 for grpo and rloo
    num_rollout_workers: int = Field(1, ge=1)

    # lengths, in tokens of the policy
    max_prompt_length: int = Field(512, ge=1)
    max_response_length: int = Field(512, ge=1)
    overlong: Literal["truncate", "filter", "error"] = "truncate"  # prompts; truncate keeps the end

    # KL to the starting policy
    init_kl_coef: float | None = Field(None, ge=0)  # default 0.1 for ppo, 0 for the others
    kl_target: float | None = Field(None, gt=0)  # set: adaptive controller
    kl_horizon: int = Field(10_000, ge=1)  # rows

    # the run
    total_steps: int | None = Field(None, ge=1)
    total_epochs: float | None = Field(None, gt=0)  # default 1 epoch when neither is given
    seed: int = 0
    run_dir: str = "runs/default"
    gradient_checkpointing: bool = True
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    device_map: dict[str, Any] = Field(default_factory=dict)
    log_level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
