"""`Setup`: a whole run as rules see it, after the recipe has been written into the owners.

    setup = Setup("bf16_mixed", model={"num_layers": 80, "hidden_size": 8192}, target=parse_target("h100x8"))
    setup.scheme, setup.model.num_layers, setup.target.gpu

Owners may be Megatron's own objects, subclasses of them, mappings from YAML, or nothing at all. Nothing heavy is
imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bridge.preflight.section import Malformed, Section, read_precision, read_section
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import get_mixed_precision_config
from bridge.rules.context import RuleContext, View
from bridge.rules.target import Target
from bridge.rules.versions import at_least
from bridge.sync.mapping import MappingOwner
from bridge.sync.plan import plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.preflight.auto import Choice
    from bridge.sync.report import SyncRow

__all__ = ["ROLES", "Setup"]

ROLES = ("model", "optimizer", "ddp", "train", "data", "peft")
WRITTEN = ("model", "optimizer", "ddp", "train")
Origins = Callable[[str], str]


class Setup(RuleContext):
    """A run before it is built. Read-only by intent; made anew for each check.

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
        origins: Path of a setting -> its source.
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
        config, misread, self.unknown = _precision(precision)
        owners = (model, optimizer, ddp, train, data, peft)
        sections = {role: read_section(role, owner) for role, owner in zip(ROLES, owners, strict=True)}
        self.sections: Mapping[str, Section] = sections
        self.malformed = misread + [one for section in sections.values() for one in section.malformed]
        values = {role: section.values for role, section in sections.items()}
        target = target or Target()
        super().__init__(
            config,
            rows=() if config is None else _write(config, values, target),
            views={role: View(held) for role, held in values.items()},
            given=frozenset(role for role, section in sections.items() if section.is_given),
            target=target,
            origins=origins,
        )
        self.is_whole = True
        self.checkpoint = checkpoint
        self.environment: Mapping[str, str] = environment or {}
        self.has_environment = environment is not None
        self.backend = backend
        self.choice = choice
        self.read_owners()
        self._read_shape()
        self._read_target()

    def _read_shape(self) -> None:
        """Set sizes of the parallel groups (at least 1) and what kind of model it is."""
        model = self.model
        self.train, self.data, self.peft = self.views["train"], self.views["data"], self.views["peft"]
        self.tp: int = max(1, model.tensor_model_parallel_size or 1)
        self.pp: int = max(1, model.pipeline_model_parallel_size or 1)
        self.cp: int = max(1, model.context_parallel_size or 1)
        self.ep: int = max(1, model.expert_model_parallel_size or 1)
        self.etp: int = max(1, model.expert_tensor_parallel_size or self.tp)
        self.sp: bool = bool(model.sequence_parallel) and self.tp > 1
        self.is_moe = bool(model.num_moe_experts)
        self.is_hybrid = bool(model.is_hybrid_model or model.hybrid_override_pattern or model.hybrid_layer_pattern)
        self.has_mtp = bool(model.mtp_num_layers)
        self.rank: int | None = self.peft.rank or self.peft.dim
        routes = (model.moe_token_dispatcher_type, model.moe_flex_dispatcher_backend)
        self.has_ncclep = routes == ("flex", "ncclep")
        modules = model.recompute_modules
        self.recomputed: tuple[str, ...] = ()
        if model.recompute_granularity == "selective" and isinstance(modules, list | tuple):
            self.recomputed = tuple(map(str, modules))
        self.has_peft = "peft" in self.given
        self.is_resumed = self.checkpoint is not None

    def _read_target(self) -> None:
        """Set what is known of the GPUs of the run and their libraries."""
        target = self.target
        self.cuda, self.cudnn, self.capability = target.cuda, target.cudnn, target.capability
        self.has_gpu = target.gpu is not None and target.gpu.is_gpu
        self.is_emulated = self.backend == "emulated" or (
            self.backend is None and target.gpu is not None and not target.gpu.is_gpu
        )
        self.needs_gpu_formats = self.is_low and self.has_gpu and not self.is_emulated

    @property
    def label(self) -> str:
        """The precision in a few words."""
        return self.precision.label if self.precision is not None else f"{self.mode}, without a recipe"

    @property
    def flow(self) -> str:
        """The dtypes of a gradient, from the weight gradient to the master weight."""
        weights = self.mode
        if self.has_megatron_fsdp and at_least(self.mcore, "0.19"):
            main = self.ddp.megatron_fsdp_main_grads_dtype or weights
            sent = self.ddp.megatron_fsdp_grad_comm_dtype or main
        else:
            main = sent = "fp32" if self.ddp.grad_reduce_in_fp32 else weights
        master = self.optimizer.main_params_dtype if self.has_precision_aware else "fp32"
        wgrad = f"{self.scheme} wgrad GEMM" if self.is_low else f"{weights} wgrad GEMM"
        return f"{wgrad} -> accumulated in {main} -> reduced in {sent} -> {master} master weights"


def _write(config: MixedPrecisionConfig, values: Mapping[str, dict[str, Any]], target: Target) -> Sequence[SyncRow]:
    """Write into `values` what a sync would write into the owners, and return its plan."""
    rows = plan(config, [MappingOwner(role, values[role], target.mcore) for role in WRITTEN])
    for row in rows:
        if row.verdict != "absent":
            values[row.owner][row.attribute] = row.new
    return rows


def _precision(given: Any) -> tuple[MixedPrecisionConfig | None, list[Malformed], dict[str, Any]]:
    """Return the config, what is of a wrong type in it, and keys that are no field."""
    if given is None or isinstance(given, MixedPrecisionConfig):
        return given, [], {}
    if isinstance(given, Mapping):
        return read_precision(given)
    return get_mixed_precision_config(given), [], {}
