"""The optional packages: the base install answers without them, and an extra brings them."""

from __future__ import annotations

from importlib.util import find_spec

from bridge.errors import MissingExtraError

EXTRAS = {
    "train": ("einops", "jinja2", "matplotlib", "psutil", "scipy", "tensorboard"),
    "scripts": ("tree_sitter", "tree_sitter_bash"),
}
"""Extra of the package -> the modules that it brings."""


def require_extra(extra: str, what: str) -> None:
    """Refuse what needs an extra that is not installed, before anything of it is done.

    Args:
        extra: A name of `EXTRAS`.
        what: The command, or the thing that it does, as the subject of the sentence.

    Raises:
        MissingExtraError: A module of the extra is not installed.
    """
    missing = tuple(name for name in EXTRAS[extra] if find_spec(name) is None)
    if missing:
        names = ", ".join(missing).replace("_", "-")
        message = (
            f"{what} needs packages that are not installed ({names}): "
            f"`pip install 'precision-bridge[{extra}]'`."
        )
        raise MissingExtraError(message, extra=extra, missing=missing)
