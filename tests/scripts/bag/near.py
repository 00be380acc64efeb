"""Next door to the module that is run."""

from __future__ import annotations

from dump import main as main
