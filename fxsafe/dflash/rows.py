"""Rows of JSONL files, Parquet files and Hub data sets, by number."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fxsafe.dflash.errors import DataError

__all__ = ["BrokenRow", "JsonLines", "Rows", "Table", "open_rows"]


class BrokenRow(Exception):
    """A row that cannot be read; says where it stands."""


class Rows(Protocol):
    """Rows by number, each a mapping."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        """Raises BrokenRow."""
        ...

    def origin(self, number: int) -> str:
        """Where a row stands, for messages."""
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
        at = 0
        try:
            with path.open("rb") as stream:
                for number, line in enumerate(stream, 1):
                    if line.strip():
                        self._starts.append(at)
                        self._numbers.append(number)
                    at += len(line)
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
        except ValueError as error:
            raise BrokenRow(f"{self.origin(number)}: no JSON: {error}") from None
        if not isinstance(row, dict):
            raise BrokenRow(f"{self.origin(number)}: no JSON object")
        return row

    def origin(self, number: int) -> str:
        return f"{self.path}:{self._numbers[number]}"


class Table:
    """A data set of ``datasets``, or a plain list of rows."""

    def __init__(self, table: Any, name: str) -> None:
        self._table, self._name = table, name

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._table[number]
        return row

    def origin(self, number: int) -> str:
        return f"{self._name}, row {number}"


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
    if path.suffix == ".parquet" and not path.exists():
        raise DataError(f"{name} does not exist")
    import datasets  # type: ignore[import-untyped, unused-ignore]

    try:
        if path.suffix == ".parquet":
            yield Table(datasets.Dataset.from_parquet(str(path)), name)
            return
        place, _, split = name.partition(":")
        yield Table(datasets.load_dataset(place, split=split or "train"), name)
    except Exception as error:  # datasets raises whatever its readers raise
        raise DataError(f"{name} cannot be opened: {type(error).__name__}: {error}") from error
