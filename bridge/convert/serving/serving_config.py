"""`ServingConfig`: the quantization config of a served model, with the scheme of each module.

    config = ServingConfig.from_file(Path("config.json"))
    config.scheme_of("model.layers.0.mlp.gate_proj", "vllm")    # "blockwise"

Three kinds of files are supported: a `config.json` with a `quantization_config`, a file with only
this block, and ModelOpt's `hf_quant_config.json`. Each has a list of modules that stay in high
precision, and targets with their schemes.
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
"""Dialect -> the systems that read it. Each system has a different rule for the list of modules."""
FP8_METHODS = ("fp8", "mxfp8")
"""The fp8 dialects, in the form of DeepSeek-V3's checkpoint."""
LINEAR_CLASS = "Linear"
"""The target of compressed-tensors that means every linear layer."""


def _collect_algorithms() -> dict[str, str]:
    """Return ModelOpt's name of an algorithm -> Megatron's name of the scheme."""
    schemes: dict[str, str] = {}
    for scheme, row in SERVED_SCHEMES.items():
        for algorithm in row.get("algorithms", ()):
            schemes[algorithm] = scheme
    return schemes


SCHEME_BY_ALGORITHM = _collect_algorithms()
"""ModelOpt's name of an algorithm -> Megatron's name of the scheme."""


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """The quantization config of a served model."""

    path: str
    """The file, for messages."""
    method: str = MODELOPT
    """The dialect, a key of `DIALECT_READERS`. If there are no targets, nothing is quantised."""
    model_type: str | None = None
    """The `model_type` in the config.json that has the quantization config."""
    kept: tuple[str, ...] = ()
    """Entries of the list of modules that stay in high precision."""
    targets: tuple[tuple[str, str | None], ...] = ()
    """Targets with their schemes. A target is the name of a module, an expression, or
    `LINEAR_CLASS`, which is last. A scheme is a key of `SERVED_SCHEMES` or a description; None: not
    quantised."""
    kv_cache: str | None = None
    """The format of stored keys and values as text. None: they are not quantised."""

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Return the config of a file.

        Raises:
            PayloadError: The file is not a supported config, or has an unsupported method.
        """
        config_bytes = strict_yaml.read_bytes(path, error=PayloadError, limit=MAX_FILE_BYTES)
        content = strict_json.loads(config_bytes.decode(errors="replace"), str(path))
        return cls.from_mapping(content, str(path))

    @classmethod
    def from_mapping(cls, content: object, path: str = "config") -> Self:
        """Return the config of parsed JSON.

        Args:
            content: The JSON.
            path: The file, for messages.

        Raises:
            PayloadError: The content is not a supported config, or has an unsupported method.
        """
        settings = _get_mapping(content)
        model_type = settings.get("model_type")
        if not isinstance(model_type, str):
            model_type = None
        block = _find_quantization_block(settings)
        if block is None and ("architectures" in settings or model_type):
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
        """Refuse a list of modules with an invalid regular expression.

        transformers reads each entry of the fp8 dialect as a regular expression.

        Raises:
            PayloadError: The list has an invalid expression.
        """
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
        """The systems that read the config, each with a different rule for the list of modules."""
        return DIALECT_READERS[self.method]

    @property
    def is_fp8(self) -> bool:
        """Whether the config is of the fp8 dialect, as in DeepSeek-V3's checkpoint."""
        return self.method in FP8_METHODS

    def scheme_of(self, name: str, reader: str) -> str | None:
        """Return the scheme of a linear layer, as in `targets`; None: it is not quantised.

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
        """Return the list of modules with the output layer, which the fp8 dialect never quantises.

        In transformers the output layer is the default of the list, so a stated list replaces it.
        Other systems do not treat the output layer as a linear layer.
        """
        is_replaced = bool(self.kept) and reader == "hf"
        if not self.is_fp8 or is_replaced:
            return self.kept
        return (*self.kept, OUTPUT_HEAD)


def _parse_method(block: Mapping[str, Any], path: str) -> str:
    """Return the dialect of a quantization block.

    Raises:
        PayloadError: Its `quant_method` is not read.
    """
    stated = str(block.get("quant_method", ""))
    method = stated
    if stated.startswith(MODELOPT):
        method = MODELOPT
    if method not in DIALECT_READERS:
        rule = f"must be one of {', '.join(DIALECT_READERS)}"
        raise PayloadError.of(f"{path}: quant_method", rule, stated)
    return method


def _find_quantization_block(settings: Mapping[str, Any]) -> object:
    """Return the quantization block of a file, which may have any type. None if there is none."""
    block = settings.get("quantization_config", settings.get("compression_config"))
    if not block and isinstance(settings.get("quantization"), Mapping):
        block = {"quant_method": MODELOPT, **settings["quantization"]}
    if block is None and "quant_method" in settings:
        block = settings
    return block


def _get_kept_entries(block: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the list of modules that stay in high precision, from the first key that has it."""
    for key in SERVING_ROWS["lists"]:
        if block.get(key):
            return _get_texts(block[key])
    return ()


