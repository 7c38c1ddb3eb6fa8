"""Keep transformers from printing progress bars and reports of weights that we leave out on purpose."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within the context transformers logs errors only and draws no progress bars; both are restored after."""
    from transformers.utils import logging as library

    level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if bars:
            library.enable_progress_bar()
