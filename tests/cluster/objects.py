"""What the tests' workers are: small objects, importable by name, that load torch only where a test needs it."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.cluster.group import Context

if TYPE_CHECKING:
    import torch

PATIENCE = 30.0  # seconds that anything here waits for another


class Awkward(Exception):
    """Can't be rebuilt from its message alone, so not by pickle."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Worker:
    """``context`` and the factory's further arguments, and methods that tests call."""

    def __init__(self, context: Context, *args: Any) -> None:
        self.context, self.args = context, args
        self.flag = threading.Event()
        self.parties = threading.Barrier(4)

    def who(self) -> tuple[int, int, str, int]:
        return self.context.rank, self.context.size, self.context.device, os.getpid()

    def given(self) -> tuple[Any, ...]:
        return self.args

    def echo(self, *args: Any) -> Any:
        return args

    def fail(self, kind: type[BaseException], *args: Any) -> None:
        raise kind(*args)

    def lock(self) -> Any:
        return threading.Lock()  # no pickle can hold it

    def hold(self) -> str:
        """Returns once ``release`` is called from another thread."""
        if not self.flag.wait(PATIENCE):
            raise TimeoutError("nobody released it")
        return "released"

    def release(self) -> None:
        self.flag.set()

    def arrive(self, i: int) -> int:
        """Returns once four calls are in here together."""
        self.parties.wait(PATIENCE)
        return i

    def relay(self, rank: int, method: str, *args: Any) -> Any:
        """Has another worker do it."""
        return self.context.peer(rank).call(method, *args)

    def relay_together(self, rank: int) -> list[int]:
        """Four calls to one peer, from four threads; none can end before all are there."""
        peer = self.context.peer(rank)
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(lambda i: peer.call("arrive", i), range(4)))

    def numbers(self, size: int, dtype: str = "int64") -> torch.Tensor:
        import torch

        return torch.arange(size).to(getattr(torch, dtype))

    def pull(self, rank: int, size: int, dtype: str) -> bool:
        """Whether a peer's tensor arrives as it was made, and can be written to."""
        import torch

        got = self.context.peer(rank).call("numbers", size, dtype)
        same = got.dtype == getattr(torch, dtype) and torch.equal(got, self.numbers(size, dtype))
        got += 1
        return same

    def world(self) -> list[float]:
        """The sum over ranks of ``[rank, 1]``."""
        import torch
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=self.context.meet, rank=self.context.rank, world_size=self.context.size
        )
        total = torch.tensor([float(self.context.rank), 1.0])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.tolist()

    def modules(self) -> list[str]:
        return sorted(sys.modules)


def worker(context: Context, *args: Any) -> Worker:
    return Worker(context, *args)


def refuse(context: Context, rank: int, kind: type[BaseException], message: str) -> Worker:
    """Worker ``rank`` can't be made; the others wait for it, as a collective would."""
    if context.rank == rank:
        raise kind(message)
    threading.Event().wait(PATIENCE)
    raise AssertionError("nobody ended it")


class Closing(Worker):
    """Leaves a file ``closed_<rank>`` in ``folder`` when it is closed."""

    def __init__(self, context: Context, folder: str) -> None:
        super().__init__(context)
        self.path = Path(folder) / f"closed_{context.rank}"

    def close(self) -> None:
        self.path.write_text("closed")
