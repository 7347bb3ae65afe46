"""One configuration that all ranks agree on, and the /dev/shm that they need."""
