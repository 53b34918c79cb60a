"""`check_precision`: the dtypes of a model, its gradients, its optimizer and a step of it.

    report = check_precision(model, optimizer, step=lambda: loss_of(model(x)).backward())
    print(report)

The dtype of a parameter is the dtype of its storage. It does not show the dtype of the computation:
under autocast all parameters are FP32, and every matmul runs in BF16. So a step is recorded: the
output of each module, and each matrix multiplication, with its formats in FP8 or FP4. The audit
uses the same recorder (`bridge.runtime.pytorch.record`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from bridge.errors import PrecisionTypeError
from bridge.model.module_paths import ModulePaths
from bridge.precision.foreign_names import map_to_megatron_names
from bridge.precision.mode import get_mode
from bridge.precision.module_schemes import ModuleSchemes
from bridge.precision.schemes import OPERAND_FORMATS
from bridge.precision.statements import get_field_value
from bridge.registry.registry import get_mixed_precision_config
from bridge.runtime.audit.mismatch import Mismatch, fold_mismatches, make_location
from bridge.runtime.pytorch.linear_schemes import resolve_module_schemes

if TYPE_CHECKING:
    import torch

    from bridge.precision.matchers import SchemeChoice
    from bridge.registry.mixed_precision_config import MixedPrecisionConfig
    from bridge.runtime.audit.record import GemmRow


WIDE_DTYPES = frozenset({"float32", "float64"})
"""Dtypes in which small updates of weights are kept."""


@dataclass(frozen=True, kw_only=True)
class PrecisionReport:
    """Counts per dtype of parameters, gradients, states and the operators of a step.

    Dtypes have torch's names without ``torch.``.
    """

    parameters: Mapping[str, int]
    """Dtype -> values in parameters."""
    buffers: Mapping[str, int]
    """Dtype -> values in floating-point buffers."""
    gradients: Mapping[str, int]
    """Dtype -> values in `.grad`; empty before a backward pass."""
    optimizer_state: Mapping[str, int]
    """Dtype -> values in tensors of the optimizer's state, without step counts.

    It is empty before the optimizer's first step.
    """
    activations: Mapping[str, int] = field(default_factory=dict)
    """Dtype -> number of modules whose output has the dtype in the step, without containers."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Name of a module -> dtype of its output in the step."""
    matmuls: Mapping[str, int] = field(default_factory=dict)
    """Dtype of the operands -> number of matrix multiplications in the step.

    In FP8 and FP4 the key is formats and scheme.
    """
    gemms: tuple[GemmRow, ...] = ()
    """The recorded GEMMs of linear layers."""
    converted: Mapping[str, int] = field(default_factory=dict)
    """Class of torchao -> number of layers of this class, or with a parameter of it.

    The formats of torchao's emulated FP8 are not always visible in its matmuls.
    """

    def __str__(self) -> str:
        rows = [
            _format_line("parameters", self.parameters, "values"),
            _format_line("buffers", self.buffers, "values"),
            _format_line("gradients", self.gradients, "values"),
            _format_line("optimizer state", self.optimizer_state, "values"),
            _format_line("activations", self.activations, "modules"),
            _format_line("matmuls", self.matmuls, "calls"),
        ]
        return "\n".join(rows)

    def disagreements(self, config: str | MixedPrecisionConfig) -> list[str]:
        """Return the differences of the report from a recipe, a sentence each.

        - A half-precision recipe is satisfied by half-precision weights, and by FP32 weights under
          autocast. It is not satisfied if most matmuls are in FP32, if a matmul is in another half
          precision, or if the optimizer keeps nothing in FP32.
        - An FP8 or FP4 recipe needs matmuls in its scheme and formats.
        - An FP32 recipe needs matmuls in FP32 or FP64.
        - Under rows of `modules` each linear layer has to run in its scheme of `linear_schemes`.

        Args:
            config: A recipe, or its name.

        Raises:
            BridgeError: There is no recipe of that name, the argument is of another type, or a row
                of `modules` takes no linear layer that multiplied.
        """
        config = get_mixed_precision_config(config)
        sentences = []
        if get_field_value(config, "modules"):
            sentences = self._check_linears(config)
        elif self.matmuls:
            sentences = self._check_matmuls(config)
        dtypes_between_steps = {**self.parameters, **self.optimizer_state}
        if dtypes_between_steps and dtypes_between_steps.keys().isdisjoint(WIDE_DTYPES):
            sentences.append(
                "Neither weights nor optimizer state are FP32: small updates are lost. "
                "Keep FP32 masters."
            )
        if config.grad_reduce_in_fp32 and self.gradients and "float32" not in self.gradients:
            sentences.append(
                f"Gradients are {', '.join(self.gradients)}, "
                "and grad_reduce_in_fp32 asks for float32."
            )
        return sentences

    def _check_matmuls(self, config: MixedPrecisionConfig) -> list[str]:
        """Return the differences of the matmuls from a recipe without rows of `modules`."""
        sentences = []
        if config.fp8 or config.fp4:
            if self.converted or self._has_low_matmuls(config):
                return self._check_linears(config)
            family = "FP4"
            if config.fp8:
                family = "FP8"
            counted = _format_counts(self.matmuls, "calls")
            sentences.append(
                f"No matmul ran in {family}: {counted}. Were the linear layers converted?"
            )
        return sentences + self._check_high_precision(_get_wanted_dtype(config))

    def _has_low_matmuls(self, config: MixedPrecisionConfig) -> bool:
        """Return whether a matmul ran in the family of a recipe, FP8 or FP4."""
        prefix = "float4"
        if config.fp8:
            prefix = "float8"
        if any(name.startswith(prefix) for name in self.matmuls):
            return True
        return any(row.scheme != "none" for row in self.gemms)

    def _check_high_precision(self, wanted: str) -> list[str]:
        """Return the differences of the matmuls from a dtype of high precision.

        Args:
            wanted: float32, bfloat16 or float16.
        """
        counted = _format_counts(self.matmuls, "calls")
        wide, others = [], []
        for name in self.matmuls:
            if name in WIDE_DTYPES:
                wide.append(name)
            elif name != wanted:
                others.append(name)
        if wanted not in self.matmuls and not (wanted == "float32" and wide):
            return [f"No matmul ran in {wanted}: {counted}. Is autocast around the forward pass?"]
        sentences = []
        if others:
            sentences.append(
                f"Matmuls ran in {', '.join(others)} and {wanted}: {counted}. "
                "Which layers cast to it?"
            )
        wide_calls = sum(self.matmuls[name] for name in wide)
        if wanted != "float32" and wide_calls * 2 > sum(self.matmuls.values()):
            sentences.append(
                f"Most matmuls ran in {', '.join(wide)}, not in {wanted}: {counted}. "
                "Does autocast cover them?"
            )
        return sentences

    def _check_linears(self, config: MixedPrecisionConfig) -> list[str]:
        """Return a sentence for each linear layer in another scheme or format than the recipe's."""
        chosen = _choose_schemes(self.gemms, config)
        mismatches = []
        for row in self.gemms:
            key = _make_layer_key(row)
            if key not in chosen:
                continue
            scheme = chosen[key]
            planned = str(get_mode(config))
            if scheme is not None:
                if self._may_be_torchao(row):
                    continue
                planned = _format_operands(scheme, row.gemm)
            if row.formats != planned:
                location = make_location(row.layer, row.module, row.gemm)
                mismatches.append(
                    Mismatch(column="formats", planned=planned, ran=row.formats, **location)
                )
        return [str(mismatch) for mismatch in fold_mismatches(mismatches)]

    def _may_be_torchao(self, row: GemmRow) -> bool:
        """Return whether a GEMM may be one of torchao's, whose formats are not visible."""
        return row.scheme == "scaled" or (row.scheme == "none" and bool(self.converted))


