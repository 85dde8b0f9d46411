"""One file an operation: its eager reference, its kernels and their dispatch."""
