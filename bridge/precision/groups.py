"""The fields of a precision by subject."""

import textwrap
from types import MappingProxyType

from bridge.precision.config import FIELDS
from bridge.precision.subjects import SUBJECTS

GROUPS = MappingProxyType(
    {one.title: tuple(name for name, field in FIELDS.items() if field.subject is one) for one in SUBJECTS}
)
"""Subject -> its fields; each field is in one."""


def by_subject() -> str:
    """Return the names of the fields as a list for a command's help, a paragraph for each subject."""
    lines = ["fields by subject:"]
    for subject, names in GROUPS.items():
        lines.extend(textwrap.wrap(f"  {subject}: {', '.join(names)}", 110, subsequent_indent="    "))
    return "\n".join(lines)
