"""What publishing the actor's weights costs under a placement, beside the two classic ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl.config.run import RunConfig
from verl.dataflow.placement import Placement
from verl.hybrid.reshard import Cost, Weight, cost_of_gathering, plan, training, whole
from verl.layout import Layout

GRADIENT, MASTER, MOMENTS = 4, 4, 8  # bytes of a trained value: fp32, AdamW's two; fp32 weights are their own masters


@dataclass(frozen=True)
class Estimate:
    """Bytes, the most over workers. ``ours``: as this run does it; ``None`` where rollouts use the actor's own."""

    model: int
    values: int
    actor: int  # of the actor's worker: its part of the weights and of what trains them
    ours: Cost | None
    everything: Cost  # each rank gathers the model from all
    groups: Cost | None  # each model-parallel group gathers it, where there are some


def estimate(cfg: RunConfig, placement: Placement, weights: Sequence[Weight], in_place: bool) -> Estimate:
    """``in_place``: rollouts sample from the actor's own parameters."""
    fsdp, actors, rollouts = cfg.actor_model_config.fsdp_config, placement.ranks("actor"), placement.ranks("rollout")
    layout = Layout.of(len(actors), tp=fsdp.tensor_parallel_size)
    held = training(weights, layout, sharded=fsdp.sharding_strategy != "NO_SHARD")
    model = sum(weight.bytes for weight in weights)
    values = sum(weight.bytes // weight.itemsize for weight in weights)
    shares = layout.tp * (layout.dp if fsdp.sharding_strategy != "NO_SHARD" else 1)
    if fsdp.sharding_strategy == "HYBRID_SHARD" and fsdp.shard_size:
        shares = layout.tp * fsdp.shard_size
    each = GRADIENT + MOMENTS + (MASTER if model < 4 * values else 0)
    trained = 0 if cfg.actor_model_config.use_lora else each * values
    ours = None
    if rollouts and not in_place:
        by_rank = {actors[i]: part for i, part in held.items()}
        everything = {weight.name: [whole(weight.shape)] for weight in weights}
        made = plan(weights, by_rank, dict.fromkeys(rollouts, everything))
        bucket = cfg.hybrid_config.bucket_mib << 20
        most = max(made.received(rank) for rank in rollouts)
        part = model // shares if set(rollouts) & set(actors) else 0  # a whole copy beside the training part
        ours = Cost(most, part + model + 2 * min(bucket, most), part)
    return Estimate(
        model, values, (model + trained) // shares, ours,
        cost_of_gathering(weights, layout, held, everything=True),
        cost_of_gathering(weights, layout, held, everything=False) if layout.tp > 1 else None,
    )  # fmt: skip
