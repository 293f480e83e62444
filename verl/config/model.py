"""Models: what to load, how it is trained, where a reward comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from verl.config.devices import MOST
from verl.config.section import ModelSource, Section

Dtype = Literal["auto", "bf16", "fp32"]
REWARD_MODEL = "reward_model"  # what a model that scores is called among the rewards
Devices = Annotated[int, Field(ge=1, le=MOST)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW, SGD or Muon with a learning-rate schedule that ends at the last optimizer step."""

    name: Literal["adamw", "adamw8bit", "sgd", "muon"] | Callable[..., Any] = Field(
        "adamw",
        description="adamw8bit: its moments take a quarter of the memory (bitsandbytes); muon: for the backbone's "
        "matrices, adamw for the rest; or, from Python, a factory called as `factory(parameters, lr=lr)`",
    )
    lr: float = Field(1e-6, ge=0, examples=[1e-6, 3e-5], description="peak learning rate")
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.95), strict=False, examples=[[0.9, 0.95], [0.9, 0.999]], description="AdamW's decay of both moments"
    )
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="after the warm-up; linear and cosine end at 0"
    )
    warmup_steps: int = Field(0, ge=0, description="optimizer steps from 0 to lr")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this norm")


class CriticOptimizerConfig(OptimizerConfig):
    """As the actor's, with a learning rate that suits a new value head."""

    lr: float = Field(1e-5, ge=0, examples=[1e-5, 1e-4], description="peak learning rate")


class FsdpConfig(Section):
    """How a model is spread over its role's devices; on one device every strategy is the same."""

    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"] = Field(
        "FULL_SHARD",
        description="what each device has a part of: everything; the same, but parameters stay gathered within an "
        "optimizer step; everything, with a copy per shard_size ranks; nothing",
    )
    shard_size: int | None = Field(
        None, ge=1, description="HYBRID_SHARD: data-parallel ranks that share one copy; divides those of the role"
    )
    context_parallel_size: Devices = Field(
        1, description="devices that compute the same rows, each a part of their tokens, for long rows; with "
        "tensor_parallel_size, divides the role's",
    )  # fmt: skip
    tensor_parallel_size: Devices = Field(
        1, description="devices that compute the same rows, each with a part of every layer; divides the role's"
    )
    pipeline_parallel_size: Devices = Field(
        1, description="engine megatron: devices that compute the same rows, each with some of the layers; "
        "divides the role's",
    )  # fmt: skip
    cpu_offload: bool = Field(
        False, description="the optimizer's state, fp32 masters and gradients in CPU memory, where the step is computed"
    )
    torch_compile: bool = Field(
        False, description="compile the decoder's layers: faster on a GPU, for some seconds in the first steps"
    )


def optimizer_by_name(value: Any) -> Any:
    """``{name: ...}`` of an optimizer's name or factory; anything else as it is."""
    return {"name": value} if isinstance(value, str) or callable(value) else value


class ModelConfig(Section):
    """The actor, the critic, the teacher or the process reward model."""

    model_name_or_path: ModelSource = Field(None, description="hub name, folder, or (from Python) a loaded module")
    dtype: Dtype = Field(
        "auto", description="of the weights that compute; auto: bf16 where the device is fast at it, else fp32"
    )
    trust_remote_code: bool = Field(False, description="run the model's own code from the hub")
    engine: Literal["fsdp", "megatron"] = Field(
        "fsdp", description="what trains it: PyTorch's FSDP2, or Megatron-core (all weights of Llama, Mistral, Qwen2, "
        "Qwen3, on several devices; needs verl[megatron])",
    )  # fmt: skip
    use_lora: bool = Field(False, description="train low-rank adapters, the base stays frozen")
    load_in_4bit: bool = Field(False, description="4-bit base under the adapters (QLoRA)")
    lora_r: int = Field(16, ge=1, le=2**16, description="rank of the adapters")
    lora_alpha: float | None = Field(None, gt=0, description="adapters are scaled by alpha / r; default: 2 * lora_r")
    lora_target_modules: str | list[str] = Field(
        "all-linear", examples=["all-linear", ["q_proj", "v_proj"]], description="modules that get an adapter"
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="a name is short for {name: ...}")
    fsdp_config: FsdpConfig = Field(default_factory=FsdpConfig, description="how the model is spread over devices")

    @field_validator("optimizer", mode="before")
    @classmethod
    def _optimizer_by_name(cls, value: Any) -> Any:
        return optimizer_by_name(value)


class CriticConfig(ModelConfig):
    """The value model. Default: its own copy of the actor's backbone with a new value head."""

    model_name_or_path: ModelSource = Field(None, description="default: a copy of the actor's backbone")
    dtype: Dtype = Field("auto", description="default: the actor's; a different one is an error")
    shares: Literal["actor"] | None = Field(
        None, description="put the head on the actor's backbone, which the value loss doesn't train"
    )
    optimizer: CriticOptimizerConfig = Field(
        default_factory=CriticOptimizerConfig, description="a name is short for {name: ...}"
    )


class RewardModelConfig(Section):
    """A Hugging Face sequence-classification model with its own tokenizer; its weights stay frozen."""

    model_name_or_path: ModelSource = Field(None, description="hub name, folder, or (from Python) a loaded module")
    trainable: Literal[False] = Field(False, description="false: its weights stay as they are while a policy learns")
    micro_batch_size: int = Field(16, ge=1, description="rows scored in one forward")
    max_length: int | None = Field(None, ge=2, description="tokens of question and answer; default: the model's limit")
    overlong: Literal["truncate", "error"] = Field(
        "truncate", description="rows over max_length; truncate drops the start of the question first; counted"
    )
    dtype: Dtype = Field("auto", description="as the actor's")
    trust_remote_code: bool = Field(False, description="run the model's own code from the hub")

    @field_validator("trainable", mode="before")
    @classmethod
    def _stays_frozen(cls, value: Any) -> Any:
        if value is True:
            raise ValueError(
                "a reward model is trained by a run of its own (algorithm reward_model); what learns beside a policy "
                "is prime's process_reward_model_config"
            )
        return value


def reward_model_of(entry: Any) -> RewardModelConfig | None:
    """The model of an entry ``{name: reward_model, model_name_or_path: ...}`` of reward_fn; None: a function.

    ``ValidationError`` for what ``reward_model_config`` would refuse.
    """
    if not isinstance(entry, Mapping) or entry.get("name") != REWARD_MODEL:
        return None
    return RewardModelConfig.model_validate({k: v for k, v in entry.items() if k not in ("name", "as")})
