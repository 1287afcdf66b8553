"""May this patch be applied to this torch? The release says what was tested, the shape says what is there.

A final release in the tested range whose targets have known shapes is patched. A nightly, a release candidate or a
source build counts as the release it leads to; there the shapes decide, since upstream's change may be in or not.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Literal, NamedTuple

from fxsafe.patches.base import NotNeeded, Patch, Plan, ShapeError

__all__ = ["NEWEST", "OLDEST", "Status", "Verdict", "ask", "predates", "release_doubt"]

OLDEST = (2, 5)
NEWEST = (2, 15)

# What ``info()`` says of a patch; the gate itself never says "waiting" or "disabled".
Status = Literal["active", "not-needed", "waiting", "unsupported", "disabled"]


class Verdict(NamedTuple):
    """What the gate says of one patch.

    Attributes:
        status: "active" (the plan may be carried out), "not-needed" or "unsupported".
        reason: why, for people; for an active patch empty, or what is untested about it.
        plan: present if active.
        doubt: whether strict mode refuses and the user is warned.
    """

    status: Status
    reason: str
    plan: Plan | None = None
    doubt: bool = False


def _release(torch_version: str) -> tuple[int, ...] | None:
    parts = torch_version.partition("+")[0].split(".")
    if all(part.isascii() and part.isdigit() for part in parts):
        return tuple(map(int, parts[:2]))  # a final release: the import that follows takes longer than all else here
    from packaging.version import InvalidVersion, Version

    try:
        return Version(torch_version).release[:2]
    except InvalidVersion:
        return None


@functools.lru_cache(maxsize=8)
def release_doubt(torch_version: str) -> tuple[str, str] | None:
    """What is wrong with this release of torch, if anything.

    Args:
        torch_version: as ``torch.__version__`` spells it, local part included, e.g. ``"2.16.0.dev20261101+cu130"``.

    Returns:
        None for a supported release, else ``(status, sentence)``, where status is "unsupported" for one that is too
        old and "active" for one whose shapes have to decide.
    """
    supported = f"fxsafe supports torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    release = _release(torch_version)
    if release is None:
        return "active", f"torch calls itself {torch_version!r}, which is no version number; {supported}"
    if release < OLDEST:
        return "unsupported", f"torch {torch_version} is older than the oldest supported one; {supported}"
    if release > NEWEST:
        return "active", f"torch {torch_version} is newer than the newest tested one; {supported}"
    return None


def predates(patch: Patch, torch_version: str) -> Verdict | None:
    """The verdict for a release that is older than what the patch changes: its modules will never be imported."""
    release = _release(torch_version)
    if release is None or release >= patch.since:
        return None
    since = ".".join(map(str, patch.since))
    return Verdict("not-needed", f"torch {torch_version} does not have what it changes, which came with {since}")


def ask(patch: Patch, modules: Mapping[str, ModuleType], torch_version: str) -> Verdict:
    """Decide about one patch; changes nothing.

    Args:
        patch: from the catalogue.
        modules: name -> module, for every name in ``patch.modules``.
        torch_version: ``torch.__version__``.
    """
    doubt = release_doubt(torch_version)
    if doubt is not None and doubt[0] == "unsupported":
        return Verdict("unsupported", doubt[1], doubt=True)
    try:
        plan = patch.plan(modules)
    except ShapeError as error:
        known = "" if doubt is None else f" ({doubt[1]})"
        return Verdict("unsupported", f"{error}{known}", doubt=True)
    if isinstance(plan, NotNeeded):
        return Verdict("not-needed", plan.reason)
    if doubt is not None:
        return Verdict("active", f"untested: {doubt[1]}; every target has a known shape", plan, doubt=True)
    return Verdict("active", "", plan)
