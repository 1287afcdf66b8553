"""Two threads that call Inductor itself for the first time fail with "Duplicate pattern".

``torch._inductor.compile``, ``standalone_compile`` and ``aoti_compile_and_package`` take no lock; the function that
registers Inductor's patterns is cached, but runs in each thread that comes before the first is through.
"""

import threading
from typing import Any

import torch
from torch._inductor.fx_passes import fuse_attention, post_grad
from torch.fx.experimental.proxy_tensor import make_fx

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish

ADVICE = "hold one lock around every call of torch._inductor.compile, standalone_compile and aoti_compile_and_package"
inside, both, through = threading.Event(), threading.Event(), threading.Event()
# Called while the patterns are registered, the second since torch 2.7.
places: list[tuple[Any, str]] = [(fuse_attention, "_get_sfdp_patterns"), (post_grad, "register_replacement")]
there = [(owner, name) for owner, name in places if hasattr(owner, name)]
if not there:
    cannot("this torch registers its patterns in another way")
owner, name = there[-1]
original: Any = getattr(owner, name)


def registering(*args: Any, **kwargs: Any) -> Any:
    if inside.is_set():
        both.set()
        through.wait(WAIT)
    else:
        inside.set()
        # Where compiles exclude one another the second waits for the first: do not wait for it for long.
        both.wait(3)
    return original(*args, **kwargs)


def compiling(graph: Any) -> Task:
    return Task(lambda: torch._inductor.compile(graph, [x])(x))


setattr(owner, name, registering)
x = torch.arange(4.0).reshape(2, 2)
graphs = [make_fx(lambda x: (x @ x,))(x) for _ in range(2)]  # needs no kernel, and so no C++ compiler
first = compiling(graphs[0])
if not inside.wait(WAIT):
    cannot(f"no patterns were registered: {first.result(0)}")
second = compiling(graphs[1])
got = [first.result()]
through.set()
got.append(second.result())
wrong = [g for g in got if isinstance(g, str) or not torch.equal(g[0], x @ x)]
finish(bool(wrong) or both.is_set(), wrong=wrong, registered_at_once=both.is_set())
