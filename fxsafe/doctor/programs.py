"""The fault programs, read without running them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FAULTS", "Program", "programs"]

FAULTS = Path(__file__).parent / "faults"


@dataclass(frozen=True, slots=True)
class Program:
    """One program of ``fxsafe.doctor.faults``.

    Attributes:
        name: of the module.
        title: one line for people, without the full stop.
        advice: what to do where no patch cures the fault.
    """

    name: str
    title: str
    advice: str

    @property
    def module(self) -> str:
        return f"fxsafe.doctor.faults.{self.name}"


def programs(folder: Path = FAULTS) -> list[Program]:
    """All programs, in the order of their names.

    Raises:
        ValueError: a program has no docstring or no ``ADVICE``.
    """
    return [_read(path) for path in sorted(folder.glob("*.py")) if not path.name.startswith("_")]


def _read(path: Path) -> Program:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstring = ast.get_docstring(tree)
    advice = next((value for statement in tree.body if (value := _advice(statement)) is not None), None)
    if not docstring or not advice:
        raise ValueError(f"{path} needs a docstring and a string ADVICE")
    return Program(path.stem, docstring.splitlines()[0].rstrip("."), advice)


def _advice(statement: ast.stmt) -> str | None:
    if not isinstance(statement, ast.Assign):
        return None
    named = any(isinstance(target, ast.Name) and target.id == "ADVICE" for target in statement.targets)
    if not named or not isinstance(statement.value, ast.Constant) or not isinstance(statement.value.value, str):
        return None
    return statement.value.value
