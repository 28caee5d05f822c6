"""The C compiler: found on this machine, or the one in the `ziglang` wheel, so that none has to be installed.

Comes in: C text and flags. Goes out: objects and shared libraries in a content-addressed cache: a file's name is the
hash of everything that went into it, so that a present file never has to be built again. Files appear whole, and end
in the digest of what stands before it, which no reader of ELF looks at: one that was damaged since is built again.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tilecore.commands import Commands

COMMON = (
    "-std=gnu11", "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
    "-Wall", "-Wextra", "-Werror", "-Wno-unknown-warning-option", "-Wno-ignored-optimization-argument",
    "-Wno-unused-function", "-Wno-unused-variable", "-Wno-aggressive-loop-optimizations",
    "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized",  # gcc guesses, and differently at every version
)  # fmt: skip
GCC_ONLY = ("-fno-tree-loop-distribute-patterns",)  # a short fill must not become `rep stos`
ELF = b"\x7fELF"
DIGEST = hashlib.sha256().digest_size
PATIENCE = 600  # seconds that a compiler may take for one file
PATIENCE_FOR_VERSION = 60  # zig unpacks itself first
ANOTHER = "name another folder, in TILEFUSE_CACHE or by cache= of tilecore.jit"
LINK = ("-shared", "-Wl,-z,nodelete", "-lm", "-lpthread", "-ldl")


class BuildError(RuntimeError):
    """No usable C compiler, or it refused a source; carries its output."""


class BrokenToolchainError(BuildError):
    """Nothing can be built: the cache cannot be written, or the compiler fails on everything."""


class KernelBuildError(BuildError):
    """The compiler refused some kernels; `problems` has its output by the kernel's name."""

    def __init__(self, problems: Mapping[str, str]) -> None:
        super().__init__("\n".join(f"{name}: {problem}" for name, problem in problems.items()))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C compiler: the command, what `--version` says, which is part of every cache key, and how it spells flags."""

    command: tuple[str, ...]
    version: str
    is_zig: bool = False

    def spelled(self, flags: Sequence[str]) -> list[str]:
        """`flags`, which are gcc's and clang's, as this compiler wants them: zig names processors with underscores."""
        if "Free Software Foundation" in self.version:
            return [*flags, *GCC_ONLY]
        if not self.is_zig:
            return list(flags)
        march = "-march="
        return [f"-mcpu={f[len(march) :].replace('-', '_')}" if f.startswith(march) else f for f in flags]


@dataclass(frozen=True, slots=True)
class Source:
    """A translation unit: C text, flags beside the common ones, and the folders of its headers."""

    text: str
    flags: tuple[str, ...] = ()
    include: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A compiler and the directory where what it builds is kept."""

    compiler: Compiler
    cache: Path
    commands: Commands = field(default_factory=Commands, compare=False, repr=False)

    def object(self, source: Source) -> Path:
        """The object file of a source. BuildError with the compiler's output when it is refused."""
        headers = [path.read_bytes() for folder in source.include for path in sorted(folder.glob("*.h"))]
        key = self._key("object", source.text.encode(), *map(str.encode, source.flags), *headers)
        target = self.cache / f"{key}.o"
        if not _is_sound(target):
            include = [f"-I{folder}" for folder in source.include]
            self._build(target, source.text, [*COMMON, *self.compiler.spelled(source.flags), *include, "-c"])
        return target

    def library(self, objects: Sequence[Path], flags: Sequence[str] = ()) -> Path:
        """The shared library of objects from this cache."""
        key = self._key("library", *(path.name.encode() for path in objects), *map(str.encode, flags))
        target = self.cache / f"{key}.so"
        if not _is_sound(target):
            self._run(target, [*map(str, objects), *flags, *LINK])
        return target

    def _key(self, *parts: str | bytes) -> str:
        digest = hashlib.sha256()
        for part in (self.compiler.version, *COMMON, *LINK, *parts):
            data = part.encode() if isinstance(part, str) else part
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()[:32]

    def _build(self, target: Path, source: str, arguments: list[str]) -> None:
        with self._writing():
            self.cache.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.cache, suffix=".c")
        try:
            with self._writing(), os.fdopen(handle, "w") as file:
                file.write(source)
            self._run(target, [*arguments, name])
        finally:
            os.unlink(name)

    def _run(self, target: Path, arguments: list[str]) -> None:
        with self._writing():
            self.cache.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=self.cache, suffix=target.suffix)
            os.close(handle)
        try:
            problem = self._call([*arguments, "-o", partial])
            if problem:
                self._check_itself(partial)
                raise BuildError(problem)
            with self._writing():
                with open(partial, "rb+") as file:
                    if file.read(len(ELF)) != ELF:
                        command = " ".join(self.compiler.command)
                        raise BrokenToolchainError(f"{command} ended well and wrote no object: is it a C compiler?")
                    file.seek(0)
                    digest = hashlib.file_digest(file, "sha256").digest()
                    file.seek(0, os.SEEK_END)
                    file.write(digest)
                os.replace(partial, target)
        finally:
            Path(partial).unlink(missing_ok=True)

    def _call(self, arguments: Sequence[str], source: str | None = None) -> str:
        """What is wrong, or ""; the source goes in by standard input."""
        command = [*self.compiler.command, *arguments]
        try:
            result = self.commands.run(command, given=source, timeout=PATIENCE)
        except subprocess.TimeoutExpired as error:
            name = " ".join(self.compiler.command)
            raise BrokenToolchainError(f"{name} did not end within {PATIENCE} s, and was stopped") from error
        except OSError as error:
            raise BuildError(f"{self.compiler.command[0]} cannot be run: {error.strerror}") from error
        if result.returncode == 0:
            return ""
        return f"{' '.join(self.compiler.command)} failed with status {result.returncode}:\n{result.stderr.strip()}"

    def _check_itself(self, partial: str) -> None:
        """BrokenToolchainError when not even a trivial source builds here: then no kernel is to blame."""
        trivial = "#include <stdint.h>\nint32_t tile_nothing = 1;\n" + f"/* {'as long as a kernel ' * 2000} */\n"
        padding = f"char tile_padding[{1 << 16}] = {{1}};\n"  # an object as large as a kernel's
        problem = self._call(["-x", "c", "-c", "-", "-o", partial], trivial + padding)
        if problem:
            raise BrokenToolchainError(f"the C compiler builds nothing at all in {self.cache}: {problem}")

    @contextmanager
    def _writing(self) -> Generator[None]:
        """BrokenToolchainError in the place of an error of the file system."""
        try:
            yield
        except OSError as error:
            raise BrokenToolchainError(
                f"cannot write to the cache {self.cache}: {error.strerror}; make room there or {ANOTHER}"
            ) from error


