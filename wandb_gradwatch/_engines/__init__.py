"""Engines with gradients in memory of their own, DeepSpeed and Megatron-core, as modules that the capture can watch."""
