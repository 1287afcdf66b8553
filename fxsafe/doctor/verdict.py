"""What the two tries of a fault mean together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxsafe.doctor.programs import Program
from fxsafe.doctor.trial import Outcome

__all__ = ["MISSING", "Claim", "Finding", "judge"]

# The outcome of a fault that a patch names and for which there is no program.
MISSING = Outcome("broken", "fxsafe has no such fault program", {})


@dataclass(frozen=True, slots=True)
class Claim:
    """A patch that names a fault, and its status on this torch."""

    patch: str
    status: str
    reason: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report.

    Attributes:
        claimed: a patch that is active here names the fault.
        failed: fxsafe does not keep its word: a claimed fault is not cured, or shows only with fxsafe.
        advice: one sentence for people.
    """

    program: Program
    plain: Outcome
    with_fxsafe: Outcome
    claims: tuple[Claim, ...]
    claimed: bool
    failed: bool
    advice: str

    def record(self) -> dict[str, Any]:
        return {
            "name": self.program.name,
            "title": self.program.title,
            "plain": self.plain.kind,
            "plain_detail": self.plain.detail,
            "with_fxsafe": self.with_fxsafe.kind,
            "with_fxsafe_detail": self.with_fxsafe.detail,
            "patches": [{"name": c.patch, "status": c.status, "reason": c.reason} for c in self.claims],
            "claimed": self.claimed,
            "failed": self.failed,
            "advice": self.advice,
            "facts": {"plain": self.plain.facts, "with_fxsafe": self.with_fxsafe.facts},
        }


def judge(program: Program, plain: Outcome, patched: Outcome, claims: Sequence[Claim]) -> Finding:
    active = [claim.patch for claim in claims if claim.status == "active"]
    claimed = bool(active)
    # "cannot be tried" is no cure if the same program could be tried without fxsafe.
    uncured = patched.bad or (patched.kind == "cannot-try" and plain.kind != "cannot-try")
    failed = uncured and (claimed or not plain.bad)
    return Finding(
        program,
        plain,
        patched,
        tuple(claims),
        claimed,
        failed,
        _advice(program, plain, patched, claims, active, failed),
    )


def _advice(
    program: Program, plain: Outcome, patched: Outcome, claims: Sequence[Claim], active: list[str], failed: bool
) -> str:
    names = ", ".join(active)
    if failed and plain.bad:
        return f"NOT CURED although {names} should cure it: please report this; until then {program.advice}"
    if failed:
        return "SHOWS ONLY WITH FXSAFE: please report this"
    if plain.kind == "cannot-try" and not patched.bad:
        return f"cannot be tried here: {plain.detail}"
    if not plain.bad and active:
        return f"nothing: this torch does not show it, and {names} guards against it"
    if not plain.bad:
        reasons = "; ".join(f"{claim.patch}: {claim.status}" for claim in claims)
        return f"nothing: this torch does not have it{f' ({reasons})' if reasons else ''}"
    if not patched.bad and active:
        return f"nothing more: {names} cures it"
    if not patched.bad:
        return f"`python -m fxsafe run` cures it; with install() alone: {program.advice}"
    return f"{_why_unclaimed(claims)}: {program.advice}"


def _why_unclaimed(claims: Sequence[Claim]) -> str:
    if not claims:
        return "not cured by fxsafe"
    if all(claim.status == "disabled" and "always-false" in claim.reason for claim in claims):
        return f"{', '.join(claim.patch for claim in claims)} of the default fix 'thread-local' cures it; with this fix"
    return "; ".join(f"{claim.patch} is {claim.status} ({claim.reason})" for claim in claims)


def claims_by_fault(named: Mapping[str, Sequence[str]], records: Sequence[Mapping[str, Any]]) -> dict[str, list[Claim]]:
    """Fault -> the patches that name it.

    Args:
        named: patch -> faults, as the catalogue has it.
        records: of ``fxsafe.info()``.
    """
    status = {record["name"]: (record["status"], record.get("reason") or "") for record in records}
    claims: dict[str, list[Claim]] = {}
    for patch, faults in named.items():
        for fault in faults:
            claims.setdefault(fault, []).append(Claim(patch, *status.get(patch, ("unsupported", "not reported"))))
    return claims
