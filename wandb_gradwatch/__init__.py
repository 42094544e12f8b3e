"""One line that tells you, in Weights & Biases, what the gradients of every layer do."""

__version__ = "0.1.0"
