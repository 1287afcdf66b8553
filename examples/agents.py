"""Agents that call models in parallel: each loads its own, and loading one that was saved as a ``GraphModule`` traces.

Calculators of interatomic potentials (MACE on e3nn) load modules of generated code in this way, and agents that call
them as tools do it in a thread for each call: "module is not installed as a submodule", or another model's numbers.

    python examples/agents.py [--plain]
"""

from __future__ import annotations

import argparse
import collections
import io
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import fxsafe


class Potential(nn.Module):
    """Energy of a configuration of atoms, from distances."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 1))
        self.power = power

    def forward(self, distances):  # not annotated: a GraphModule does not pickle annotations that are strings
        return self.layers(distances**self.power).sum()


def save(power: int) -> bytes:
    torch.manual_seed(power)
    stream = io.BytesIO()
    torch.save(torch.fx.symbolic_trace(Potential(power)), stream)
    return stream.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="without fxsafe")
    plain = parser.parse_args().plain
    handle = None if plain else fxsafe.install()
    files = {power: save(power) for power in (1, 2, 3)}
    distances = torch.linspace(0.5, 2.0, 12)[:, None]

    def tool(power: int) -> tuple[float, float]:
        """Energy and the largest force."""
        model = torch.load(io.BytesIO(files[power]), weights_only=False)
        x = distances.clone().requires_grad_()
        energy = model(x)
        (force,) = torch.autograd.grad(energy, x)
        return energy.item(), force.abs().max().item()

    right = {power: tool(power) for power in files}
    outcomes: collections.Counter[str] = collections.Counter()

    def agent(number: int) -> None:
        for turn in range(15):
            power = 1 + (number + turn) % 3
            try:
                outcomes["right" if tool(power) == right[power] else "another model's numbers"] += 1
            except Exception as error:
                outcomes[f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"] += 1

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(agent, range(6)))
    if handle is not None:
        handle.uninstall()
    print(dict(outcomes))
    return 0 if set(outcomes) == {"right"} else 1


if __name__ == "__main__":
    sys.exit(main())
