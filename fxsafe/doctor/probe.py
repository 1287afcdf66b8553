"""Says what fxsafe does on the installed torch once everything that its patches wait for is imported.

Run as ``python -m fxsafe.doctor.probe FIX``; prints ``RESULT {json}`` like a fault program. Status 2, with "why":
fxsafe cannot be installed, or torch cannot be imported.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import warnings
from typing import Any, cast

import fxsafe
from fxsafe import Fix, FxsafeError
from fxsafe.patches import CATALOGUE


def probe(fix: Fix) -> dict[str, Any]:
    """Install, import, and report.

    Returns:
        ``{"bug": False, "torch": version, "patches": fxsafe.info(), "warnings": [text, ...]}``

    Raises:
        FxsafeError: the message is for the user.
    """
    fxsafe.install(fix)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fxsafe.FxsafeWarning)
        try:
            import torch
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise FxsafeError(f"torch cannot be imported: {error}") from error
            raise FxsafeError(f"torch is not installed for {sys.executable}") from error
        except (ImportError, OSError) as error:
            raise FxsafeError(f"torch cannot be imported: {error}") from error
        for name in dict.fromkeys(module for patch in CATALOGUE for module in patch.modules):
            # Other libraries than torch may be missing, of another release, or broken.
            with contextlib.suppress(ImportError if name.partition(".")[0] == "torch" else Exception):
                importlib.import_module(name)
    said = [str(warning.message) for warning in caught if issubclass(warning.category, fxsafe.FxsafeWarning)]
    return {"bug": False, "torch": torch.__version__, "patches": fxsafe.info(), "warnings": said}


def main() -> int:
    try:
        record = probe(cast("Fix", sys.argv[1]))  # install() looks whether it is one
    except FxsafeError as error:
        print("RESULT " + json.dumps({"bug": None, "why": str(error)}))
        return 2
    print("RESULT " + json.dumps(record, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
