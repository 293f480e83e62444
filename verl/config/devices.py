"""What ``device_map`` says: which devices a role is on, and which it follows where it has no entry.

An entry is a GPU's number, ``cpu`` or ``cpu:1`` (each a worker process on the CPU), a range of either (``0-3``,
``cpu:0-1``), one of these on a node of a cluster (``node1:0-3``), ``{label: a100, count: 4}``, or a list of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, get_args

from verl.config.errors import RequestError

Role = Literal["actor", "critic", "reference", "reward_model", "rollout", "teacher", "process_reward"]
ROLES: tuple[str, ...] = get_args(Role)
FOLLOWS: dict[str, str] = {  # where a role without an entry is
    "critic": "actor", "reference": "actor", "teacher": "actor", "process_reward": "actor", "rollout": "actor",
    "reward_model": "rollout",
}  # fmt: skip
LABEL = "label:"
MOST = 4096  # devices of one range or label: a mistyped one takes no memory

_PLACE = re.compile(r"(?:(?P<node>[^:\s]+):)??(?:(?P<cpu>cpu)|(?:(?P<cpus>cpu):)?(?P<first>\d+)(?:-(?P<last>\d+))?)")
_NO_NODES = ("cpu", "gpu", "cuda")


@dataclass(frozen=True)
class Device:
    """A GPU, or a worker process on the CPU. ``node``: the machine's name in the cluster; None: this machine, or any.

    Devices that were asked for by label have the node ``label:NAME`` and count from 0 among those with the label.
    """

    kind: Literal["cpu", "cuda"]
    index: int
    node: str | None = None

    def __str__(self) -> str:
        return f"{self.node}/{self.plain}" if self.node else self.plain

    @property
    def plain(self) -> str:
        """Without its node, as torch names it: ``cuda:1``."""
        return f"{self.kind}:{self.index}"


def cores() -> int:
    """Of the machine, as many as this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse(place: Any) -> list[Device]:
    """The devices of one entry, in its order.

    ``RequestError``: nothing, no such form, a device named twice, or GPUs beside CPU workers. The message continues a
    sentence that begins with the role.
    """
    devices = [d for part in (place if isinstance(place, list | tuple) else [place]) for d in _part(part)]
    if not devices:
        raise RequestError("has no device: it needs at least 1, such as cpu or [0]")
    once = list(dict.fromkeys(devices))
    if len(once) < len(devices):
        twice = next(d for d in once if devices.count(d) > 1)
        other = once if len(once) > 1 else [twice, replace(twice, index=twice.index + 1)]
        raise RequestError(f"names {twice} twice: a device is one worker; {_or(written(other), written([twice]))}")
    if len({d.kind for d in once}) > 1:
        kinds = [[d for d in once if d.kind == kind] for kind in ("cuda", "cpu")]
        raise RequestError(f"is on GPUs and on the CPU: a role is on one of them; {_or(*map(written, kinds))}")
    return once


def written(devices: Sequence[Device]) -> str:
    """A value of ``device_map``, as YAML spells it, that names these devices."""
    parts: list[str] = []
    for (_, node, _), run in groupby(enumerate(devices), key=lambda e: (e[1].kind, e[1].node, e[1].index - e[0])):
        some = [d for _, d in run]
        if node and node.startswith(LABEL):
            parts.append(f"{{label: {node.removeprefix(LABEL)}, count: {len(some)}}}")
        elif len(some) > 2:
            parts.append(_spelled(some[0], f"{some[0].index}-{some[-1].index}"))
        else:
            parts += [_spelled(d, str(d.index)) for d in some]
    alone = len(parts) == 1 and not parts[0].isdecimal()
    return parts[0] if alone else f"[{', '.join(parts)}]"


def entry_of(device_map: Mapping[str, Any], role: str) -> str | None:
    """The role whose entry says where ``role`` is: itself, or one that it follows; None: no entry does."""
    while role not in device_map:
        if role not in FOLLOWS:
            return None
        role = FOLLOWS[role]
    return role


def devices_of(device_map: Mapping[str, Any], role: str, default: Device | None = None) -> list[Device]:
    """The devices of a role, by its entry or the one that it follows, else ``default`` (None: nothing)."""
    entry = entry_of(device_map, role)
    if entry is None:
        return [default] if default else []
    return parse(device_map[entry])


def workers(
    device_map: Mapping[str, Any], roles: Collection[str], default: Device | None = None
) -> dict[Device, list[str]]:
    """Each device that hosts any of ``roles``, with those, the actor's first; a worker's rank is its place here."""
    hosted: dict[Device, list[str]] = {}
    for role in (r for r in ROLES if r in roles):
        for device in devices_of(device_map, role, default):
            hosted.setdefault(device, []).append(role)
    return hosted


