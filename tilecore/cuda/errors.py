"""What the CUDA backend refuses: a message with what was found, what is needed and what to change."""


class CudaError(ValueError):
    """A tile program, a shape or an array that this backend has no kernel for; or a failing call of the driver."""
