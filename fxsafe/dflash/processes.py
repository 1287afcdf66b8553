"""Several processes of one run, as torchrun starts them: gradients are added up over all of them.

Each process has targets and drafters of its own and every ``world``-th micro-batch; all make the same optimizer step.
The first one alone writes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxsafe.dflash.errors import SettingsError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Processes", "alone", "joined"]


@dataclasses.dataclass(frozen=True, slots=True)
class Processes:
    """This process among those of the run."""

    rank: int = 0
    world: int = 1
    flags: Any = None
    """a group on the CPU for what is no tensor of the drafter's device"""

    @property
    def first(self) -> bool:
        return self.rank == 0

    def reduce(self, tensors: list[Tensor]) -> None:
        """Add up in place over all processes, in one message for each dtype and device."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for (_, device), members in kinds.items():
            flat = torch.cat([t.flatten() for t in members])
            dist.all_reduce(flat, group=self.flags if device.type == "cpu" else None)
            for tensor, part in zip(members, torch.split(flat, [t.numel() for t in members]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process; all have to ask."""
        if self.world == 1:
            return flag
        count = torch.tensor([int(flag)])
        dist.all_reduce(count, group=self.flags)
        return bool(count)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.world > 1:
            dist.barrier(group=self.flags)


@contextmanager
def joined(cuda: bool) -> Iterator[Processes]:
    """The processes of torchrun's environment; one alone without it.

    Args:
        cuda: the drafters are on GPUs, so that gradients go through NCCL.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Processes()
        return
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield Processes(dist.get_rank(), world, dist.new_group(backend="gloo"))
    finally:
        dist.destroy_process_group()


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """No other run has the directory meanwhile; the kernel ends this with the process, however that ends.

    Raises:
        SettingsError: another one has it.
    """
    if fcntl is None:
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"run.out {directory} belongs to a run that has not ended; choose another one"
            ) from None
        except OSError:
            pass  # some network file systems lock no directories
        yield
    finally:
        os.close(handle)
