"""The wire format: `open_inference.proto` and the Python stubs that are generated from it when the project is built.

The stubs (`open_inference_pb2`, `open_inference_pb2_grpc`) are not in version control. `pip install .` and
`pip install -e .` generate them; in a plain checkout `python -m proto.generate` does.
"""

from pathlib import Path

_STUBS = ("open_inference_pb2", "open_inference_pb2_grpc")


def __getattr__(name: str) -> object:
    """Say how to generate the stubs when one is imported that is not there."""
    if name in _STUBS and not Path(__file__).with_name(f"{name}.py").is_file():
        raise ImportError(
            f"proto.{name} has not been generated yet: run `python -m proto.generate` in the project folder "
            "(needs grpcio-tools), or install the project with `pip install .`"
        )
    raise AttributeError(f"module 'proto' has no attribute {name!r}")
