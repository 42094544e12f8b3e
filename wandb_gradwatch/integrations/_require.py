"""Import what an integration is for, or say how to install it."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def require(*modules: str, extra: str) -> Any:
    """The first of these modules that the program has already imported, otherwise the first that can be imported.

    Raises:
        ImportError: none of them is installed; it names the extra.
    """
    for module in modules:
        if sys.modules.get(module) is not None:
            return sys.modules[module]
    first_error: ImportError | None = None
    for module in modules:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            first_error = first_error or error
    raise ImportError(
        f"wandb_gradwatch.integrations.{extra} needs {' or '.join(modules)}, which could not be imported "
        f"({first_error}); run: pip install 'wandb-gradwatch[{extra}]'"
    ) from first_error
