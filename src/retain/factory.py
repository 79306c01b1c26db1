"""Functions of the user's own, named in the configuration as `package.module:function`: the only code that a run imports."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from retain.errors import ConfigError

LOG = logging.getLogger("retain")


def load_factory(key: str, name: str) -> Callable[..., Any]:
    """Import the function that a user's own file names; the working directory can be imported from meanwhile.

    Args:
        key: the configuration's key, for messages.
        name: ``package.module:function``.

    Raises:
        ConfigError: there is no such module or function, or its import fails.
    """
    module_name, _, function_name = name.partition(":")
    folder = os.getcwd()
    if module_name not in sys.modules:
        LOG.info("%s=%s: importing code from %s, as the configuration says", key, name, module_name)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        with blaming(key, name):
            module = importlib.import_module(module_name)
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    function: Any = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{key}={name}: {module.__file__ or module_name} has no function {function_name}.")
    return function


def _not_theirs(filename: str) -> bool:
    own, standard = os.path.dirname(__file__), os.path.dirname(os.__file__)
    return filename.startswith((own, standard, "<frozen")) or "site-packages" in filename


@contextmanager
def blaming(key: str, name: str) -> Iterator[None]:
    """A region in which a user's function runs: whatever it raises becomes a ConfigError that names it and the line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if not _not_theirs(frame.filename)]
        where = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
        raise ConfigError(f"{key}={name}: {type(error).__name__}: {error}{where}") from error
