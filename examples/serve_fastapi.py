"""A threaded inference server: FastAPI runs plain ``def`` endpoints in a pool of threads.

Some requests call a compiled model, others load one that was saved as a ``GraphModule``, which is a trace. Up to torch
2.13 the first are refused while one of the second runs; on every torch eager modules raise then.

    pip install fastapi httpx uvicorn
    uvicorn --app-dir examples serve_fastapi:app        # serves
    python examples/serve_fastapi.py [--plain]          # sends itself requests from eight threads
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import pickle
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

if missing := [name for name in ("fastapi", "httpx") if importlib.util.find_spec(name) is None]:
    sys.exit(f"this example needs {' and '.join(missing)}: pip install {' '.join(missing)}")

import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from torch import nn

import fxsafe

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
saved = pickle.dumps(torch.fx.symbolic_trace(model))
compiled = torch.compile(model, backend="aot_eager")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    handle = None if app.state.plain else fxsafe.install()
    # Warm before the first request, as requests will call it: threads that miss the cache together all compile.
    predict(0.0)
    yield
    if handle is not None:
        handle.uninstall()


app = FastAPI(lifespan=lifespan)
app.state.plain = False  # uvicorn's command line is not ours


@app.get("/predict")
def predict(value: float) -> list[float]:
    with torch.no_grad():
        return compiled(torch.full((1, 8), value))[0].tolist()


@app.get("/reload")
def reload(value: float) -> list[float]:
    with torch.no_grad():
        return pickle.loads(saved)(torch.full((1, 8), value))[0].tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="without fxsafe")
    app.state.plain = parser.parse_args().plain
    outcomes: collections.Counter[str] = collections.Counter()
    with TestClient(app, raise_server_exceptions=False) as client:
        with torch.no_grad():
            right = model(torch.full((1, 8), 0.5))[0]

        def ask(number: int) -> None:
            for turn in range(20):
                answer = client.get("/predict" if (number + turn) % 2 else "/reload", params={"value": 0.5})
                good = answer.status_code == 200 and torch.allclose(torch.tensor(answer.json()), right, atol=1e-6)
                outcomes["right" if good else f"wrong, status {answer.status_code}"] += 1

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(dict(outcomes))
    return 0 if set(outcomes) == {"right"} else 1


if __name__ == "__main__":
    sys.exit(main())
