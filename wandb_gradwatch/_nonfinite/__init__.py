"""Find the first operation that makes a NaN or Inf, by observing every operation of a forward and backward."""
