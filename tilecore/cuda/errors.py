"""What the CUDA backend refuses: a message with what was found, what is needed and what to change."""

from collections.abc import Mapping


class CudaError(ValueError):
    """A tile program, a shape or an array that this backend has no kernel for; or a failing call of the driver."""


class NoCandidateError(CudaError):
    """None of a kernel's candidates can be built: `reasons` says why, one each, that of the best one first."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = tuple(reasons.values()) or ("no tile extents suit it",)
        super().__init__("\n".join(f"{choice}: {why}" for choice, why in reasons.items()) or self.reasons[0])
