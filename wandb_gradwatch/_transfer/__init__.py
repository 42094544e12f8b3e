"""Sample buffers on the devices, and asynchronous copies of samples to the host."""
