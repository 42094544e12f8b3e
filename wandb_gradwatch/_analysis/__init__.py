"""What the judgement and the rules of metrics share: baselines, layers, depth, forecasts, texts of alerts."""
