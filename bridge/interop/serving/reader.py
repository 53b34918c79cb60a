"""The quantisation config of a served model, read from a file: the scheme that it gives to a module, by its name.

Read are `config.json` with a `quantization_config`, that block alone, and ModelOpt's `hf_quant_config.json`. The same
list of names means different modules in different systems, so each reader of the fp8 dialect has its own rule.

Source: vLLM 4de0dd6 layers/quantization/utils/quant_utils.py (is_layer_skipped) and 00155cd modelopt.py
(is_layer_excluded); SGLang pull request 23467 layers/quantization/utils.py; transformers 5.23.0
quantizers/quantizers_utils.py (should_convert_module) and quantizers/base.py; compressed-tensors 0.20.0 utils/match.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from bridge.errors import PayloadError
from bridge.interop.reading import strict_json
from bridge.interop.serving.formats import COMPRESSED, scheme_of_algorithm, scheme_of_arguments, scheme_of_fp8, words_of
from bridge.interop.serving.manifest import LARGEST
from bridge.interop.serving.names import HEAD
from bridge.precision import strict_yaml

MODELOPT = "modelopt"
READERS = {"fp8": ("vllm", "sglang", "hf"), "mxfp8": ("sglang", "hf")}
"""Method -> systems that read its list of modules, each by its own rule; other methods have one rule."""
METHODS = (COMPRESSED, *READERS, MODELOPT)
LINEAR = "Linear"
"""The class that compressed-tensors takes every linear layer for, in any system."""
_EXPRESSION = "re:"


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """The quantisation config of a served model."""

    path: str
    method: str | None
    """One of `METHODS`; None: nothing is quantised."""
    content: Mapping[str, Any] = field(default_factory=dict)
    model_type: str | None = None
    """That of the config.json around it."""

    @classmethod
    def read(cls, path: Path) -> ServingConfig:
        """Return the config of a file."""
        data = strict_yaml.read_bytes(path, error=PayloadError, limit=LARGEST)
        return cls.of(strict_json.loads(data.decode(errors="replace"), str(path)), str(path))

    @classmethod
    def of(cls, found: Any, path: str = "config") -> ServingConfig:
        """Return the config of parsed JSON; errors as for `read`."""
        outer = found if isinstance(found, Mapping) else {}
        block = outer.get("quantization_config", outer.get("compression_config"))
        model_type = str(outer["model_type"]) if isinstance(outer.get("model_type"), str) else None
        if block is None and isinstance(outer.get("quantization"), Mapping):
            block = {"quant_method": MODELOPT, **outer["quantization"]}
        if block is None and "quant_method" in outer:
            block = outer
        if block is None and ("architectures" in outer or model_type):
            return cls(path=path, method=None, model_type=model_type)
        if not isinstance(block, Mapping):
            rule = "must be a config.json, its quantization_config, or an hf_quant_config.json"
            raise PayloadError(f"{path}: {rule}. Give the file next to the served weights.")
        stated = str(block.get("quant_method", ""))
        method = MODELOPT if stated.startswith(MODELOPT) else stated
        if method not in METHODS:
            raise PayloadError.of(f"{path}: quant_method", f"must be one of {', '.join(METHODS)}", stated)
        if method == COMPRESSED and not isinstance(block.get("config_groups"), Mapping):
            raise PayloadError(f"{path}: config_groups: must be a mapping of groups. Give a config with its groups.")
        config = cls(path=path, method=method, content=block, model_type=model_type)
        config.require_expressions()
        return config

    def require_expressions(self) -> None:
        """Refuse entries that their readers take for regular expressions, and that are none.

        Raises:
            PayloadError: There is one.
        """
        targets = [target for patterns, _ in self._groups for target in patterns]
        for entry in [*self._ignored, *targets]:
            if entry.startswith(_EXPRESSION) or self.method in READERS:
                try:
                    re.compile(entry.removeprefix(_EXPRESSION))
                except re.error as error:
                    rule = f"must be a regular expression ({error})"
                    raise PayloadError.of(f"{self.path}: list of modules", rule, entry) from None

    @property
    def readers(self) -> tuple[str, ...]:
        """The systems whose rules for its lists differ; one empty name where all read it alike."""
        return READERS.get(self.method or "", ("",))

    def scheme_of(self, name: str, reader: str) -> str | None:
        """Return the scheme of a linear layer, as `formats` names it; None: it is not quantised."""
        if self.method is None:
            return None
        if self.method == COMPRESSED:
            return self._of_group(name)
        if self.method == MODELOPT:
            return self._of_modelopt(name)
        return None if self._is_kept(name, reader) else scheme_of_fp8(self.content)

    @property
    def kv_cache(self) -> str | None:
        """The format of stored keys and values in words; None: they are not quantised."""
        scheme = _mapping(self.content.get("kv_cache_scheme"))
        return words_of(scheme) if scheme else str(self.content.get("kv_cache_quant_algo") or "") or None

    def unmatched(self, names: list[str]) -> list[str]:
        """Return the entries of a list of compressed-tensors that take none of the names; names of norms count not."""
        targets = [target for patterns, _ in self._groups for target in patterns if target != LINEAR]
        entries = [*self._ignored, *targets] if self.method == COMPRESSED else []
        return [entry for entry in entries if "norm" not in entry and not any(_takes(entry, name) for name in names)]

    @cached_property
    def _ignored(self) -> list[str]:
        """The list of modules that stay in high precision."""
        keys = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
        return next(([str(entry) for entry in _list(self.content[key])] for key in keys if self.content.get(key)), [])

    @cached_property
    def _groups(self) -> list[tuple[list[str], str | None]]:
        """Targets and scheme of each config group."""
        groups = [group for group in self.content.get("config_groups", {}).values() if isinstance(group, Mapping)]
        return [
            (
                [str(target) for target in _list(group.get("targets"))],
                scheme_of_arguments(_mapping(group.get("weights")), _mapping(group.get("input_activations"))),
            )
            for group in groups
        ]

    def _of_group(self, name: str) -> str | None:
        if any(_takes(entry, name) for entry in self._ignored):
            return None
        for takes in (_takes, lambda target, _: target == LINEAR):  # a name goes before a class
            for targets, scheme in self._groups:
                if any(takes(target, name) for target in targets):
                    return scheme
        return None

    def _of_modelopt(self, name: str) -> str | None:
        place = _of_experts(name)
        if any(entry in place or fnmatchcase(place, entry) for entry in self._ignored):
            return None
        algorithm = str(self.content.get("quant_algo", ""))
        own = self.content.get("quantized_layers")
        if isinstance(own, Mapping):
            layer = own.get(name, own.get(place))
            algorithm = str(layer.get("quant_algo", "")) if isinstance(layer, Mapping) else ""
        return scheme_of_algorithm(algorithm) if algorithm else None

    def _is_kept(self, name: str, reader: str) -> bool:
        """Return whether a reader of the fp8 dialect leaves a module in high precision."""
        place = _of_experts(name)
        if reader == "hf":
            entries = self._ignored or [HEAD]  # without a list it leaves the output layer alone
            return any(
                re.match(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", place) or place.endswith(entry) for entry in entries
            )
        if name == HEAD:
            return True  # their output layer is no linear layer that this dialect reaches
        if reader == "sglang":
            return any(f".{entry}." in f".{place}." for entry in self._ignored)
        if place != name:
            return any(place in entry for entry in self._ignored)
        return place in self._ignored


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _takes(entry: str, name: str) -> bool:
    """Return whether an entry of compressed-tensors names a module."""
    if entry.startswith(_EXPRESSION):
        return re.match(entry.removeprefix(_EXPRESSION), name) is not None
    return entry == name


def _of_experts(name: str) -> str:
    """Return the name of the module that holds all experts of a layer, for one of them; other names as they are."""
    return re.sub(r"(\.experts)\.\d+\..*", r"\1", name)
