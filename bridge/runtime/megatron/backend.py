"""The backend of a run: the implementation of its linear layers.

    te         Transformer Engine, on a GPU
    te_cpu     Transformer Engine's Python, on a CPU; in a process that was declared for it
    emulated   the emulation of FP8 and FP4, on any device
    local      Megatron's local layers, for a run without FP8 and FP4

`choose_backend` chooses a backend, and `use_backend` prepares Megatron for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from megatron.core import fp4_utils
from megatron.core.fp8_utils import get_fp8_recipe

from bridge.errors import BackendUnavailableError, PrecisionConfigError
from bridge.precision.matchers import ModulePrecision, list_matchers, parse_quant_recipes
from bridge.rules.environment_variables import (
    check_environment,
    format_set_variables,
    list_scheme_variables,
    list_set_variables,
)
from bridge.runtime.megatron.cpu.cuda_shim import cpu_as_cuda
from bridge.runtime.megatron.emulation.parallel_linear import (
    get_layer_scheme,
    make_gemm_precision,
)
from bridge.runtime.megatron.emulation.scale_updates import checkpoint_region
from bridge.runtime.megatron.emulation.stored_weight import register_stored_weights
from bridge.runtime.megatron.optimizer import gather_buckets_separately
from bridge.runtime.megatron.patching import Patch, apply_patches, keep_compatible
from bridge.runtime.megatron.te.machine import list_missing_for_te
from bridge.runtime.megatron.te_cpu.install import TOO_LATE_MESSAGE, get_installed_te
from bridge.target.gpus import make_gpu_of_capability
from bridge.target.target import Target
from bridge.target.versions import format_dotted, parse_version

OVERRIDE_VARIABLE = "NVTE_BACKWARD_OVERRIDE"
"""The only variable of Transformer Engine that the emulation follows."""
BACKENDS = ("auto", "te", "emulated", "te_cpu")
"""Values of `precision_backend`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """Implementation of a run's linear layers."""

    name: str
    """te, emulated, te_cpu, or local: Megatron's local layers in the weights' dtype."""
    notes: tuple[str, ...] = ()
    """Sentences about the choice, for the log."""
    backward_override: str | None = None
    """The `backward_override` of Transformer Engine's recipes that the emulation follows."""


LOCAL_BACKEND = Backend(name="local")
"""Megatron's local layers."""


def choose_backend_of_phases(
    requested: str, models: Sequence[Any], environ: Mapping[str, str] = MappingProxyType({})
) -> Backend:
    """Return the backend for a run of several phases of precision.

    It is the backend of the first phase with FP8 or FP4 matmuls, with the notes of all such phases.

    Args:
        requested: As for `choose_backend`.
        models: Model config of each phase.
        environ: As for `choose_backend`.

    Raises:
        BackendUnavailableError, PrecisionConfigError: As for `choose_backend`, in any phase.
    """
    backends = [choose_backend(requested, model, environ) for model in models]
    low_precision: list[Backend] = []
    notes: dict[str, None] = {}
    for backend, model in zip(backends, models, strict=True):
        if get_layer_scheme(model) is not None:
            low_precision.append(backend)
            notes.update(dict.fromkeys(backend.notes))
    if not low_precision:
        return backends[0]
    return replace(low_precision[0], notes=tuple(notes))


def choose_backend(
    requested: str, config: Any, environ: Mapping[str, str] = MappingProxyType({})
) -> Backend:
    """Return the backend for a model config on this machine.

    Args:
        requested: One of `BACKENDS`. auto is Transformer Engine if it works on this machine, and
            the emulation otherwise. te_cpu needs a process that was declared for it
            (`bridge.preflight.gpu_for_te_cpu`), and such a process runs no other backend.
        config: A `TransformerConfig`.
        environ: Environment variables. Only Transformer Engine's variables are read.

    Raises:
        BackendUnavailableError: The requested backend cannot run here.
        PrecisionConfigError: There is no such scheme or format, or a variable of the environment
            contradicts the config.
    """
    scheme = get_layer_scheme(config)
    effects: list[ModulePrecision] = []
    for matcher in list_matchers(getattr(config, "quant_recipe", None)):
        effects.extend(matcher.effects)
    schemes = [scheme, *(effect.scheme for effect in effects if effect.scheme is not None)]
    if requested == "te_cpu" or get_installed_te() is not None:
        return _make_te_cpu_backend(requested, config, schemes, environ)
    missing: list[str] = []
    if requested != "emulated":
        missing = _list_missing(schemes)
        if not missing:
            notes = ("Layers: Transformer Engine.", *_make_te_notes(config, environ))
            return Backend(name="te", notes=notes)
    if requested == "te":
        raise BackendUnavailableError(
            "precision_backend: Transformer Engine cannot run here, got 'te'. "
            f"Missing: {'; '.join(missing)}. "
            "Use auto or emulated, use te_cpu for its Python on this CPU, or run this where it "
            "works."
        )
    if scheme is None and not any(effect.chooses_in_high_precision for effect in effects):
        return _make_local_backend(requested)
    reason = "as asked for"
    if requested != "emulated":
        reason = f"Transformer Engine cannot run here: {'; '.join(missing)}"
    return _make_emulated_backend(config, reason, environ, schemes)


def _make_local_backend(requested: str) -> Backend:
    """Return the backend of a run without FP8 and FP4 matmuls: Megatron's layers."""
    if requested != "emulated":
        return Backend(name="local")
    note = "precision_backend=emulated has no effect: this precision has no FP8 or FP4 matmuls."
    return Backend(name="local", notes=(note,))


