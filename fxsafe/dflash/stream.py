"""An endless, shuffled stream of micro-batches that can go on from any place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch

from fxsafe.dflash.anchors import candidates
from fxsafe.dflash.batches import Example, MicroBatch, collate, seed_for
from fxsafe.dflash.errors import DataError
from fxsafe.dflash.rows import BrokenRow, Rows, Stream

__all__ = ["Counts", "Examples", "micro_batches"]


_REPORTED = 20
"""broken rows that are told one by one"""


@dataclasses.dataclass(slots=True)
class Counts:
    """What became of the rows."""

    used: int = 0
    broken: int = 0
    too_long: int = 0
    nothing_to_learn: int = 0


class Examples:
    """Examples of shuffled rows, for ever; each epoch has an order of its own, from the seed and its number.

    Args:
        rows: at least one; a stream is shuffled within each of its windows.
        encode: raises BrokenRow.
        seed: of the order.
        max_length: in tokens.
        too_long: "truncate", "skip" or "refuse".
        on_error: "skip" or "refuse".
        report: is told of rows that are left out as broken, up to a number; the others are only counted.
        shuffle: False keeps the order of the rows.
        name: of the rows, for messages.
    """

    def __init__(
        self,
        rows: Rows | Stream,
        encode: Callable[[Mapping[str, Any]], Example],
        *,
        seed: int,
        max_length: int,
        too_long: Literal["truncate", "skip", "refuse"] = "truncate",
        on_error: Literal["skip", "refuse"] = "skip",
        report: Callable[[str], None] = print,
        shuffle: bool = True,
        name: str = "data.train",
    ) -> None:
        self._name = name
        self._rows, self._encode, self._seed, self._shuffle = rows, encode, seed, shuffle
        self._max_length, self._too_long, self._on_error, self._report = max_length, too_long, on_error, report
        self.counts = Counts()
        self._reported: set[int] = set()
        self.epoch, self.offset = 0, 0
        self._order: list[int] | None = None

    @property
    def position(self) -> dict[str, int]:
        """Where the stream stands, as JSON; the row at ``offset`` of the epoch's order comes next."""
        return {"epoch": self.epoch, "offset": self.offset}

    def seek(self, position: Mapping[str, int]) -> None:
        """Go to a place that :attr:`position` gave."""
        self.epoch, self.offset, self._order = position["epoch"], position["offset"], None

    def __iter__(self) -> Iterator[Example]:
        return self

    def __next__(self) -> Example:
        """The next one that holds something to learn.

        Raises:
            DataError: a row that is refused, or a whole epoch without anything to learn.
        """
        whole = self.epoch if not self.offset else self.epoch + 1
        before = dataclasses.replace(self.counts)
        while True:
            number = self._number()
            if number is None:
                if self.epoch == whole:
                    raise DataError(self._nothing(before))
                self.epoch, self.offset, self._order = self.epoch + 1, 0, None
                before = dataclasses.replace(self.counts)
                continue
            self.offset += 1
            if (example := self._example(number)) is not None:
                self.counts.used += 1
                return example

    def _nothing(self, before: Counts) -> str:
        """Why an epoch that began with these counts had nothing."""
        now = self.counts
        return (
            f"{self._name}: none of {self.offset} rows can be learnt from: {now.broken - before.broken} broken, "
            f"{now.too_long - before.too_long} too long, {now.nothing_to_learn - before.nothing_to_learn} without two "
            f"tokens of the assistant in a row within {self._max_length} tokens"
        )

    def _number(self) -> int | None:
        """The row at ``offset`` of this epoch's order; None behind the last one."""
        rows = self._rows
        if not isinstance(rows, Stream):
            if self._order is None:
                self._order = self._ordered(len(rows), "epoch", self.epoch)
            return self._order[self.offset] if self.offset < len(self._order) else None
        window, at = divmod(self.offset, rows.window)
        count = rows.load(window * rows.window)
        if at >= count:
            return None
        if self._order is None or at == 0:
            self._order = self._ordered(count, "epoch", self.epoch, window)
        return window * rows.window + self._order[at]

    def _ordered(self, count: int, *words: object) -> list[int]:
        if not self._shuffle:
            return list(range(count))
        generator = torch.Generator().manual_seed(seed_for(self._seed, *words))
        order: list[int] = torch.randperm(count, generator=generator).tolist()
        return order

    def _example(self, number: int) -> Example | None:
        origin = self._rows.origin(number)
        try:
            example = self._encode(self._rows[number])
        except BrokenRow as error:
            message = error.at(origin)
            if self._on_error == "refuse":
                raise DataError(f'{message} (data.on_error: "skip" leaves such rows out)') from error
            self.counts.broken += 1
            if number not in self._reported and len(self._reported) < _REPORTED:
                self._reported.add(number)
                self._report(f"left out: {message}")
                if len(self._reported) == _REPORTED:
                    self._report(f"{self._name}: further rows that are left out are only counted")
            return None
        if len(example.ids) > self._max_length:
            self.counts.too_long += 1
            if self._too_long == "refuse":
                raise DataError(f"{origin}: {len(example.ids)} tokens, and data.max_length is {self._max_length}")
            if self._too_long == "skip":
                return None
        learn = list(example.learn[: self._max_length])
        if not candidates(torch.tensor([learn], dtype=torch.bool)).any():
            self.counts.nothing_to_learn += 1
            return None
        return Example(example.ids[: self._max_length], learn, origin)


def micro_batches(
    examples: Examples,
    *,
    seed: int,
    batch_size: int,
    anchors: int,
    bucket: int,
    limit: int | None = None,
    start: int = 0,
    rank: int = 0,
    world: int = 1,
) -> Iterator[MicroBatch]:
    """Micro-batches of a stream, for ever.

    Args:
        examples: where it stands decides what comes.
        seed: of the anchors.
        batch_size: sequences of each.
        anchors: of each sequence.
        bucket: see :func:`collate`.
        limit: see :func:`collate`; the positions that the target has.
        start: index of the first one.
        rank: of this process; every ``world``-th micro-batch is its own, and the others are passed over.
        world: processes.
    """
    index = start
    while True:
        # All processes read the same rows, and a position is that behind the micro-batches of all of them.
        groups = [[next(examples) for _ in range(batch_size)] for _ in range(world)]
        yield collate(
            groups[rank],
            index=index + rank,
            seed=seed,
            anchors=anchors,
            bucket=bucket,
            limit=limit,
            position=examples.position,
        )
        index += world
