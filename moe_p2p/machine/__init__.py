"""What this host is: NICs and transports, the GPU driver, compiled kernels, fp8, measurements."""
