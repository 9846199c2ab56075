"""Whether this machine has a GPU that the installed torch can use, found out without torch.

The API process must know it before the worker starts, for the defaults that depend on it. Looks at
the driver's files and at torch's own record of how it was built. The worker alone can tell whether
the GPU really works, and says why if it does not. Not for: the worker (`device/cuda.py`).
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_CUDA = re.compile(r"^cuda\s*(?::[^=]*)?=\s*['\"]", re.MULTILINE)


def has_gpu(root: Path, visible: str | None) -> bool:
    """True if the driver shows a GPU; `visible` is CUDA_VISIBLE_DEVICES, None if not set."""
    return gpu_count(root, visible) > 0


def gpu_count(root: Path, visible: str | None) -> int:
    """How many GPUs the driver shows, of those that `visible` (CUDA_VISIBLE_DEVICES) names."""
    found = sum(path.name[6:].isdecimal() for path in (root / "dev").glob("nvidia*"))
    if visible is None:
        return found
    named = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return min(found, len(named))


def torch_folder() -> Path | None:
    """Where torch lies, without importing it."""
    found = importlib.util.find_spec("torch")
    return None if found is None or found.origin is None else Path(found.origin).parent


def built_for_cuda(folder: Path | None) -> bool:
    """True if the torch in `folder` was built with CUDA."""
    if folder is None:
        return False
    try:
        return _CUDA.search((folder / "version.py").read_text(encoding="utf-8")) is not None
    except OSError:
        return False
