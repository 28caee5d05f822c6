"""Opens a fused model in ONNX Runtime with its kernels.

In: the path of `OUT.onnx`, whose library `OUT.so` lies beside it. Out: an ordinary `onnxruntime.InferenceSession`.
The invariant: every kernel that the model names is in the library and runs on this processor. Plain ONNX Runtime would
quietly inline the function body of a node without a kernel; `load` says so instead. A library runs as native code, so
`load` opens it only if it is the one that was written with the model, by the hash that the model records.
"""

from __future__ import annotations  # OrtEpDevice is not in every supported onnxruntime

import ctypes
import hashlib
import shutil
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnxruntime as ort

DOMAIN = "tilefuse"
PROVIDER = "TileFuseExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"
LIBRARY_HASH = "tilefuse.library_sha256"  # metadata of a fused model, written by `optimize`
PROVIDER_MINIMUM = (1, 24)
REGISTRATION_KEY = "tilefuse_registration"  # as in plugin_ep.c
# by default, ONNX Runtime rounds the other operand of what it makes of DequantizeLinear and MatMul to bytes
EXACT_WEIGHTS = "session.qdq_matmulnbits_accuracy_level"
RECORD_ASSIGNMENT = "session.record_ep_graph_assignment_info"  # for get_provider_graph_assignment_info()

_REGISTERING = threading.Lock()  # two threads that load the same library register it once


class LoadError(RuntimeError):
    """The model cannot run with its kernels here; the message says why and what to do."""


def load(
    path: str | Path,
    *,
    provider: bool = False,
    cuda: bool = False,
    threads: int | None = None,
    recorded: bool = False,
) -> ort.InferenceSession:
    """Open the fused model at `path` with the library beside it.

    Args:
        path: `OUT.onnx`, as `tilefuse optimize` wrote it; `OUT.so` must lie in the same folder.
        provider: run the kernels through the execution provider `TileFuseExecutionProvider` instead of as custom ops
            of the CPU provider. Needs ONNX Runtime 1.24.
        cuda: run on an NVIDIA card through ONNX Runtime's CUDA provider, the fused nodes by kernels that
            `tilefuse optimize --target cuda` built. Needs onnxruntime-gpu.
        threads: threads of the session; by default ONNX Runtime's choice, one per core.
        recorded: refuse a model that records no hash of its library, too.

    Raises:
        FileNotFoundError: the model or its library is missing.
        ValueError: `threads` is below 1, or both providers are asked for.
        LoadError: the library is not the one that the model records, lacks a kernel of it, this processor cannot run
            it, or ONNX Runtime is too old or has no CUDA provider.
    """
    model = Path(path).absolute()  # not resolved: a linked model has its library beside the link
    library = model.with_suffix(".so")
    if not model.is_file():
        raise FileNotFoundError(f"{model}: no such model")
    if not library.is_file():
        if not any(node.domain == DOMAIN for node in onnx.load(str(model), load_external_data=False).graph.node):
            raise LoadError(f"{model}: not a fused model, it has no kernels: `tilefuse optimize` makes one of it")
        raise FileNotFoundError(
            f"{library}: the library with the kernels of {model.name} is missing. Run `tilefuse optimize` again, "
            f"or open the model with plain onnxruntime, which runs the function bodies (correct, but unfused)."
        )
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}, expected at least 1")
    if provider and cuda:
        raise ValueError("provider=True is for the processor, cuda=True for a card: ask for one of them")
    options = ort.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
    _check_hash(model, library, required=recorded)
    options.add_session_config_entry(EXACT_WEIGHTS, "0")
    with _loadable(library) as file:
        _check_library(model, library, file)
        if cuda:
            _check_cuda(model, library, file)
        if not provider:
            options.register_custom_ops_library(str(file))
            providers = [CUDA_PROVIDER, "CPUExecutionProvider"] if cuda else ["CPUExecutionProvider"]
            return ort.InferenceSession(str(model), options, providers=providers)
        options.add_session_config_entry(RECORD_ASSIGNMENT, "1")
        options.add_provider_for_devices([_provider_device(library, file)], {})
        return ort.InferenceSession(str(model), options)


@contextmanager
def _loadable(library: Path) -> Generator[Path]:
    """Yield a path under which the dynamic loader finds `library` as it is now.

    The loader goes by path: once a process has loaded a library, its path means that one, even after the file was
    replaced by another. A replaced library is loaded from a passing copy.
    """
    real = library.resolve()
    inode = real.stat().st_ino
    mapped: set[int] = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, _, _, _, inode_text, *path = line.split(maxsplit=5)
        if path and path[0].removesuffix(" (deleted)") == str(real):
            mapped.add(int(inode_text))
    if mapped <= {inode}:
        yield real
        return
    with tempfile.TemporaryDirectory(prefix="tilefuse-") as folder:
        yield Path(shutil.copy(real, folder))