def _get_wanted_dtype(config: MixedPrecisionConfig) -> str:
    """Return the dtype that matmuls in high precision should have."""
    dtype = get_mode(config)
    if config.autocast_enabled:
        dtype = config.to_dict().get("autocast_dtype") or dtype
    return {"bf16": "bfloat16", "fp16": "float16"}.get(str(dtype), "float32")


def _format_operands(scheme: SchemeChoice, gemm: str) -> str:
    """Return the formats that a GEMM multiplies under a scheme, as a record writes them."""
    forward, backward = OPERAND_FORMATS.get(scheme.format, ("custom", "custom"))
    left = backward
    if gemm == "fprop":
        left = forward
    return f"{left} x {forward} ({scheme.scheme})"


def _choose_schemes(
    rows: Sequence[GemmRow], config: MixedPrecisionConfig
) -> dict[str, SchemeChoice | None]:
    """Return key of a linear layer -> scheme that a recipe chooses for it.

    The result is None for high precision.

    A recipe without rows of `modules` chooses only for the layers that ran in a low precision.
    """
    if not get_field_value(config, "modules"):
        run_scheme = ModuleSchemes.get_run_scheme(config)
        return {_make_layer_key(row): run_scheme for row in rows if row.scheme != "none"}
    places = map_to_megatron_names(row.module for row in rows)
    chosen: dict[str, SchemeChoice | None] = {}
    for row in rows:
        if not row.layer:
            chosen[_make_layer_key(row)] = None
        # A layer of a Megatron model; prediction layers and the output are left out.
        if row.layer.isdecimal():
            number = int(row.layer) - 1
            path = ModulePaths().path(row.layer, number, row.module)
            places[_make_layer_key(row)] = number, path.removeprefix(f"decoder.layers.{number}.")
    if not places:
        return {}
    schemes = resolve_module_schemes([*places.values()], config)
    for key, place in places.items():
        chosen[key] = schemes.chosen(*place)
    return chosen


