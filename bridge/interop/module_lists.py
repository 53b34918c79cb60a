"""Lists of module names: the filters of torchtitan and torchao, written from the rows of a precision.

A name of such a list takes every module whose full name contains it, so that ``layers.1`` takes layer 12 too.
Source: torchtitan 0.3.0 components/quantization/utils.py and mx.py, torchao 0.18.0 float8/float8_linear_utils.py.
"""

from collections.abc import Collection, Mapping, Sequence

from bridge.errors import WrongValueError
from bridge.interop.builders import ExportBuilder
from bridge.interop.contract import ContextKey
from bridge.precision.matchers import HIGH, Chosen
from bridge.precision.module_schemes import ModuleSchemes

NUM_LAYERS = ContextKey("num_layers", "layers of the model, where a precision chooses single layers", use=("export",))


def schemes_for(
    builder: ExportBuilder, num_layers: int | None, *, available: Collection[str], setting: str
) -> ModuleSchemes | None:
    """Return the schemes of a precision's linear layers, and map or report what chooses them.

    None where the choice cannot be written, which is reported. `available` are the schemes of the other system;
    `setting` will hold the choice.
    """
    config = builder.config
    fields = [name for name in ("modules", "first_last_layers_bf16") if builder.values[name]]
    try:
        schemes = ModuleSchemes.of(config, num_layers)
    except WrongValueError as error:
        for field in fields:
            builder.record("modules.got-num_layers", field, rule=error.rule, num_layers=num_layers)
        return None
    for field in fields:
        builder.map(field, setting)
    if config.first_last_layers_bf16:
        for count in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            builder.map(count, setting)
    report_rows(builder, schemes, available)
    return schemes


def report_rows(builder: ExportBuilder, schemes: ModuleSchemes, available: Collection[str]) -> None:
    """Report the rows that the other system runs in another precision, each with the choices that are left."""
    run = schemes.run.scheme if schemes.run is not None else HIGH
    for row in schemes.matchers.matchers:
        scheme = row.precision
        if scheme not in (HIGH, *available):
            builder.record("modules.is-to-run-in-which-has", "modules", select=row.select, scheme=scheme, run=run)
        if row.evaluation not in (None, row.training):
            builder.record(
                "modules.is-to-run-in-outside-of", "modules", select=row.select, outside=row.outside, scheme=scheme
            )


def name_lists(schemes: ModuleSchemes, names: Mapping[str, Sequence[str]]) -> dict[Chosen | None, list[str]]:
    """Return the names of the modules that run in each scheme, None standing for the dtype of the run.

    A name that would take modules of another scheme too, as ``wq`` takes ``wq_a``, is left out.

    `names` maps Megatron's name within a layer to the other system's.
    """
    layers = range(schemes.num_layers or 1)
    chosen = {name: tuple(schemes.chosen(layer, name) for layer in layers) for name in names}
    found: dict[Chosen | None, list[str]] = {}
    for name, theirs in names.items():
        alike = [other for other, others in names.items() if any(own in one for own in theirs for one in others)]
        if any(chosen[other] != chosen[name] for other in alike):
            continue
        for one in dict.fromkeys(chosen[name]):
            numbers = [layer for layer in layers if chosen[name][layer] == one]
            places = [""] if len(numbers) == len(layers) else [f"layers.{number}." for number in numbers]
            found.setdefault(one, []).extend(place + own for place in places for own in theirs)
    return found
