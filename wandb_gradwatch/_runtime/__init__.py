"""What capture and guard both stand on: torch's engine, ranks and shards, the error boundary. No training's state."""
