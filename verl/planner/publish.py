"""What publishing the actor's weights costs under a placement, beside the two classic ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl.config.run import RunConfig
from verl.dataflow.placement import Placement
from verl.hybrid.reshard import Cost, Weight, cost, cost_of_gathering, training
from verl.layout import Layout, whole

GRADIENT, MASTER = 4, 4  # bytes of a trained value; fp32 weights are their own masters
MOMENTS = {"adamw": 8, "adamw8bit": 2, "muon": 8, "sgd": 4}  # at most; a factory's are taken to be AdamW's


@dataclass(frozen=True)
class Estimate:
    """Bytes, the most over workers. ``ours``: as this run does it; ``None`` where rollouts use the actor's own."""

    model: int
    values: int
    actor: int  # of the actor's worker: its part of the weights and of what trains them
    ours: Cost | None
    everything: Cost  # each rank gathers the model from all
    groups: Cost | None  # each model-parallel group gathers it, where there are some


def estimate(
    cfg: RunConfig, placement: Placement, weights: Sequence[Weight], in_place: bool, adapters: bool = False
) -> Estimate:
    """``in_place``: rollouts sample from the actor's own parameters; ``adapters``: these alone are trained.

    Without what a step needs for a moment: activations, and with several micro-batches per step and sharding a whole
    fp32 gradient.
    """
    fsdp, actors, rollouts = cfg.actor_model_config.fsdp_config, placement.ranks("actor"), placement.ranks("rollout")
    layout = Layout.of(len(actors), tp=fsdp.tensor_parallel_size, pp=fsdp.pipeline_parallel_size)
    cut = cfg.actor_model_config.engine == "fsdp" and fsdp.sharding_strategy != "NO_SHARD"
    replica = layout  # the ranks that share one copy
    if cut and fsdp.sharding_strategy == "HYBRID_SHARD":
        replica = Layout(dp=fsdp.shard_size or layout.dp, tp=layout.tp)
    parts = training(weights, replica, sharded=cut)
    held = {rank: parts[rank % replica.size] for rank in range(layout.size)}
    model = sum(weight.bytes for weight in weights)
    values = sum(weight.bytes // weight.itemsize for weight in weights)
    shares = replica.size if cut else layout.tp * layout.pp
    optimizer = cfg.actor_model_config.optimizer.name
    moments = MOMENTS.get(optimizer, 8) if isinstance(optimizer, str) else 8
    each = 0 if fsdp.cpu_offload else GRADIENT + moments + (MASTER if model < 4 * values else 0)
    trained = 0 if adapters else each * values
    ours = None
    if rollouts and not in_place:
        by_rank = {actors[i]: part for i, part in held.items()}
        everything = {weight.name: [whole(weight.shape)] for weight in weights}
        wanted = dict.fromkeys(rollouts, everything)  # a whole copy beside the training part
        bucket = cfg.hybrid_config.bucket_mib << 20
        ours = cost(weights, by_rank, wanted, bucket, reused=False, spans=placement.spans)
    gathered = cost_of_gathering(weights, layout, held, everything=True)
    if set(rollouts) - set(actors):  # somebody has no part of it
        gathered = Cost(model, model, gathered.redundant)
    copies = layout.dp if cfg.actor_model_config.engine == "megatron" else 1  # that share the optimizer
    return Estimate(
        model, values, model // shares + trained // (shares * copies), ours,
        gathered,
        cost_of_gathering(weights, layout, held, everything=False) if layout.tp * layout.pp > 1 else None,
    )  # fmt: skip
