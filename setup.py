"""The build hook: generates the protobuf stubs before setuptools collects the modules."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # PEP 517 front ends run this file without the project folder on the path

from proto.generate import generate  # noqa: E402


class BuildWithStubs(build_py):
    """`build_py` that first writes the stubs into the source tree, so wheels and editable installs both have them."""

    def run(self) -> None:
        """Generate, then build."""
        generate(ROOT)
        super().run()


setup(cmdclass={"build_py": BuildWithStubs})
