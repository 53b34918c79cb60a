"""`DebugFeatures`: a features file of Transformer Engine's debugger, and its changes to a layer.

    tensor_inspect:
      enabled: true
      features:
        fc1_in_bf16:
          enabled: true
          layers: {layer_name_regex_pattern: .*fc1.*}
          transformer_engine: {DisableFP8Layer: {enabled: true}}

The debugger names a layer by its path. The layer number in it counts from 1 in the whole model:
``model.module.module.decoder.layers.3.mlp.linear_fc1``.

Source: nvdlfw-inspect 0.2.2 config_manager.py and api.py, infer_and_assign_layer_names; Transformer
Engine 2.20.2 debug/features and debug/pytorch/debug_quantization.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from bridge.errors import RunConfigError
from bridge.precision.operand_copies import HIGH_PRECISION_COPY, CopyPair, LayerCopies, OperandCopy
from bridge.precision.schemes import GEMMS, WHOLE_TENSOR

ERROR_PATH = "debug features"
"""The beginning of the path in messages."""
NAMESPACE = "transformer_engine"
ENABLED = "enabled"
READ_ONLY_FEATURES = frozenset(
    {"LogTensorStats", "LogFp8TensorStats", "LogNvfp4TensorStats", "DumpTensors"}
)
"""Features that read tensors and do not change them."""
WHOLE_LAYER_FEATURES = frozenset({"DisableFP8Layer", "DisableQuantizationLayer"})
SINGLE_GEMM_FEATURES = frozenset({"DisableFP8GEMM", "DisableQuantizationGEMM"})
FAKE, PER_TENSOR = "FakeQuant", "PerTensorScaling"
SUPPORTED_FEATURES = frozenset({*WHOLE_LAYER_FEATURES, *SINGLE_GEMM_FEATURES, FAKE, PER_TENSOR})
DEBUGGER_TENSOR_NAMES = {"input": "activation", "weight": "weight", "grad_output": "gradient"}
"""Operand -> its name in the debugger."""
FAKE_FORMATS = {
    "FP8E4M3": "e4m3",
    "FP8E5M2": "e5m2",
    "MXFP8E4M3": "e4m3 (mxfp8)",
    "MXFP8E5M2": "e5m2 (mxfp8)",
}
"""`quant_format` of FakeQuant -> the format to which values are rounded."""
LAYER_SELECTORS = ("layer_types", "layer_numbers", "layer_name_regex_pattern", "exact_layer_names")
"""Keys of `layers`. An entry needs one of them."""
NUMBER_IN_LAYER_NAME = re.compile(r"(?<!fc)\d+")
"""The number of a layer in its name, as the debugger finds it. The 1 in fc1 does not count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerChanges:
    """The changes to the operand copies that a layer's GEMMs read."""

    high_gemms: tuple[str, ...] = ()
    """GEMMs that multiply in high precision."""
    modified: tuple[tuple[str, str, str], ...] = ()
    """(GEMM, operand, format to which it is rounded). An empty format: the tensor gets one scale."""

    def apply_to(self, copies: LayerCopies) -> LayerCopies:
        """Return the copies of a layer's operands after the changes."""
        pairs = {}
        for operand in DEBUGGER_TENSOR_NAMES:
            pair = copies.get_pair(operand)
            row = self._change_copy(pair.row, operand, columnwise=False)
            column = self._change_copy(pair.column, operand, columnwise=True)
            pairs[operand] = CopyPair(row=row, column=column)
        return replace(
            copies,
            input=pairs["input"],
            weight=pairs["weight"],
            grad_output=pairs["grad_output"],
        )

    def _change_copy(self, copy: OperandCopy, operand: str, *, columnwise: bool) -> OperandCopy:
        gemm = _find_reading_gemm(operand, columnwise=columnwise)
        for changed_gemm, changed_operand, rounded_to in self.modified:
            if (changed_gemm, changed_operand) != (gemm, operand):
                continue
            if rounded_to:
                return OperandCopy(rounded_to=rounded_to)
            return OperandCopy(scheme="tensorwise", format=copy.format, tile=WHOLE_TENSOR)
        if gemm in self.high_gemms:
            return HIGH_PRECISION_COPY
        return copy


def _find_reading_gemm(operand: str, *, columnwise: bool) -> str:
    """Return the GEMM that reads one copy of an operand."""
    for gemm in GEMMS.values():
        is_left = (gemm.left, gemm.left_columnwise) == (operand, columnwise)
        is_right = (gemm.right, gemm.right_columnwise) == (operand, columnwise)
        if is_left or is_right:
            return gemm.name
    raise KeyError(operand)


