"""ONNX Runtime's exceptions, sorted by what they mean to a server. They share no base class but Exception."""

from onnxruntime.capi.onnxruntime_pybind11_state import (  # pyright: ignore[reportMissingImports]
    Fail,
    InvalidArgument,
    InvalidGraph,
    InvalidProtobuf,
    NoSuchFile,
    NotImplemented,
    RuntimeException,
)

LOAD_ERRORS: tuple[type[Exception], ...] = (
    Fail,
    InvalidArgument,
    InvalidGraph,
    InvalidProtobuf,
    NoSuchFile,
    NotImplemented,
    RuntimeException,
)
"""A model or its library cannot be loaded."""

RUN_ERRORS: tuple[type[Exception], ...] = (Fail, InvalidArgument, RuntimeException)
"""A session could not finish a run."""
