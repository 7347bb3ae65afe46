"""The GPU side of a communicator: memory, kernels by NVRTC, launch shapes, the driver."""