def check_map(device_map: Mapping[str, Any]) -> dict[str, Any]:
    """The map with each entry as it was written, but one number as a list of one, and without entries that are null.

    ``RequestError`` with every fault in one message.
    """
    given = {role: _plain(place) for role, place in device_map.items() if place is not None}
    faults: list[str] = []
    for role, place in given.items():
        if role not in ROLES:
            faults.append(f"{role!r} is no role: one of {', '.join(ROLES)}")
            continue
        try:
            parse(place)
        except RequestError as fault:
            faults.append(f"{role} {fault}")
    if faults:
        raise RequestError("; ".join(faults))
    return given


def check_exists(devices: Iterable[Device], gpus: int, role: str | None = None) -> None:
    """``RequestError`` where this machine, which has so many ``gpus``, lacks one of the devices. Those on named nodes
    are the cluster's to find. ``role``: whose devices these are, for the message."""
    missing = [d for d in devices if d.kind == "cuda" and d.node is None and d.index >= gpus]
    if not missing:
        return
    have = "no GPU, only cpu" if gpus == 0 else "GPU 0 and cpu" if gpus == 1 else f"GPUs 0 to {gpus - 1} and cpu"
    fits = {
        0: ("{actor: cpu}", "{actor: [cpu, cpu:1]}"),
        1: ("{actor: [0]}", "{actor: cpu}"),
    }.get(gpus, ("{actor: [0], critic: [1]}", "{actor: [0, 1]}"))
    numbers = ", ".join(str(d.index) for d in missing)
    what = f"device {numbers} does not exist" if len(missing) == 1 else f"devices {numbers} do not exist"
    where = f"device_map.{role}: " if role else ""
    raise RequestError(f"{where}{what}; this machine has {have}; device_map: {_or(*fits)}")


def _spelled(device: Device, numbers: str) -> str:
    """``numbers`` (one, or a range) of the device's kind and node."""
    if device.kind == "cpu":
        numbers = "cpu" if numbers == "0" else f"cpu:{numbers}"
    return f"{device.node}:{numbers}" if device.node else numbers


def _plain(place: Any) -> Any:
    return [place] if type(place) is int else list(place) if isinstance(place, tuple) else place


def _part(part: Any) -> Iterator[Device]:
    """One number, text or label."""
    if isinstance(part, Mapping):
        yield from _labelled(part)
    elif type(part) is int:
        if part < 0:
            raise RequestError(f"names GPU {part}: GPUs are numbered from 0, such as [0] or [0, 1]")
        yield Device("cuda", part)
    elif isinstance(part, str) and (found := _PLACE.fullmatch(part.strip())) and found["node"] not in _NO_NODES:
        kind: Literal["cpu", "cuda"] = "cpu" if found["cpu"] or found["cpus"] else "cuda"
        first = int(found["first"] or 0)
        last = int(found["last"] or first)
        if last < first:
            ends = [Device(kind, index, found["node"]) for index in (first, last)]
            fits = _or(_spelled(ends[0], f"{last}-{first}"), written(ends))
            raise RequestError(f"has the range {part!r}, which runs backwards; {fits}")
        if last - first >= MOST:
            raise RequestError(f"has the range {part!r}, which is over {MOST} devices; {_or('0-3', '0-7')}")
        for index in range(first, last + 1):
            yield Device(kind, index, found["node"])
    else:
        raise RequestError(
            f"names {part!r}, which is no device: a GPU is its number, the CPU is cpu, such as [0, 1] or cpu; there "
            "are also ranges (0-3, cpu:0-1), and in a cluster node1:0-3 or {label: a100, count: 4}"
        )


def _labelled(part: Mapping[Any, Any]) -> Iterator[Device]:
    label, count = part.get("label"), part.get("count")
    if part.keys() != {"label", "count"} or not isinstance(label, str) or not label.strip() or type(count) is not int:
        raise RequestError(
            f"names {dict(part)!r}: a label has a name and a count, such as {{label: a100, count: 4}} or "
            "{label: l4, count: 1}"
        )
    if not 0 < count <= MOST:
        raise RequestError(f"asks for {count} devices of label {label}: from 1 to {MOST}, such as count 1 or 4")
    for index in range(count):
        yield Device("cuda", index, LABEL + label)


def _or(*settings: str) -> str:
    return f"{' or '.join(settings)} would fit"
