"""The optional packages: the base install answers without them, and an extra brings them."""

from __future__ import annotations

from importlib.util import find_spec

from bridge.errors import MissingExtraError

EXTRAS = {
    "train": ("einops", "jinja2", "matplotlib", "psutil", "scipy", "tensorboard"),
    "scripts": ("tree_sitter", "tree_sitter_bash"),
}
"""Extra of the package -> the modules that it brings."""


def require_extra(extra: str, subject: str) -> None:
    """Refuse a command that needs an extra that is not installed, before it does anything.

    Args:
        extra: A name of `EXTRAS`.
        subject: The subject of the sentence in the message: the command, or its action.

    Raises:
        MissingExtraError: A module of the extra is not installed.
    """
    missing = tuple(name for name in EXTRAS[extra] if find_spec(name) is None)
    if missing:
        names = ", ".join(missing).replace("_", "-")
        message = (
            f"{subject} needs packages that are not installed ({names}): "
            f"`pip install 'precision-bridge[{extra}]'`."
        )
        raise MissingExtraError(message, extra=extra, missing=missing)
