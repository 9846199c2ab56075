"""Finds the model that the options name, pulling it first if it is one that we know how to pull.

Not for: how a pull works (`checkpoint/pull.py`) or a model is opened (`checkpoint/`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.checkpoint.checkpoint import open_checkpoint
from octavo.checkpoint.pull import REGISTRY, pull
from octavo.checkpoint.records import Checkpoint
from octavo.errors import ConfigError
from octavo.options import EngineArgs, cache_dir


def locate(args: EngineArgs) -> Checkpoint:
    """Opens `args.model`. Raises CheckpointError that says what to do."""
    if args.model in REGISTRY:
        if args.revision is not None:
            raise ConfigError(
                f"{args.label('revision')}: {args.model} has one version; leave it out.", "revision"
            )
        pull_with_bar(args.model, args)
    return open_checkpoint(
        args.model,
        revision=args.revision,
        download_dir=_download_dir(args),
        cache_dir=cache_dir(args),
        load_format=args.load_format,
    )


def open_named(name: str, args: EngineArgs, *, revision: str | None = None) -> Checkpoint:
    """Opens a model of which no weights are needed, such as that of another tokenizer."""
    return open_checkpoint(
        name,
        revision=revision,
        download_dir=_download_dir(args),
        cache_dir=cache_dir(args),
        weights=False,
    )


def _download_dir(args: EngineArgs) -> Path | None:
    """Where hub models go: the folder that was named, else the hub library's own."""
    return None if args.download_dir is None else Path(args.download_dir).expanduser()


def pull_with_bar(name: str, args: EngineArgs) -> str:
    """Pulls a known model; shows a bar on standard error if there is something to fetch."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("Pulling {task.description}"), BarColumn(), DownloadColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, TransferSpeedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(name, total=None, visible=False)

        def show(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        return str(pull(name, cache_dir=cache_dir(args), progress=show))
