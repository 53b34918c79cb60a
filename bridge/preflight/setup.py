"""`Setup`: everything a rule may look at, after the recipe has been written into the owners.

    setup = Setup("bf16_mixed", model={"num_layers": 80, "hidden_size": 8192}, target=parse_target("h100x8"))
    setup.scheme, setup.model.num_layers, setup.target.gpu

Owners may be Megatron's own objects, subclasses of them, mappings from YAML, or nothing at all. A value that nobody
gave is Megatron's class default; where Megatron has none (`seq_length`, `target.te`), None stands for "not known", and
a rule that needs it stays silent. Nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bridge.precision.config import FIELD_DEFAULTS
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES, Scheme
from bridge.preflight.section import Malformed, Section, read_precision, read_section
from bridge.preflight.settle import NAMES_OF, Replaced, mode_of, settle
from bridge.preflight.target import Target
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import get_mixed_precision_config
from bridge.rules.fields import DEFAULTS
from bridge.rules.versions import at_least

if TYPE_CHECKING:
    from bridge.preflight.auto import Choice

__all__ = ["ROLES", "Setup"]

ROLES = ("model", "optimizer", "ddp", "train", "data", "peft")
Origins = Callable[[str], str]


class Setup:
    """A run as a rule sees it. Read-only by intent; made anew for each check.

    Args:
        precision: A recipe's name, a config, a mapping of stated fields, or None: the owners keep their own settings.
        model: A TransformerConfig, a mapping of its fields, or None.
        optimizer: An OptimizerConfig, likewise.
        ddp: A DistributedDataParallelConfig, likewise.
        train: Batch sizes and the loss check.
        data: Sequence length and packing.
        peft: An adapter's settings, None for full training.
        checkpoint: The precision fingerprint of the checkpoint that the run resumes from.
        target: Where it is going to run; None: nothing is known but what is installed.
        environment: Environment variables of the run; None: not known.
        backend: te or emulated: what runs low-precision GEMMs; None: Transformer Engine where the target has a GPU.
        origins: Path of a setting -> who set it.
        choice: What `auto` was resolved to, for reports.
    """

    def __init__(
        self,
        precision: str | MixedPrecisionConfig | Mapping[str, Any] | None = None,
        *,
        model: Any = None,
        optimizer: Any = None,
        ddp: Any = None,
        train: Any = None,
        data: Any = None,
        peft: Any = None,
        checkpoint: Mapping[str, Any] | None = None,
        target: Target | None = None,
        environment: Mapping[str, str] | None = None,
        backend: str | None = None,
        origins: Origins | None = None,
        choice: Choice | None = None,
    ) -> None:
        self.precision, misread, self.unknown = _precision(precision)
        self.said: Mapping[str, Any] = {} if self.precision is None else self.precision.stated_values
        given = (model, optimizer, ddp, train, data, peft)
        sections = {role: read_section(role, owner) for role, owner in zip(ROLES, given, strict=True)}
        self.sections: Mapping[str, Section] = sections
        self.checkpoint = checkpoint
        self.target = target or Target()
        self.environment: Mapping[str, str] = environment or {}
        self.has_environment = environment is not None
        self.backend = backend
        self.choice = choice
        self._origins = origins
        self.malformed = misread + [one for section in sections.values() for one in section.malformed]
        values = {role: section.values for role, section in sections.items()}
        self.replaced: list[Replaced] = settle(self.said, values) if self.precision is not None else []
        self.model = _View(values["model"])
        self.optimizer = _View(values["optimizer"])
        self.ddp = _View(values["ddp"])
        self.train = _View(values["train"])
        self.data = _View(values["data"])
        self.peft = _View(values["peft"])
        self._read_precision()
        self._read_layout()
        self._read_situation()

    def _read_precision(self) -> None:
        """Set what the run's precision comes down to."""
        model, ddp = self.model, self.ddp
        if self.precision is not None:
            self.mode = mode_of(self.said)
        else:
            self.mode = "bf16" if model.bf16 is True else "fp16" if model.fp16 is True else "fp32"
        self.is_bf16, self.is_fp16, self.is_fp32 = self.mode == "bf16", self.mode == "fp16", self.mode == "fp32"
        self.is_half = not self.is_fp32
        self.fp8: str | None = model.fp8 or None
        self.fp4: str | None = model.fp4 or None
        self.is_low = bool(self.fp8 or self.fp4)
        self.scheme: str | None = model.fp8_recipe if self.fp8 else model.fp4_recipe if self.fp4 else None
        self.row: Scheme | None = (FP8_SCHEMES if self.fp8 else FP4_SCHEMES).get(self.scheme or "")
        self.is_delayed = self.scheme == "delayed"
        self.is_blockwise = self.scheme == "blockwise"
        self.is_mxfp8 = self.scheme == "mxfp8"
        self.is_tensorwise = self.scheme == "tensorwise"
        self.is_custom = self.scheme == "custom"
        self.gathers_fp8: bool = bool(model.fp8_param or ddp.fp8_param_gather)
        self.gathers_fp4: bool = bool(model.fp4_param or ddp.fp4_param_gather)
        self.reuses_buffer: bool = bool(
            ddp.reuse_grad_buf_for_mxfp8_param_ag or self.optimizer.reuse_grad_buf_for_mxfp8_param_ag
        )
        self.has_dynamic_scale = self.is_fp16 and not self.optimizer.loss_scale

    def _read_layout(self) -> None:
        """Set sizes of the parallel groups (at least 1) and what kind of model it is."""
        model, ddp = self.model, self.ddp
        self.tp: int = max(1, model.tensor_model_parallel_size or 1)
        self.pp: int = max(1, model.pipeline_model_parallel_size or 1)
        self.cp: int = max(1, model.context_parallel_size or 1)
        self.ep: int = max(1, model.expert_model_parallel_size or 1)
        self.etp: int = max(1, model.expert_tensor_parallel_size or self.tp)
        self.sp: bool = bool(model.sequence_parallel) and self.tp > 1
        self.is_moe = bool(model.num_moe_experts)
        self.is_hybrid = bool(model.is_hybrid_model or model.hybrid_override_pattern or model.hybrid_layer_pattern)
        self.has_mtp = bool(model.mtp_num_layers)
        self.has_precision_aware: bool = bool(self.optimizer.use_precision_aware_optimizer)
        self.has_megatron_fsdp = bool(ddp.use_megatron_fsdp or ddp.use_custom_fsdp)
        self.has_torch_fsdp2: bool = bool(ddp.use_torch_fsdp2)
        self.has_fsdp_v2 = self.has_megatron_fsdp and ddp.megatron_fsdp_version == 2
        self.is_sharded = bool(self.optimizer.use_distributed_optimizer or ddp.use_distributed_optimizer)
        self.rank: int | None = self.peft.rank or self.peft.dim
        routes = (model.moe_token_dispatcher_type, model.moe_flex_dispatcher_backend)
        self.has_ncclep = routes == ("flex", "ncclep")
        modules = model.recompute_modules
        self.recomputed: tuple[str, ...] = ()
        if model.recompute_granularity == "selective" and isinstance(modules, list | tuple):
            self.recomputed = tuple(map(str, modules))

    def _read_situation(self) -> None:
        """Set what is known of the place the run happens in."""
        target, sections = self.target, self.sections
        self.mcore, self.te, self.cuda, self.cudnn = target.mcore, target.te, target.cuda, target.cudnn
        self.capability = target.capability
        self.has_gpu = target.gpu is not None and target.gpu.is_gpu
        self.is_emulated = self.backend == "emulated" or (
            self.backend is None and target.gpu is not None and not target.gpu.is_gpu
        )
        self.needs_gpu_formats = self.is_low and self.has_gpu and not self.is_emulated
        self.has_owners = any(sections[role].is_given for role in ("model", "optimizer", "ddp"))
        self.has_optimizer, self.has_ddp = sections["optimizer"].is_given, sections["ddp"].is_given
        self.has_model = sections["model"].is_given
        self.has_peft = sections["peft"].is_given
        self.is_plain_optimizer = self.has_optimizer and not self.has_precision_aware
        self.is_resumed = self.checkpoint is not None

    @property
    def label(self) -> str:
        """What is checked, in a few words."""
        return self.precision.label if self.precision is not None else f"{self.mode}, without a recipe"

    @property
    def flow(self) -> str:
        """The way of a gradient, from the weight gradient to the master weight."""
        weights = self.mode
        if self.has_megatron_fsdp and at_least(self.mcore, (0, 19)):
            main = self.ddp.megatron_fsdp_main_grads_dtype or weights
            sent = self.ddp.megatron_fsdp_grad_comm_dtype or main
        else:
            main = sent = "fp32" if self.ddp.grad_reduce_in_fp32 else weights
        master = self.optimizer.main_params_dtype if self.has_precision_aware else "fp32"
        wgrad = f"{self.scheme} wgrad GEMM" if self.is_low else f"{weights} wgrad GEMM"
        return f"{wgrad} -> accumulated in {main} -> reduced in {sent} -> {master} master weights"

    # -- what rules ask ----------------------------------------------------------------------------------------------

    def stands_out(self, field: str) -> bool:
        """Return whether a precision field was stated with another value than its default."""
        return field in self.said and self.said[field] != FIELD_DEFAULTS[field]

    def path(self, name: str) -> str:
        """Return the full path of a setting: a precision field is the recipe's, or without one an owner's."""
        if name not in FIELD_DEFAULTS:
            return name
        return f"mixed_precision.{name}" if self.precision is not None else f"{_owner_of(name)}.{name}"

    def value(self, path: str) -> Any:
        """Return what a path holds; None for one that is no setting."""
        section, _, name = path.partition(".")
        if section == "mixed_precision":
            for role in ("model", "optimizer", "ddp"):
                if name in DEFAULTS[role]:
                    return self.said.get(name, self.sections[role].values[name])
            return self.said.get(name, FIELD_DEFAULTS.get(name))
        if section in self.sections:
            return self.sections[section].values.get(name)
        return None

    def where(self, path: str) -> str | None:
        """Return who set a path, or None where nobody is known."""
        section, _, name = path.partition(".")
        if section == "mixed_precision" and self.precision is not None and name in FIELD_DEFAULTS:
            for known in NAMES_OF.get(name, (name,)):
                if known in self.said:
                    return str(self.precision.sources.get(known) or "stated")
            return None
        return self._origins(path) if self._origins is not None and section in self.sections else None


class _View:
    """A section's values as attributes; the dictionary is shared, not copied."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__ = values

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def _owner_of(name: str) -> str:
    return next((role for role in ("model", "optimizer", "ddp") if name in DEFAULTS[role]), "model")


def _precision(given: Any) -> tuple[MixedPrecisionConfig | None, list[Malformed], tuple[str, ...]]:
    """Return the config, what is of a wrong type in it, and keys that are no field."""
    if given is None or isinstance(given, MixedPrecisionConfig):
        return given, [], ()
    if isinstance(given, Mapping):
        return read_precision(given)
    return get_mixed_precision_config(given), [], ()
