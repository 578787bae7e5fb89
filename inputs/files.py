"""The project's folders, replacing files and folders as a whole, and errors of one line."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from inputs.commandLine import one_line
from utils import UserError, out_of_memory

ROOT = Path(__file__).resolve().parent.parent
# Use these two as `files.MODELS` and `files.DATASETS`, so that a test can replace them in one place.
MODELS = ROOT / "models"
DATASETS = ROOT / "datasets"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a full disk


def replace_file(path: Path, text: str) -> None:
    """Replace the content of `path` with `text` (UTF-8) in one step: a reader sees the old content or the new. The text
    is written beside it and flushed; then that file takes the name. Raises OSError, and leaves `path` unchanged."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}") as folder:
        temporary = Path(folder) / path.name
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to write into. At the end of the block it becomes `folder`, in place of one that exists; after an
    error it is removed. Its parent takes temporary files. Raises UserError as `lock_folder` does."""
    with lock_folder(folder), tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        written, old = Path(temporary) / ".new", Path(temporary) / ".old"
        written.mkdir()
        yield written
        try:
            if folder.exists():
                folder.rename(old)
            written.rename(folder)
        except BaseException:  # Ctrl-C too.
            if old.exists() and not folder.exists():
                old.rename(folder)
            raise


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other processes from writing `folder`. Creates its parent. Raises UserError if another holds the lock."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.resolve().with_name(f".{folder.name}.lock")
    try:
        with FileLock(lock, timeout=0):
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
    except Timeout:
        raise UserError(f"another process is writing {folder}; wait for it") from None


@contextmanager
def library_errors(what: str, remedy: str) -> Iterator[None]:
    """Raise whatever a library raises for broken or foreign files as a UserError: a broken file can raise nearly
    anything. Errors of a full disk or a full memory, and UserErrors, pass."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        if out_of_memory(cause) or getattr(cause, "errno", None) in FULL:
            raise cause from None
        raise UserError(f"{what} ({one_line(cause)}); {remedy}") from None


@contextmanager
def file_errors() -> Iterator[None]:
    """Raise the OSErrors of the block, or of the function that this decorates, as UserErrors."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or 'a file'}: {error.strerror or one_line(error)}; fix this and run the command again"
        if error.errno in FULL:
            what = "the disk is full; free some space and run the command again: it continues where it stopped"
        raise UserError(what) from None


def gigabytes(count: float) -> str:
    """A number of bytes as a person reads it, such as '1.5 GB'."""
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if count >= u), (1e3, "KB"))
    return f"{count / unit:.1f} {name}"
