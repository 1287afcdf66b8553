"""Rows of JSONL files, Parquet files and Hub data sets, by number."""

from __future__ import annotations

import hashlib
import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fxsafe.dflash.errors import DataError

__all__ = ["BrokenRow", "JsonLines", "Rows", "Stream", "Table", "open_rows", "open_stream"]


_LEARNT = ("messages", "conversations", "text", "input_ids", "loss_mask")
_SAMPLED = 4096
"""rows, at least, that stand for all of a data set of the Hub"""


class BrokenRow(Exception):
    """A row that cannot be read."""

    def at(self, origin: str) -> str:
        """What is wrong, and where: who reads a line says its place already, who reads a row does not know it."""
        return str(self) if str(self).startswith(origin) else f"{origin}: {self}"


class Rows(Protocol):
    """Rows by number, each a mapping."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        """Raises BrokenRow."""
        ...

    def origin(self, number: int) -> str:
        """Where a row stands, for messages."""
        ...

    def digests(self) -> dict[str, str]:
        """Each source's name and a digest of what it holds, which tells whether it has been changed since."""
        ...


class JsonLines:
    """A JSONL file, read line by line when a line is wanted; only the places of the lines are in memory.

    ``datasets`` would read it too, but names neither file nor line if one of them is broken, and then stops.

    Raises:
        DataError: no such file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts, self._numbers = array("Q"), array("Q")
        self._digest = hashlib.blake2b(digest_size=16)  # on the way, as each byte is read once in any case
        at = 0
        try:
            with path.open("rb") as stream:
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        self._starts.append(at)
                        self._numbers.append(number)
                    at += len(line)
                    self._digest.update(line)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        with self.path.open("rb") as stream:
            stream.seek(self._starts[number])
            line = stream.readline()
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BrokenRow(f"{self.origin(number)}: no JSON: {error}") from None
        if not isinstance(row, dict):
            raise BrokenRow(f"{self.origin(number)}: no JSON object")
        return row

    def origin(self, number: int) -> str:
        return f"{self.path}:{self._numbers[number]}"

    def digests(self) -> dict[str, str]:
        return {str(self.path): self._digest.hexdigest()}


class Table:
    """A data set of ``datasets``, or a plain list of rows.

    Args:
        table: rows by number.
        name: for messages.
        file: where all of it stands, if it is one.
    """

    def __init__(self, table: Any, name: str, file: Path | None = None) -> None:
        self._table, self._name, self._file = table, name, file

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._table[number]
        return row

    def origin(self, number: int) -> str:
        return f"{self._name}, row {number}"

    def digests(self) -> dict[str, str]:
        """Of the file, or else of some thousand rows from everywhere.

        All rows of a Hub data set would take minutes, and what ``datasets`` notes about it changes with its cache.
        """
        digest = hashlib.blake2b(digest_size=16)
        if self._file is not None:
            try:
                with self._file.open("rb") as stream:
                    while chunk := stream.read(1 << 22):
                        digest.update(chunk)
            except OSError as error:
                raise DataError(f"{self._file} cannot be read: {error}") from error
        else:
            count = len(self)
            digest.update(str(count).encode())
            for number in range(0, count, max(1, count // _SAMPLED)):
                row = self[number]
                learnt = {key: row[key] for key in _LEARNT if key in row}
                digest.update(json.dumps(learnt, default=str).encode())
        return {self._name: digest.hexdigest()}


class Joined:
    """Several ones behind each other, or chosen rows of one."""

    def __init__(self, places: Sequence[tuple[Rows, int]]) -> None:
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        rows, at = self._places[number]
        return rows[at]

    def origin(self, number: int) -> str:
        rows, at = self._places[number]
        return rows.origin(at)

    def digests(self) -> dict[str, str]:
        out: dict[str, str] = {}
        for rows in {id(rows): rows for rows, _ in self._places}.values():
            out |= rows.digests()
        return out


class Stream:
    """Rows that can only be read in order, from the first one again in each epoch; a window of them is in memory.

    Args:
        parts: names and what can be iterated over, from the beginning each time.
        window: rows in memory.
    """

    def __init__(self, parts: Sequence[tuple[str, Iterable[Mapping[str, Any]]]], window: int) -> None:
        self._parts, self.window = parts, window
        self._source: Iterator[tuple[str, Mapping[str, Any]]] | None = None
        self._start, self._end = 0, 0
        self._held: list[tuple[str, Mapping[str, Any]]] = []

    def load(self, start: int) -> int:
        """Take the rows from ``start``, a multiple of the window, into memory; returns how many there are.

        What lies before is read over: from where the last window ended, or else from the first row.

        Raises:
            DataError: the source failed.
        """
        if self._source is None or start != self._start:
            try:
                if self._source is None or start < self._end:
                    self._source, self._end = self._rows(), 0
                self._end += sum(1 for _ in itertools.islice(self._source, start - self._end))
                self._held = list(itertools.islice(self._source, self.window))
            except Exception as error:  # datasets raises whatever its readers raise
                self._source = None
                raise DataError(f"{self.origin(self._end)} cannot be read: {type(error).__name__}: {error}") from error
            self._start, self._end = start, self._end + len(self._held)
        return len(self._held)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        return self._held[number - self._start][1]

    def origin(self, number: int) -> str:
        held = self._held[number - self._start][0] if self._start <= number < self._end and self._held else ""
        return held or f"{', '.join(name for name, _ in self._parts)}, row {number} or a later one"

    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for name, part in self._parts:
            for number, row in enumerate(part):
                yield f"{name}, row {number}", row


def open_stream(names: Sequence[str], window: int) -> Stream:
    """Open Parquet files and Hub data sets to be read in order, without the disk or the memory for all of them.

    Raises:
        DataError: one of them does not exist, or is a JSONL file, which is read line by line in any case.
    """
    if not names:
        raise DataError("data.train is empty")
    parts = []
    for name in names:
        if Path(name).suffix in (".jsonl", ".json"):
            raise DataError(f"{name} is read line by line in any case; leave data.streaming off for it")
        parts += [(name, part) for part in _tables(name, streaming=True)]
    return Stream(parts, window)


def open_rows(names: Sequence[str]) -> Rows:
    """Open files and Hub data sets, one behind the other.

    Raises:
        DataError: one of them does not exist, or there are no rows at all.
    """
    parts = [part for name in names for part in _open(name)]
    total = sum(len(part) for part in parts)
    if not total:
        raise DataError(f"there is not a single row in {', '.join(names) or 'data.train, which is empty'}")
    return parts[0] if len(parts) == 1 else Joined([(part, i) for part in parts for i in range(len(part))])


def split_rows(rows: Rows, share: float, seed: int) -> tuple[Rows, Rows]:
    """Set a share of the rows apart, chosen by ``seed`` and the number of the row alone; at least one if share > 0."""
    import torch

    count = min(len(rows) - 1, max(1, round(share * len(rows)))) if share else 0
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    apart = set(order[:count])
    return (
        Joined([(rows, i) for i in range(len(rows)) if i not in apart]),
        # In the order of the draw: whoever measures only the first ones measures rows from everywhere.
        Joined([(rows, i) for i in order[:count]]),
    )


def _open(name: str) -> Iterator[Rows]:
    path = Path(name)
    if path.suffix in (".jsonl", ".json"):
        yield JsonLines(path)
        return
    for table in _tables(name, streaming=False):
        yield Table(table, name, path if path.suffix == ".parquet" else None)


def _tables(name: str, *, streaming: bool) -> Iterator[Any]:
    path = Path(name)
    if path.suffix == ".parquet" and not path.exists():
        raise DataError(f"{name} does not exist")
    import datasets  # type: ignore[import-untyped, unused-ignore]

    try:
        if path.suffix == ".parquet":
            if streaming:
                yield datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
            else:
                yield datasets.Dataset.from_parquet(str(path))
            return
        place, _, split = name.partition(":")
        words = [place]
        if place.count("/") == 2 and not Path(place).exists():
            words = place.rsplit("/", 1)  # owner/name/config
        yield datasets.load_dataset(*words, split=split or "train", streaming=streaming)
    except Exception as error:  # datasets raises whatever its readers raise
        raise DataError(f"{name} cannot be opened: {type(error).__name__}: {error}") from error
