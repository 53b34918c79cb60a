"""The quantisation config of a served model, read from a file: the scheme that it gives to a module, by its name.

Read are `config.json` with a `quantization_config`, that block alone, and ModelOpt's `hf_quant_config.json`. Each is a
list of entries that stay in high precision, and rows of a target and its scheme. The same entry means different modules
in different systems: `TAKES` has each system's rule.

Source: vLLM 4de0dd6 layers/quantization/utils/quant_utils.py (is_layer_skipped) and 00155cd modelopt.py
(is_layer_excluded); SGLang pull request 23467 layers/quantization/utils.py; transformers 5.23.0
quantizers/quantizers_utils.py (should_convert_module) and quantizers/base.py; compressed-tensors 0.20.0 utils/match.py.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

from bridge.convert.serving.formats import (
    COMPRESSED,
    ROWS,
    SERVED,
    compared,
    scheme_where,
    words_of,
)
from bridge.convert.serving.manifest import LARGEST
from bridge.convert.serving.names import HEAD
from bridge.errors import PayloadError
from bridge.precision import strict_yaml
from bridge.read.text import strict_json

MODELOPT = "modelopt"
READERS: Mapping[str, list[str]] = ROWS["readers"]
LINEAR = "Linear"
"""The class that compressed-tensors takes every linear layer for, in any system."""
EXPRESSION = "re:"
ALGORITHMS = {name: scheme for scheme, row in SERVED.items() for name in row.get("algorithms", ())}


def _named(entry: str, name: str, _place: str = "") -> bool:
    if entry.startswith(EXPRESSION):
        return re.match(entry.removeprefix(EXPRESSION), name) is not None
    return entry == name


TAKES: Mapping[str, Callable[[str, str, str], bool]] = {
    COMPRESSED: _named,
    MODELOPT: lambda entry, _, place: entry in place or fnmatchcase(place, entry),
    "vllm": lambda entry, name, place: entry == name if place == name else place in entry,
    "sglang": lambda entry, _, place: f".{entry}." in f".{place}.",
    "hf": lambda entry, _, place: (
        place.endswith(entry) or re.match(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", place) is not None
    ),
}
"""Method, or reader of the fp8 dialect -> whether an entry of a list takes a module.

