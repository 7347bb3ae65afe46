"""What a communicator needs on a GPU: memory, kernels by NVRTC, launch shapes, the driver."""
