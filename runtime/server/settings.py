"""How one model is to be served: frozen `Settings`, and their reading from `config.pbtxt` and `tilefuse.toml`.

In: the two optional files of a model's folder. Out: `Settings`, or a `SettingsError` that names file, place and key.
Invariant: a key that this server does not act on is refused (ours) or named in `warnings` (Triton's), never ignored.
"""

from dataclasses import dataclass
from pathlib import Path

from runtime.wire import Datatype

MODEL_FILE = "model.onnx"


class SettingsError(Exception):
    """A configuration file cannot be used; the message names the file and what to change."""


@dataclass(frozen=True)
class DeclaredTensor:
    """An input or output as config.pbtxt declares it; without the batch dim when `max_batch_size` is above 0."""

    name: str
    datatype: Datatype
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Latest:
    """Serve the `count` highest versions."""

    count: int


@dataclass(frozen=True)
class Specific:
    """Serve exactly these versions."""

    versions: tuple[int, ...]


@dataclass(frozen=True)
class Every:
    """Serve all versions."""


VersionPolicy = Latest | Specific | Every


@dataclass(frozen=True)
class QueuePolicy:
    """What becomes of requests that wait; times in seconds."""

    timeout: float | None = None
    """How long a request may wait; None: as long as its client does."""
    delay: bool = False
    """After the timeout: keep waiting behind all of its level that are in time, rather than being refused."""
    override: bool = False
    """A request may shorten its own timeout."""
    largest: int = 0
    """The most requests of one level that may wait; 0: no limit of its own."""


@dataclass(frozen=True)
class Batching:
    """Requests of equal shapes run together, at most `max_batch_size` rows; nothing waits while an instance is idle."""

    preferred: tuple[int, ...] = ()
    """Batches of these many rows are formed where there are enough rows."""
    passed_over: float = 0.0
    """Seconds that the oldest request may be passed over for one of other shapes that fills a preferred batch."""
    priorities: int = 0
    """Priority levels, 1 the highest; 0: there are none."""
    default_priority: int = 0
    policy: QueuePolicy = QueuePolicy()
    policies: tuple[tuple[int, QueuePolicy], ...] = ()
    """Policies of single priority levels."""


@dataclass(frozen=True)
class Padding:
    """Extents of one symbolic dim are rounded up to a bucket, so that requests of other lengths can run together."""

    dim: str
    """The symbol, as the model's inputs name it."""
    buckets: tuple[int, ...]
    """Extents, rising; longer requests are refused."""
    mask: str
    """The input that says which positions count: it is padded with 0."""
    values: tuple[tuple[str, int | float], ...] = ()
    """What other inputs are padded with, where that is not 0."""
    unpad: bool = False
    """Fuse the model so that what it computes for each token by itself is not computed for padding."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How a decoder with a cache answers streams, token after token."""

    enabled: bool = True
    input_ids: str = "input_ids"
    """The model's names of its tensors."""
    attention_mask: str = "attention_mask"
    position_ids: str = "position_ids"
    logits: str = "logits"
    streams: int = 32
    """The most streams that are answered at the same time."""
    waiting: int = 256
    """The most streams that may wait for their turn."""
    cache_bytes: int = 2**30
    """What the caches of all streams may take."""
    context: int = 2048
    """The most tokens of one stream, those of its prompt and those that were generated."""
    max_tokens: int = 256
    """How many tokens are generated where the request does not say."""
    prefill: int = 64
    """Tokens of prompts that are read between two steps of the streams that are being answered."""
    idle_seconds: float = 60.0
    """How long the cache of a sequence is kept between its requests."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer, unless a request ignores them."""


@dataclass(frozen=True)
class WarmupInput:
    """One input of a warm-up run, with all of its dims."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    content: str
    """zero, random, or the path of a file of raw data in the model's folder `warmup`."""


@dataclass(frozen=True)
class Warmup:
    """A run before the model is ready."""

    name: str
    inputs: tuple[WarmupInput, ...]
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to serve one model; the defaults are those of a folder without configuration files."""

    max_batch_size: int = 0
    """Above 0: the first dim of every tensor is the batch, and a request has at most this many rows."""
    version_policy: VersionPolicy = Latest(1)
    inputs: tuple[DeclaredTensor, ...] = ()
    outputs: tuple[DeclaredTensor, ...] = ()
    filename: str = MODEL_FILE
    """The model's file in the folder of a version."""
    optimize: bool = True
    """Fuse a plain model when it is loaded."""
    optimize_first: bool = False
    """Fuse a plain model before it is served, rather than in the background while it is served unfused."""
    threads: int | None = None
    """Threads of the session; None leaves it to the server's own setting."""
    provider: bool = False
    """Run fused nodes through the plugin execution provider instead of custom ops."""
    instances: int | None = None
    """Runs at the same time; None: one where requests are batched, else as many as there are cores, at least 4."""
    batching: Batching | None = None
    padding: Padding | None = None
    generation: Generation | None = None
    """None: with the defaults, if the model is a decoder."""
    warmups: tuple[Warmup, ...] = ()
    auto_warmup: bool = True
    """Run each batch size and bucket once before the model is ready, if `warmups` names no runs."""
    warnings: tuple[str, ...] = ()
    """What the files ask for and this server does not do."""

    @property
    def unpad(self) -> str | None:
        """The mask by which a model is to leave out padding."""
        return self.padding.mask if self.padding is not None and self.padding.unpad else None


def require_one_of(path: Path, key: str, value: str, accepted: tuple[str, ...]) -> None:
    """Raise a SettingsError unless `value` is empty or accepted."""
    if value and value not in accepted:
        wanted = " or ".join(map(repr, accepted))
        raise SettingsError(f"{path}: {key} is {value!r}, but only {wanted} can be served here")
