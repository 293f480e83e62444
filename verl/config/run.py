"""The whole run: one YAML file. Batch words are those of docs/batch-words.md."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from verl.config.algorithm import AlgorithmConfig
from verl.config.devices import check_map
from verl.config.engine import CheckpointConfig, ClusterConfig, EvalConfig, HybridConfig, MetricsConfig, RolloutConfig
from verl.config.model import CriticConfig, ModelConfig, RewardModelConfig, reward_model_of
from verl.config.section import LONGEST, DataSource, PathText, RewardSources, Section

Rows = Annotated[int, Field(ge=1, le=10**9)]  # a mistyped size is told at once
DERIVED: Any = None  # the default of keys that load_config fills in


class RunConfig(Section):
    """Every key of a configuration file; ``load_config`` fills in the derived ones."""

    # what to train, on what, for what
    actor_model_config: ModelConfig = Field(default_factory=ModelConfig, description="the policy; needs a model")
    critic_model_config: CriticConfig | None = Field(
        None, description="the value model; default for ppo: a copy of the actor's backbone; others have none"
    )
    reward_model_config: RewardModelConfig | None = Field(None, description="a model that scores; null: none")
    teacher_model_config: ModelConfig | None = Field(None, description="distill: the frozen model to learn from")
    process_reward_model_config: ModelConfig | None = Field(
        None, description="prime: the model whose log-ratio is the token reward; what it leaves out is as the actor's"
    )
    reward_fn: RewardSources = Field(
        default_factory=list,
        description="`module:function`, a rule's name, {name: reward_model, model_name_or_path: ...}, a list of these, "
        "or (from Python) functions; see docs/rewards.md",
    )
    reward_weights: list[float] = Field(
        DERIVED, strict=False, examples=[[1.0], [1.0, 0.5]],
        description="one per reward, the reward model's is the last; default 1 each",
    )  # fmt: skip
    reward_timeout: float | None = Field(
        60.0, gt=0, le=LONGEST, description="seconds that one row may take; null: no limit"
    )
    reward_failure: Literal["error", "drop", "default"] = Field(
        "error", description="when a reward raises, times out or gives NaN: stop, leave the row out, or reward_default"
    )
    reward_default: float = Field(0.0, description="the value of reward_failure: default")
    dataset: DataSource = Field(
        None, description="file, folder, hub name, {name: arithmetic, ...}, or (Python) a data set"
    )
    columns: dict[str, str] = Field(
        default_factory=dict, examples=[{"prompt": "question"}, {"answer": "solution"}],
        description="our column names to the data's, such as {prompt: question}",
    )  # fmt: skip
    bad_rows: Literal["error", "drop"] = Field(
        "error", description="rows of the data that can't be read: stop and name them, or leave them out; counted"
    )
    dataset_cache_dir: PathText | None = Field(
        None, examples=["cache", "/data/cache"], description="where downloaded data lies; default: the library's"
    )
    streaming: bool = Field(False, description="read a hub data set while training")
    shuffle: bool = Field(True, description="a new seeded order each epoch")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig, description="the algorithm and its numbers")

    # batch words: rows, see docs/batch-words.md
    rollout_batch_size: Rows = Field(
        64, description="rows sampled per rollout, a multiple of group_size; only where answers are sampled"
    )
    train_batch_size: Rows = Field(
        DERIVED, description="rows of one lap, a multiple of rollout_batch_size; default: rollout_batch_size"
    )
    mini_batch_size: Rows = Field(
        DERIVED, description="rows of one optimizer step over all devices; default: micro_batch_size x "
        "gradient_accumulation_steps, else train_batch_size",
    )  # fmt: skip
    micro_batch_size: Rows = Field(
        DERIVED, description="most rows in one forward on one device, memory only; default: the mini-batch's "
        "largest divisor up to 16",
    )  # fmt: skip
    gradient_accumulation_steps: Rows = Field(
        DERIVED, description="micro-batches of one optimizer step over all devices; default: mini / micro"
    )
    max_tokens_per_micro_batch: int | None = Field(None, ge=1, description="token limit of one forward; null: none")
    group_size: Rows = Field(
        DERIVED, description="responses per prompt; default: 8 where the baseline is the group's, else 1"
    )
    num_rollout_workers: int = Field(
        1, ge=1, description="concurrent feeders of the rollout's engines, of which each of its devices has one"
    )

    # lengths, in tokens of the policy
    max_prompt_length: int = Field(512, ge=1, description="tokens of a prompt, chat template included")
    max_response_length: int = Field(
        512, ge=1, description="tokens of a response at most; of an episode, all that come after the prompt"
    )
    overlong: Literal["truncate", "filter", "error"] = Field(
        "truncate", description="prompts over max_prompt_length: keep their end, leave them out, or stop; counted"
    )

    # KL to the starting policy
    init_kl_coef: float = Field(DERIVED, ge=0, description="weight of the KL penalty; default: 0.1 for ppo, else 0")
    kl_sample_rows: int = Field(
        0,
        ge=0,
        description="with init_kl_coef 0: rows per lap on which KL is measured; 0: not measured, no reference kept",
    )
    kl_target: float | None = Field(None, gt=0, description="KL per response that an adaptive controller aims at")
    kl_horizon: int = Field(10_000, ge=1, description="rows over which the controller moves")

    # the run
    total_steps: int | None = Field(None, ge=1, description="laps; this or total_epochs")
    total_epochs: float | None = Field(None, gt=0, description="passes over the data; default 1 without total_steps")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="of data order, sampling and new weights")
    run_dir: PathText = Field(
        "runs/default", examples=["runs/default", "runs/mine"], description="where the run writes"
    )
    gradient_checkpointing: bool = Field(True, description="recompute activations in the backward pass: less memory")
    hybrid_engine: bool = Field(
        True, description="rollouts get only the parts of weights they lack; false: every weight whole, to compare"
    )
    hybrid_config: HybridConfig = Field(default_factory=HybridConfig, description="how weights get to rollouts")
    max_staleness: int = Field(
        DERIVED, ge=0, description="most laps between the weights that sample a row and those that its training starts "
        "from; above hybrid_config.reshard_interval - 1, its default, rollouts on devices of their own sample the next "
        "lap while this one trains",
    )  # fmt: skip
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="how responses are sampled")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="held-out prompts")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="what is saved when")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="where metrics go beside metrics.jsonl")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="where workers run")
    device_map: dict[str, Any] = Field(
        default_factory=dict, examples=[{"actor": "cpu"}, {"actor": [0, 1]}],
        description="role to devices: `0`, `[0, 1]`, `0-3`, `cpu`, `cpu:0-1`, `node1:0-3`, `{label: a100, count: 4}`; "
        "see docs/placement.md; default: all where the actor is, the actor on the first GPU, else on cpu",
    )  # fmt: skip
    log_level: Literal["DEBUG", "INFO", "WARNING"] = Field(
        "INFO", description="DEBUG adds each stage's share of the step"
    )

    @property
    def reward_models(self) -> dict[str, RewardModelConfig]:
        """Every model that scores, by the key that names it."""
        named = {f"reward_fn[{i}]": reward_model_of(entry) for i, entry in enumerate(self.reward_fn)}
        named["reward_model_config"] = self.reward_model_config
        return {key: model for key, model in named.items() if model is not None}

    @field_validator("reward_fn")
    @classmethod
    def _models_among_rewards(cls, value: list[Any]) -> list[Any]:
        for entry in value:
            try:
                reward_model_of(entry)
            except ValidationError as error:
                raise ValueError(error) from error  # as one finding on this key
        return value

    @field_validator("device_map")
    @classmethod
    def _devices(cls, value: dict[str, Any]) -> dict[str, Any]:
        return check_map(value)
