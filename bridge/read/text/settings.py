"""`Settings`: the settings of another system, read with the types that its loader accepts.

    settings = Settings({"enabled": True, "loss_scale": 0}, "DeepSpeed", "fp16")
    settings.switch("enabled")               # True
    settings.number("loss_scale", least=0)   # 0
    settings.whole("hysteresis")             # None: the file does not have it

A value of another type raises a short error: "DeepSpeed: fp16.enabled: must be true or false, got
'yes'. Write true or false, without quotes."
"""

import sys
from collections.abc import Mapping
from typing import Any

from bridge.errors import PayloadError, close_matches, did_you_mean, listed
from bridge.precision.coercion import FALSE_WORDS, TRUE_WORDS, parse_dtype, parse_number

SHORT_DTYPES = {
    "32": "fp32",
    "32-true": "fp32",
    "16": "fp16",
    "16-mixed": "fp16",
    "bf16-mixed": "bf16",
}
"""Lightning's name of a precision -> the dtype that NeMo and Megatron Bridge read."""
MAX_FLOAT = sys.float_info.max
"""The largest finite number."""
SWITCH_VALUES = {
    **dict.fromkeys((*TRUE_WORDS, "t", "y"), True),
    **dict.fromkeys((*FALSE_WORDS, "f", "n"), False),
}
"""Text that pydantic accepts as a switch, in lower case -> its value."""


class Settings:
    """A mapping of another system's settings.

    Args:
        payload: The mapping.
        system: The name of the system, with which every message begins.
        path: The key of the mapping in its document, such as "fsdp_config". Empty: the whole
            document.
        lenient: Whether "true" and 1 are accepted as switches, and 16.0 and "16" as whole numbers,
            as in pydantic.

    Raises:
        PayloadError: The payload is not a mapping.
    """

    def __init__(
        self, payload: object, system: str, path: str = "", *, lenient: bool = False
    ) -> None:
        self.system = system
        self.path = path
        self.lenient = lenient
        if not isinstance(payload, Mapping):
            raise self.wrong(
                "", "must be a mapping of settings", payload, "Give the parsed contents of the file"
            )
        self.values: dict[str, Any] = {}
        for key, value in payload.items():
            if isinstance(key, str):
                self.values[key] = value

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def name(self, key: str) -> str:
        """Return the name of a setting from the top of the document: "fsdp_config.dtype"."""
        if not self.path:
            return key
        return f"{self.path}.{key}"

    def is_written(self, key: str) -> bool:
        """Return whether a setting has a value other than null."""
        return self.values.get(key) is not None

    # Each method below returns None for an absent setting and for null. It raises PayloadError for
    # a value of another type.

    def switch(self, key: str) -> bool | None:
        """Return true or false."""
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return value
        if self.lenient and (type(value) is int or isinstance(value, str)):
            word = str(value).lower()
            if word in SWITCH_VALUES:
                return SWITCH_VALUES[word]
        raise self.wrong(key, "must be true or false", value, "Write true or false, without quotes")

    def whole(self, key: str, *, least: int | None = None) -> int | None:
        """Return a whole number.

        Args:
            key: The setting.
            least: The least number that is allowed; None: any.
        """
        value = self.number(key)
        if isinstance(value, float) and self.lenient and value.is_integer():
            value = int(value)
        if isinstance(value, float):
            raise self.wrong(key, "must be a whole number", value, "Write digits, without quotes")
        self._require_least(key, value, least)
        return value

    def number(self, key: str, *, least: float | None = None) -> float | None:
        """Return a finite number.

        Args:
            key: The setting.
            least: The least number that is allowed; None: any.
        """
        value = self.values.get(key)
        if value is None:
            return None
        if self.lenient and isinstance(value, str):
            value = parse_number(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or _is_infinite(value):
            raise self.wrong(
                key, "must be a finite number", value, "Write a number, without quotes"
            )
        self._require_least(key, value, least)
        return value

    def _require_least(self, key: str, value: float | None, least: float | None) -> None:
        """Refuse a number below the least number that is allowed."""
        if value is not None and least is not None and value < least:
            raise self.wrong(key, f"must be at least {least}", value, f"Use {least} or more")

    def text(self, key: str) -> str | None:
        """Return a string."""
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(key, "must be a string", value, "Write a word")

    def word(self, key: str, choices: tuple[str, ...]) -> str | None:
        """Return a string, which must be one of `choices`."""
        value = self.text(key)
        if value is None or value in choices:
            return value
        remedy = did_you_mean(close_matches(value, choices))
        if not remedy:
            remedy = f"Use {listed(choices[:3])}"
        raise self.wrong(key, f"must be {listed(choices)}", value, remedy)

    def named_dtype(self, key: str) -> str | None:
        """Return the dtype that a setting of NeMo or Megatron Bridge names, such as "bf16"."""
        return parse_named_dtype(self.values.get(key), self.name(key))

    def section(self, key: str) -> "Settings":
        """Return the settings in the mapping of a key. Empty if it is absent or null."""
        value = self.values.get(key)
        if value is None:
            value = {}
        return Settings(value, self.system, self.name(key), lenient=self.lenient)

    def wrong(self, key: str, rule: str, value: object, remedy: str) -> PayloadError:
        """Return the error to raise about a setting.

        Args:
            key: The setting. Empty: the mapping itself.
            rule: The rule that its value breaks: "must be ...".
            remedy: A sentence about a correct value. The full stop may be missing.
        """
        setting = self.name(key) if key else self.path
        path = ": ".join(filter(None, (self.system, setting)))
        if not remedy.endswith(("?", ".")):
            remedy = f"{remedy}."
        return PayloadError.of(path, rule, value, remedy)


def _is_infinite(number: float) -> bool:
    """Return whether a number is infinite, NaN, or an integer larger than any float."""
    return not abs(number) <= MAX_FLOAT


def parse_named_dtype(value: object, location: str) -> str | None:
    """Return the dtype that a setting of NeMo or Megatron Bridge names. None for null.

    Args:
        value: A dtype, a precision of Lightning such as "bf16-mixed", or a mapping with `_target_`.
        location: The setting in messages.

    Raises:
        PayloadError: The value does not name a dtype.
    """
    name = value
    if isinstance(value, Mapping) and "_target_" in value:
        name = value["_target_"]
    if name is None:
        return None
    try:
        return SHORT_DTYPES.get(str(name)) or parse_dtype(name)
    except ValueError as error:
        raise PayloadError(f"{location}: {error}") from None


def parse_mode_dtype(value: object) -> str | None:
    """Return "fp32", "bf16" or "fp16" for a spelling of this dtype. None for any other value."""
    try:
        dtype = parse_dtype(value)
    except ValueError:
        return None
    if dtype not in ("fp32", "bf16", "fp16"):
        return None
    return dtype
