"""Symptom patterns: each function returns one probable cause that the evidence shows, or None."""
