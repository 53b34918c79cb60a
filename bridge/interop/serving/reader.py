"""The quantisation config of a served model, read from a file: the scheme that it gives to a module, by its name.

Read are `config.json` with a `quantization_config`, that block alone, and ModelOpt's `hf_quant_config.json`. The same
list of names means different modules in different systems: `TAKES` has each system's rule.

Source: vLLM 4de0dd6 layers/quantization/utils/quant_utils.py (is_layer_skipped) and 00155cd modelopt.py
(is_layer_excluded); SGLang pull request 23467 layers/quantization/utils.py; transformers 5.23.0
quantizers/quantizers_utils.py (should_convert_module) and quantizers/base.py; compressed-tensors 0.20.0 utils/match.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from bridge.errors import PayloadError
from bridge.interop.reading import strict_json
from bridge.interop.serving.formats import COMPRESSED, scheme_of_algorithm, scheme_of_fp8, scheme_of_group, words_of
from bridge.interop.serving.manifest import LARGEST
from bridge.interop.serving.names import HEAD
from bridge.precision import strict_yaml

if TYPE_CHECKING:
    from pathlib import Path

MODELOPT = "modelopt"
READERS = {"fp8": ("vllm", "sglang", "hf"), "mxfp8": ("sglang", "hf")}
"""Method -> systems that read its list of modules, each by its own rule; other methods have one rule."""
METHODS = (COMPRESSED, *READERS, MODELOPT)
LISTS = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
"""Keys of the list of modules that stay in high precision."""
LINEAR = "Linear"
"""The class that compressed-tensors takes every linear layer for, in any system."""
EXPRESSION = "re:"


def _named(entry: str, name: str, _place: str = "") -> bool:
    if entry.startswith(EXPRESSION):
        return re.match(entry.removeprefix(EXPRESSION), name) is not None
    return entry == name


def _by_transformers(entry: str, _name: str, place: str) -> bool:
    return place.endswith(entry) or re.match(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", place) is not None


TAKES: Mapping[str, Callable[[str, str, str], bool]] = {
    COMPRESSED: _named,
    MODELOPT: lambda entry, _, place: entry in place or fnmatchcase(place, entry),
    "vllm": lambda entry, name, place: entry == name if place == name else place in entry,
    "sglang": lambda entry, _, place: f".{entry}." in f".{place}.",
    "hf": _by_transformers,
}
"""Method, or reader of the fp8 dialect -> whether an entry of a list takes a module.

The function is given the entry, the module's name and, for one of the experts of a layer, the name of what holds them.
"""


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
        outer = _mapping(found)
        block = outer.get("quantization_config", outer.get("compression_config"))
        model_type = outer["model_type"] if isinstance(outer.get("model_type"), str) else None
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
        """Raise PayloadError for an entry that its reader takes for a regular expression, and that is none."""
        for entry in self._entries:
            if entry.startswith(EXPRESSION) or self.method in READERS:
                try:
                    re.compile(entry.removeprefix(EXPRESSION))
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
        takes, kept, place = TAKES[reader if self.method in READERS else self.method], self._kept, _of_experts(name)
        if self.method in READERS and not (kept and reader == "hf"):
            kept = [*kept, HEAD]  # a list replaces it in transformers; it is no linear layer to the others
        if any(takes(entry, name, place) for entry in kept):
            return None
        if self.method == COMPRESSED:
            by_name = (scheme for target, scheme in self._targets if _named(target, name))
            by_class = (scheme for target, scheme in self._targets if target == LINEAR)
            return next(chain(by_name, by_class), None)
        if self.method in READERS:
            return scheme_of_fp8(self.content)
        layers = self.content.get("quantized_layers")
        own = layers.get(name, layers.get(place)) if isinstance(layers, Mapping) else self.content
        return scheme_of_algorithm(str(_mapping(own).get("quant_algo", "")))

    @property
    def kv_cache(self) -> str | None:
        """The format of stored keys and values in words; None: they are not quantised."""
        scheme = _mapping(self.content.get("kv_cache_scheme"))
        return words_of(scheme) if scheme else str(self.content.get("kv_cache_quant_algo") or "") or None

    def unmatched(self, names: list[str]) -> list[str]:
        """Return the entries of a list of compressed-tensors that take none of the names; names of norms count not."""
        entries = self._entries if self.method == COMPRESSED else []
        return [entry for entry in entries if "norm" not in entry and not any(_named(entry, name) for name in names)]

    @cached_property
    def _kept(self) -> list[str]:
        """The entries of the list of modules that stay in high precision."""
        return next((_texts(self.content[key]) for key in LISTS if self.content.get(key)), [])

    @cached_property
    def _targets(self) -> list[tuple[str, str | None]]:
        """The targets of the config groups, names or classes, each with its scheme."""
        groups = [_mapping(group) for group in self.content.get("config_groups", {}).values()]
        schemes = [
            scheme_of_group(_mapping(one.get("weights")), _mapping(one.get("input_activations"))) for one in groups
        ]
        pairs = zip(groups, schemes, strict=True)
        return [(target, scheme) for group, scheme in pairs for target in _texts(group.get("targets"))]

    @property
    def _entries(self) -> list[str]:
        return [*self._kept, *(target for target, _ in self._targets if target != LINEAR)]


def _texts(value: object) -> list[str]:
    return [str(entry) for entry in value] if isinstance(value, list) else []


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _of_experts(name: str) -> str:
    """Return the name of the module that holds all experts of a layer, for one of them; other names as they are."""
    return re.sub(r"(\.experts)\.\d+\..*", r"\1", name)
