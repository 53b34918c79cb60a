"""`check_precision`: what a model, its gradients, its optimizer and one step of it are really in.

    report = check_precision(model, optimizer, step=lambda: loss_of(model(x)).backward())
    print(report)

The dtype of a parameter says what is stored, not what computes: under autocast all parameters are FP32 and every matmul
runs in BF16. So one step is watched: the output of each module, and each matrix multiplication, with its formats where
it is in FP8 or FP4. The record is that of the audit (`bridge.runtime.pytorch.record`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from bridge.errors import PrecisionTypeError
from bridge.model.modules import ModulePaths
from bridge.precision.foreign_names import megatron_names
from bridge.precision.mode import mode_of
from bridge.precision.module_schemes import ModuleSchemes
from bridge.precision.schemes import OPERAND_FORMATS
from bridge.precision.statements import field_value
from bridge.runtime.audit.compare import Mismatch, folded, place_of
from bridge.runtime.pytorch.linear_schemes import schemes_of

if TYPE_CHECKING:
    import torch

    from bridge.precision.matchers import Chosen
    from bridge.registry.config import MixedPrecisionConfig
    from bridge.runtime.audit.record import GemmRow


@dataclass(frozen=True, kw_only=True)
class PrecisionReport:
    """How much there is of each dtype; names of dtypes as torch has them, without ``torch.``."""

    parameters: Mapping[str, int]
    """Dtype -> values in parameters."""
    buffers: Mapping[str, int]
    """Dtype -> values in floating-point buffers."""
    gradients: Mapping[str, int]
    """Dtype -> values in `.grad`; empty before a backward pass."""
    optimizer_state: Mapping[str, int]
    """Dtype -> values in tensors of the optimizer's state, step counts left out; empty before its first step."""
    activations: Mapping[str, int] = field(default_factory=dict)
    """Dtype -> modules whose output had it in the step; containers do not count."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Name of a module -> dtype of its output in the step."""
    matmuls: Mapping[str, int] = field(default_factory=dict)
    """Dtype of the operands, or formats and scheme in FP8 and FP4 -> matrix multiplications in the step."""
    gemms: tuple[GemmRow, ...] = ()
    """The record of the linear layers: module, GEMM, formats, scheme."""
    converted: Mapping[str, int] = field(default_factory=dict)
    """Class of torchao -> layers converted to it, whose FP8 matmuls need not show where it emulates them."""

    def __str__(self) -> str:
        values = dict.fromkeys(("parameters", "buffers", "gradients", "optimizer_state"), "values")
        units = values | {"activations": "modules", "matmuls": "calls"}
        rows = (
            f"{name.replace('_', ' '):<16} {_counted(getattr(self, name), unit)}"
            for name, unit in units.items()
        )
        return "\n".join(rows)

    def disagreements(self, config: str | MixedPrecisionConfig) -> list[str]:
        """Return where the report is not what the recipe asks for, one sentence each.

        Half-precision weights and FP32 weights under autocast both satisfy a half-precision recipe; what it does not
        satisfy is matmuls mostly in FP32 (a few, of a head say, may be), any in another half precision, or an optimizer
        that keeps nothing in FP32. An FP8 or FP4 recipe asks for matmuls in its scheme and its formats, an FP32 one for
        no narrower matmul. With rows of `modules` each linear layer is asked for its own scheme, as `linear_schemes`
        names it.

        Args:
            config: A recipe, or the name of one.

        Raises:
            BridgeError: There is no recipe of that name, it is neither a name nor a recipe, or a row of `modules` takes
                no linear layer that multiplied.
        """
        from bridge.registry.registry import get_mixed_precision_config

        config = get_mixed_precision_config(config)
        autocast = config.to_dict().get("autocast_dtype") if config.autocast_enabled else None
        wanted = {"bf16": "bfloat16", "fp16": "float16"}.get(
            str(autocast or mode_of(config)), "float32"
        )
        found = []
        if field_value(config, "modules"):
            found = self._of_linears(config)
        elif self.matmuls:
            found = self._of_matmuls(wanted, config)
        held = {**self.parameters, **self.optimizer_state}
        if held and not any(name in ("float32", "float64") for name in held):
            found.append(
                "Neither weights nor optimizer state are FP32: small updates are lost. Keep FP32 masters."
            )
        if config.grad_reduce_in_fp32 and self.gradients and "float32" not in self.gradients:
            found.append(
                f"Gradients are {', '.join(self.gradients)}, and grad_reduce_in_fp32 asks for float32."
            )
        return found

    def _of_matmuls(self, wanted: str, config: MixedPrecisionConfig) -> list[str]:
        counted = _counted(self.matmuls, "calls")
        found = []
        if config.fp8 or config.fp4:
            scheme, low = ("FP8", "float8") if config.fp8 else ("FP4", "float4")
            ran = any(name.startswith(low) for name in self.matmuls) or any(
                row.scheme != "none" for row in self.gemms
            )
            if self.converted or ran:
                return self._of_linears(config)
            found.append(f"No matmul ran in {scheme}: {counted}. Were the linear layers converted?")
        wide = {
            name: count for name, count in self.matmuls.items() if name in ("float32", "float64")
        }
        other = [name for name in self.matmuls if name not in (wanted, *wide)]
        if wanted not in self.matmuls and not (wanted == "float32" and wide):
            return [
                *found,
                f"No matmul ran in {wanted}: {counted}. Is autocast around the forward pass?",
            ]
        if other:
            found.append(
                f"Matmuls ran in {', '.join(other)} and {wanted}: {counted}. Which layers cast to it?"
            )
        if wanted != "float32" and sum(wide.values()) * 2 > sum(self.matmuls.values()):
            most = f"Most matmuls ran in {', '.join(wide)}, not in {wanted}"
            found.append(f"{most}: {counted}. Does autocast cover them?")
        return found

    def _of_linears(self, config: MixedPrecisionConfig) -> list[str]:
        """Return where linear layers ran in another scheme or in other formats than a recipe gives them."""
        chosen = _chosen(self.gemms, config)
        found = []
        for row in self.gemms:
            if _key(row) not in chosen:
                continue
            one, planned = chosen[_key(row)], str(mode_of(config))
            if one is not None:
                forward, backward = OPERAND_FORMATS.get(one.format, ("custom", "custom"))
                planned = (
                    f"{forward if row.gemm == 'fprop' else backward} x {forward} ({one.scheme})"
                )
            is_hidden = row.scheme == "scaled" or (
                row.scheme == "none" and bool(self.converted)
            )  # torchao's own
            if row.formats != planned and not (one is not None and is_hidden):
                place = place_of(row.layer, row.module, row.gemm)
                found.append(Mismatch(column="formats", planned=planned, ran=row.formats, **place))
        return list(map(str, folded(found)))