def _is_sound(path: Path) -> bool:
    """Whether a file can be read and is what was written."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-DIGEST]).digest() == data[-DIGEST:]


def load_library(path: Path) -> ctypes.CDLL:
    """A library of a cache in this process. BrokenToolchainError where the system does not load it from there."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BrokenToolchainError(
            f"what was built cannot be loaded: {error}; if files there may not be executed, {ANOTHER}"
        ) from error


def own_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of this user's cache: TILEFUSE_CACHE, or a folder of XDG_CACHE_HOME or of the home directory.

    BrokenToolchainError for a user who has none of them.
    """
    if environment.get("TILEFUSE_CACHE"):
        return Path(environment["TILEFUSE_CACHE"])
    if environment.get("XDG_CACHE_HOME"):
        return Path(environment["XDG_CACHE_HOME"]) / "tilefuse"
    try:
        return Path.home() / ".cache" / "tilefuse"
    except RuntimeError as error:
        raise BrokenToolchainError(
            "this user has no home directory: set TILEFUSE_CACHE to a folder for what is kept"
        ) from error


def find_toolchain(cache_directory: Path, preferred: str | None = None) -> Toolchain:
    """The first of `preferred`, cc, gcc, clang and the ziglang wheel that runs. BuildError says what was looked for."""
    return Toolchain(find_compiler(preferred), cache_directory)


@cache
def find_compiler(preferred: str | None = None) -> Compiler:
    """The compiler that `find_toolchain` uses."""
    names = [preferred] if preferred else ["cc", "gcc", "clang"]
    for name in names:
        found = shutil.which(name)
        if found:
            return Compiler((found,), _version((found,)))
    if not preferred and importlib.util.find_spec("ziglang"):
        command = (sys.executable, "-m", "ziglang", "cc")
        return Compiler(command, _version(command), is_zig=True)
    wanted = preferred or "cc, gcc, clang or the ziglang package"
    raise BuildError(f"no C compiler: looked for {wanted}. Install one, e.g. `python -m pip install ziglang`")


def _version(command: tuple[str, ...]) -> str:
    name = " ".join(command)
    try:
        result = Commands().run([*command, "--version"], timeout=PATIENCE_FOR_VERSION)
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"{name} --version did not end within {PATIENCE_FOR_VERSION} s: is it a C compiler?"
        ) from error
    except OSError as error:
        raise BuildError(f"{name} cannot be run: {error.strerror}") from error
    if result.returncode:
        said = result.stderr.strip() or f"status {result.returncode} and no word; is it a C compiler?"
        raise BuildError(f"{name} --version failed: {said}")
    return result.stdout
