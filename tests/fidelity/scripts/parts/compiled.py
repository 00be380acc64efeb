"""torch.compile, without a compiler."""

import torch
import witness

from parts.model import make, steps

BACKENDS = ["eager"]


def run(name):
    for backend in BACKENDS:
        model = make()
        compiled = torch.compile(model, backend=backend)
        witness.generators(f"{name}: {backend}", *witness.ALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        steps(compiled, optimizer, (torch.rand(4, 8) for _ in range(5)), f"{name}: {backend}")
        witness.weights(model, f"{name}: {backend}")