def _make_emulated_backend(
    config: Any, reason: str, environ: Mapping[str, str], schemes: Sequence[str | None]
) -> Backend:
    """Return the emulation, with notes about the choice and about Transformer Engine's variables.

    Raises:
        BackendUnavailableError: A variable switches on a feature that the emulation does not have.
    """
    override = _read_backward_override(environ, schemes)
    precision = make_gemm_precision(config)
    formats = "chosen per module"
    if precision is not None:
        formats = f"{precision.scheme}, {precision.format}"
        if parse_quant_recipes(getattr(config, "quant_recipe", None)):
            formats += ", and per module"
    notes = [f"FP8/FP4 matmuls: emulated ({formats}), {reason}."]
    for row, stated_value in list_set_variables(environ):
        if row.name == OVERRIDE_VARIABLE and override is not None:
            notes.append(f"{row.name}={stated_value}: the emulation follows it, and {row.effect}.")
        else:
            notes.append(f"{row.name}={stated_value}: the emulation does not read it.")
    return Backend(name="emulated", notes=tuple(notes), backward_override=override)


def _read_backward_override(
    environ: Mapping[str, str], schemes: Sequence[str | None]
) -> str | None:
    """Return the `backward_override` that the environment states for a run's schemes.

    The result is None if the environment states none.

    Raises:
        BackendUnavailableError: Another variable changes the recipe of a scheme.
    """
    override = None
    for scheme in dict.fromkeys(schemes):
        if scheme is None:
            continue
        for row, stated_value in list_scheme_variables(scheme, environ, attention=False):
            if not row.keyword or not row.is_active(stated_value):
                continue
            if row.name != OVERRIDE_VARIABLE:
                raise BackendUnavailableError(
                    f"precision_backend: the emulation has no {row.keyword}, "
                    f"which {row.name}={stated_value} switches on for {scheme}, got 'emulated'. "
                    "Unset it."
                )
            if scheme not in row.refused_by:
                override = stated_value
    return override


def _make_te_cpu_backend(
    requested: str, config: Any, schemes: list[str | None], environ: Mapping[str, str]
) -> Backend:
    """Return the backend of a process with Transformer Engine's Python on a CPU.

    Raises:
        BackendUnavailableError: Another backend was requested, or the process was not declared.
    """
    installed = get_installed_te()
    if requested != "te_cpu":
        raise BackendUnavailableError(
            "precision_backend: this process was declared for te_cpu and keeps Transformer Engine "
            f"to its end, got {requested!r}. Start the run in a process of its own."
        )
    if installed is None:
        raise BackendUnavailableError(TOO_LATE_MESSAGE)
    gpu = make_gpu_of_capability(installed.capability)
    missing = _list_missing(schemes, Target(gpu=gpu, te=parse_version(installed.version)))
    if missing:
        raise BackendUnavailableError(
            "precision_backend: Transformer Engine would refuse this run on the declared GPU, "
            f"got 'te_cpu'. Missing: {'; '.join(missing)}. Name another GPU with target."
        )
    note = (
        f"Layers: the Python of Transformer Engine {installed.version} on this CPU, with the "
        f"branches of compute capability {format_dotted(installed.capability)}; "
        "its compiled part is modelled."
    )
    return Backend(name="te_cpu", notes=(note, *_make_te_notes(config, environ)))


def _list_missing(schemes: Sequence[str | None], machine: Target | None = None) -> list[str]:
    """Return the requirements of Transformer Engine, under some schemes, that a machine does not meet.

    Args:
        schemes: Schemes of the run.
        machine: A declared machine. None: this machine.
    """
    missing: dict[str, None] = {}
    for scheme in schemes:
        missing.update(dict.fromkeys(list_missing_for_te(scheme, machine)))
    return list(missing)


def _make_te_notes(config: Any, environ: Mapping[str, str]) -> list[str]:
    """Return sentences about Transformer Engine's recipe and variables.

    Raises:
        PrecisionConfigError: A variable contradicts the config.
    """
    attention = bool(getattr(config, "fp8_dot_product_attention", False))
    findings = check_environment(get_layer_scheme(config), environ, attention=attention)
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        raise PrecisionConfigError("The environment contradicts the config of this run:", errors)
    recipe = get_te_recipe(config)
    if recipe is None:
        return []
    in_one_line = " ".join(str(recipe).split())
    return [f"Recipe: {in_one_line}.", *format_set_variables(environ), *map(str, findings)]


def get_te_recipe(config: Any) -> Any:
    """Return Transformer Engine's recipe of a model config, or None without FP8 and FP4."""
    if getattr(config, "fp8", None):
        with cpu_as_cuda():  # Megatron reads the current device for a recipe of delayed scaling
            return get_fp8_recipe(config)
    if getattr(config, "fp4", None):
        return fp4_utils.get_fp4_recipe(config)
    return None


_CHECKPOINT_MODULES = (
    "megatron.core.transformer.transformer_block",
    "megatron.core.extensions.transformer_engine",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.recompute",  # from 0.19
)
"""Modules with Transformer Engine's recomputation under the name `te_checkpoint`."""


@contextmanager
def use_backend(backend: Backend) -> Iterator[None]:
    """Prepare Megatron for a backend, for the ``with`` block that builds and trains the model."""
    with ExitStack() as stack:
        if backend.name in ("emulated", "te_cpu"):
            stack.enter_context(gather_buckets_separately())
        if backend.name == "emulated":
            stack.enter_context(register_stored_weights())
            stack.enter_context(apply_patches(keep_compatible(_list_checkpoint_patches())))
        yield


def _list_checkpoint_patches() -> list[Patch]:
    """Return the patches that replace `te_checkpoint` by the emulation's recomputation."""
    patches = []
    for name in _CHECKPOINT_MODULES:
        if find_spec(name) is not None:
            module = import_module(name)
            if hasattr(module, "te_checkpoint"):
                patches.append((module, "te_checkpoint", checkpoint_region))
    return patches
