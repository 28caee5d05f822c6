"""The commands: arguments in, one call each, a table or JSON on stdout out.

Invariant: stdout carries only the result, so that `--json` can be piped; progress and errors go to stderr. The exit
status is 0 on success, 1 when the answer is no (a bad model, a failed verdict, a refused request), 2 on wrong usage.
"""

import json
import signal
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import onnx
import typer
from rich.console import Console

from fuser.load import read_proto
from runtime import inputs as model_inputs
from runtime.bench import bench
from runtime.bench_regions import bench_regions, read_timings
from runtime.cli.serve import serve_command
from runtime.cli.tables import (
    print_bench,
    print_cards,
    print_measured,
    print_outputs,
    print_profiles,
    print_regions,
    print_report,
    print_tuned,
    print_tuned_functions,
    print_verdict,
)
from runtime.client import Client, random_inputs
from runtime.compile import explain, optimize
from runtime.demo import demo
from runtime.kernels import CARD_PROFILES
from runtime.machine import save_profile
from runtime.options import Options, OptionsError
from runtime.tune import SIZES, tune, tune_functions
from runtime.verify import verify
from runtime.wire import datatype_of
from tilecore.measure import measure_profile
from tilecore.profile import PROFILES
from tilecore.toolchain import find_toolchain

Arrays = Mapping[str, np.ndarray[Any, Any]]

