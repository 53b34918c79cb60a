"""`Settings`: a foreign mapping, read with the types that its own loader takes.

    settings = Settings({"enabled": True, "loss_scale": 0}, "DeepSpeed", "fp16")
    settings.switch("enabled")               # True
    settings.number("loss_scale", least=0)   # 0
    settings.whole("hysteresis")             # None: nothing is written

A value of another type is an error of one sentence: "DeepSpeed: fp16.enabled: must be true or
false, got 'yes'. Write true or false, without quotes."
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
"""Words of Lightning that NeMo and Megatron Bridge take for dtypes -> the dtype."""
MAX_FLOAT = sys.float_info.max
"""The largest finite number."""
SWITCH_VALUES = {
    **dict.fromkeys((*TRUE_WORDS, "t", "y"), True),
    **dict.fromkeys((*FALSE_WORDS, "f", "n"), False),
}
"""Word that pydantic takes for a switch, in small letters -> its value."""


class Settings:
    """A mapping of another system's settings.

    Args:
        payload: The mapping; any other value is an error.
        system: The system's name, the start of every path in messages.
        path: The place of the mapping in its document: "fsdp_config".
        lenient: Whether "true", 1, 16.0 and "16" count for the switch or number that they spell, as
            pydantic takes them.
    """

    def __init__(
        self, payload: object, system: str, path: str = "", *, lenient: bool = False
    ) -> None:
        self.system, self.path, self.lenient = system, path, lenient
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
        """Return the setting's name from the top of the document: "fsdp_config.mixed_precision_policy"."""
        return f"{self.path}.{key}" if self.path else key

    def is_written(self, key: str) -> bool:
        """Return whether a value is written; null does not count."""
        return self.values.get(key) is not None

    def switch(self, key: str) -> bool | None:
        """Return true or false; None where nothing is written."""
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return value
        if self.lenient and (type(value) is int or isinstance(value, str)):
            word = str(value).lower()
            if word in SWITCH_VALUES:
                return SWITCH_VALUES[word]
        raise self.wrong(key, "must be true or false", value, "Write true or false, without quotes")

    def whole(self, key: str, *, least: int | None = None) -> int | None:
        """Return a whole number; None where nothing is written."""
        value = self.number(key)
        if isinstance(value, float) and self.lenient and value.is_integer():
            value = int(value)
        if isinstance(value, float):
            raise self.wrong(key, "must be a whole number", value, "Write digits, without quotes")
        self.number(key, least=least)
        return value

    def number(self, key: str, *, least: float | None = None) -> float | None:
        """Return a finite number; None where nothing is written."""
        value = self.values.get(key)
        if value is None:
            return None
        if self.lenient and isinstance(value, str):
            value = parse_number(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or _is_infinite(value):
            raise self.wrong(
                key, "must be a finite number", value, "Write a number, without quotes"
            )
        if least is not None and value < least:
            raise self.wrong(key, f"must be at least {least}", value, f"Use {least} or more")
        return value

    def text(self, key: str) -> str | None:
        """Return a string; None where nothing is written."""
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(key, "must be a string", value, "Write a word")

    def word(self, key: str, choices: tuple[str, ...]) -> str | None:
        """Return one of `choices`; None where nothing is written."""
        value = self.text(key)
        if value is None or value in choices:
            return value
        remedy = did_you_mean(close_matches(value, choices))
        if not remedy:
            remedy = f"Use {listed(choices[:3])}"
        raise self.wrong(key, f"must be {listed(choices)}", value, remedy)

    def named_dtype(self, key: str) -> str | None:
        """Return the dtype that a setting of NeMo or Megatron Bridge names, None for null."""
        return parse_named_dtype(self.values.get(key), self.name(key))

    def section(self, key: str) -> "Settings":
        """Return the mapping under `key`; an empty one where nothing is written."""
        value = self.values.get(key)
        if value is None:
            value = {}
        return Settings(value, self.system, self.name(key), lenient=self.lenient)

    def wrong(self, key: str, rule: str, value: object, remedy: str) -> PayloadError:
        """Return the error to raise about `key`."""
        setting = self.name(key) if key else self.path
        path = ": ".join(filter(None, (self.system, setting)))
        if not remedy.endswith(("?", ".")):
            remedy = f"{remedy}."
        return PayloadError.of(path, rule, value, remedy)


def _is_infinite(number: float) -> bool:
    """Return whether a number is infinite, NaN, or an integer larger than any float."""
    return not abs(number) <= MAX_FLOAT


def parse_named_dtype(value: object, where: str) -> str | None:
    """Return the dtype that a setting of NeMo or Megatron Bridge names; None for null."""
    named = value
    if isinstance(value, Mapping) and "_target_" in value:
        named = value["_target_"]
    if named is None:
        return None
    try:
        return SHORT_DTYPES.get(str(named)) or parse_dtype(named)
    except ValueError as error:
        raise PayloadError(f"{where}: {error}") from None


def parse_mode_dtype(value: object) -> str | None:
    """Return "fp32", "bf16" or "fp16" for a dtype in any spelling; None for any other value."""
    try:
        dtype = parse_dtype(value)
    except ValueError:
        return None
    if dtype not in ("fp32", "bf16", "fp16"):
        return None
    return dtype
