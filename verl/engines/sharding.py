"""Spreading a module's parameters over ranks, and the way between a whole tensor and a rank's part of it.

A mesh has dimensions out of ``replicate``, ``dp`` and ``tp``, in this order. Ranks that differ in ``tp`` compute the
same tokens together; all others compute tokens of their own: other rows, or with context parallelism another run of the
same rows' tokens. Parameters are sharded over ``dp``, once per ``replicate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from verl.config.errors import RequestError
from verl.layout import Layout, Piece
from verl.models.decoder import Decoder
from verl.models.policy import Policy
from verl.models.probe import probe
from verl.models.scorer import Scorer
from verl.models.value import Value

Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"]
"""What each data-parallel rank holds: a part of everything, and gathers a layer's parameters when it computes the layer
(FULL_SHARD); the same, but keeps what it gathered until the optimizer step (SHARD_GRAD_OP); FULL_SHARD within groups of
ranks and copies over groups (HYBRID_SHARD); everything (NO_SHARD)."""


def device_mesh(layout: Layout, device_type: str, replicas: int = 1, ranks: Sequence[int] | None = None) -> DeviceMesh:
    """The mesh of ``layout.size`` ``ranks`` of the world, in ascending order (default: all there are).

    ``replicas`` (HYBRID_SHARD) divides ``layout.dp * layout.cp``, the mesh's ``replicate`` times ``dp``. Every process
    of the world calls this, with the same arguments and in the same order of calls; one that isn't among ``ranks`` has
    no use for the mesh it gets.
    """
    if layout.pp > 1:
        raise RequestError("FSDP takes data, context and tensor parallel ranks only; the pipeline size must be 1")
    data = layout.dp * layout.cp
    if data % replicas:
        raise RequestError(f"{replicas} replicas don't divide {data} data-parallel ranks")
    sizes = {"replicate": replicas, "dp": data // replicas, "tp": layout.tp}
    kept = {name: size for name, size in sizes.items() if name == "dp" or size > 1}
    ranks = list(range(dist.get_world_size()) if ranks is None else ranks)
    if len(ranks) != layout.size or ranks != sorted(set(ranks)):
        raise ValueError(f"ranks {ranks} aren't {layout.size} different ones in ascending order")
    return DeviceMesh(device_type, torch.tensor(ranks).view(*kept.values()), mesh_dim_names=tuple(kept))


def shard(
    module: Policy | Value | Scorer, mesh: DeviceMesh, strategy: Sharding, compute_dtype: torch.dtype | None
) -> None:
    """FSDP2, in place: one group of parameters per decoder layer, and one of all others (embedding, norm, head).

    Tied embeddings are one parameter of the last group. That group belongs to ``module`` itself, so it is whole
    during all of ``module``'s forward, where ``head_weight`` is read without any module's forward.
    """
    names = mesh.mesh_dim_names or ()
    if ("replicate" in names) != (strategy == "HYBRID_SHARD"):
        raise RequestError(f"{strategy} on a mesh of {' x '.join(names)}: HYBRID_SHARD, and only it, has replicas")
    data = mesh["replicate", "dp"] if "replicate" in names else mesh["dp"]
    # gradients of micro-batches add up, and are reduced over ranks, in float32
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    again = strategy != "SHARD_GRAD_OP"
    if isinstance(module, Value):  # its head is float32 whatever the backbone is, and a group has one dtype
        fully_shard(module.value_head, mesh=data, reshard_after_forward=again)
    for layer in layers_of(module.backbone):
        fully_shard(layer, mesh=data, reshard_after_forward=again, mp_policy=policy)
    # the backward pass begins with these, so they stay whole between the passes
    fully_shard(module, mesh=data, reshard_after_forward=False, mp_policy=policy)
    for unit in units(module):  # losses are shares that add, so gradients are summed, not averaged
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def read(module: Policy | Value | Scorer, device_type: str) -> None:
    """Fill a sharded module whose weights are in their files still: each rank reads its part of them alone."""
    kept = module.unread
    if kept is None:
        return
    module._apply(lambda t: torch.empty_like(t, device=device_type) if t.is_meta else t)
    parameters = dict(module.weights())
    with torch.no_grad():
        for name, stored in kept.tensors(set(parameters)):
            if (mine := local(parameters[name])).numel():
                mine.copy_(part_of(stored, parameters[name]))
    module.unread = None


def prove(module: Policy | Value | Scorer) -> None:
    """``probe`` a sharded module, on all ranks together. Its parameters are whole in a forward alone."""
    vars(module)["probed"] = lambda whole: probe(whole.lm if isinstance(whole, Decoder) else whole.backbone)
    register_fsdp_forward_method(module, "probed")
    vars(module).pop("probed")(module)  # on a GPU FSDP's hook wants an argument
    for unit in units(module):  # back to the sharded parameters
        unit.reshard()


def units(module: nn.Module) -> list[FSDPModule]:
    """The modules that gather and reduce a group of parameters each."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def layers_of(backbone: nn.Module) -> list[nn.Module]:
    """The decoder's layers: its longest list of modules."""
    lists = [list(part) for part in backbone.children() if isinstance(part, nn.ModuleList)]
    return max(lists, key=len, default=[])


def local(tensor: Tensor) -> Tensor:
    """This rank's part, in place; a plain tensor is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(part: Tensor, like: Tensor) -> Tensor:
    """The full tensor of which every rank has a ``part`` placed like the parameter ``like``. All ranks call this."""
    if not isinstance(like, DTensor):
        return part
    if not isinstance(part, DTensor):
        part = DTensor.from_local(part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
    # FSDP cut what tensor parallelism had cut, so its pieces are joined first
    inner = [Replicate()] * (part.device_mesh.ndim - 1)
    return part.redistribute(placements=[*inner, part.placements[-1]]).full_tensor()


def part_of(full: Any, like: Tensor) -> Tensor:
    """This rank's part of ``full`` (which every rank has, or can index), placed like ``like``; the way back from
    `whole`."""
    if not isinstance(like, DTensor):
        return full
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    mine = full[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
    return mine.to(like.device)


def piece_of(name: str, tensor: Tensor, like: Tensor | None, mesh: DeviceMesh | None) -> Piece | None:
    """What this rank of ``mesh`` saves of ``tensor``, its part placed like ``like``: of ranks that have the same part
    the first has it to save, and nothing where there are no values."""
    mine = local(tensor)
    cut: set[str] = set()  # axes along which ranks have different parts
    shape, start = tuple(mine.shape), (0,) * mine.ndim
    if isinstance(like, DTensor):
        names = like.device_mesh.mesh_dim_names or ()
        cut = {axis for axis, p in zip(names, like.placements, strict=True) if not p.is_replicate()}
        shape = tuple(like.shape)
        start = tuple(compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)[1])
    if mesh is not None:
        at = zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True)
        if any(place and axis not in cut for axis, place in at) or (cut and not mine.numel()):
            return None
    return Piece(name, mine, shape, start)


def distributed(full: Any, like: Tensor | None) -> Tensor:
    """``full``, a tensor or what gives parts of one, as a tensor of ``like``'s kind: ``like.copy_`` takes it."""
    if not isinstance(like, DTensor) or full.shape != like.shape:
        return full[...]
    return DTensor.from_local(
        part_of(full, like).contiguous(), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def copies(tensor: Tensor, ranks: int) -> int:
    """How many of ``ranks`` ranks hold each element of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return ranks
    parts = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        parts *= 1 if placement.is_replicate() else size
    return ranks // parts
