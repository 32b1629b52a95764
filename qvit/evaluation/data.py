"""Where the pictures come from."""

from __future__ import annotations

from qvit.evaluation.demo import demo_normalise, demo_split

__all__ = ["demo_normalise", "demo_split"]
