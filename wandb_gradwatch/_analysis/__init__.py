"""Analyses of snapshots that both rules and diagnosis use: baselines, layers, depth, forecasts, texts of alerts."""
