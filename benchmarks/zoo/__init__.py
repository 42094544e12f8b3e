"""Trainings with known answers, healthy and faulty: what alerts are scored on. `python -m benchmarks.zoo`."""
