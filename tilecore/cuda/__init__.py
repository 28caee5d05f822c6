"""The CUDA backend: the same tile programs as CUDA C++ for Hopper (sm_90a), built by NVRTC, launched by the driver."""
