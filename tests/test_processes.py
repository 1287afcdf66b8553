"""Child processes: spawned ones start without fxsafe, and DataLoader workers are told to install it."""

from __future__ import annotations

import sys

import pytest
from support import FLAG_IS_GLOBAL, python

SCRIPT = """
import multiprocessing, sys, warnings
warnings.simplefilter("ignore")
import torch, fxsafe
from torch.utils.data import DataLoader, Dataset

def status(_=None):
    return fxsafe.is_installed() and fxsafe.info()[0]["status"]

def install(_=None):
    fxsafe.install()

class Data(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, i):
        torch.fx.symbolic_trace(torch.nn.ReLU())
        return {"active": 1, "not-needed": 2, False: 0}[status()]

if __name__ == "__main__":
    fxsafe.install()
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(1) as pool:
        print(pool.map(status, [0]))
    with context.Pool(1, initializer=install) as pool:
        print(pool.map(status, [0]))
    for init in (None, install):
        loader = DataLoader(Data(), batch_size=2, num_workers=1, worker_init_fn=init, multiprocessing_context=context)
        print([batch.tolist() for batch in loader])
    fxsafe.uninstall()
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_workers(tmp_path, method):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = python(str(script), method)
    assert done.returncode == 0, done.stderr
    here = "active" if FLAG_IS_GLOBAL else "not-needed"
    number = 1 if FLAG_IS_GLOBAL else 2
    inherited, number_inherited = (here, number) if method == "fork" else (False, 0)
    assert done.stdout.splitlines() == [
        f"[{inherited!r}]",
        f"[{here!r}]",
        f"[[{number_inherited}, {number_inherited}]]",
        f"[[{number}, {number}]]",
    ], (sys.executable, done.stdout)
