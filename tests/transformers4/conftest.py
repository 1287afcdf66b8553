"""Tested where transformers has ``HFTracer``: ``make test-transformers4`` installs it."""

from __future__ import annotations

import importlib.metadata

try:
    _old = importlib.metadata.version("transformers").startswith("4.")
except importlib.metadata.PackageNotFoundError:
    _old = False

collect_ignore = [] if _old else ["test_hf_tracer.py"]