def check_precision(
    model: torch.nn.Module, optimizer: Any = None, step: Callable[[], object] | None = None
) -> PrecisionReport:
    """Return the dtypes of a model, of its optimizer, and of the operators of a step.

    An error of `step` is not caught, and leaves no hook behind.

    Args:
        model: Any module.
        optimizer: A `torch.optim.Optimizer`, or another object with such a `state`. None: no
            optimizer.
        step: Runs a forward pass, and for gradients a backward pass, with everything that the
            training loop puts around them. It is called once. None: the report has the present
            tensors only.

    Raises:
        PrecisionTypeError: An argument is not a module, optimizer or function.
    """
    _require_types(model, optimizer, step)
    from bridge.runtime.pytorch.record.gemm_watch import GemmWatch  # imports torch

    modules: dict[str, str] = {}
    watch = GemmWatch([model])
    if step is not None:
        with _record_outputs(model, modules), watch.record_gemms():
            step()
    parameters = list(model.parameters())
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return PrecisionReport(
        parameters=_count_values(parameters),
        buffers=_count_values(buffers),
        gradients=_count_values(gradients),
        optimizer_state=_count_values(_list_state_tensors(optimizer)),
        activations=dict(Counter(modules.values())),
        modules=modules,
        matmuls=dict(watch.calls),
        gemms=watch.rows,
        converted=dict(Counter(_list_converted_classes(model))),
    )


def _require_types(model: object, optimizer: object, step: object) -> None:
    """Refuse arguments of `check_precision` of another type."""
    import torch

    if not isinstance(model, torch.nn.Module):
        kind = type(model).__name__
        raise PrecisionTypeError(f"model: must be a torch.nn.Module, got {kind}. Give the model.")
    if step is not None and not callable(step):
        kind = type(step).__name__
        raise PrecisionTypeError(
            f"step: must be a function, got {kind}. Wrap the step in a lambda."
        )
    if optimizer is not None and not isinstance(getattr(optimizer, "state", None), Mapping):
        kind = type(optimizer).__name__
        raise PrecisionTypeError(f"optimizer: must have a state, got {kind}. Give the optimizer.")


def _make_layer_key(row: GemmRow) -> str:
    """Return the name of a linear layer. In a Megatron model the label of its layer comes first."""
    if not row.layer:
        return row.module
    return f"{row.layer}.{row.module}"


def _list_converted_classes(model: torch.nn.Module) -> Iterator[str]:
    """Yield torchao's class of each layer that is converted, or that has a converted parameter."""
    for module in model.modules():
        for part in (module, *module.parameters(recurse=False)):
            kind = type(part)
            if kind.__module__.startswith("torchao."):
                yield kind.__name__
                break


@contextmanager
def _record_outputs(model: torch.nn.Module, modules: dict[str, str]) -> Iterator[None]:
    """Write the dtype of each module's output into `modules`, in a ``with`` block."""
    from bridge.runtime.pytorch.record.modules import is_more_than_container

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if is_more_than_container(module):
                hook = module.register_forward_hook(partial(_record_output, modules, name))
                hooks.callback(hook.remove)
        yield


def _record_output(
    modules: dict[str, str], name: str, _module: object, _inputs: object, output: object
) -> None:
    """Write the dtype of a module's output into `modules`. It is a hook of torch."""
    from bridge.runtime.pytorch.record.modules import get_dtype_name, list_tensors

    tensors = list_tensors(output)
    if tensors and tensors[0].is_floating_point():
        modules[name] = get_dtype_name(tensors[0])


def _list_state_tensors(optimizer: Any) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state, without step counts."""
    from bridge.runtime.pytorch.record.modules import list_tensors

    if optimizer is None:
        return []
    leaves = list_tensors([*optimizer.state.values()])
    return [leaf for leaf in leaves if leaf.dim() > 0 and leaf.is_floating_point()]


def _count_values(tensors: Iterable[Any]) -> dict[str, int]:
    """Return dtype -> number of values."""
    from bridge.runtime.pytorch.record.modules import get_dtype_name

    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[get_dtype_name(tensor)] += tensor.numel()
    return dict(sizes)


def _format_line(name: str, counts: Mapping[str, int], unit: str) -> str:
    """Return a line of the report: a name and its counts."""
    return f"{name:<16} {_format_counts(counts, unit)}"


def _format_counts(counts: Mapping[str, int], unit: str) -> str:
    """Return counts with their names and unit, "none" without counts."""
    return ", ".join(f"{name}: {count:,} {unit}" for name, count in counts.items()) or "none"
