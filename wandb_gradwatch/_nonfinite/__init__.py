"""The first operation that made a NaN or an Inf: one forward and backward looked at, operation by operation."""