def _chosen(rows: Iterable[GemmRow], config: MixedPrecisionConfig) -> dict[str, Chosen | None]:
    """Return the scheme of each linear layer that a recipe decides: by its rows, or of all that ran in a low one."""
    if not field_value(config, "modules"):
        return {_key(row): ModuleSchemes.of_run(config) for row in rows if row.scheme != "none"}
    places = megatron_names(row.module for row in rows)
    others = {_key(row) for row in rows if not row.layer}
    for row in rows:
        if (
            row.layer.isdecimal()
        ):  # of a Megatron model; prediction layers and the output are not asked
            number = int(row.layer) - 1
            path = ModulePaths().path(row.layer, number, row.module)
            places[_key(row)] = number, path.removeprefix(f"decoder.layers.{number}.")
    if not places:
        return {}
    schemes = schemes_of([*places.values()], config)
    return dict.fromkeys(others) | {key: schemes.chosen(*place) for key, place in places.items()}


def check_precision(
    model: torch.nn.Module, optimizer: Any = None, step: Callable[[], object] | None = None
) -> PrecisionReport:
    """Return the dtypes of a model, of its optimizer, and of what one step of it computes.

    Args:
        model: Any module.
        optimizer: A `torch.optim.Optimizer` or anything with such a `state`; None: there is none.
        step: Runs one forward pass, and a backward pass where gradients are asked for, with everything the training
            loop puts around them. It is called once; None: nothing runs, and what is there already is counted.

    Raises:
        PrecisionTypeError: Something else than a module, an optimizer or a function. What `step` raises is not caught,
            and leaves no hook behind.
    """
    _require_types(model, optimizer, step)
    from bridge.runtime.pytorch.record.modules import (
        holds_more_than_modules,
        tensors_in,
    )  # imports torch
    from bridge.runtime.pytorch.record.watch import GemmWatch

    modules: dict[str, str] = {}
    watch = GemmWatch([model])
    if step is not None:
        with ExitStack() as watching:
            for name, module in model.named_modules():
                if holds_more_than_modules(module):
                    watching.callback(
                        module.register_forward_hook(partial(_note, modules, name)).remove
                    )
            watching.enter_context(watch.watching())
            step()
    state = tensors_in([] if optimizer is None else [*optimizer.state.values()])
    return PrecisionReport(
        parameters=_sizes(model.parameters()),
        buffers=_sizes(buffer for buffer in model.buffers() if buffer.is_floating_point()),
        gradients=_sizes(one.grad for one in model.parameters() if one.grad is not None),
        optimizer_state=_sizes(
            leaf for leaf in state if leaf.dim() > 0 and leaf.is_floating_point()
        ),
        activations=dict(Counter(modules.values())),
        modules=modules,
        matmuls=dict(watch.calls),
        gemms=watch.rows,
        converted=dict(Counter(_converted(model))),
    )


def _require_types(model: object, optimizer: object, step: object) -> None:
    import torch

    if not isinstance(model, torch.nn.Module):
        raise PrecisionTypeError(
            f"model: must be a torch.nn.Module, got {type(model).__name__}. Give the model."
        )
    if step is not None and not callable(step):
        raise PrecisionTypeError(
            f"step: must be a function, got {type(step).__name__}. Wrap the step in a lambda."
        )
    if optimizer is not None and not isinstance(getattr(optimizer, "state", None), Mapping):
        raise PrecisionTypeError(
            f"optimizer: must have a state, got {type(optimizer).__name__}. Give the optimizer."
        )


def _key(row: GemmRow) -> str:
    return f"{row.layer}.{row.module}" if row.layer else row.module


def _converted(model: torch.nn.Module) -> Iterator[str]:
    for module in model.modules():
        kinds = [type(one) for one in (module, *module.parameters(recurse=False))]
        yield from [kind.__name__ for kind in kinds if kind.__module__.startswith("torchao.")][:1]


def _note(
    modules: dict[str, str], name: str, _module: object, _inputs: object, output: object
) -> None:
    """Note the dtype of a module's output; a hook of torch."""
    from bridge.runtime.pytorch.record.modules import dtype_of, tensors_in

    tensor = next(iter(tensors_in(output)), None)
    if tensor is not None and tensor.is_floating_point():
        modules[name] = dtype_of(tensor)


def _sizes(tensors: Iterable[Any]) -> dict[str, int]:
    from bridge.runtime.pytorch.record.modules import dtype_of

    found: Counter[str] = Counter()
    for tensor in tensors:
        found[dtype_of(tensor)] += tensor.numel()
    return dict(found)


def _counted(counts: Mapping[str, int], unit: str) -> str:
    return ", ".join(f"{name}: {count:,} {unit}" for name, count in counts.items()) or "none"
