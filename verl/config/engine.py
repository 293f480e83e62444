"""The generation engine and the run's housekeeping sections."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from verl.config.devices import MOST
from verl.config.section import LONGEST, DataSource, FunctionSource, PathText, Section


class RolloutConfig(Section):
    """How responses are sampled."""

    engine: Literal["auto", "native", "vllm", "openai", "sglang"] = Field(
        "auto", description="native (auto): ours, on the trainer's own parameters where it can; vllm (auto, where "
        "tensor_parallel_size is above 1): in this process; "
        "openai: vLLM servers at `url`; sglang: SGLang servers at `url`; see docs/rollout.md",
    )  # fmt: skip
    url: str | list[str] | None = Field(
        None, examples=["http://127.0.0.1:8000", "http://10.0.0.1:8000"],
        description="openai, sglang: where the servers are, one or a list",
    )  # fmt: skip
    model: str | None = Field(None, examples=["policy", "base"], description="openai: the served name; null: asked")
    api_key_env: str | None = Field(
        None, examples=["VLLM_API_KEY", "API_KEY"], description="environment variable that holds the servers' key"
    )
    timeout: float = Field(600.0, gt=0, le=LONGEST, description="openai, sglang: seconds for one answer")
    weights_dir: PathText | None = Field(
        None, examples=["/shared/weights", "/dev/shm/weights"],
        description="openai, sglang: where weights are written for the servers, which see it under the same name; "
        "null: a temporary folder of this machine",
    )  # fmt: skip
    options: dict[str, Any] = Field(
        default_factory=dict, examples=[{"gpu_memory_utilization": 0.4}, {"enforce_eager": True}],
        description="vllm: more of its engine's options, by their names",
    )  # fmt: skip
    temperature: float = Field(
        1.0,
        ge=1e-4,
        description="softmax temperature, applied by sampler and trainer alike; 0 has no density to train on",
    )
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; below 1 the trainer can't match the density")
    top_k: int = Field(0, ge=0, le=2**31 - 1, description="0: off; above 0 the trainer can't match the density")
    stop: list[str] = Field(
        default_factory=list, strict=False, examples=[["\n\n"], ["</answer>"]], description="texts that end a response"
    )
    environment: FunctionSource = Field(
        None, examples=["my_game:turn", "my_tools:answer"],
        description="`module:function` that answers each message of the policy, or ends the episode; see "
        "docs/rollout.md; null: one response per row",
    )  # fmt: skip
    max_turns: int = Field(8, ge=1, description="environment: most messages of the policy in an episode")
    turn_timeout: float | None = Field(
        60.0, gt=0, le=LONGEST, description="environment: seconds that one answer of it may take; null: no limit"
    )
    max_rows: int = Field(256, ge=1, description="rows decoded side by side; memory and speed only")
    cache_gib: float | None = Field(
        None, gt=0, le=1e6, examples=[4.0, 16.0],
        description="native: most GiB of keys and values on a device; rows that don't fit wait; null: no limit",
    )  # fmt: skip
    tensor_parallel_size: int = Field(
        1, ge=1, le=MOST, description="vllm: devices that share each engine's weights; it divides the rollout's devices"
    )

    @property
    def kind(self) -> str:
        """The engine; what ``auto`` comes to."""
        if self.engine != "auto":
            return self.engine
        return "native" if self.tensor_parallel_size == 1 else "vllm"

    @property
    def served(self) -> bool:
        """Whether servers sample."""
        return self.engine in ("openai", "sglang")

    @property
    def outside(self) -> bool:
        """Whether what samples keeps weights of its own kind, so that no policy of ours is loaded for it."""
        return self.served or self.kind == "vllm"


class HybridConfig(Section):
    """How the actor's weights get to rollouts that don't sample from its own parameters; see docs/placement.md."""

    reshard_interval: int = Field(1, ge=1, description="laps between publishes; rows are up to N - 1 laps stale")
    incremental: Literal["auto", True, False] = Field(
        "auto", description="send only values that changed, where that is fewer bytes: auto where the old ones are at "
        "hand to compare with and the link isn't one between GPUs of a machine; true: there, too, and elsewhere from a "
        "copy of what was sent; false: never",
    )  # fmt: skip
    bucket_mib: int = Field(256, ge=1, description="most MiB on their way at once; two such buckets are in memory")


class CheckpointConfig(Section):
    """``checkpoints/step_N`` under the run directory."""

    every_steps: int = Field(50, ge=0, description="laps between checkpoints; 0: only at the end and on a signal")
    every_minutes: float | None = Field(
        None, gt=0, examples=[15.0, 60.0], description="and after a lap that starts so long after the last save"
    )
    save: Literal["global", "actor"] = Field(
        "global", description="global: all that a resume needs; actor: the policy alone, to start other runs from"
    )
    keep: int = Field(2, ge=1, description="newest checkpoints that stay")
    beside_training: bool = Field(
        True, description="write while training goes on, from a copy in host memory; false: no copy, training waits"
    )


class EvalConfig(Section):
    """Greedy answers on held-out prompts, one per prompt, scored by the run's own rewards."""

    dataset: DataSource = Field(None, description="as the training data set")
    columns: dict[str, str] | None = Field(
        None, examples=[{"prompt": "question"}, {}], description="as the training data's; default: the same"
    )
    every_steps: int = Field(0, ge=0, description="laps between evaluations; 0: before the first and after the last")
    limit: int | None = Field(None, ge=1, description="only the first prompts of the set")


class MetricsConfig(Section):
    """Where metrics go beside ``metrics.jsonl`` and the console."""

    tensorboard: bool = Field(True, description="write `tensorboard/` in the run directory")
    prometheus_port: int | None = Field(
        None, ge=1, le=65535, examples=[9400, 9401], description="serve metrics on this port of 127.0.0.1; null: off"
    )
    alarms: dict[str, float] = Field(
        default_factory=dict, examples=[{"generate/latency_p99": 30.0}, {"kl/mean": 1.0}],
        description="a step in which the metric is above its limit warns and counts; time/step: also while it lasts",
    )  # fmt: skip
    alarms_below: dict[str, float] = Field(
        default_factory=dict, examples=[{"gpu/utilisation": 0.3}, {"policy/entropy": 0.1}],
        description="and one in which it is below",
    )  # fmt: skip
    max_bad_steps: int = Field(
        5, ge=1, description="stop when so many optimizer steps in a row were skipped since the gradient isn't finite "
        "(no lap counts in which one was made); the last lap's rows are then in `bad_rows.jsonl`",
    )  # fmt: skip


class ClusterConfig(Section):
    """Where workers run."""

    backend: Literal["local", "ray"] = Field(
        "local",
        description="local: processes of this machine (one device: in this process); ray: actors of a Ray cluster",
    )
    address: PathText | None = Field(
        None, examples=["auto", "10.0.0.1:6379"],
        description="ray: the cluster's HOST:PORT, or auto (this machine's); null: RAY_ADDRESS, else a new one here",
    )  # fmt: skip
    max_restarts: int = Field(0, ge=0, description="times that lost workers are started anew from the last checkpoint")
    heartbeat_seconds: float = Field(20.0, gt=0, description="a worker that says nothing for so long is lost")
