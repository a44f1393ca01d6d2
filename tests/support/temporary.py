"""Temporary files of this process and of everything that it starts: whatever they leave goes with their folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

ABOVE = Path("/tmp")
"""Not a $TMPDIR of before: a Unix socket's path may have 107 bytes."""
PREFIX = "wc-tmp-"


@contextlib.contextmanager
def own_folder(above: Path = ABOVE) -> Iterator[Path]:
    """Inside, $TMPDIR is a folder below ``above`` that everybody may use, as /tmp; it is removed in the end.

    SGLang removes none of its sockets, and who is killed leaves everything. What a run left that was killed itself goes
    when the next one begins.
    """
    for left in above.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _held(left):
            shutil.rmtree(left, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_made(above))
        before, environment = tempfile.tempdir, os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        try:
            yield folder
        finally:
            tempfile.tempdir = before
            if environment is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = environment


@contextlib.contextmanager
def _made(above: Path) -> Iterator[Path]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=above))
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(_held(folder))
                folder.chmod(0o1777)
            except OSError:  # another run has just taken it for one that was left
                continue
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            yield folder
            return


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The kernel gives it back when this process ends, whatever ends it. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise PermissionError(f"{folder} is somebody else's")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
