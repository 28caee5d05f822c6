"""Records in a cache: whole or not there, whatever ends a writer."""

import json
import resource
from pathlib import Path

import pytest

from tilecore.records import write_json


class Unwritable(dict[str, int]):
    """Ends its writer as a signal would."""

    def __bool__(self) -> bool:
        raise KeyboardInterrupt


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "record.json"
    for value in ({"a": 1.5}, {"b": [2, None]}):
        write_json(path, value)
        assert json.loads(path.read_text()) == value
        assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    path, soft = tmp_path / "record.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    write_json(path, {"times": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, soft[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_json(path, {"times": ["long"] * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    assert json.loads(path.read_text()) == {"times": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_json(tmp_path / "record.json", Unwritable())
    assert list(tmp_path.iterdir()) == []
