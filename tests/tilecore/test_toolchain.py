"""What building does when the machine is against it: one clear error each, and nothing left behind."""

import ctypes
import resource
import stat
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest

from tilecore.commands import StoppedError
from tilecore.link import Objects, link_kernels
from tilecore.target import target_named
from tilecore.toolchain import (
    BrokenToolchainError,
    BuildError,
    Source,
    Toolchain,
    find_compiler,
    find_toolchain,
    load_library,
    own_cache,
)

SOURCE = "int answer(void) { return 42; }\n"
ROW = target_named("x86-64-v3")


def script(folder: Path, text: str) -> Path:
    """A compiler that is a shell script."""
    path = folder / "fakecc"
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo fake 1.0; exit 0; fi\n{text}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def sleeping(folder: Path) -> Path:
    """A compiler that starts a program, says so, and waits for it far longer than anybody would."""
    said = f"echo $! > {folder}/said; mv {folder}/said {folder}/asleep"
    return script(folder, f"sleep 1000 & {said}; wait")


def has_ended(folder: Path) -> bool:
    """Whether what `sleeping` started is gone, or soon is: what was killed takes a moment, and may be left unread."""
    state = Path(f"/proc/{int((folder / 'asleep').read_text())}/stat")
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            if state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def build(toolchain: Toolchain, source: str = SOURCE) -> Path:
    return toolchain.object(Source(source))


def test_a_compiler_that_fails_on_everything_is_one_error(tmp_path: Path) -> None:
    compiler = script(tmp_path, "echo 'cc1: not found' >&2; exit 1")
    toolchain = find_toolchain(tmp_path / "cache", str(compiler))
    with pytest.raises(BrokenToolchainError, match=r"(?s)builds nothing at all in .*cc1: not found"):
        build(toolchain)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_that_says_no_version_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "deadcc"
    path.write_text("#!/bin/sh\necho 'cannot load' >&2\nexit 127\n")
    path.chmod(0o755)
    with pytest.raises(BuildError, match="deadcc --version failed: cannot load"):
        find_compiler(str(path))
    path.write_text("#!/bin/sh\nexit 3\n")
    find_compiler.cache_clear()
    with pytest.raises(BuildError, match="deadcc --version failed: status 3 and no word; is it a C compiler"):
        find_compiler(str(path))


def test_a_compiler_that_vanishes_is_one_error(tmp_path: Path) -> None:
    toolchain = find_toolchain(tmp_path / "cache", str(script(tmp_path, "exit 0")))
    (tmp_path / "fakecc").unlink()
    with pytest.raises(BuildError, match="fakecc cannot be run: No such file"):
        build(toolchain)


@pytest.mark.parametrize("written", [":", "echo garbage > $out", "head -c 300 /dev/zero > $out"])
def test_a_compiler_that_writes_no_object_is_one_error(written: str, tmp_path: Path) -> None:
    compiler = script(tmp_path, f'for out in "$@"; do :; done; {written}')
    with pytest.raises(BrokenToolchainError, match="fakecc ended well and wrote no object: is it a C compiler"):
        build(find_toolchain(tmp_path / "cache", str(compiler)))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_whose_library_is_none_is_one_error(tmp_path: Path) -> None:
    compiler = script(tmp_path, r"""for out in "$@"; do :; done; printf '\177ELF and no more' > $out""")
    toolchain = find_toolchain(tmp_path / "cache", str(compiler))
    with pytest.raises(BrokenToolchainError, match=r"what was built cannot be loaded: .*TILEFUSE_CACHE"):
        load_library(toolchain.library([build(toolchain)]))


