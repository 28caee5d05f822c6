"""What the README shows works: its kernel runs, its commands exist, its files are there."""

import re
import shlex
from pathlib import Path

import typer.main

from runtime.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{re.escape(language)}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_kernel_runs_and_checks_itself(tmp_path: Path) -> None:
    (kernel,) = [block for block in blocks("python") if "T.Kernel" in block]
    assert "assert_allclose" in kernel
    file = tmp_path / "kernel.py"  # a file, because statements of a program point at their lines
    file.write_text(kernel, encoding="utf-8")
    exec(compile(kernel, str(file), "exec"), {"__name__": "kernel"})


def test_every_command_and_flag_exists() -> None:
    commands = typer.main.get_group(app).commands
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    shown = [part for line in lines for part in line.split("#")[0].split("&&") if part.strip().startswith("tilefuse ")]
    assert len(shown) >= 7
    for line in shown:
        _, name, *arguments = shlex.split(line)
        flags = {flag for parameter in commands[name].params for flag in parameter.opts}
        assert {argument for argument in arguments if argument.startswith("-")} <= flags, line


def test_every_link_leads_to_a_file() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target.partition("#")[0]).exists(), target