app = typer.Typer(
    name="tilefuse",
    help="Fuse ONNX models with a tile compiler; run them in stock ONNX Runtime and over gRPC.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class CommandError(Exception):
    """A file that a command was given cannot be used; the message says which and why."""


class Interrupted(BaseException):
    """A signal asks to stop. What holds passing files removes them on the way out; nothing takes it for a fault."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout instead of a table.")]
Inputs = Annotated[Path | None, typer.Option("--inputs", metavar="FILE.npz", help="Inputs by name; else generated.")]
FuseAll = Annotated[bool, typer.Option("--all", help="Fuse also where no gain is predicted.")]
TargetChoice = Annotated[
    Literal["cpu", "cuda", "cuda-sm80"] | None,
    typer.Option(
        "--target",
        help="Kernels for NVIDIA cards too; what has none is left to ONNX Runtime. cuda: Hopper, cuda-sm80: Ampere.",
    ),
]
Unpad = Annotated[
    str | None,
    typer.Option(
        "--unpad", metavar="MASK", help="Compute tokens only: MASK is the input [batch, length] that is 0 at padding."
    ),
]
Narrow = Annotated[
    Literal["f32", "bf16"],
    typer.Option("--precision", help="Round operands of contractions and attention to this; sums stay f32."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, help="Threads of the sessions that it is for. Default: TILEFUSE_THREADS, else all."
    ),
]
MODEL = "IN.onnx"


def _options(fuse_all: bool, target: str | None, unpad: str | None, threads: int | None) -> Options:
    """The environment's settings with those of the command line."""
    options = replace(Options.from_environment(), fuse_all=fuse_all, unpad=unpad)
    options = options if threads is None else replace(options, threads=threads)
    return options if target is None else replace(options, target=target)


@app.command("optimize")
def optimize_command(
    model: Annotated[Path, typer.Argument(metavar=MODEL, help="The model to fuse.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT.onnx", help="Written with OUT.so beside it.")],
    check: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare with the original first.")] = True,
    inputs: Inputs = None,
    repros: Annotated[
        Path | None,
        typer.Option("--save-repro", metavar="DIR", help="Write regions whose kernel is wrong there, to report them."),
    ] = None,
    fuse_all: FuseAll = False,
    target: TargetChoice = None,
    unpad: Unpad = None,
    precision: Narrow = "f32",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Fuse a model and write it with its library of kernels beside it."""
    feeds = _read_inputs(inputs, read_proto(model))
    with Console(stderr=True).status("optimising") as status:
        report = optimize(
            model,
            output,
            options=replace(_options(fuse_all, target, unpad, threads), precision=precision),
            progress=lambda stage: status.update(stage),
            verify=check,
            inputs=feeds,
            repros=repros,
        )
    for fault in report.faults:
        where = f"send us {fault.repro}" if fault.repro else "run again with --save-repro DIR and send us that"
        print(f"BUG: left out the {fault.kind} region {fault.label}, its kernel is at fault; {where}", file=sys.stderr)
    if as_json:
        _print_json(report.to_json())
    else:
        print_report(Console(), report)


@app.command("explain")
def explain_command(
    model: Annotated[Path, typer.Argument(metavar=MODEL, help="The model to look at.")],
    page: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page that shows graph, regions and kernels."),
    ] = None,
    timings: Annotated[
        Path | None,
        typer.Option("--timings", metavar="FILE", help="What bench --per-region --json printed, to show beside it."),
    ] = None,
    fuse_all: FuseAll = False,
    target: TargetChoice = None,
    unpad: Unpad = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Say what would be fused, what not, and why; the model is not touched."""
    read_proto(model)
    with Console(stderr=True).status("looking for regions"):
        report = explain(
            model,
            options=_options(fuse_all, target, unpad, threads),
            page=page,
            timings=None if timings is None else read_timings(timings),
        )
    if as_json:
        _print_json(report.to_json())
    else:
        print_report(Console(), report)


@app.command("verify")
def verify_command(
    original: Annotated[Path, typer.Argument(metavar="ORIGINAL.onnx")],
    fused: Annotated[Path, typer.Argument(metavar="FUSED.onnx")],
    inputs: Inputs = None,
    as_json: Json = False,
) -> None:
    """Run both models on the same inputs and compare every output."""
    feeds = _read_inputs(inputs, read_proto(original))
    read_proto(fused)
    with Console(stderr=True).status("comparing"):
        verdict = verify(original, fused, inputs=feeds)
    if as_json:
        _print_json(verdict.to_json())
    else:
        print_verdict(Console(), verdict)
    if not verdict.ok:
        raise typer.Exit(1)


@app.command("bench")
def bench_command(
    fused: Annotated[Path, typer.Argument(metavar="FUSED.onnx")],
    original: Annotated[Path, typer.Option("--against", metavar="ORIGINAL.onnx", help="The model to compare with.")],
    inputs: Inputs = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of both sessions.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="How long to measure: 5, or 0.5 per region.")] = None,
    per_region: Annotated[
        bool, typer.Option("--per-region", help="Time each region alone, and print what was predicted.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Time both models, one run of each in turn, and print medians and their ratio."""
    feeds = _read_inputs(inputs, read_proto(original))
    read_proto(fused)
    threads = threads if threads is not None else Options.from_environment().threads
    with Console(stderr=True).status("measuring"):
        result = None if per_region else bench(fused, original, inputs=feeds, threads=threads, seconds=seconds or 5.0)
        timings = (
            bench_regions(fused, original, inputs=feeds, threads=threads, seconds=seconds or 0.5) if per_region else ()
        )
    if result is None and as_json:
        _print_json({"regions": [timing.to_json() for timing in timings]})
    elif result is None:
        print_regions(Console(), timings)
    elif as_json:
        _print_json(result.to_json())
    else:
        print_bench(Console(), result)


@app.command("profile")
def profile_command(
    table: Annotated[bool, typer.Option("--table", help="Print the machines that are known; measure nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Measure this machine, and keep what was found: later commands choose tile extents by it."""
    if table:
        profiles = {profile.name: profile.to_json() for profile in PROFILES}
        if as_json:
            _print_json(profiles | {card.name: asdict(card) for card in CARD_PROFILES.values()})
        else:
            print_profiles(Console(), PROFILES)
            print_cards(Console(), CARD_PROFILES)
        return
    options = Options.from_environment()
    with Console(stderr=True).status("measuring") as status:
        toolchain = find_toolchain(options.cache / "objects", options.compiler)
        measured = measure_profile(toolchain, progress=lambda stage: status.update(f"measuring: {stage}"))
        path = save_profile(measured.profile, options)
    if as_json:
        rates = {rate.name: {"alone": rate.alone, "together": rate.together} for rate in measured.rates}
        _print_json({"profile": measured.profile.to_json(), "rates": rates, "file": str(path)})
    else:
        print_measured(Console(), measured)
        print(f"wrote {path}")


@app.command("tune")
def tune_command(
    model: Annotated[Path, typer.Argument(metavar=MODEL, help="The model, or the Python file, whose kernels to tune.")],
    top: Annotated[int, typer.Option(min=1, help="Candidates to measure for each kernel.")] = 5,
    size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Size of symbolic dims; repeat for several. Default: 128 and 512."),
    ] = None,
    dim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SIZE", help="Of a Python file: a dim or a parameter of its kernels. Repeat."),
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Measure the best candidates for every kernel of a model; `optimize` takes the fastest from then on.

    Of a Python file, measure the configurations of its kernels under `tilecore.autotune`; calls take the fastest.
    """
    if model.suffix == ".py":
        if threads is not None:
            raise typer.BadParameter("--threads is for models; a Python file gives its own to tilecore.jit")
        _tune_functions(model, _dims(dim or ()), as_json)
        return
    if dim:
        raise typer.BadParameter("--dim is for Python files; sizes of a model's symbolic dims are --size")
    read_proto(model)
    with Console(stderr=True).status("tuning") as status:
        found = tune(
            model,
            options=_options(False, None, None, threads),
            progress=lambda stage: status.update(f"tuning: {stage}"),
            top=top,
            sizes=size or SIZES,
        )
    if as_json:
        _print_json({"kernels": [kernel.to_json() for kernel in found]})
    else:
        print_tuned(Console(), found)


def _tune_functions(path: Path, dims: Mapping[str, int], as_json: bool) -> None:
    with Console(stderr=True).status("tuning") as status:
        found = tune_functions(path, dims, progress=lambda stage: status.update(f"tuning: {stage}"))
    if as_json:
        _print_json({"kernels": [function.to_json() for function in found]})
    else:
        print_tuned_functions(Console(), found)
    if any(function.problem for function in found):
        raise typer.Exit(1)


def _dims(given: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for text in given:
        name, _, value = text.partition("=")
        if not name.isidentifier() or not value.isdigit() or int(value) < 1:
            raise typer.BadParameter(f"--dim is {text!r}: expected NAME=SIZE, such as M=512")
        found[name] = int(value)
    return found


app.command("serve")(serve_command())


@app.command("infer")
def infer_command(
    url: Annotated[str, typer.Argument(metavar="URL", help="HOST:PORT of the server.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.")],
    inputs: Inputs = None,
    as_json: Json = False,
) -> None:
    """Send one request to a server; inputs are made up from the model's metadata when none are given."""
    with Client(url) as client:
        feeds = _read_archive(inputs) if inputs is not None else random_inputs(client.metadata(model))
        outputs = client.infer(model, feeds)
    if as_json:
        tensors = {
            name: {"datatype": datatype_of(array).wire, "shape": list(array.shape), "data": array.tolist()}
            for name, array in outputs.items()
        }
        _print_json({"model": model, "outputs": tensors})
    else:
        print_outputs(Console(), outputs)


@app.command("generate")
def generate_command(
    url: Annotated[str, typer.Argument(metavar="URL", help="HOST:PORT of the server.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.")],
    prompt: Annotated[str, typer.Argument(metavar="TOKENS", help="The prompt: tokens with commas between.")],
    max_tokens: Annotated[int | None, typer.Option(min=1, help="The most tokens; else as the server says.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among so many; 0: among all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among the likeliest with this share together.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes the choice the same every time.")] = None,
    stop: Annotated[str, typer.Option(metavar="TOKENS", help="Tokens that end the answer.")] = "",
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end tokens.")] = False,
    as_json: Json = False,
) -> None:
    """Have a server continue a prompt of tokens, and print each token as it comes."""
    with Client(url) as client:
        tokens = client.generate(
            model,
            _read_tokens(prompt, "TOKENS"),
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_token_ids=_read_tokens(stop, "--stop"),
            ignore_eos=ignore_eos,
        )
        if as_json:
            _print_json({"model": model, "tokens": list(tokens)})
            return
        for token in tokens:
            print(token, end=" ", flush=True)
        print()


def _read_tokens(text: str, name: str) -> list[int]:
    """Tokens with commas or spaces between. BadParameter: it is something else."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of tokens such as 1,2,3", param_hint=name) from None


@app.command("demo")
def demo_command() -> None:
    """Fuse, verify, time, serve and query a sentence encoder."""
    demo(Console(soft_wrap=True, markup=False, highlight=False), Options.from_environment())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, of this process when no arguments are given; exits with its status."""
    try:
        debug = Options.from_environment().debug
    except OptionsError as error:
        _fail(error)
    try:
        with _signals_raise():
            app(args=arguments, prog_name="tilefuse")
    except Interrupted as stop:
        print(f"stopped by {signal.Signals(stop.number).name}", file=sys.stderr)
        sys.exit(128 + stop.number)
    except Exception as error:
        if debug:
            raise
        _fail(error)


@contextmanager
def _signals_raise() -> Generator[None]:
    """Inside, SIGINT and SIGTERM raise `Interrupted`, unless whoever started the process had them ignored."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Interrupted(number)

    signals = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is not signal.SIG_IGN]
    before = [(number, signal.signal(number, stop)) for number in signals]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _fail(error: Exception) -> NoReturn:
    text = " ".join(str(error).split()) or f"{type(error).__name__}; set TILEFUSE_DEBUG=1 to see where"
    print(f"error: {text}", file=sys.stderr)
    sys.exit(1)


def _print_json(value: object) -> None:
    print(json.dumps(value))


def _read_inputs(path: Path | None, model: onnx.ModelProto) -> Arrays | None:
    """The archive's arrays, checked against the model; None without an archive."""
    return None if path is None else model_inputs.load(path, model)


def _read_archive(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError) as error:
        raise CommandError(f"{path}: not a readable .npz file ({error})") from error