def test_a_compiler_that_hangs_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilecore.toolchain.PATIENCE", 0.2)
    toolchain = find_toolchain(tmp_path / "cache", str(sleeping(tmp_path)))
    with pytest.raises(BrokenToolchainError, match=r"fakecc did not end within 0\.2 s, and was stopped"):
        build(toolchain)
    assert list((tmp_path / "cache").iterdir()) == []
    assert has_ended(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_leaving_by_an_error_ends_the_compilers(error: type[BaseException], tmp_path: Path) -> None:
    toolchain = find_toolchain(tmp_path / "cache", str(sleeping(tmp_path)))
    made: list[Future[Path]] = []

    def interrupted() -> None:
        with Objects(lambda: toolchain) as objects:
            made.extend(objects.start(Source(text)) for text in (SOURCE, SOURCE + "\n"))
            while not (tmp_path / "asleep").exists():
                time.sleep(0.01)
            raise error

    with pytest.raises(error):
        interrupted()
    for one in made:
        with pytest.raises(StoppedError):
            one.result()
    assert list((tmp_path / "cache").iterdir()) == []
    assert has_ended(tmp_path)


def test_words_of_a_compiler_in_no_encoding_are_shown(tmp_path: Path) -> None:
    toolchain = find_toolchain(tmp_path / "cache", str(script(tmp_path, r"printf 'no \377 room' >&2; exit 1")))
    with pytest.raises(BrokenToolchainError, match="no � room"):
        build(toolchain)


def test_no_compiler_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no C compiler: looked for no-such-cc\. Install one"):
        find_toolchain(tmp_path, "no-such-cc")


@pytest.mark.parametrize("cache", ["/proc/tilefuse", "/dev/null/tilefuse"])
def test_a_cache_that_cannot_be_written_is_one_error(cache: str, tmp_path: Path) -> None:
    toolchain = find_toolchain(Path(cache), str(script(tmp_path, "exit 0")))
    with pytest.raises(BrokenToolchainError, match=f"cannot write to the cache {cache}: .*TILEFUSE_CACHE"):
        build(toolchain)


@pytest.mark.cpu
def test_a_wrong_source_is_the_source_s_fault(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="answer") as caught:
        build(find_toolchain(tmp_path), "int answer(void) { return nothing; }\n")
    assert not isinstance(caught.value, BrokenToolchainError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.cpu
def test_a_full_disk_is_one_error(tmp_path: Path) -> None:
    """Files that may not grow are as good as a disk without room: writing fails in the middle."""
    toolchain, soft = find_toolchain(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, soft[1]))
    try:
        with pytest.raises(BrokenToolchainError, match=r"cannot write to the cache .*File too large"):
            build(toolchain, SOURCE + "// long\n" * 1000)
        with pytest.raises(BrokenToolchainError, match="builds nothing at all"):
            build(toolchain, f"char large[{1 << 16}] = {{1}};\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    assert list(tmp_path.iterdir()) == []
    assert build(toolchain).stat().st_size > 0


@pytest.mark.cpu
def test_what_is_in_a_cache_needs_no_writing(tmp_path: Path) -> None:
    """A cache on a read-only disk serves what it has: it is not even opened for writing."""
    toolchain = find_toolchain(tmp_path)
    path = build(toolchain)
    before = tmp_path.stat().st_mtime_ns
    assert build(toolchain) == path
    assert tmp_path.stat().st_mtime_ns == before


@pytest.mark.cpu
@pytest.mark.parametrize("damage", [b"", b"\x7fELF", None], ids=["emptied", "cut short", "one byte changed"])
def test_what_was_damaged_in_a_cache_is_built_again(damage: bytes | None, tmp_path: Path) -> None:
    """A damaged library would end the process that loads it."""
    toolchain = find_toolchain(tmp_path)
    made = build(toolchain)
    paths = (made, toolchain.library([made]))
    whole = [path.read_bytes() for path in paths]
    for path, data in zip(paths, whole, strict=True):
        path.write_bytes(bytes([*data[:100], data[100] ^ 1, *data[101:]]) if damage is None else damage)
    assert toolchain.library([build(toolchain)]) == paths[1]
    assert ctypes.CDLL(str(paths[1]))
    assert [len(path.read_bytes()) for path in paths] == [len(data) for data in whole]


@pytest.mark.cpu
def test_processes_that_build_the_same_at_once_agree(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tilecore.toolchain import Source, find_toolchain\n"
        "toolchain = find_toolchain(Path(sys.argv[1]))\n"
        f"objects = [toolchain.object(Source({SOURCE!r}.replace('answer', name))) for name in ('one', 'two')]\n"
        "print(toolchain.library(objects))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "cache")]
    running = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        for _ in range(4)
    ]
    results = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0] * 4, results
    paths = {out for out, _ in results}
    assert len(paths) == 1
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".o", ".o", ".so"]


@dataclass(frozen=True)
class Calling:
    """As much of a kernel as linking reads: its table, and a call of what kernels share."""

    name: str
    sources: dict[str, str]


def calling(name: str) -> Calling:
    table = f"const int tile_kernel_{name}_x86_64_v3 = 1;"
    return Calling(name, {ROW.name: f"void tile_product_x86_64_v3(void);\n{table}\nvoid call_{name}(void) "
                                    "{ tile_product_x86_64_v3(); }\n"})  # fmt: skip


@pytest.mark.cpu
def test_kernels_share_a_product_that_is_built_once(tmp_path: Path) -> None:
    toolchain, kernels = find_toolchain(tmp_path), [calling("first"), calling("second")]
    with Objects(lambda: toolchain) as objects:
        for kernel in kernels:
            objects.start_kernel(kernel, [ROW])  # as soon as it is written
        library = link_kernels(kernels, [ROW], objects)
    assert len(list(tmp_path.glob("*.o"))) == 4, "two kernels, what they share, and the table"
    assert hasattr(ctypes.CDLL(str(library)), "tile_generated_library")


def test_nothing_is_looked_for_before_something_is_built() -> None:
    def missing() -> Toolchain:
        raise BuildError("no C compiler")

    with Objects(missing) as objects, pytest.raises(BuildError, match="no C compiler"):
        link_kernels([], [ROW], objects)


def test_a_cache_is_where_the_environment_says() -> None:
    """For kernels of one's own as for models: the message of a full disk names the variable."""
    assert own_cache({"TILEFUSE_CACHE": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c")
    assert own_cache({"TILEFUSE_CACHE": "", "XDG_CACHE_HOME": "/x"}) == Path("/x/tilefuse")
    assert own_cache({}) == Path.home() / ".cache" / "tilefuse"


def test_a_user_without_a_home_is_told_what_to_set(tmp_path: Path) -> None:
    """As in a container whose user has no name. Importing asks for no home yet."""
    text = """
import pwd
def nobody(number):
    raise KeyError(number)
pwd.getpwuid = nobody
import tilecore
from tilecore.toolchain import BrokenToolchainError, own_cache
try:
    own_cache()
except BrokenToolchainError as error:
    print(error)
"""
    command, root = [sys.executable, "-c", text], Path(__file__).parents[2]
    run = subprocess.run(
        command, env={"PYTHONPATH": str(root)}, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run.stdout == "this user has no home directory: set TILEFUSE_CACHE to a folder for what is kept\n"
