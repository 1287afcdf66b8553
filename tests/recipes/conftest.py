"""The recipes that need libraries are tested where these are: ``make test-recipes`` installs them."""

from __future__ import annotations

import importlib.util

_NEEDED = ("fastapi", "httpx", "transformers", "accelerate")

collect_ignore_glob = ["test_*.py"] if any(importlib.util.find_spec(name) is None for name in _NEEDED) else []
