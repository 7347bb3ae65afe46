"""The GPU side of a communicator: memory, kernels, launch shapes."""
