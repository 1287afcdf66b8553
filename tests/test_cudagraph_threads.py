"""What can be tested without a device; benchmarks/cudagraph_threads.py does the rest."""

from __future__ import annotations

import pytest
import torch._inductor.cudagraph_trees as trees
from locks_support import plan_of
from support import Task, program

FIXED = hasattr(trees, "_initialize_tls")
CONTAINERS = """
import threading, torch, sys
import torch._inductor.cudagraph_trees as trees
sys.path.insert(0, "tests")
from locks_support import applied
found = []
def look():
    try:
        first = trees.get_obj(trees.local, "tree_manager_containers")
        found.append(first is trees.get_obj(trees.local, "tree_manager_containers") and first == {})
        found.append(torch._C._is_key_in_tls("tree_manager_locks"))
    except AssertionError:
        found.append("asserts")
def run():
    thread = threading.Thread(target=look); thread.start(); thread.join()
"""


@pytest.mark.skipif(not FIXED, reason="a fault of torch up to 2.12")
def test_upstream_has_fixed_it() -> None:
    assert "2.13" in plan_of("cudagraph-threads").reason
    assert Task(lambda: trees.get_obj(trees.local, "tree_manager_containers")).result() == {}


@pytest.mark.skipif(FIXED, reason="fixed in torch 2.13")
def test_a_thread_that_python_started_gets_managers_of_its_own() -> None:
    patched = 'with applied("cudagraph-threads"):\n    run()\n'
    main = 'assert trees.get_obj(trees.local, "tree_manager_locks") is trees.local.tree_manager_locks\n'
    assert program(CONTAINERS + "run(); print(found)").strip() == "['asserts']"
    assert program(CONTAINERS + patched + main + "print(found)").strip() == "[True, True]"
