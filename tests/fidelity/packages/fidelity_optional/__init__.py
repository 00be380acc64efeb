"""An optional dependency of fidelity_looks."""
