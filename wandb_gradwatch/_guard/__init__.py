"""Skips steps whose gradients are unhealthy, as all ranks decide together."""
