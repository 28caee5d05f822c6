"""Generates the Python stubs: `open_inference.proto` in, `open_inference_pb2` (with types) and `_pb2_grpc` out.

Invariant: the generated messages live in a descriptor pool of their own. Every Open Inference client
(tritonclient, the KServe SDK) registers messages of the same full names, `inference.ModelInferRequest` and so on, in
protobuf's default pool, and that pool refuses a second file that defines them. With our own pool, all of them work
side by side in one process.
"""

import sys
from pathlib import Path

from grpc_tools import protoc

_SOURCE = "proto/open_inference.proto"
_DEFAULT_POOL = "_descriptor_pool.Default().AddSerializedFile("
_OWN_POOL = "_descriptor_pool.DescriptorPool().AddSerializedFile("


class GenerationError(Exception):
    """protoc failed, or wrote something that this module does not know how to move into its own descriptor pool."""


def generate(root: Path) -> None:
    """Write the stubs into `root/proto`, where `root` is the project folder.

    Raises:
        GenerationError: with the reason; protoc's own messages are on stderr.
    """
    status = protoc.main(
        ["protoc", f"-I{root}", f"--python_out={root}", f"--pyi_out={root}", f"--grpc_python_out={root}", _SOURCE]
    )
    if status != 0:
        raise GenerationError(f"protoc could not compile {root / _SOURCE} (exit status {status})")
    messages = root / "proto" / "open_inference_pb2.py"
    text = messages.read_text(encoding="utf-8")
    if text.count(_DEFAULT_POOL) != 1:
        raise GenerationError(
            f"{messages} does not register itself in the default descriptor pool exactly once; "
            "this version of grpcio-tools generates code of another form, and proto/generate.py must learn it"
        )
    messages.write_text(text.replace(_DEFAULT_POOL, _OWN_POOL), encoding="utf-8")


if __name__ == "__main__":
    try:
        generate(Path(__file__).resolve().parent.parent)
    except GenerationError as error:
        sys.exit(f"error: {error}")
