"""Stateless foundations of capture and guard: torch's autograd engine, ranks and shards, the error boundary."""
