"""What is installed for which hardware, read from files instead of importing it."""

from __future__ import annotations

import os
from typing import NamedTuple


class Build(NamedTuple):
    """What the installed torch was built for; "" where it was not (or where there is no torch)."""

    cuda: str = ""
    hip: str = ""
    xpu: str = ""


def torch_build(folder: str | None = None) -> Build:
    """What torch was built for, read from its version.py without importing it."""
    if folder is None:
        import importlib.util

        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return Build()
        folder = os.path.dirname(spec.origin)
    import ast

    words: dict[str, str] = {}
    try:
        with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return Build()
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            words[target.id] = value.value if isinstance(value.value, str) else ""
    return Build(words.get("cuda", ""), words.get("hip", ""), words.get("xpu", ""))


def installed(distribution: str) -> str:
    """The version of an installed distribution, "" where it is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
