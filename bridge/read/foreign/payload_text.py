"""`as_json` and `as_yaml`: the payload of an export as the text of a file."""

import json
from typing import Any


def as_json(payload: Any) -> str:
    """Return a payload as the text of a JSON file."""
    return json.dumps(payload, indent=2) + "\n"


def as_yaml(payload: Any) -> str:
    """Return a payload as the text of a YAML file."""
    import yaml  # not at the top, because launch scripts are read without YAML

    return str(yaml.safe_dump(payload, sort_keys=False))
