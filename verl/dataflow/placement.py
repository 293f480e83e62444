"""Which worker hosts which role, from ``device_map`` and its defaults. Names only: no device is touched."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from verl.config.devices import ROLES, Device, check_exists, devices_of, workers
from verl.config.rules import check_modules
from verl.config.run import RunConfig


@dataclass(frozen=True)
class Placement:
    """``devices``: one worker each, whose rank is its place here; the actor's come first. ``roles``: role to ranks,
    ascending. ``spans``: of a rollout's worker whose engine computes on several devices, the ranks of all of these;
    the others of a span have no engine."""

    devices: tuple[Device, ...]
    roles: dict[str, tuple[int, ...]]
    spans: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def ranks(self, role: str) -> tuple[int, ...]:
        """The workers that host a role; none, where the plan lacks it."""
        return self.roles.get(role, ())

    def span(self, rank: int) -> tuple[int, ...]:
        """Whose devices a worker's rollout engine computes on."""
        return self.spans.get(rank, (rank,))

    def reach(self, role: str) -> tuple[int, ...]:
        """Whose devices the role computes on."""
        if role != "rollout":
            return self.ranks(role)
        return tuple(sorted(rank for first in self.ranks(role) for rank in self.span(first)))

    def disjoint(self, a: str, b: str) -> bool:
        """Whether two roles share no device, so that neither ever waits for the other."""
        return not set(self.reach(a)) & set(self.reach(b))

    def hosted(self, rank: int) -> tuple[str, ...]:
        """The roles of a worker."""
        return tuple(role for role, ranks in self.roles.items() if rank in ranks)

    def check(self, gpus: int) -> None:
        """``RequestError`` where this machine, which has so many ``gpus``, lacks a device; names role and device."""
        for role in self.roles:
            check_exists([self.devices[rank] for rank in self.reach(role)], gpus, role)


def place(cfg: RunConfig, default: Device, roles: Collection[str]) -> Placement:
    """Where ``roles`` (those that the plan has) are; ``default``: the actor's device where the map doesn't name one.

    ``ConfigError``: several workers, and a model that is a loaded module.
    """
    hosted = workers(cfg.device_map, roles, default)
    check_modules(cfg, len(hosted))
    rank = {device: number for number, device in enumerate(hosted)}
    placed = {
        role: tuple(sorted(rank[d] for d in devices_of(cfg.device_map, role, default)))
        for role in ROLES
        if role in roles
    }
    spans: dict[int, tuple[int, ...]] = {}
    if (width := cfg.rollout.tensor_parallel_size) > 1 and (ranks := placed.get("rollout", ())):
        spans = {ranks[i]: ranks[i : i + width] for i in range(0, len(ranks), width)}
        placed["rollout"] = tuple(spans)
    return Placement(tuple(hosted), placed, spans)
