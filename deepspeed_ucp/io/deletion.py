"""Delete local files and folders by directory descriptors, following no link."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def open_below(folder: str, path: str) -> Iterator[int]:
    """Yield a descriptor of ``folder/path``; follow no links below ``folder``.

    Args:
        folder: may itself be reached through links.
        path: relative to ``folder``.

    Raises:
        OSError: a part of ``path`` is missing, is a link or is not a folder.
    """
    fd = os.open(folder, _FOLDER)
    try:
        for part in [part for part in path.split("/") if part not in ("", ".")]:
            if part == "..":
                raise OSError(errno.EINVAL, "leads out of its folder", os.path.join(folder, path))
            below = _open_folder(part, fd, os.path.join(folder, path))
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def delete_files(
    fd: int, choose: Callable[[str], bool], enter: Callable[[str], bool] = lambda _: True, above: str = ""
) -> None:
    """Delete chosen files below an open folder, and entered subfolders that are empty.

    A link counts as a file: the link is deleted, its target stays.

    Args:
        choose: returns True for the relative path of a file to delete.
        enter: returns True for the relative path of a folder to look into.
        above: prefix of the relative paths.
    """
    with os.scandir(fd) as entries:
        children = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in children:
        path = above + name
        if not is_folder and choose(path):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
        elif is_folder and enter(path):
            try:
                below = _open_folder(name, fd, path)
            except FileNotFoundError:
                continue
            try:
                delete_files(below, choose, enter, f"{path}/")
            finally:
                os.close(below)
            with suppress(OSError):  # it holds other files
                os.rmdir(name, dir_fd=fd)


def delete_tree(path: str, below: str | None = None) -> None:
    """Delete a folder with everything in it, or a single link or file, if it exists.

    Args:
        below: a folder that contains ``path``; no link between the two is followed. Default: the parent folder.
    """
    above, name = os.path.split(os.path.normpath(path))
    if name in ("", ".", ".."):
        raise OSError(errno.EINVAL, "does not end in a name", path)
    below = above or "." if below is None else below
    with open_below(below, os.path.relpath(above or ".", below)) as fd:
        try:
            inside = _open_folder(name, fd, path)
        except FileNotFoundError:
            return
        except NotADirectoryError:
            os.unlink(name, dir_fd=fd)
            return
        try:
            delete_files(inside, lambda _: True)
        finally:
            os.close(inside)
        os.rmdir(name, dir_fd=fd)


def try_delete_tree(path: str) -> None:
    """Delete a folder as :func:`delete_tree` does, but ignore errors."""
    with suppress(OSError):
        delete_tree(path)


def _open_folder(name: str, fd: int, path: str) -> int:
    """Return the descriptor of a folder in an open one; raise ``ENOTDIR`` for a link."""
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
    except OSError as error:
        code = errno.ENOTDIR if error.errno == errno.ELOOP else error.errno
        raise OSError(code, f"{error.strerror}: links are not followed", path) from error
