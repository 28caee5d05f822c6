"""Reads `tilefuse.toml`, the keys of a model that Triton's configuration has no word for.

In: the file. Out: changes of the default `Settings`, by field. Invariant: an unknown key or a value of another type is
an error that names it.
"""

import tomllib
from pathlib import Path
from typing import Any

from runtime.server.settings import Generation, Padding, SettingsError

_KEYS: dict[str, type] = {
    "optimize": bool,
    "optimize_first": bool,
    "threads": int,
    "provider": bool,
    "instances": int,
    "warmup": bool,
    "padding": dict,
    "generation": dict,
}
_PADDING_KEYS: dict[str, type] = {"dim": str, "buckets": list, "mask": str, "values": dict, "unpad": bool}
_GENERATION_KEYS: dict[str, type] = {
    "enabled": bool,
    "input_ids": str,
    "attention_mask": str,
    "position_ids": str,
    "logits": str,
    "streams": int,
    "waiting": int,
    "cache_mib": int,
    "context": int,
    "max_tokens": int,
    "prefill": int,
    "idle_seconds": float,
    "eos_token_ids": list,
}


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in the file, by their names in `Settings`.

    Raises:
        SettingsError: it cannot be parsed, or a key is unknown or has a wrong value.
    """
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from error
    _check_keys(path, read, _KEYS)
    for key in ("threads", "instances"):
        if read.get(key, 1) < 1:
            raise SettingsError(f"{path}: {key} is {read[key]}, but it must be 1 or more")
    found = {key: value for key, value in read.items() if key not in ("warmup", "padding", "generation")}
    if "warmup" in read:
        found["auto_warmup"] = read["warmup"]
    if "padding" in read:
        found["padding"] = _padding(path, read["padding"])
    if "generation" in read:
        found["generation"] = _generation(path, read["generation"])
    return found


def _generation(path: Path, table: dict[str, Any]) -> Generation:
    _check_keys(path, table, _GENERATION_KEYS, prefix="generation.")
    for key, value in table.items():
        least = 0 if key in ("waiting", "idle_seconds") else 1
        if type(value) in (int, float) and value < least:
            raise SettingsError(f"{path}: generation.{key} is {value}, but it must be {least} or more")
    tokens = table.get("eos_token_ids", [])
    if any(type(token) is not int or token < 0 for token in tokens):
        raise SettingsError(f"{path}: generation.eos_token_ids is {tokens}, but it must be a list of tokens")
    given: dict[str, Any] = {key: value for key, value in table.items() if key != "cache_mib"}
    given["eos_token_ids"] = tuple(tokens)
    if "cache_mib" in table:
        given["cache_bytes"] = table["cache_mib"] * 2**20
    return Generation(**given)


def _padding(path: Path, table: dict[str, Any]) -> Padding:
    _check_keys(path, table, _PADDING_KEYS, prefix="padding.")
    for key in ("dim", "buckets", "mask"):
        if not table.get(key):
            raise SettingsError(f"{path}: padding needs {key}")
    buckets = table["buckets"]
    if any(type(extent) is not int or extent < 1 for extent in buckets) or buckets != sorted(set(buckets)):
        raise SettingsError(f"{path}: padding.buckets is {buckets}, but it must be whole numbers above 0 that rise")
    values = table.get("values", {})
    for name, value in values.items():
        if type(value) not in (int, float):
            raise SettingsError(f"{path}: padding.values.{name} is {value!r}, but it must be a number")
    return Padding(table["dim"], tuple(buckets), table["mask"], tuple(values.items()), table.get("unpad", False))


def _check_keys(path: Path, table: dict[str, Any], keys: dict[str, type], *, prefix: str = "") -> None:
    for key, value in table.items():
        kind = keys.get(key)
        if kind is None:
            raise SettingsError(f"{path}: unknown key {prefix + key!r}; this server reads {', '.join(keys)}")
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise SettingsError(f"{path}: {prefix}{key} is {value!r}, but it must be of type {kind.__name__}")