def _describe_kv_cache(block: Mapping[str, Any]) -> str | None:
    """Return the format of stored keys and values as text. None: they are not quantised."""
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
    """Yield the targets of a config, each with its scheme.

    Args:
        block: The quantization block.
        method: Its dialect.
        path: The file, for messages.
    """
    if method == MODELOPT:
        yield from _list_modelopt_targets(block)
    elif method == COMPRESSED_TENSORS:
        yield from _list_group_targets(block, path)
    else:
        yield LINEAR_CLASS, _get_fp8_scheme(block)


def _list_modelopt_targets(block: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield the targets of ModelOpt's dialect: single layers, or all of them."""
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
    """Yield the targets of the groups of compressed-tensors.

    Raises:
        PayloadError: The groups are not a mapping.
    """
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
    """Return the scheme of a block of the fp8 dialect, or its description if it has no row."""
    method = str(block["quant_method"])
    activation_scheme = str(block.get("activation_scheme", "dynamic"))
    block_size = block.get("weight_block_size")
    if method == "mxfp8":
        block_size = [1, 32]  # the only block size of MXFP8, which a config may omit
    form: dict[str, Any] = {"quant_method": method, "activation_scheme": activation_scheme}
    weights = f"{method} weights"
    if block_size is not None:
        form["weight_block_size"] = block_size
    if block_size:
        weights = f"{weights} in blocks of {block_size}"
    return find_scheme(
        lambda row: bool(row.get("fp8") == form), f"{weights}, {activation_scheme} inputs"
    )


def _get_group_scheme(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> str | None:
    """Return the scheme of a group of compressed-tensors, or its description if it has no row.

    Args:
        weights: The arguments of the weights. Without them the group quantises nothing.
        inputs: The arguments of the inputs; empty: inputs are not quantised.
    """
    if not weights:
        return None
    weight_arguments = select_compared_arguments(weights)
    input_arguments = select_compared_arguments(inputs)

    def fits(row: Mapping[str, Any]) -> bool:
        if select_compared_arguments(row["weights"]) != weight_arguments:
            return False
        return select_compared_arguments(row["inputs"]) == input_arguments

    input_description = "unquantised"
    if inputs:
        input_description = format_arguments(inputs)
    return find_scheme(fits, f"{format_arguments(weights)} weights, {input_description} inputs")


def _get_texts(value: object) -> tuple[str, ...]:
    """Return the entries of a list as texts. Empty for any other value."""
    if not isinstance(value, list):
        return ()
    return tuple(map(str, value))


def _get_mapping(value: object) -> Mapping[str, Any]:
    """Return a value if it is a mapping, else an empty mapping."""
    if not isinstance(value, Mapping):
        return {}
    return value
