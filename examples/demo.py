"""One fault, three ways: plain torch, and fxsafe with each of its fixes.

A thread is inside ``torch.fx.symbolic_trace`` (up to 2.12 any cold compile does as well) while the main thread calls a
function that was compiled long before. Up to torch 2.13 the call is refused, or silently runs eager.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

PROGRAM = """
import sys, threading, torch, torch.fx
if len(sys.argv) > 1:
    import fxsafe
    fxsafe.install(fix=sys.argv[1])

compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
x = torch.ones(3)
expected = compiled(x)                         # warm: nothing is left to compile

inside, let_out = threading.Event(), threading.Event()
class Model(torch.nn.Module):
    def forward(self, y):
        inside.set()
        let_out.wait(30)
        return y * 2

tracing = threading.Thread(target=lambda: torch.fx.symbolic_trace(Model()))
tracing.start()
inside.wait(30)
try:
    print("the warm call", "gives the right result" if torch.equal(compiled(x), expected) else "GIVES A WRONG RESULT")
except RuntimeError as error:
    print("the warm call FAILS:", str(error).splitlines()[0])
finally:
    let_out.set()
    tracing.join()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    import torch

    print(f"torch {torch.__version__}: a warm compiled call while another thread traces")
    failed = 0
    for fix in (None, "thread-local", "always-false"):
        command = [sys.executable, "-c", PROGRAM, *([fix] if fix else [])]
        done = subprocess.run(command, capture_output=True, text=True)
        print(f"  {'fxsafe, ' + repr(fix) if fix else 'plain torch':24s} {done.stdout.strip() or done.stderr.strip()}")
        failed += fix is not None and "right result" not in done.stdout
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
