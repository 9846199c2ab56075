"""Builds the native kernels into the package where a compiler is there; else they wait for one.

All else about the package is in `pyproject.toml`.
"""

import importlib.util
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithKernels(build_py):
    """Compiles before the package's files are collected. A failure is a message, not an error."""

    def run(self):
        path = Path(__file__).parent / "octavo/kernels/cpu/build.py"
        spec = importlib.util.spec_from_file_location("octavo_kernels_build", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        try:
            print(f"native kernels: {module.prebuild()}")
        except OSError as error:
            print(f"native kernels: not built: {error}")
        super().run()


setup(cmdclass={"build_py": BuildWithKernels})
