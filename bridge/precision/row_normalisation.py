"""`modules`: the precision of single modules, as an ordered list of rows *select -> precision*.

    modules:
    - {select: "*.linear_qkv", precision: bf16}
    - {select: {layers: [0, 1, -1], module: linear_fc2}, fp8_recipe: mxfp8}
    - {select: "decoder.layers.3.mlp.*", precision: blockwise, evaluation: bf16}

A module has the precision of the first row that selects it, as in Megatron Core. A module that no row
selects has the precision of the run. `select` is either

- a glob over Megatron's module names (``decoder.layers.3.mlp.linear_fc2``,
  ``mtp.layers.0.eh_proj``), in which ``layers.N.`` names a layer by its number in the whole model,
  from 0; or
- ``layers`` and ``module``: numbers of layers, negative ones from the end, and the end of a
  module's name. Without ``layers`` it is about every layer, also of multi-token prediction.

A row that names layers also decides for layers that `first_last_layers_bf16` keeps in BF16. A row that
names no layers does not change kept layers.

A list is stored as normalised plain data, so that it can be dumped, compared and read back.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bridge.errors import WrongValueError, close_matches, did_you_mean, listed
from bridge.precision.matchers import HIGH_PRECISION, ModulePrecision
from bridge.precision.module_row import LAYER_NUMBER, PER_MODULE_SCHEMES, parse_module_precision
from bridge.precision.schemes import find_scheme


def _list_short_schemes() -> tuple[str, ...]:
    """Return the schemes that need no further setting. `custom` needs a factory."""
    names = (*PER_MODULE_SCHEMES["fp8"], *PER_MODULE_SCHEMES["fp4"])
    return tuple(name for name in names if name != "custom")


SHORT_PRECISIONS = (HIGH_PRECISION, *_list_short_schemes())
"""Values of `precision` and `evaluation`."""
VALUES_BY_KEY = {
    "precision": SHORT_PRECISIONS,
    "fp8": ("e4m3", "hybrid"),
    "fp8_recipe": PER_MODULE_SCHEMES["fp8"],
    "fp4_recipe": PER_MODULE_SCHEMES["fp4"],
}
"""Key -> its values."""
SWITCH_KEYS = ("fp8_param", "fp4_param", "tp_only_amax_red")
FACTORY_KEYS = ("fp8_quantizer_factory", "fp4_quantizer_factory")
PRECISION_KEYS = ("precision", "fp8", "fp8_recipe", "fp4_recipe", *FACTORY_KEYS, *SWITCH_KEYS)

_NEGATIVE_LAYER_NUMBER = re.compile(r"layers\.-\d")
_AMBIGUOUS_NUMBER = re.compile(r"(?:^|[.*?\]])(?:\d|\?|\[)")
"""A digit, ``?`` or ``[`` where a whole part of a name may begin.

It may stand for the number of a layer.
"""


class WrongRowsError(WrongValueError):
    """Rows that cannot be read. `faults` has one error for each of them."""

    def __init__(self, faults: Sequence[WrongValueError]) -> None:
        first = faults[0]
        super().__init__(first.rule, first.value, first.remedy)
        self.faults = tuple(faults)


def normalise_rows(value: object) -> tuple[dict[str, Any], ...]:
    """Return the rows of a list in the form in which they are stored.

    Raises:
        WrongValueError: The value is not a list of rows.
        WrongRowsError: Rows cannot be read. It has an error for each of them.
    """
    if isinstance(value, Mapping | str) or not hasattr(value, "__iter__"):
        remedy = 'Write [{select: "*.linear_qkv", precision: bf16}].'
        raise WrongValueError("must be a list of rows", value, remedy)
    rows = []
    faults = []
    for number, row in enumerate(value):
        try:
            rows.append(_normalise_row(row))
        except WrongValueError as error:
            faults.append(WrongValueError(f"row {number}: {error.rule}", error.value, error.remedy))
    if faults:
        raise WrongRowsError(faults)
    return tuple(rows)


def _normalise_row(written: object) -> dict[str, Any]:
    """Return a row with its keys in one order and its values in one form."""
    if not isinstance(written, Mapping):
        remedy = 'Write {select: "*.linear_qkv", precision: bf16}.'
        raise WrongValueError("must be a mapping", written, remedy)
    _refuse_unknown(written, ("select", *PRECISION_KEYS, "evaluation"), "a row has no such key")
    if "select" not in written:
        remedy = 'Say which modules: select: "*.linear_qkv".'
        raise WrongValueError("has no `select`", dict(written), remedy)
    row: dict[str, Any] = {"select": _normalise_select(written["select"])}
    row.update(_normalise_precision(written))
    evaluation = written.get("evaluation")
    if isinstance(evaluation, Mapping):
        _refuse_unknown(evaluation, PRECISION_KEYS, "`evaluation` has no such key")
        row["evaluation"] = _normalise_precision(evaluation)
    elif evaluation is not None:
        row["evaluation"] = _require_choice("evaluation", evaluation, SHORT_PRECISIONS)
    return row


def _refuse_unknown(mapping: Mapping[Any, Any], known: Sequence[str], rule: str) -> None:
    for key in mapping:
        if key not in known:
            near = did_you_mean(close_matches(str(key), known)) or f"There are {', '.join(known)}."
            raise WrongValueError(rule, key, near)


def _normalise_select(select: object) -> str | dict[str, Any]:
    if isinstance(select, str):
        return _normalise_glob(select)
    if not isinstance(select, Mapping):
        rule = "`select` must be one glob, or {layers: [0, -1], module: linear_fc2}"
        raise WrongValueError(rule, select, "Write a row for each choice.")
    _refuse_unknown(select, ("layers", "module"), "`select` has no such key")
    module = select.get("module")
    if not isinstance(module, str) or not module or "layers." in module:
        rule = "`select.module` must be the end of one module's name"
        raise WrongValueError(rule, module, "Use linear_fc2, for example.")
    layers = select.get("layers")
    if layers is None:
        return {"module": module}
    return {"layers": _normalise_layers(layers), "module": module}


def _normalise_layers(layers: Any) -> list[int]:
    numbers = [layers]
    if hasattr(layers, "__iter__") and not isinstance(layers, str | Mapping):
        numbers = list(layers)
    for number in numbers:
        if isinstance(number, bool) or not hasattr(number, "__index__"):
            rule = "`select.layers` must be whole numbers, from 0"
            raise WrongValueError(rule, number, "Write [0, 1, -1].")
    if not numbers:
        rule = "`select.layers` must name a layer"
        raise WrongValueError(rule, [], "Drop it to mean every layer.")
    return [int(number) for number in numbers]


def _normalise_glob(glob: str) -> str:
    """Return a glob in which a number of a layer can only be ``layers.N.``."""
    if not glob:
        raise WrongValueError("`select` must not be empty", glob, 'Use "*" for every module.')
    if _NEGATIVE_LAYER_NUMBER.search(glob):
        rule = "a glob counts layers from 0 alone"
        raise WrongValueError(rule, glob, "Use {layers: [-1], module: NAME} to count from the end.")
    named: list[re.Match[str]] = []
    if not glob.startswith("mtp."):
        named.extend(LAYER_NUMBER.finditer(glob))
    before = ""
    if named:
        before = glob[: named[0].start()]
    if len(named) > 1 or before not in ("", "*", "*.", "decoder.", "*decoder.", "*.decoder."):
        rule = "`select` must name a layer as decoder.layers.N"
        raise WrongValueError(rule, glob, "Use {layers: [N], module: NAME} for other choices.")
    rest = LAYER_NUMBER.sub("layers", glob)
    rest = re.sub(r"(local_experts\.)[^.]+", r"\1", rest)
    if _AMBIGUOUS_NUMBER.search(rest):
        rule = (
            "`select` may name the number of a layer as `layers.N.` alone, since globs match digits"
        )
        raise WrongValueError(rule, glob, "Use {layers: [N], module: NAME}, or write out layers.N.")
    return glob


def _normalise_precision(written: Mapping[Any, Any]) -> dict[str, Any]:
    row = {}
    for key in PRECISION_KEYS:
        value = written.get(key)
        if value is not None:
            row[key] = _normalise_setting(key, value)
    _refuse_contradictions(row)
    return row


def _normalise_setting(key: str, value: object) -> Any:
    if key in VALUES_BY_KEY:
        return _require_choice(key, value, VALUES_BY_KEY[key])
    if key in FACTORY_KEYS:
        if isinstance(value, str) and value:
            return str(value)
        rule = f"`{key}` must be an import path"
        raise WrongValueError(rule, value, "Write package.module.function.")
    if str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    raise WrongValueError(f"`{key}` must be true or false", value, "Correct it.")


def _refuse_contradictions(row: Mapping[str, Any]) -> None:
    """Refuse a row without a precision, with two, and with a setting that has no meaning there."""
    chosen = [key for key in ("precision", "fp8_recipe", "fp4_recipe") if key in row]
    if len(chosen) != 1:
        rule = "must choose one of precision, fp8_recipe and fp4_recipe"
        choices = {key: row[key] for key in chosen}
        raise WrongValueError(rule, choices, "State precision: bf16 for no FP8 and FP4.")
    effect = parse_module_precision(row)
    for key in row:
        if key not in chosen and not _has_meaning(key, effect):
            rule = f"`{key}` has no meaning in a module in {effect.scheme or HIGH_PRECISION}"
            raise WrongValueError(rule, row[key], "Drop it.")
    scheme = find_scheme(effect.scheme, effect.family)
    if effect.format is not None and scheme is not None and effect.format not in scheme.formats:
        formats = listed(scheme.formats)
        rule = f"`fp8` must be {formats} under {effect.scheme}"
        raise WrongValueError(rule, effect.format, f"Use {formats}.")
    if effect.scheme == "custom" and effect.factory is None:
        rule = f"the scheme custom needs `{effect.family}_quantizer_factory`"
        raise WrongValueError(rule, None, "Give the factory's import path.")


def _has_meaning(key: str, effect: ModulePrecision) -> bool:
    """Return whether a setting acts in the family of formats that a row chooses."""
    if effect.family is None:
        return False
    return key == "tp_only_amax_red" or key.startswith(effect.family)


def _require_choice(key: str, written: object, known: Sequence[str]) -> str:
    value = getattr(written, "value", written)
    if value == "delayed":
        rule = (
            f"`{key}` cannot be delayed scaling, "
            "which Transformer Engine does not run for single modules"
        )
        raise WrongValueError(rule, value, f"Use {listed(known)}.")
    if isinstance(value, str) and value in known:
        return str(value)
    remedy = did_you_mean(close_matches(str(value), known)) or f"Use {listed(known)}."
    raise WrongValueError(f"`{key}` must be one of {', '.join(known)}", value, remedy)
