"""Code that imported is_fx_tracing by name, or reads the flag itself, sees another thread's trace.

Libraries read torch.fx._symbolic_trace._is_fx_tracing_flag directly. Every way to ask must say no in a thread that does
not trace, and yes in the one that does.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch.fx._symbolic_trace as symbolic
from torch.fx._symbolic_trace import is_fx_tracing

from fxsafe.doctor.faults._kit import WAIT, Task, cannot, finish, trace

ADVICE = "upgrade to torch 2.14, or ask whether a value is a torch.fx.Proxy instead of asking for the flag"
imported: dict[str, Callable[[], Any]] = {"is_fx_tracing": is_fx_tracing}
if hasattr(symbolic, "is_fx_symbolic_tracing"):
    imported["is_fx_symbolic_tracing"] = symbolic.is_fx_symbolic_tracing


def ask() -> dict[str, bool]:
    answers = {name: bool(ask_it()) for name, ask_it in imported.items()}
    if hasattr(symbolic, "_is_fx_tracing_flag"):  # gone in 2.14
        answers["_is_fx_tracing_flag"] = bool(symbolic._is_fx_tracing_flag)
    return answers


inside, leave = threading.Event(), threading.Event()
own: list[dict[str, bool]] = []


def traced(x: Any) -> Any:
    own.append(ask())
    inside.set()
    leave.wait(WAIT)
    own.append(ask())
    return x + 1


task = Task(lambda: trace(traced).code)
if not inside.wait(WAIT):
    cannot(f"the trace did not start: {task.result(0)}")
other = ask()
leave.set()
task.result()
after = ask()
# Not is_fx_symbolic_tracing: whoever wants compiled calls never refused has it say False to everybody.
told = [value for answers in own for name, value in answers.items() if name != "is_fx_symbolic_tracing"]
wrong = any(other.values()) or any(after.values()) or not all(told)
finish(wrong or len(own) != 2, tracing_thread=own, other_thread=other, after=after)
