"""Statistics on the CPU."""

from .reference import measure, sum_sq

__all__ = ["measure", "sum_sq"]
