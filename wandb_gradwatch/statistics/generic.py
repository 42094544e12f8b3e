"""Statistics in plain torch on any device."""

from .reference import measure, sum_sq

__all__ = ["measure", "sum_sq"]
