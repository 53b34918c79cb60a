"""`ServingConfig`: the quantisation config of a served model, with the scheme of each module.

    config = ServingConfig.read(Path("config.json"))
    config.scheme_of("model.layers.0.mlp.gate_proj", "vllm")    # "blockwise"

Three files are read: `config.json` with a `quantization_config`, that block alone, and ModelOpt's
`hf_quant_config.json`. Each has a list of modules that stay in high precision, and rows of a target
and its scheme.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bridge.convert.serving.formats import (
    COMPRESSED_TENSORS,
    MODELOPT,
    SERVED_SCHEMES,
    SERVING_ROWS,
    find_scheme,
    format_arguments,
    select_compared_arguments,
)
from bridge.convert.serving.kept_modules import EXPRESSION_PREFIX, get_layer_name, is_kept, is_match
from bridge.convert.serving.manifest import MAX_FILE_BYTES
from bridge.convert.serving.module_names import OUTPUT_HEAD
from bridge.errors import PayloadError
from bridge.precision import strict_yaml
from bridge.read.text import strict_json

DIALECT_READERS: Mapping[str, list[str]] = SERVING_ROWS["readers"]
"""Dialect -> the systems that read it, each by its own rule; one empty name where the rule is one."""
FP8_METHODS = ("fp8", "mxfp8")
LINEAR_CLASS = "Linear"
"""The class that compressed-tensors takes every linear layer for, in any system."""


def _collect_algorithms() -> dict[str, str]:
    schemes: dict[str, str] = {}
    for scheme, row in SERVED_SCHEMES.items():
        for algorithm in row.get("algorithms", ()):
            schemes[algorithm] = scheme
    return schemes


SCHEME_BY_ALGORITHM = _collect_algorithms()
"""ModelOpt's name of an algorithm -> Megatron's name of the scheme."""


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """The quantisation config of a served model."""

    path: str
    method: str = MODELOPT
    """The dialect, one of `READERS`; without `targets` nothing is quantised."""
    model_type: str | None = None
    """That of the config.json around it."""
    kept: tuple[str, ...] = ()
    """Entries of the list of modules that stay in high precision."""
    targets: tuple[tuple[str, str | None], ...] = ()
    """Name of a module, an expression or, last, `LINEAR`, and its scheme as `formats` names it."""
    kv_cache: str | None = None
    """The format of stored keys and values in words; None: they are not quantised."""

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Return the config of a file; PayloadError for a file of another kind."""
        data = strict_yaml.read_bytes(path, error=PayloadError, limit=MAX_FILE_BYTES)
        return cls.from_mapping(
            strict_json.loads(data.decode(errors="replace"), str(path)), str(path)
        )

    @classmethod
    def from_mapping(cls, content: Any, path: str = "config") -> Self:
        """Return the config of parsed JSON; errors as for `read`."""
        outer = _get_mapping(content)
        model_type = outer.get("model_type")
        if not isinstance(model_type, str):
            model_type = None
        block = _find_quantization_block(outer)
        if block is None and ("architectures" in outer or model_type):
            return cls(path=path, model_type=model_type)
        if not isinstance(block, Mapping):
            rule = "must be a config.json, its quantization_config, or an hf_quant_config.json"
            raise PayloadError(f"{path}: {rule}. Give the file next to the served weights.")
        method = _parse_method(block, path)
        targets = list(_list_targets(block, method, path))
        targets.sort(key=lambda target: target[0] == LINEAR_CLASS)
        config = cls(
            path=path,
            method=method,
            model_type=model_type,
            kept=_get_kept_entries(block),
            targets=tuple(targets),
            kv_cache=_describe_kv_cache(block),
        )
        config.require_expressions()
        return config

    def require_expressions(self) -> None:
        """Refuse an entry of a list of modules that is used as a regular expression and is not valid."""
        entries = [*self.kept]
        for target, _ in self.targets:
            entries.append(target)
        for entry in entries:
            if not self.is_fp8 and not entry.startswith(EXPRESSION_PREFIX):
                continue
            try:
                re.compile(entry.removeprefix(EXPRESSION_PREFIX))
            except re.error as error:
                rule = f"must be a regular expression ({error})"
                raise PayloadError.of(f"{self.path}: list of modules", rule, entry) from None

    @property
    def readers(self) -> list[str]:
        """The systems whose rules for its list differ; one empty name where all read it alike."""
        return DIALECT_READERS[self.method]

    @property
    def is_fp8(self) -> bool:
        """Whether the config is of the fp8 dialect, which DeepSeek-V3 began."""
        return self.method in FP8_METHODS

    def scheme_of(self, name: str, reader: str) -> str | None:
        """Return the scheme of a linear layer, as `formats` names it; None: it is not quantised.

        Args:
            name: The module's name in the checkpoint.
            reader: The system that reads the config, one of `readers`.
        """
        if is_kept(self._kept_by(reader), name, dialect=self.method, system=reader):
            return None
        names = {LINEAR_CLASS, name}
        if self.method == MODELOPT:
            names = {LINEAR_CLASS, get_layer_name(name)}
        for target, scheme in self.targets:
            if target in names or is_match(target, name):
                return scheme
        return None

    def _kept_by(self, reader: str) -> tuple[str, ...]:
        """Return the list of modules with the output layer, which the fp8 dialect leaves out by itself.

        In transformers a list replaces it. To the other systems it is no linear layer.
        """
        is_replaced = bool(self.kept) and reader == "hf"
        if not self.is_fp8 or is_replaced:
            return self.kept
        return (*self.kept, OUTPUT_HEAD)


