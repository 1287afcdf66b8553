"""The recipes that need libraries are tested where these are: ``make test-recipes`` installs them."""

from __future__ import annotations

import importlib.util

_NEEDED = {
    "test_recipes_with_libraries.py": ("fastapi", "httpx", "transformers", "accelerate"),
    "test_lightning_threads.py": ("lightning",),
    "test_ray_actor_threads.py": ("ray",),
}

collect_ignore = [
    name for name, needed in _NEEDED.items() if any(importlib.util.find_spec(library) is None for library in needed)
]
