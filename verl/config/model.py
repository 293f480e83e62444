"""Models: what to load, how it is trained, where a reward comes from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, values are not changed after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, protected_namespaces=())


class OptimizerConfig(Section):
    """AdamW or SGD with a learning-rate schedule that ends at the last optimizer step."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(1e-6, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)  # optimizer steps from 0 to lr
    max_grad_norm: float = Field(1.0, gt=0)


class FsdpConfig(Section):
    """How parameters are spread over the ranks of one role; with one process every strategy is the same."""

    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"] = "FULL_SHARD"
    cpu_offload: bool = False


class ModelConfig(Section):
    """A trained model: the actor, or the critic."""

    model_name_or_path: Any = None  # hub name, folder, or (from Python) a loaded module
    dtype: Literal["auto", "bf16", "fp32"] = "auto"  # auto: bf16 where the device computes it fast, else fp32
    trust_remote_code: bool = False
    use_lora: bool = False
    lora_r: int = Field(16, ge=1)
    lora_alpha: float | None = Field(None, gt=0)  # default: 2 * lora_r
    lora_target_modules: list[str] | str = "all-linear"
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    fsdp_config: FsdpConfig = Field(default_factory=FsdpConfig)

    @field_validator("optimizer", mode="before")
    @classmethod
    def _optimizer_by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class CriticConfig(ModelConfig):
    """The value model. Default: its own copy of the actor's backbone with a new value head.

    ``shares: actor`` puts the head on the actor's backbone, which the value loss doesn't train.
    """

    shares: Literal["actor"] | None = None
    optimizer: OptimizerConfig = Field(default_factory=lambda: OptimizerConfig(lr=1e-5))


class RewardModelConfig(Section):
    """A Hugging Face sequence-classification model with its own tokenizer; its weights stay frozen."""

    model_name_or_path: Any = None
    trainable: Literal[False] = False  # training a reward model together with the policy is not built yet
    micro_batch_size: int = Field(16, ge=1)
    max_length: int | None = Field(None, ge=2)  # default: the model's own limit
    overlong: Literal["truncate", "error"] = "truncate"  # truncate drops the start of the question first; counted
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    trust_remote_code: bool = False
