"""Recognises a decoder with a cache by its inputs and outputs.

In: the tensors of a model. Out: a `Decoder`, which says what each of them is for, or a `NotADecoderError` with the
reason. Invariant: every input of the model has a part; that the parts are right is checked by running it, see `probe`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.server.settings import Generation
from runtime.wire import Datatype

Dim = int | str | None
_PARTS = re.compile(r"\d+|[a-z]+")
_SIDES = frozenset({"past", "present", "keys", "values", "cache", "in", "out"})
"""Words that tell the two sides of a cache apart, or say that it is one."""
_WHOLE = {"INT64", "INT32"}
_REAL = {"FP16", "BF16", "FP32", "FP64"}
MERGED = "use_cache_branch"


class NotADecoderError(Exception):
    """A model does not generate; the message says why. `likely`: it has caches, so somebody may have expected it to."""

    def __init__(self, reason: str, *, likely: bool) -> None:
        super().__init__(reason)
        self.likely = likely


class Port(Protocol):
    """An input or output of a model."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def datatype(self) -> Datatype: ...  # noqa: D102
    @property
    def shape(self) -> tuple[Dim, ...]: ...  # noqa: D102


@dataclass(frozen=True)
class Cache:
    """One tensor that a run reads as `past` and writes, longer by the new positions, as `present`."""

    past: str
    present: str
    datatype: Datatype
    shape: tuple[int, ...]
    """Extents; those of the batch, the first, and of the positions are 0."""
    axis: int
    """The dim of the positions."""

    def shape_for(self, rows: int, extent: int) -> tuple[int, ...]:
        """Its shape for so many rows and positions."""
        return tuple(rows if at == 0 else extent if at == self.axis else fixed for at, fixed in enumerate(self.shape))

    @property
    def token_bytes(self) -> int:
        """Bytes of one position of one row."""
        count = self.datatype.dtype.itemsize
        for extent in self.shape_for(1, 1):
            count *= extent
        return count


@dataclass(frozen=True)
class Decoder:
    """What each input and output of a model is for."""

    ids: Port
    mask: Port | None
    positions: Port | None
    logits: Port
    caches: tuple[Cache, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes that one position of one stream takes in all caches."""
        return sum(cache.token_bytes for cache in self.caches)

    @property
    def most_new(self) -> int | None:
        """The only number of new tokens that the model takes; None: any."""
        extent = self.ids.shape[1]
        return extent if isinstance(extent, int) else None

    @property
    def one_row(self) -> bool:
        """The model takes one row at a time."""
        return self.ids.shape[0] == 1


def recognise(inputs: Sequence[Port], outputs: Sequence[Port], names: Generation) -> Decoder:
    """The decoder that these tensors belong to.

    Raises:
        NotADecoderError: it is none, or one that cannot be served token by token.
    """
    plain = {names.input_ids, names.attention_mask, names.position_ids}
    pasts = [port for port in inputs if port.name not in plain and _growing_axis(port) is not None]
    presents = [port for port in outputs if port.name != names.logits and len(port.shape) > 2]
    likely = bool(pasts and presents)

    def refuse(reason: str) -> NotADecoderError:
        return NotADecoderError(reason, likely=likely)

    by_name = {port.name: port for port in inputs}
    if MERGED in by_name:
        raise refuse(
            f"it is a merged decoder with {MERGED!r}, whose branches take other caches: export a decoder whose one "
            "graph takes an empty cache, too"
        )
    if not pasts or not presents:
        raise refuse("it has no caches: inputs [batch, …, past, …] and outputs that continue them")
    ids = _plain_input(by_name.get(names.input_ids), names.input_ids, refuse)
    if ids is None:
        raise refuse(f"it has no input {names.input_ids!r}")
    mask = _plain_input(by_name.get(names.attention_mask), names.attention_mask, refuse)
    positions = _plain_input(by_name.get(names.position_ids), names.position_ids, refuse)
    if ids.shape[0] != 1 and isinstance(ids.shape[0], int):
        raise refuse(f"input {ids.name!r} has a fixed batch of {ids.shape[0]}, but it must be free, or 1")
    if strange := by_name.keys() - plain - {port.name for port in pasts}:
        raise refuse(f"inputs {', '.join(sorted(strange))} have no part in generation")
    logits = next((port for port in outputs if port.name == names.logits), None)
    if logits is None or len(logits.shape) != 3 or logits.datatype.wire not in _REAL:
        raise refuse(f"it has no output {names.logits!r} of real numbers [batch, new, vocabulary]")
    return Decoder(ids, mask, positions, logits, _pair(pasts, presents, refuse))


class _Refuse(Protocol):
    def __call__(self, reason: str) -> NotADecoderError: ...


def _plain_input(port: Port | None, name: str, refuse: _Refuse) -> Port | None:
    if port is not None and (port.datatype.wire not in _WHOLE or len(port.shape) != 2):
        raise refuse(f"input {name!r} is {port.datatype.wire} {list(port.shape)}, but it must be INT64 [batch, tokens]")
    return port


def _growing_axis(port: Port) -> int | None:
    """The one free dim besides the batch, if that is what the port has."""
    if port.datatype.wire not in _REAL or len(port.shape) < 3:
        return None
    if isinstance(port.shape[0], int) and port.shape[0] != 1:
        return None
    free = [axis for axis, extent in enumerate(port.shape) if axis > 0 and not isinstance(extent, int)]
    return free[0] if len(free) == 1 else None


def _pair(pasts: Sequence[Port], presents: Sequence[Port], refuse: _Refuse) -> tuple[Cache, ...]:
    """Each past with the present that continues it: by the layer and the part in their names, else by their order."""
    by_key = {_key(port.name): port for port in presents}
    if len(by_key) == len(presents) and by_key.keys() >= {_key(port.name) for port in pasts}:
        partners = [by_key[_key(port.name)] for port in pasts]
    else:
        partners = list(presents)
    if len({port.name for port in partners}) != len(pasts) or len(partners) != len(pasts):
        raise refuse(
            f"its {len(pasts)} caches {', '.join(port.name for port in pasts[:4])}… cannot be paired with the "
            f"{len(presents)} outputs {', '.join(port.name for port in presents[:4])}…"
        )
    caches: list[Cache] = []
    for past, present in zip(pasts, partners, strict=True):
        axis = _growing_axis(past)
        assert axis is not None
        fixed = tuple(extent if isinstance(extent, int) and at else 0 for at, extent in enumerate(past.shape))
        fits = len(past.shape) == len(present.shape) and all(
            not isinstance(extent, int) or not wanted or extent == wanted
            for extent, wanted in zip(present.shape, fixed, strict=True)
        )
        if past.datatype is not present.datatype or not fits:
            raise refuse(
                f"output {present.name!r} {list(present.shape)} does not continue {past.name!r} {list(past.shape)}"
            )
        caches.append(Cache(past.name, present.name, past.datatype, fixed, axis))
    return tuple(caches)


def _key(name: str) -> tuple[str, ...]:
    """What the names of both sides of one cache share: numbers, and words but those that tell the sides apart."""
    return tuple(part for part in _PARTS.findall(name.lower().replace("key_values", "")) if part not in _SIDES)
