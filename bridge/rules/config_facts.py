"""`ConfigFacts`: the facts that rules read of a precision, its configs and the target.

    facts.model.fp8, facts.scheme, facts.has_precision_aware_optimizer, facts.target.mcore

A value that no config states is Megatron's class default. The value is None if Megatron has no
default (`seq_length`) or the target does not state a version. A rule that needs this value reports
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from bridge.model.read_tracking import AttributeView
from bridge.precision.mode import get_mode
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES, Scheme
from bridge.precision.statements import get_stated_values, get_switches_put_aside
from bridge.rules.inert_fields import GRAD_BUFFER_REUSE
from bridge.target.target import Target

if TYPE_CHECKING:
    from bridge.precision.precision_config import PrecisionConfig
    from bridge.rules.owner_values import (
        DataValues,
        DdpValues,
        ModelValues,
        OptimizerValues,
        PeftValues,
        TrainValues,
    )


class ConfigFacts:
    """The facts that rules read of a precision, its configs and the target.

    Args:
        precision: The precision. None: the configs keep their settings.
        views: Owner name -> the values of that config after the sync, as attributes. Dtypes are
            tokens. A view has only the known fields, so that a rule that reads another attribute
            fails at once.
        present: Names of the configs that the run has.
        scheme: The scaling scheme of the run, if it is known already.
        target: The GPUs and versions of the run.
        backend: The code that runs low-precision GEMMs: te, emulated or te_cpu. None: Transformer
            Engine if the target has a GPU.
        environment: Environment variables of the run. None: they are not known.
    """

    def __init__(
        self,
        precision: PrecisionConfig | None,
        *,
        views: Mapping[str, AttributeView],
        present: frozenset[str],
        scheme: str | None,
        target: Target | None,
        backend: str | None,
        environment: Mapping[str, str] | None,
    ) -> None:
        self.precision = precision
        self.stated: Mapping[str, Any] = {}
        self.put_aside: Mapping[str, str] = {}
        if precision is not None:
            self.stated = get_stated_values(precision)
            self.put_aside = get_switches_put_aside(precision)
        self.views = views
        self.present = present
        self.target = target or Target()
        self.backend = backend
        self.environment: Mapping[str, str] = environment or {}
        self.has_environment = environment is not None
        self._scheme = scheme

    # -- the owners' values ----------------------------------------------------------------------

    @property
    def model(self) -> ModelValues:
        """Values of the model config."""
        return cast("ModelValues", self.views["model"])

    @property
    def optimizer(self) -> OptimizerValues:
        """Values of the optimizer config."""
        return cast("OptimizerValues", self.views["optimizer"])

    @property
    def ddp(self) -> DdpValues:
        """Values of the DDP config."""
        return cast("DdpValues", self.views["ddp"])

    @property
    def train(self) -> TrainValues:
        """Values of the training section."""
        return cast("TrainValues", self.views["train"])

    @property
    def data(self) -> DataValues:
        """Values of the data section."""
        return cast("DataValues", self.views["data"])

    @property
    def peft(self) -> PeftValues:
        """Values of the adapter's section."""
        return cast("PeftValues", self.views["peft"])

    # -- the mode, the format and the scheme ----------------------------------------------------

    @property
    def added_schemes(self) -> Sequence[str]:
        """The scaling schemes that the framework of the run adds to Megatron Core's."""
        return ()

    @property
    def mode(self) -> str:
        """The mode: bf16, fp16 or fp32."""
        if self.precision is not None:
            return get_mode(self.precision)
        if self.model.bf16 is True:
            return "bf16"
        if self.model.fp16 is True:
            return "fp16"
        return "fp32"

    @property
    def is_bf16(self) -> bool:
        """Whether the mode is BF16."""
        return self.mode == "bf16"

    @property
    def is_fp16(self) -> bool:
        """Whether the mode is FP16."""
        return self.mode == "fp16"

    @property
    def is_fp32(self) -> bool:
        """Whether the mode is FP32."""
        return self.mode == "fp32"

    @property
    def is_half_precision(self) -> bool:
        """Whether the mode is BF16 or FP16."""
        return not self.is_fp32

    @property
    def fp8(self) -> str | None:
        """The FP8 format. None: FP8 is off."""
        return self.model.fp8 or None

    @property
    def fp4(self) -> str | None:
        """The FP4 format. None: FP4 is off."""
        return self.model.fp4 or None

    @property
    def is_fp8(self) -> bool:
        """Whether FP8 is on."""
        return self.fp8 is not None

    @property
    def is_fp4(self) -> bool:
        """Whether FP4 is on."""
        return self.fp4 is not None

    @property
    def is_low_precision(self) -> bool:
        """Whether GEMMs run in FP8 or FP4."""
        return self.is_fp8 or self.is_fp4

    def get_format(self, family: str) -> str | None:
        """Return the format of a family, fp8 or fp4, or None if the family is off."""
        if family == "fp8":
            return self.fp8
        return self.fp4

    @property
    def scheme(self) -> str | None:
        """The scaling scheme. None: FP8 and FP4 are off."""
        if self._scheme:
            return self._scheme
        if self.is_fp8:
            return self.model.fp8_recipe
        if self.is_fp4:
            return self.model.fp4_recipe
        return None

    @property
    def is_delayed(self) -> bool:
        """Whether the scheme is delayed scaling."""
        return self.scheme == "delayed"

    @property
    def is_tensorwise(self) -> bool:
        """Whether the scheme is current scaling."""
        return self.scheme == "tensorwise"

    @property
    def is_blockwise(self) -> bool:
        """Whether the scheme is blockwise scaling."""
        return self.scheme == "blockwise"

    @property
    def is_mxfp8(self) -> bool:
        """Whether the scheme is MXFP8."""
        return self.scheme == "mxfp8"

    @property
    def is_nvfp4(self) -> bool:
        """Whether the scheme is NVFP4."""
        return self.scheme == "nvfp4"

    @property
    def is_custom(self) -> bool:
        """Whether a factory of the user makes the scheme."""
        return self.scheme == "custom"

    @property
    def scheme_row(self) -> Scheme | None:
        """The row of the scheme in the table of schemes."""
        if self.is_fp8:
            return FP8_SCHEMES.get(self.scheme or "")
        return FP4_SCHEMES.get(self.scheme or "")

    @property
    def gathers_fp8(self) -> bool:
        """Whether weights are stored and gathered in FP8."""
        return bool(self.model.fp8_param or self.ddp.fp8_param_gather)

    @property
    def gathers_fp4(self) -> bool:
        """Whether weights are stored and gathered in FP4."""
        return bool(self.model.fp4_param or self.ddp.fp4_param_gather)

    def gathers_family(self, family: str) -> bool:
        """Return whether weights are stored and gathered in a family, fp8 or fp4."""
        if family == "fp8":
            return self.gathers_fp8
        return self.gathers_fp4

    @property
    def reuses_buffer(self) -> bool:
        """Whether MXFP8 weights are gathered through the gradient buffer."""
        return bool(
            getattr(self.ddp, GRAD_BUFFER_REUSE) or getattr(self.optimizer, GRAD_BUFFER_REUSE)
        )

    @property
    def has_dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is dynamic."""
        return self.is_fp16 and not self.optimizer.loss_scale

    # -- the parts of the run --------------------------------------------------------------------

    @property
    def has_model(self) -> bool:
        """Whether there is a model config."""
        return "model" in self.present

    @property
    def has_optimizer(self) -> bool:
        """Whether there is an optimizer config."""
        return "optimizer" in self.present

    @property
    def has_ddp(self) -> bool:
        """Whether there is a DDP config."""
        return "ddp" in self.present

    @property
    def has_owners(self) -> bool:
        """Whether there is an owner of the precision."""
        return self.has_model or self.has_optimizer or self.has_ddp

    @property
    def has_peft(self) -> bool:
        """Whether the run trains adapters."""
        return "peft" in self.present

    @property
    def has_precision_aware_optimizer(self) -> bool:
        """Whether the precision-aware optimizer runs."""
        return bool(self.optimizer.use_precision_aware_optimizer)

    @property
    def has_megatron_fsdp(self) -> bool:
        """Whether Megatron-FSDP runs."""
        return bool(self.ddp.use_megatron_fsdp or self.ddp.use_custom_fsdp)

    @property
    def has_fsdp(self) -> bool:
        """Whether a kind of fully sharded data parallelism runs."""
        return self.has_megatron_fsdp or bool(self.ddp.use_torch_fsdp2)

    @property
    def has_emerging_optimizer(self) -> bool:
        """Whether the optimizer is neither Adam nor SGD."""
        return self.has_optimizer and self.optimizer.optimizer not in ("adam", "sgd")

    @property
    def is_sharded(self) -> bool:
        """Whether the distributed optimizer runs."""
        return bool(self.optimizer.use_distributed_optimizer or self.ddp.use_distributed_optimizer)

    @property
    def has_ncclep(self) -> bool:
        """Whether kernels of NCCL dispatch tokens to experts."""
        is_flexible = self.model.moe_token_dispatcher_type == "flex"  # noqa: S105  it is no password
        return is_flexible and self.model.moe_flex_dispatcher_backend == "ncclep"

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """The modules that selective recomputation runs again."""
        modules = self.model.recompute_modules
        if self.model.recompute_granularity == "selective" and isinstance(modules, list | tuple):
            return tuple(map(str, modules))
        return ()

    # -- the target ------------------------------------------------------------------------------

    @property
    def has_gpu(self) -> bool:
        """Whether the target is a GPU."""
        return self.target.gpu is not None and self.target.gpu.is_gpu

    @property
    def is_emulated(self) -> bool:
        """Whether FP8 and FP4 GEMMs are emulated."""
        is_cpu = self.target.gpu is not None and not self.target.gpu.is_gpu
        return self.backend in ("emulated", "te_cpu") or (self.backend is None and is_cpu)

    @property
    def calls_te(self) -> bool:
        """Whether Transformer Engine's Python code runs, on a GPU or on a CPU."""
        return self.backend == "te_cpu" or not self.is_emulated

    @property
    def needs_gpu_formats(self) -> bool:
        """Whether the GPU has to run FP8 or FP4 GEMMs."""
        return self.is_low_precision and self.has_gpu and not self.is_emulated
