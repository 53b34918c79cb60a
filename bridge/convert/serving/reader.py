"""The quantisation config of a served model, read from a file: the scheme of each module.

Read are `config.json` with a `quantization_config`, that block alone, and ModelOpt's
`hf_quant_config.json`. Each is a list of entries that stay in high precision, and rows of a target
and its scheme. The same entry means different modules in different systems: `TAKES` has each
system's rule.

Source: vLLM 4de0dd6 layers/quantization/utils/quant_utils.py (is_layer_skipped) and 00155cd
modelopt.py (is_layer_excluded); SGLang pull request 23467 layers/quantization/utils.py;
transformers 5.23.0 quantizers/quantizers_utils.py (should_convert_module) and quantizers/base.py;
compressed-tensors 0.20.0 utils/match.py.
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
ALGORITHMS: dict[str, str] = {}
for _scheme, _row in SERVED.items():
    ALGORITHMS.update(dict.fromkeys(_row.get("algorithms", ()), _scheme))


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

The function is given the entry, the module's name and, for one of the experts of a layer, the name
of what holds them.
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
        model_type = outer.get("model_type")
        if not isinstance(model_type, str):
            model_type = None
        block = _block(outer)
        if block is None and ("architectures" in outer or model_type):
            return cls(path=path, model_type=model_type)
        if not isinstance(block, Mapping):
            rule = "must be a config.json, its quantization_config, or an hf_quant_config.json"
            raise PayloadError(f"{path}: {rule}. Give the file next to the served weights.")
        stated = str(block.get("quant_method", ""))
        method = stated
        if stated.startswith(MODELOPT):
            method = MODELOPT
        if method not in READERS:
            rule = f"must be one of {', '.join(READERS)}"
            raise PayloadError.of(f"{path}: quant_method", rule, stated)
        targets = sorted(_targets(block, method, path), key=lambda target: target[0] == LINEAR)
        config = cls(
            path=path,
            method=method,
            model_type=model_type,
            kept=_kept(block),
            targets=tuple(targets),
            kv_cache=_kv_cache(block),
        )
        config.require_expressions()
        return config

    def require_expressions(self) -> None:
        """Refuse an entry of a list of modules that is used as an expression and is none."""
        entries = list(self.kept)
        for target, _ in self.targets:
            entries.append(target)
        for entry in entries:
            if not self.is_fp8 and not entry.startswith(EXPRESSION):
                continue
            try:
                re.compile(entry.removeprefix(EXPRESSION))
            except re.error as error:
                rule = f"must be a regular expression ({error})"
                raise PayloadError.of(f"{self.path}: list of modules", rule, entry) from None

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
        # The name of what holds all experts of a layer, for one of them.
        place = re.sub(r"(\.experts)\.\d+\..*", r"\1", name)
        dialect = self.method
        kept = self.kept
        if self.is_fp8:
            dialect = reader
            # A list replaces the head in transformers; it is no linear layer to the others.
            if not kept or reader != "hf":
                kept = (*kept, HEAD)
        takes = TAKES[dialect]
        if any(takes(entry, name, place) for entry in kept):
            return None
        exact = {LINEAR, name}
        if self.method == MODELOPT:
            exact = {LINEAR, place}
        for target, scheme in self.targets:
            if target in exact or _named(target, name):
                return scheme
        return None


def _block(outer: Mapping[str, Any]) -> Any:
    """Return the quantisation block of a file; None where it has none."""
    block = outer.get("quantization_config", outer.get("compression_config"))
    if not block and isinstance(outer.get("quantization"), Mapping):
        block = {"quant_method": MODELOPT, **outer["quantization"]}
    if block is None and "quant_method" in outer:
        block = outer
    return block


def _kept(block: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the entries of the first list of modules that stay in high precision."""
    for key in ROWS["lists"]:
        if block.get(key):
            return _texts(block[key])
    return ()


def _kv_cache(block: Mapping[str, Any]) -> str | None:
    """Return the format of stored keys and values in words; None: they are not quantised."""
    scheme = _mapping(block.get("kv_cache_scheme"))
    if scheme:
        return words_of(scheme)
    algorithm = block.get("kv_cache_quant_algo")
    if not algorithm:
        return None
    return str(algorithm)


def _targets(block: Mapping[str, Any], method: str, path: str) -> Iterator[tuple[str, str | None]]:
    """Yield the targets of a config, each with its scheme.

    PayloadError for groups that are none.
    """
    if method == MODELOPT:
        layers = block.get("quantized_layers")
        if not isinstance(layers, Mapping):
            layers = {LINEAR: block}
        for name, row in layers.items():
            stated = str(_mapping(row).get("quant_algo", ""))
            scheme = None
            if stated:
                scheme = ALGORITHMS.get(stated.upper(), f"ModelOpt's {stated}")
            yield name, scheme
    elif method != COMPRESSED:
        yield LINEAR, _of_fp8(block)
    elif not isinstance(block.get("config_groups"), Mapping):
        rule = "config_groups: must be a mapping of groups"
        raise PayloadError(f"{path}: {rule}. Give a config with its groups.")
    else:
        for group in map(_mapping, block["config_groups"].values()):
            weights = _mapping(group.get("weights"))
            scheme = _of_group(weights, _mapping(group.get("input_activations")))
            for target in _texts(group.get("targets")):
                yield target, scheme


def _of_fp8(block: Mapping[str, Any]) -> str:
    method = str(block["quant_method"])
    inputs = str(block.get("activation_scheme", "dynamic"))
    sizes = block.get("weight_block_size")
    if method == "mxfp8":
        sizes = [1, 32]  # SGLang and MXFP8 allow no other
    stated: dict[str, Any] = {"quant_method": method, "activation_scheme": inputs}
    if sizes is not None:
        stated["weight_block_size"] = sizes
    weights = f"{method} weights"
    if sizes:
        weights = f"{weights} in blocks of {sizes}"
    return scheme_where(lambda row: row.get("fp8") == stated, f"{weights}, {inputs} inputs")


def _of_group(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> str | None:
    if not weights:
        return None
    values = compared(weights), compared(inputs)
    of_inputs = "unquantised"
    if inputs:
        of_inputs = words_of(inputs)
    words = f"{words_of(weights)} weights, {of_inputs} inputs"
    return scheme_where(
        lambda row: values == (compared(row["weights"]), compared(row["inputs"])), words
    )


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        return ()
    return tuple(map(str, value))


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        return {}
    return value