def _parse_method(block: Mapping[str, Any], path: str) -> str:
    """Return the dialect of a quantisation block; PayloadError for a `quant_method` that is not read."""
    stated = str(block.get("quant_method", ""))
    method = stated
    if stated.startswith(MODELOPT):
        method = MODELOPT
    if method not in DIALECT_READERS:
        rule = f"must be one of {', '.join(DIALECT_READERS)}"
        raise PayloadError.of(f"{path}: quant_method", rule, stated)
    return method


def _find_quantization_block(outer: Mapping[str, Any]) -> Any:
    """Return the quantisation block of a file; None where it has none."""
    block = outer.get("quantization_config", outer.get("compression_config"))
    if not block and isinstance(outer.get("quantization"), Mapping):
        block = {"quant_method": MODELOPT, **outer["quantization"]}
    if block is None and "quant_method" in outer:
        block = outer
    return block


def _get_kept_entries(block: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the entries of the first list of modules that stay in high precision."""
    for key in SERVING_ROWS["lists"]:
        if block.get(key):
            return _get_texts(block[key])
    return ()


def _describe_kv_cache(block: Mapping[str, Any]) -> str | None:
    """Return the format of stored keys and values in words; None: they are not quantised."""
    scheme = _get_mapping(block.get("kv_cache_scheme"))
    if scheme:
        return format_arguments(scheme)
    algorithm = block.get("kv_cache_quant_algo")
    if not algorithm:
        return None
    return str(algorithm)


def _list_targets(
    block: Mapping[str, Any], method: str, path: str
) -> Iterator[tuple[str, str | None]]:
    """Yield the targets of a config, each with its scheme."""
    if method == MODELOPT:
        yield from _list_modelopt_targets(block)
    elif method == COMPRESSED_TENSORS:
        yield from _list_group_targets(block, path)
    else:
        yield LINEAR_CLASS, _get_fp8_scheme(block)


def _list_modelopt_targets(block: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    layers = block.get("quantized_layers")
    if not isinstance(layers, Mapping):
        layers = {LINEAR_CLASS: block}
    for name, row in layers.items():
        stated = str(_get_mapping(row).get("quant_algo", ""))
        scheme = None
        if stated:
            scheme = SCHEME_BY_ALGORITHM.get(stated.upper(), f"ModelOpt's {stated}")
        yield name, scheme


def _list_group_targets(block: Mapping[str, Any], path: str) -> Iterator[tuple[str, str | None]]:
    """Yield the targets of compressed-tensors' groups; PayloadError for groups that are no mapping."""
    groups = block.get("config_groups")
    if not isinstance(groups, Mapping):
        rule = "config_groups: must be a mapping of groups"
        raise PayloadError(f"{path}: {rule}. Give a config with its groups.")
    for group in map(_get_mapping, groups.values()):
        weights = _get_mapping(group.get("weights"))
        scheme = _get_group_scheme(weights, _get_mapping(group.get("input_activations")))
        for target in _get_texts(group.get("targets")):
            yield target, scheme


def _get_fp8_scheme(block: Mapping[str, Any]) -> str:
    """Return the scheme of a block of the fp8 dialect, or words for a scheme without a row."""
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
    return find_scheme(lambda row: row.get("fp8") == stated, f"{weights}, {inputs} inputs")


def _get_group_scheme(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> str | None:
    """Return the scheme of a group of compressed-tensors, or words for a scheme without a row.

    A group without weights quantises nothing, and its scheme is None.
    """
    if not weights:
        return None
    values = select_compared_arguments(weights), select_compared_arguments(inputs)
    input_words = "unquantised"
    if inputs:
        input_words = format_arguments(inputs)
    words = f"{format_arguments(weights)} weights, {input_words} inputs"
    return find_scheme(
        lambda row: (
            values
            == (select_compared_arguments(row["weights"]), select_compared_arguments(row["inputs"]))
        ),
        words,
    )


def _get_texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        return ()
    return tuple(map(str, value))


def _get_mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        return {}
    return value