def library_hash(library: Path) -> str:
    """What `LIBRARY_HASH` is for a library. OSError as it comes."""
    with library.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_hash(model: Path, library: Path, *, required: bool) -> None:
    """Raise unless `library` is the one whose hash `model` records; without a record, only if one is required."""
    metadata = onnx.load(str(model), load_external_data=False).metadata_props
    wanted = next((entry.value for entry in metadata if entry.key == LIBRARY_HASH), None)
    if wanted is None and required:
        raise LoadError(f"{model} does not record the hash of its library. Run `tilefuse optimize` again.")
    if wanted is not None and library_hash(library) != wanted:
        raise LoadError(
            f"{library}: its content is not what was written with {model.name}: the hash that the model records is "
            f"another. Run `tilefuse optimize` again, or restore the library."
        )


def _check_library(model: Path, library: Path, file: Path) -> None:
    """Raise unless this processor runs `library` (loaded from `file`) and it has every kernel that `model` names."""
    try:
        loaded = ctypes.CDLL(str(file))
    except OSError as error:
        raise LoadError(f"{library}: cannot be loaded: {error}") from error
    try:
        variant, kernel_name = loaded.TileFuseVariant, loaded.TileFuseKernelName
    except AttributeError as error:
        raise LoadError(f"{library}: not a library of `tilefuse optimize`: {error}") from error
    variant.restype = kernel_name.restype = ctypes.c_char_p
    kernel_name.argtypes = [ctypes.c_int32]
    wanted = {f.name for f in onnx.load(str(model), load_external_data=False).functions if f.domain == DOMAIN}
    if wanted and variant() is None:
        raise LoadError(
            f"{library}: this processor lacks the instructions that the library was built for. Run `tilefuse optimize` "
            f"on this machine, or open {model.name} with plain onnxruntime, which runs the function bodies."
        )
    offered: list[str] = []
    while (name := kernel_name(len(offered))) is not None:
        offered.append(name.decode())
    if missing := sorted(wanted.difference(offered)):
        raise LoadError(
            f"{library}: has no kernel {', '.join(missing)}, which {model.name} names: the two were not written "
            f"together. Run `tilefuse optimize` again."
        )


def _check_cuda(model: Path, library: Path, file: Path) -> None:
    """Raise unless ONNX Runtime has its CUDA provider and `library` (loaded from `file`) kernels for it."""
    loaded = ctypes.CDLL(str(file))
    loaded.TileFuseKernelName.restype = ctypes.c_char_p
    count = 0
    while loaded.TileFuseKernelName(count) is not None:
        count += 1
    if not any(loaded.TileFuseHasCuda(number) for number in range(count)):
        raise LoadError(
            f"{library}: has no kernels for NVIDIA cards, so that ONNX Runtime would copy everything to the processor "
            f"and back. Run `tilefuse optimize --target cuda`, or open {model.name} without cuda=True."
        )
    found = ort.get_available_providers()
    if CUDA_PROVIDER not in found:
        raise LoadError(
            f"cuda=True needs an onnxruntime with {CUDA_PROVIDER}, found {', '.join(found)}: install onnxruntime-gpu "
            f"in the place of onnxruntime."
        )


def _provider_device(library: Path, file: Path) -> ort.OrtEpDevice:
    """Return the CPU device of `library`, registering it (from `file`) unless this process has done so already."""
    version = tuple(int(part) for part in ort.__version__.split(".")[:2])
    if version < PROVIDER_MINIMUM:
        raise LoadError(
            f"provider=True needs onnxruntime {'.'.join(map(str, PROVIDER_MINIMUM))} or newer, found "
            f"{ort.__version__}. Without it the same kernels run as custom ops."
        )
    stat = library.stat()
    registration = f"tilefuse:{library}:{stat.st_ino}:{stat.st_mtime_ns}"
    with _REGISTERING:
        device = _find_device(registration)
        if device is None:
            ort.register_execution_provider_library(registration, str(file))
            device = _find_device(registration)
    if device is None:
        raise LoadError(f"{library}: onnxruntime {ort.__version__} offers no CPU device for {PROVIDER}")
    return device


def _find_device(registration: str) -> ort.OrtEpDevice | None:
    for device in ort.get_ep_devices():
        if device.ep_name == PROVIDER and device.ep_metadata.get(REGISTRATION_KEY) == registration:
            return device
    return None
