"""One drafter trained by several processes: who they are, and how they exchange numbers and gradients.

Every process owns some lanes of the order and runs the same code; one alone exchanges nothing and is, bit for bit, a
plain run. Gradients go through DistributedDataParallel on NCCL (gloo on CPUs), outside compiled regions. Counts, flags
and log numbers go through a gloo group of their own, so no such number waits for the device; as integers or by
``math.fsum`` they come out the same in any grouping.

Started by our launcher or by torchrun alike: ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and
``MASTER_PORT`` say everything.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_offline.errors import DFlashOfflineError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

GRADIENT_TIMEOUT = timedelta(minutes=30)
CONTROL_TIMEOUT = timedelta(days=7)  # replicas wait here while rank 0 writes a checkpoint, or for data


class PeerLost(DFlashOfflineError):
    """Another replica ended in the middle of an exchange; its own error is the one to read."""


@dataclass(frozen=True)
class Place:
    """Which of the processes this is.

    Attributes:
        rank: Replica number, from 0.
        world: Replicas.
        local_rank: Number on this host.
        local_world: Replicas on this host.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Place | None:
        """What torchrun or our launcher has set; None where neither started this process."""
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        return cls(
            int(environment["RANK"]),
            int(environment["WORLD_SIZE"]),
            int(environment.get("LOCAL_RANK", 0)),
            int(environment.get("LOCAL_WORLD_SIZE", 1)),
        )


class Replicas:
    """The exchange between replicas; with one of them every method returns at once.

    Args:
        place: Which one this is.
        device: Where its drafter is.
    """

    def __init__(self, place: Place, device: torch.device) -> None:
        self.rank, self.world, self.local_world = place.rank, place.world, place.local_world
        self.device = device
        self._control: Any = None
        if self.world > 1:
            import torch.distributed as dist

            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, init_method="env://", rank=self.rank, world_size=self.world, timeout=GRADIENT_TIMEOUT
            )
            self._control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)

    @property
    def first(self) -> bool:
        """Whether this one writes logs and checkpoints."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """What every replica gave, by rank."""
        if self.world == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.world
        with _peers():
            dist.all_gather_object(found, value, group=self._control)
        return found

    def broadcast(self, value: Any) -> Any:
        """What rank 0 gave; the others' argument is not looked at."""
        if self.world == 1:
            return value
        import torch.distributed as dist

        held = [value if self.first else None]
        with _peers():
            dist.broadcast_object_list(held, src=0, group=self._control)
        return held[0]

    def add(self, numbers: np.ndarray) -> np.ndarray:
        """Sum of an int64 vector over the replicas."""
        if self.world == 1:
            return numbers
        import torch
        import torch.distributed as dist

        held = torch.from_numpy(np.array(numbers, dtype=np.int64))
        with _peers():
            dist.all_reduce(held, group=self._control)
        return held.numpy()

    def broadcast_tensors(self, tensors: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """Rank 0's tensors on every replica's device, over the gradients' links."""
        if self.world == 1:
            return dict(tensors or {})
        import torch
        import torch.distributed as dist

        about = [(name, tensor.shape, tensor.dtype) for name, tensor in (tensors or {}).items()]
        found = {}
        with _peers():
            for name, shape, dtype in self.broadcast(about):
                held = torch.empty(shape, dtype=dtype, device=self.device)
                if self.first and tensors is not None:
                    held.copy_(tensors[name])
                dist.broadcast(held, src=0)
                found[name] = held
        return found

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model with gradients averaged over the replicas; its weights become rank 0's."""
        if self.world == 1:
            return model
        from torch.nn.parallel import DistributedDataParallel

        with _peers():
            return DistributedDataParallel(model, gradient_as_bucket_view=True)

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around work that exchanges gradients: a lost peer gets its own error."""
        with _peers() if self.world > 1 else contextlib.nullcontext():
            yield

    def agree(self, what: str, value: Any) -> None:
        """
        Raises:
            DFlashOfflineError: replicas do not have the same value; they read different caches or recipes.
        """
        values = self.gather(value)
        if any(other != values[0] for other in values):
            raise DFlashOfflineError(
                f"replicas do not agree on {what}: {values}. Every host must see the same cache and recipe"
            )

    def board(self) -> Board | None:
        """A new board of these replicas, who must all ask for it together; None where there is one replica."""
        if self.world == 1:
            return None
        import torch.distributed as dist

        host = os.environ["MASTER_ADDR"]
        with _peers():
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if self.first else None
            port = self.broadcast(store.port if store is not None else None)
            return Board(store or dist.TCPStore(host, port, is_master=False, wait_for_workers=False))

    def close(self) -> None:
        """Leave the group."""
        if self.world > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()


class Board:
    """Short texts by key, put up by one replica and looked at by others without waiting."""

    def __init__(self, store: dist.TCPStore) -> None:
        self._store = store

    def put(self, key: str, text: str) -> None:
        """Put a text up; it stays."""
        with _board():
            self._store.set(key, text)

    def look(self, key: str) -> str | None:
        """The text, or None where none was put up."""
        with _board():
            return self._store.get(key).decode() if self._store.check([key]) else None


@contextlib.contextmanager
def _board() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"another replica ended while this one waited: {str(error).splitlines()[0]}") from error


@contextlib.contextmanager
def _peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
        if any(part in text for part in (*lost, "Timed out waiting", "Socket closed", "Connection refused")):
            raise PeerLost(f"another replica ended in the middle of an exchange: {text.splitlines()[0]}") from error
        raise