The function is given the entry, the module's name and, for one of the experts of a layer, the name of what holds them.
"""


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """The quantisation config of a served model."""

    path: str
    method: str = MODELOPT
    """One of `READERS`; without `targets` nothing is quantised."""
    model_type: str | None = None
    """That of the config.json around it."""
    kept: tuple[str, ...] = ()
    """Entries of the list of modules that stay in high precision."""
    targets: tuple[tuple[str, str | None], ...] = ()
    """Name of a module, an expression or, last, `LINEAR`, and its scheme as `formats` names it."""
    kv_cache: str | None = None
    """The format of stored keys and values in words; None: they are not quantised."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the config of a file."""
        data = strict_yaml.read_bytes(path, error=PayloadError, limit=LARGEST)
        return cls.of(strict_json.loads(data.decode(errors="replace"), str(path)), str(path))

    @classmethod
    def of(cls, found: Any, path: str = "config") -> Self:
        """Return the config of parsed JSON; errors as for `read`."""
        outer = _mapping(found)
        model_type = outer["model_type"] if isinstance(outer.get("model_type"), str) else None
        block = outer.get("quantization_config", outer.get("compression_config"))
        if isinstance(outer.get("quantization"), Mapping):
            block = block or {"quant_method": MODELOPT, **outer["quantization"]}
        block = outer if block is None and "quant_method" in outer else block
        if block is None and ("architectures" in outer or model_type):
            return cls(path=path, model_type=model_type)
        if not isinstance(block, Mapping):
            rule = "must be a config.json, its quantization_config, or an hf_quant_config.json"
            raise PayloadError(f"{path}: {rule}. Give the file next to the served weights.")
        stated = str(block.get("quant_method", ""))
        method = MODELOPT if stated.startswith(MODELOPT) else stated
        if method not in READERS:
            raise PayloadError.of(
                f"{path}: quant_method", f"must be one of {', '.join(READERS)}", stated
            )
        cache = _mapping(block.get("kv_cache_scheme"))
        config = cls(
            path=path,
            method=method,
            model_type=model_type,
            kept=next((_texts(block[key]) for key in ROWS["lists"] if block.get(key)), ()),
            targets=tuple(sorted(_targets(block, method, path), key=lambda row: row[0] == LINEAR)),
            kv_cache=words_of(cache)
            if cache
            else str(block.get("kv_cache_quant_algo") or "") or None,
        )
        for entry in (*config.kept, *(target for target, _ in config.targets)):
            try:
                re.compile(
                    entry.removeprefix(EXPRESSION)
                    if config.is_fp8 or entry.startswith(EXPRESSION)
                    else ""
                )
            except re.error as error:
                rule = f"must be a regular expression ({error})"
                raise PayloadError.of(f"{path}: list of modules", rule, entry) from None
        return config

    @property
    def readers(self) -> list[str]:
        """The systems whose rules for its lists differ; one empty name where all read it alike."""
        return READERS[self.method]

    @property
    def is_fp8(self) -> bool:
        """Whether it is of the fp8 dialect, which each system reads by its own rule."""
        return len(self.readers) > 1

    def scheme_of(self, name: str, reader: str) -> str | None:
        """Return the scheme of a linear layer, as `formats` names it; None: it is not quantised."""
        place = re.sub(
            r"(\.experts)\.\d+\..*", r"\1", name
        )  # what holds all experts of a layer, for one of them
        takes, kept = TAKES[reader if self.is_fp8 else self.method], self.kept
        if self.is_fp8 and not (kept and reader == "hf"):
            kept = (
                *kept,
                HEAD,
            )  # a list replaces it in transformers; it is no linear layer to the others
        if any(takes(entry, name, place) for entry in kept):
            return None
        own = {LINEAR, place if self.method == MODELOPT else name}
        return next(
            (scheme for target, scheme in self.targets if target in own or _named(target, name)),
            None,
        )


def _targets(block: Mapping[str, Any], method: str, path: str) -> Iterator[tuple[str, str | None]]:
    """Yield the targets of a config, each with its scheme; PayloadError for groups that are none."""
    if method == MODELOPT:
        layers = block.get("quantized_layers")
        for name, row in (layers if isinstance(layers, Mapping) else {LINEAR: block}).items():
            stated = str(_mapping(row).get("quant_algo", ""))
            yield name, ALGORITHMS.get(stated.upper(), f"ModelOpt's {stated}") if stated else None
    elif method != COMPRESSED:
        yield LINEAR, _of_fp8(block)
    elif not isinstance(block.get("config_groups"), Mapping):
        raise PayloadError(
            f"{path}: config_groups: must be a mapping of groups. Give a config with its groups."
        )
    else:
        for group in map(_mapping, block["config_groups"].values()):
            scheme = _of_group(
                _mapping(group.get("weights")), _mapping(group.get("input_activations"))
            )
            yield from ((target, scheme) for target in _texts(group.get("targets")))


def _of_fp8(block: Mapping[str, Any]) -> str:
    method, inputs = str(block["quant_method"]), str(block.get("activation_scheme", "dynamic"))
    sizes = (
        [1, 32] if method == "mxfp8" else block.get("weight_block_size")
    )  # SGLang and MXFP8 allow no other
    stated: dict[str, Any] = {"quant_method": method, "activation_scheme": inputs}
    stated |= {} if sizes is None else {"weight_block_size": sizes}
    blocks = f" in blocks of {sizes}" if sizes else ""
    return scheme_where(
        lambda row: row.get("fp8") == stated, f"{method} weights{blocks}, {inputs} inputs"
    )


def _of_group(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> str | None:
    if not weights:
        return None
    found = compared(weights), compared(inputs)
    words = f"{words_of(weights)} weights, {words_of(inputs) if inputs else 'unquantised'} inputs"
    return scheme_where(
        lambda row: found == (compared(row["weights"]), compared(row["inputs"])), words
    )


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
