"""Builds the native kernels into the package where a compiler is there; else they wait for one.

All else about the package is in `pyproject.toml`.
"""

import importlib.util
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

KERNELS = Path("octavo/kernels/cpu")


class BuildWithKernels(build_py):
    """Compiles beside the package's collected files. A failure is a message, not an error."""

    def run(self):
        super().run()
        path = Path(__file__).parent / KERNELS / "build.py"
        spec = importlib.util.spec_from_file_location("octavo_kernels_build", path)
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        # In an editable install nothing is collected: the first use builds into the cache.
        if self.editable_mode:
            return
        try:
            print(f"native kernels: {build.prebuild(Path(self.build_lib) / KERNELS / 'prebuilt')}")
        except OSError as error:
            print(f"native kernels: not built: {error}")


setup(cmdclass={"build_py": BuildWithKernels})