@dataclass(frozen=True, kw_only=True)
class FeatureRow:
    """One entry of the file: the layers that it selects, and its features."""

    name: str
    numbers: frozenset[int] | None = None
    """Numbers of layers. None: the entry has no layer_numbers. -1: every layer."""
    types: tuple[str, ...] | None = None
    """Parts of layer names. "all": every layer. None: the entry has no layer_types."""
    pattern: re.Pattern[str] | None = None
    features: Mapping[str, Mapping[str, Any]]
    """Feature that is on -> its settings."""

    def matches(self, layer: str) -> bool:
        """Return whether the entry selects the layer of this name, like `is_layer_in_cfg`."""
        if self.pattern is not None:
            return self.pattern.search(layer) is not None
        if self.numbers is None and self.types is None:
            return False
        return self._has_number(layer) and self._has_type(layer)

    def unmatched_types(self, layers: Collection[str]) -> list[str]:
        """Return the parts of `layer_types` that none of these layer names has."""
        if self.pattern is not None:
            return []
        unmatched = []
        for part in self.types or ():
            if part != "all" and not any(part in layer for layer in layers):
                unmatched.append(part)
        return unmatched

    def _has_number(self, layer: str) -> bool:
        if self.numbers is None:
            return True
        numbers = NUMBER_IN_LAYER_NAME.findall(layer)
        if len(numbers) != 1:
            rule = f"layer_numbers needs one number in each layer's name, and {layer} has other"
            raise _make_error(self.name, rule)
        return -1 in self.numbers or int(numbers[0]) in self.numbers

    def _has_type(self, layer: str) -> bool:
        if self.types is None:
            return True
        return "all" in self.types or any(part in layer for part in self.types)

    @property
    def changes(self) -> LayerChanges:
        """The changes to the layers that the entry selects."""
        high: dict[str, None] = {}
        modified: dict[tuple[str, str, str], None] = {}
        for name, settings in self.features.items():
            if name in WHOLE_LAYER_FEATURES:
                high.update(dict.fromkeys(GEMMS))
            elif name in SINGLE_GEMM_FEATURES:
                high.update(dict.fromkeys(gemm for gemm, _ in _list_gemms(settings)))
            elif name in (FAKE, PER_TENSOR):
                for gemm, of_gemm in _list_gemms(settings):
                    if name == FAKE:
                        high[gemm] = None
                    for operand, rounded_to in self._list_operands(name, of_gemm):
                        modified[gemm, operand, rounded_to] = None
        return LayerChanges(high_gemms=tuple(high), modified=tuple(modified))

    def _list_operands(self, name: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for tensor, of_tensor in _list_tensors(settings):
            rounded_to = ""
            if name == FAKE:
                chosen = of_tensor.get("quant_format", settings.get("quant_format"))
                if chosen not in FAKE_FORMATS:
                    rule = f"quant_format must be one of {', '.join(FAKE_FORMATS)}"
                    raise _make_error(f"{self.name}.{name}", f"{rule}, got {chosen!r}")
                rounded_to = FAKE_FORMATS[chosen]
            for operand, theirs in DEBUGGER_TENSOR_NAMES.items():
                if theirs == tensor:
                    yield operand, rounded_to


def _list_gemms(settings: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each GEMM that a feature names, with the settings for it."""
    for row in settings.get("gemms_struct") or ():
        if isinstance(row, Mapping):
            yield str(row.get("gemm")), {**settings, **row}
    if "gemms_struct" not in settings:
        for gemm in settings.get("gemms") or ():
            yield str(gemm), settings


def _list_tensors(settings: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each tensor that a feature names, with the settings for it."""
    for row in settings.get("tensors_struct") or ():
        if isinstance(row, Mapping):
            yield str(row.get("tensor")), row
    if "tensors_struct" not in settings:
        for tensor in settings.get("tensors") or ():
            yield str(tensor), settings


@dataclass(frozen=True, kw_only=True)
class DebugFeatures:
    """The entries of a features file that are on."""

    rows: tuple[FeatureRow, ...]

    @classmethod
    def from_content(cls, content: Any) -> DebugFeatures:
        """Return the features of a file's content.

        Without content there are no features: Megatron Bridge then starts the debugger without a file.

        Raises:
            RunConfigError: The debugger refuses such a file.
        """
        if content is None or content == {}:
            return cls(rows=())
        if not isinstance(content, Mapping):
            remedy = "Write each entry under a name."
            raise _make_error("", f"must be a mapping of entries, got {content!r:.80}", remedy)
        rows = []
        for key, entry in content.items():
            name = str(key)
            if not isinstance(entry, Mapping):
                rule = f"must be a mapping with enabled and layers, got {entry!r:.80}"
                raise _make_error(name, rule, "Write both, or leave the entry out.")
            if ENABLED not in entry:
                rule = f"must have enabled, got {', '.join(map(str, entry)) or 'no key'}"
                raise _make_error(name, rule, "Add enabled: true or enabled: false.")
            if entry[ENABLED]:
                rows.append(_parse_row(name, entry))
        if not rows:
            names = ", ".join(map(str, content))
            rule = f"must have an entry that is on, and {names} has enabled: false"
            raise _make_error("", rule, "Set enabled: true, or leave the debugger out.")
        return cls(rows=tuple(rows))

    @property
    def names(self) -> tuple[str, ...]:
        """The distinct features that are on and that change the computation of layers."""
        names: dict[str, None] = {}
        for row in self.rows:
            for name in row.features:
                if name not in READ_ONLY_FEATURES:
                    names[name] = None
        return tuple(names)

    def find_changes(self, layer: str) -> LayerChanges | None:
        """Return the changes to the layer of this name, or None if nothing changes.

        Raises:
            RunConfigError: Two entries select the layer, which the debugger refuses.
        """
        selecting = [row for row in self.rows if row.features and row.matches(layer)]
        if len(selecting) > 1:
            raise _make_error(
                f"{selecting[0].name} and {selecting[1].name}", f"both take the layer {layer}"
            )
        for row in selecting:
            changes = row.changes
            if changes != LayerChanges():
                return changes
        return None

    def scales_tensors(self, layer: str) -> bool:
        """Return whether `PerTensorScaling` acts on a layer."""
        return any(PER_TENSOR in row.features and row.matches(layer) for row in self.rows)


def _parse_row(name: str, entry: Mapping[str, Any]) -> FeatureRow:
    layers = entry.get("layers")
    if not isinstance(layers, Mapping) or all(layers.get(key) is None for key in LAYER_SELECTORS):
        rule = (
            f"layers must be a mapping with one of {', '.join(LAYER_SELECTORS)}, got {layers!r:.80}"
        )
        raise _make_error(name, rule, "Choose layers, such as layers: {layer_types: [fc1]}.")
    if layers.get("exact_layer_names") is not None:
        rule = "exact_layer_names ends a run at the first layer that is not in the list"
        raise _make_error(name, rule)
    pattern = None
    if layers.get("layer_name_regex_pattern") is not None:
        pattern = _compile_pattern(name, str(layers["layer_name_regex_pattern"]))
    types = _parse_types(name, layers.get("layer_types"))
    features: dict[str, Mapping[str, Any]] = {}
    chosen = entry.get(NAMESPACE, {})
    if not isinstance(chosen, Mapping):
        rule = f"{NAMESPACE} must be a mapping of features, got {chosen!r:.80}"
        raise _make_error(name, rule, "Name each feature with its settings, or leave the key out.")
    for feature, settings in chosen.items():
        is_on = not isinstance(settings, Mapping) or settings.get(ENABLED, True)
        if feature == ENABLED or not is_on:
            continue
        features[str(feature)] = {}
        if isinstance(settings, Mapping):
            features[str(feature)] = settings
        if feature in SINGLE_GEMM_FEATURES or feature in (FAKE, PER_TENSOR):
            _require_gemms(f"{name}.{feature}", features[str(feature)])
    numbers = _parse_numbers(name, layers.get("layer_numbers"))
    return FeatureRow(name=name, numbers=numbers, types=types, pattern=pattern, features=features)


def _require_gemms(name: str, settings: Mapping[str, Any]) -> None:
    """Refuse a feature without GEMMs, or with an unknown GEMM."""
    known = ", ".join(GEMMS)
    remedy = f"Name {known} or some of them."
    key = "gemms"
    if "gemms_struct" in settings:
        key = "gemms_struct"
    rows = settings.get(key)
    if not isinstance(rows, list | tuple):
        raise _make_error(name, f"{key} must be a list, got {rows!r:.80}", remedy)
    for row in rows:
        gemm = row
        if key == "gemms_struct":
            if not isinstance(row, Mapping):
                raise _make_error(
                    name, f"{key} must have mappings with gemm, got {row!r:.80}", remedy
                )
            gemm = row.get("gemm")
        if gemm not in tuple(GEMMS):
            raise _make_error(name, f"{key} must have GEMMs of {known}, got {gemm!r:.80}", remedy)


def _parse_types(name: str, value: Any) -> tuple[str, ...] | None:
    """Return the parts of names in `layer_types`, or None if the key is absent."""
    if value is None:
        return None
    is_list = isinstance(value, list | tuple)
    if not is_list or not all(isinstance(part, str) for part in value):
        rule = f"layer_types must be a list of parts of layers' names, got {value!r:.80}"
        raise _make_error(name, rule, "Write, for example, [fc1, qkv].")
    return tuple(value)


def _compile_pattern(name: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        rule = f"layer_name_regex_pattern is no regular expression ({error}): {pattern!r}"
        raise _make_error(name, rule) from None


def _parse_numbers(name: str, value: Any) -> frozenset[int] | None:
    """Return the numbers in `layer_numbers`, or None if the key is absent. "2-5" is a range."""
    if value is None:
        return None
    if value == "all" or (isinstance(value, list) and "all" in value):
        return frozenset({-1})
    if not isinstance(value, list):
        raise _make_error(name, f"layer_numbers must be a list, got {value!r}")
    numbers: set[int] = set()
    for part in value:
        first, _, last = str(part).partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise _make_error(
                name, f"layer_numbers has numbers and ranges such as 2-5, got {part!r}"
            )
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _make_error(name: str, rule: str, remedy: str = "") -> RunConfigError:
    """Return the error about an entry, or about the whole file if the name is empty."""
    path = ERROR_PATH
    if name:
        path = f"{ERROR_PATH}, {name}"
    sentence = f"{path}: {rule}. nvdlfw-inspect 0.2.2 raises an error. {remedy}".rstrip()
    return RunConfigError(sentence, path=path, remedy=remedy)
