"""The command `tilefuse serve`: flags and a file to `ServerOptions`, and the server's life.

Invariant: the flags are those of the option table, no more and no fewer.
"""

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from runtime.options import Options
from runtime.server.compiling import make_loader
from runtime.server.control import EXPLICIT
from runtime.server.operations.logs import set_up_logs
from runtime.server.option_table import OPTIONS, ConfigError, Option, build_options, read_file
from runtime.server.processes import reserved_port, run_together
from runtime.server.serve import serve

_REPOSITORY = Annotated[Path, typer.Argument(metavar="REPOSITORY", help="A folder of NAME/VERSION/model.onnx.")]
_CONFIG = Annotated[Path | None, typer.Option(metavar="FILE", help="A TOML file with any of the options below.")]


def serve_repository(repository: Path, config: Path | None, **flags: Any) -> None:
    """Serve a repository of models over gRPC until SIGTERM."""
    given = read_file(config) if config is not None else {}
    given |= {name: getattr(value, "value", value) for name, value in flags.items() if _is_given(value)}
    if given.get("processes", 1) == 1:
        _serve(repository, given)
    else:
        _serve_together(repository, given)


def _serve_together(repository: Path, given: Mapping[str, Any]) -> None:
    """Serve from several processes. ConfigError: they cannot do what is asked for."""
    options, count = build_options(given), given["processes"]
    if options.control_mode == EXPLICIT:
        raise ConfigError(
            f"processes is {count} and model_control_mode is explicit, but a request to load a model reaches only one "
            "process: use poll, with which each follows the folder"
        )
    if options.status_port and options.status_port + count - 1 > 65535:
        raise ConfigError(f"status_port is {options.status_port}, but {count} processes need as many ports from it on")
    set_up_logs(given.get("log_format", "text"))
    with reserved_port(options.transport.host, options.transport.port) as port:
        ended_well = run_together(partial(_serve_one, repository, {**given, "port": port}), count)
    if not ended_well:
        raise SystemExit(1)  # each has said why


def _serve_one(repository: Path, given: Mapping[str, Any], number: int) -> None:
    """Be one of several processes: the metrics of each have a port of their own."""
    port = given.get("status_port")
    try:
        _serve(repository, {**given, "status_port": port + number} if port else given)
    except Exception as error:
        if Options.from_environment().debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def _serve(repository: Path, given: Mapping[str, Any]) -> None:
    options = build_options(given)
    set_up_logs(given.get("log_format", "text"))
    loader = make_loader(Options.from_environment(), optimize_first=given.get("optimize_first", False))
    if not serve(repository, loader, options=options):
        print(f"error: calls in flight took longer than {options.drain_seconds:g} s and were lost", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # their threads may never end, and an ordinary exit would wait for them


def _is_given(value: Any) -> bool:
    """Whether a flag was given; 0 is a value."""
    return value is not None and value is not False and value != []


def serve_command() -> Callable[..., None]:
    """The command as typer wants it: a function whose signature has every option."""

    def command(**arguments: Any) -> None:
        serve_repository(**arguments)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("repository", keyword, annotation=_REPOSITORY),
        inspect.Parameter("config", keyword, annotation=_CONFIG, default=None),
        *(inspect.Parameter(option.name, keyword, annotation=_flag(option), default=None) for option in OPTIONS),
    ]
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = serve_repository.__doc__
    return command


def _flag(option: Option) -> Any:
    """What typer is to make of an option."""
    shown = "" if option.default in (None, "", (), False) else f" (default {option.default})"
    kind: Any = option.kind
    if option.choices:
        kind = StrEnum(option.name, {choice.upper(): choice for choice in option.choices})
    details = typer.Option(
        f"--{option.name.replace('_', '-')}", min=option.least, max=option.most, help=option.help + shown
    )
    return Annotated[(list[kind] if option.many else kind) | None, details]
