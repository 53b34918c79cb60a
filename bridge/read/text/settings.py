"""`Settings`: a foreign mapping, read with the types its own loader takes, one clear sentence for anything else."""

import sys
from collections.abc import Mapping
from typing import Any

from bridge.errors import PayloadError, close_matches, did_you_mean, listed
from bridge.precision.values import NO, YES, dtype_token, number_of_text

SHORT_DTYPES = {
    "32": "fp32",
    "32-true": "fp32",
    "16": "fp16",
    "16-mixed": "fp16",
    "bf16-mixed": "bf16",
}
"""Words of Lightning's that NeMo and Megatron Bridge take for dtypes."""
LARGEST = sys.float_info.max
SWITCHES = {**dict.fromkeys((*YES, "t", "y"), True), **dict.fromkeys((*NO, "f", "n"), False)}


class Settings:
    """A mapping of another system's settings.

    Args:
        payload: What was given; anything but a mapping is an error.
        system: The system's name, the start of every path in messages.
        path: Where in the document this mapping stands.
        lenient: Take what pydantic takes: "true", 1, 16.0 and "16" for the switch or number they
            spell.
    """

    def __init__(
        self, payload: object, system: str, path: str = "", *, lenient: bool = False
    ) -> None:
        self.system, self.path, self.lenient = system, path, lenient
        if not isinstance(payload, Mapping):
            raise self.wrong(
                "", "must be a mapping of settings", payload, "Give the parsed contents of the file"
            )
        self.values: dict[str, Any] = {
            key: value for key, value in payload.items() if isinstance(key, str)
        }

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def name(self, key: str) -> str:
        """Return the setting's name from the top of the document: "fsdp_config.mixed_precision_policy"."""
        return f"{self.path}.{key}" if self.path else key

    def given(self, key: str) -> bool:
        """Return whether a value is written, null not counting."""
        return self.values.get(key) is not None

    def switch(self, key: str) -> bool | None:
        """Return true or false, None where nothing was written."""
        value = self.values.get(key)
        if value is None or isinstance(value, bool):
            return value
        if (
            self.lenient
            and (type(value) is int or isinstance(value, str))
            and str(value).lower() in SWITCHES
        ):
            return SWITCHES[str(value).lower()]
        raise self.wrong(key, "must be true or false", value, "Write true or false, without quotes")

    def whole(self, key: str, *, least: int | None = None) -> int | None:
        """Return a whole number, None where nothing was written."""
        value = self.number(key)
        if isinstance(value, float) and self.lenient and value.is_integer():
            value = int(value)
        if isinstance(value, float):
            raise self.wrong(key, "must be a whole number", value, "Write digits, without quotes")
        self.number(key, least=least)
        return value

    def number(self, key: str, *, least: float | None = None) -> float | None:
        """Return a finite number, None where nothing was written."""
        value = self.values.get(key)
        if value is None:
            return None
        if self.lenient and isinstance(value, str):
            value = number_of_text(value)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not abs(value) <= LARGEST
        ):
            raise self.wrong(
                key, "must be a finite number", value, "Write a number, without quotes"
            )
        if least is not None and value < least:
            raise self.wrong(key, f"must be at least {least}", value, f"Use {least} or more")
        return value

    def text(self, key: str) -> str | None:
        """Return a string, None where nothing was written."""
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(key, "must be a string", value, "Write a word")

    def word(self, key: str, choices: tuple[str, ...]) -> str | None:
        """Return one of `choices`, None where nothing was written."""
        value = self.text(key)
        if value is None or value in choices:
            return value
        near = did_you_mean(close_matches(value, choices)).removesuffix("?")
        raise self.wrong(
            key,
            f"must be {listed(choices)}",
            value,
            near + "?" if near else f"Use {listed(choices[:3])}",
        )

    def named_dtype(self, key: str) -> str | None:
        """Return the dtype that a setting of NeMo or Megatron Bridge names, None for null."""
        return named_dtype(self.values.get(key), self.name(key))

    def section(self, key: str) -> "Settings":
        """Return the mapping under `key`, empty where nothing was written."""
        value = self.values.get(key)
        return Settings(
            {} if value is None else value, self.system, self.name(key), lenient=self.lenient
        )

    def wrong(self, key: str, rule: str, value: object, remedy: str) -> PayloadError:
        """Return the error to raise about `key`."""
        path = ": ".join(filter(None, (self.system, self.name(key) if key else self.path)))
        return PayloadError.of(
            path, rule, value, remedy if remedy.endswith(("?", ".")) else f"{remedy}."
        )


def named_dtype(value: object, where: str) -> str | None:
    """Return the dtype that a setting of NeMo or Megatron Bridge names; None for null."""
    named = value["_target_"] if isinstance(value, Mapping) and "_target_" in value else value
    if named is None:
        return None
    try:
        return SHORT_DTYPES.get(str(named)) or dtype_token(named)
    except ValueError as error:
        raise PayloadError(f"{where}: {error}") from None


def half_or_fp32(value: object) -> str | None:
    """Return "fp32", "bf16" or "fp16" for a dtype in any spelling, None for anything else."""
    try:
        compute = dtype_token(value)
    except ValueError:
        return None
    return compute if compute in ("fp32", "bf16", "fp16") else None
