"""The public door to ``create_model``."""

from __future__ import annotations

from verl.models.factory import create_model

__all__ = ["create_model"]
