"""Instructions without and with fxsafe, counted: ``python benchmarks/instructions.py [WHAT ...]``.

Wall time cannot tell 50 ns in a call of 14 us, or 1 % of a trace, from where code happens to lie in memory. Valgrind
(callgrind) counts the instructions, in one process, in turns: without, with, without, with. What the interpreter
executes more is fxsafe's; look-ups of attributes vary with which types share a line of CPython's type cache, from turn
to turn too.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TURNS = 6
WHAT = {  # how often a turn calls it
    "warm_call": 1000,
    "symbolic_trace": 5,
    "make_fx": 1,
}
# The profile is written, and the count begins again, at each getppid() of the process.
PROGRAM = """
import contextlib, gc, logging, os, torch, fxsafe
logging.disable(logging.WARNING)
torch.set_num_threads(1)
from torch.fx.experimental.proxy_tensor import make_fx
from models import Transformer
compiled, x = torch.compile(lambda x: x + 1, backend="eager"), torch.ones(2)
model, y = Transformer(), torch.ones(1, 8, 64)
what = {{
    "warm_call": lambda: compiled(x),
    "symbolic_trace": lambda: torch.fx.symbolic_trace(model),
    "make_fx": lambda: make_fx(model)(y),
}}[{what!r}]

def call(times):
    for _ in range(times):
        what()

gc.disable()
for turn in range({turns}):
    with fxsafe.install({fix!r}) if turn % 2 else contextlib.nullcontext():
        call({calls} // 2 + 1)
        os.getppid()
        call({calls})
        os.getppid()
os._exit(0)
"""
KINDS = {
    "interpreter": re.compile(r"_PyEval_EvalFrame"),
    "look-ups": re.compile(r"_PyType_Lookup|find_name_in_mro|_Py_dict_lookup|unicodekeys_lookup|GetItem_KnownHash"),
}


def counts(profile: Path, calls: int) -> dict[str, float]:
    """Instructions per call, by kind."""
    shown = subprocess.run(
        ["callgrind_annotate", "--threshold=100", "--auto=no", str(profile)], check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, float] = defaultdict(float)
    for number, name in re.findall(r"^\s*([\d,]+) \([^)]*\)\s+(.+)$", shown, re.MULTILINE):
        count = int(number.replace(",", "")) / calls
        if "PROGRAM TOTALS" in name:
            found["all"] += count
        for kind, names in KINDS.items():
            if names.search(name):
                found[kind] += count
    return found


def measure(what: str, fix: str) -> None:
    calls = WHAT[what]
    program = PROGRAM.format(what=what, turns=TURNS, calls=calls, fix=fix)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                *("valgrind", "--tool=callgrind", "--dump-before=getppid", f"--callgrind-out-file={folder}/profile"),
                *(sys.executable, "-c", program),
            ],
            check=True,
            cwd=ROOT,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"},
            stderr=subprocess.DEVNULL,
        )
        # profile.1 is what came before the first turn, and every other one after it what came between two.
        turns = [counts(Path(f"{folder}/profile.{2 * turn + 2}"), calls) for turn in range(TURNS)]
    print(f"{what + ', ' + str(calls) + ' a turn':24}", *(f"{n:>13}" for n in ["without", "with"] * (TURNS // 2)))
    for kind in ("all", *KINDS):
        values = [turn[kind] for turn in turns]
        without = statistics.median(values[::2])
        more = statistics.median(values[1::2]) - without
        print(f"{kind:24}", *(f"{value:13,.0f}" for value in values), f"{more:+12,.0f} {more / without:+7.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=[], metavar="WHAT", help=f"{', '.join(WHAT)}; all by default")
    parser.add_argument("--fix", default="thread-local", help="thread-local (default) or always-false")
    options = parser.parse_args()
    if not (shutil.which("valgrind") and shutil.which("callgrind_annotate")):
        sys.exit("this needs valgrind and its callgrind_annotate on the PATH")
    if unknown := set(options.what) - WHAT.keys():
        sys.exit(f"{', '.join(unknown)}: not one of {', '.join(WHAT)}")
    for what in options.what or WHAT:
        measure(what, options.fix)


if __name__ == "__main__":
    main()
