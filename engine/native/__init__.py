"""The native step: C++ kernels, compiled on the machine they run on, and their packed weights."""
