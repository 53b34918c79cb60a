"""Settings that the plan depends on, as Megatron Core holds them after a precision was written into its configs.

The rules are the synchroniser's: the mode switches come from the precision alone; a stated field wins; an unstated one
keeps what the model's config says itself, and else reads as the precision's default. Without a precision the model's
and the optimizer's own values count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.plan.shape import read_field, whole_number
from bridge.precision.dtypes import dtype_token
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES

if TYPE_CHECKING:
    from bridge.precision.config import PrecisionConfig
    from bridge.precision.schemes import Scheme

__all__ = ["Settings"]

MEGATRON_DEFAULTS: dict[str, Any] = {
    "fp8_recipe": "delayed",
    "fp4_recipe": "nvfp4",
    "first_last_layers_bf16": False,
    "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1,
    "fp8_dot_product_attention": False,
    "fp8_multi_head_attention": False,
    "fp8_wgrad": True,
    "fp8_amax_history_len": 1,
    "fp8_param": False,
    "fp4_param": False,
    "grad_reduce_in_fp32": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
}
"""Field -> the default of Megatron Core's class that holds it."""
SECOND_HOMES = {
    "fp8_recipe": ("optimizer", "fp8_recipe"),
    "fp8_param": ("ddp", "fp8_param_gather"),
    "fp4_param": ("ddp", "fp4_param_gather"),
    "reuse_grad_buf_for_mxfp8_param_ag": ("optimizer", "reuse_grad_buf_for_mxfp8_param_ag"),
}
"""Field -> the other owner of the setting and its name there: what one was given and no recipe states holds in both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Every setting that decides in which format something is computed, kept or sent."""

    mode: str
    """fp32, fp16 or bf16: the dtype of weights and activations."""
    autocast: str | None = None
    """Dtype that torch.autocast casts matrix multiplications to, None without it."""
    family: str | None = None
    """fp8 or fp4 where one is on."""
    format: str | None = None
    """The value of `fp8` or `fp4`."""
    scheme: str | None = None
    start: int = 0
    """Layers at the start kept in the mode's dtype."""
    end: int = 0
    attention: bool = False
    """The attention core runs in FP8."""
    multi_head_attention: bool = False
    """FP8 between the attention core and its projections."""
    output_layer: bool = False
    """The output layer runs in MXFP8 (megatron-core 0.18)."""
    low_parameters: bool = False
    """Weights are stored in the scheme's format."""
    reuses_gradients: bool = False
    """MXFP8 weights are gathered through the gradient buffer."""
    grad_reduce: str = "fp32"
    reduce_in_fp32: bool = False
    """Gradients are sent in their dtype and summed in FP32 (reduce_scatter_with_fp32_accumulation)."""
    fp32_residual: bool = False
    router: str | None = None
    """Dtype of the router's GEMM where it is not the mode's."""
    distributed: bool = False
    """Masters and optimizer state are sharded over the data-parallel ranks."""
    owns_masters: bool = False
    """Precision-aware optimizer: the fused Adam holds the masters itself."""
    master: str | None = "fp32"
    """Dtype of the optimizer's copy of the weights; None: it steps on the weights."""
    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"
    remainders: bool = False
    """The masters are kept as the 16 bits that a BF16 weight lacks."""
    offloaded: bool = False
    """Masters and optimizer state, or a part of them, are on the host (optimizer_cpu_offload)."""
    optimizer: str = "adam"
    amax_history: int = 0
    """Steps of amax history that delayed scaling keeps, 0 under other schemes."""
    notes: tuple[str, ...] = ()
    """Settings that were asked for and have no effect, as sentences."""

    @property
    def row(self) -> Scheme | None:
        """The scheme's row."""
        table = FP8_SCHEMES if self.family == "fp8" else FP4_SCHEMES
        return table.get(self.scheme or "")

    @classmethod
    def of(cls, precision: PrecisionConfig | None, model: Any, optimizer: Any = None, ddp: Any = None) -> Settings:
        """Return the settings of a precision written into these configs; mappings or objects, None for the defaults."""
        read = _Effective(precision, model, optimizer or {}, ddp or {})
        family, low_format, scheme = read.low_precision()
        start, end = read.counts(family)
        fsdp = bool(read_field(ddp or {}, "use_megatron_fsdp", default=False))  # which has no buffer to reuse
        reuses = scheme == "mxfp8" and not fsdp and bool(read.value("reuse_grad_buf_for_mxfp8_param_ag"))
        notes = read.inert(family, scheme, start + end)
        table = FP8_SCHEMES if family == "fp8" else FP4_SCHEMES
        settings = table[scheme].settings if scheme in table else ()
        pao = bool(read_field(optimizer or {}, "use_precision_aware_optimizer", default=False))
        master = _dtype(read_field(optimizer or {}, "main_params_dtype", "fp32"))
        recipe = scheme if family == "fp8" else None
        offload = bool(read_field(optimizer or {}, "optimizer_cpu_offload", default=False))
        owns = pao and (master != "fp32" or recipe in (None, "delayed") or offload)
        remainders = bool(read_field(optimizer or {}, "store_param_remainders", default=True))
        mode = read.mode()
        router = read_field(model, "moe_router_dtype")
        return cls(
            mode=mode,
            autocast=read.autocast(),
            family=family,
            format=low_format,
            scheme=scheme,
            start=start,
            end=end,
            attention="fp8_dot_product_attention" in settings and bool(read.value("fp8_dot_product_attention")),
            multi_head_attention="fp8_multi_head_attention" in settings
            and bool(read.value("fp8_multi_head_attention")),
            output_layer=scheme == "mxfp8" and bool(read_field(model, "fp8_output_proj", default=False)),
            low_parameters=family is not None and bool(read.value(f"{family}_param")),
            reuses_gradients=reuses,
            grad_reduce="fp32" if read.value("grad_reduce_in_fp32") else mode,
            reduce_in_fp32=bool(read_field(ddp or {}, "reduce_scatter_with_fp32_accumulation", default=False)),
            fp32_residual=bool(read_field(model, "fp32_residual_connection", default=False)),
            router=_dtype(router) if router is not None else None,
            offloaded=offload,
            distributed=read.is_distributed(),
            owns_masters=owns,
            master=None if mode == "fp32" else master if owns else "fp32",
            exp_avg=_dtype(read_field(optimizer or {}, "exp_avg_dtype", "fp32")) if pao else "fp32",
            exp_avg_sq=_dtype(read_field(optimizer or {}, "exp_avg_sq_dtype", "fp32")) if pao else "fp32",
            remainders=owns and remainders and mode == "bf16" and master == "fp32",
            optimizer=str(read_field(optimizer or {}, "optimizer", "adam")),
            amax_history=(whole_number(read.value("fp8_amax_history_len")) or 0) if scheme == "delayed" else 0,
            notes=notes,
        )


class _Effective:
    """Reads one field from where it is decided."""

    def __init__(self, precision: PrecisionConfig | None, model: Any, optimizer: Any, ddp: Any) -> None:
        self.precision = precision
        self.model, self.optimizer, self.ddp = model, optimizer, ddp

    def owned(self, name: str) -> Any:
        """Return the owner's value, or Megatron's default."""
        in_ddp = name in ("grad_reduce_in_fp32", "reuse_grad_buf_for_mxfp8_param_ag")
        default = MEGATRON_DEFAULTS.get(name)
        value = read_field(self.ddp if in_ddp else self.model, name, default)
        if self.precision is not None and name in SECOND_HOMES and value == default:
            role, attribute = SECOND_HOMES[name]
            value = read_field({"optimizer": self.optimizer, "ddp": self.ddp}[role], attribute, default)
        return getattr(value, "value", value)

    def value(self, name: str) -> Any:
        """Return what a field will be after the precision was written into its owner."""
        own = self.owned(name)
        if self.precision is None:
            return own
        if self.precision.is_stated(name):
            return getattr(self.precision, name)
        if name in LAYER_COUNTS or own != MEGATRON_DEFAULTS[name]:
            return own
        return getattr(self.precision, name)

    def mode(self) -> str:
        if self.precision is not None:
            return self.precision.mode
        is_on = {name: bool(read_field(self.model, name, default=False)) for name in ("bf16", "fp16")}
        return next((name for name, on in is_on.items() if on), "fp32")

    def autocast(self) -> str | None:
        on = read_field(self.model, "enable_autocast", default=False)
        stated = read_field(self.model, "autocast_dtype")
        if self.precision is not None:
            values = self.precision.to_dict(full=True)
            on = values["autocast_enabled"] if self.precision.is_stated("autocast_enabled") else on
            stated = values["autocast_dtype"] or values["params_dtype"] or stated
        return _dtype(stated if stated is not None else self.mode()) if on else None

    def low_precision(self) -> tuple[str | None, str | None, str | None]:
        """Return the family, its format and the scheme; three times None without one."""
        holder = self.precision if self.precision is not None else self.model
        for family in ("fp8", "fp4"):
            given = read_field(holder, family)
            if given:
                return family, str(given), str(self.value(f"{family}_recipe"))
        return None, None, None

    def counts(self, family: str | None) -> tuple[int, int]:
        """Return how many layers stay in the mode's dtype at the start and at the end."""
        if family is None or not self.value("first_last_layers_bf16"):
            return 0, 0
        start, end = (whole_number(self.value(name)) or 0 for name in LAYER_COUNTS)
        stated = self.precision is not None and any(self.precision.is_stated(name) for name in LAYER_COUNTS)
        return (start, end) if start or end or stated or self.precision is None else (1, 1)

    def is_distributed(self) -> bool:
        """Return whether the optimizer is sharded: on in one of optimizer and DDP, it is turned on in both."""
        owners = (self.optimizer, self.ddp)
        fsdp = read_field(self.ddp, "use_megatron_fsdp", default=False)
        return bool(fsdp) or any(read_field(owner, "use_distributed_optimizer", default=False) for owner in owners)

    def inert(self, family: str | None, scheme: str | None, kept: int) -> tuple[str, ...]:
        """Return one sentence per setting that is on and does nothing here."""
        notes = []
        if family == "fp8" and self.value("fp8_wgrad") is False:
            notes.append("fp8_wgrad=False has no effect: Transformer Engine 2.0 and later run the GEMM in FP8 anyway.")
        if scheme == "delayed" and kept:
            notes.append("first_last_layers_bf16 is refused by Megatron under delayed scaling.")
        for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
            table = FP8_SCHEMES if family == "fp8" else FP4_SCHEMES
            if family is not None and self.value(name) and scheme in table and name not in table[scheme].settings:
                notes.append(f"{name}=True has no effect under {scheme} scaling.")
        return tuple(notes)


def _dtype(value: Any) -> str:
    """Return the token of a dtype as it is spelt in configs, "fp8" for bytes, and what is no dtype as it is."""
    if str(value).removeprefix("torch.") in ("fp8", "uint8"):
        return "fp8"
    try:
        return dtype_token(value)
    except ValueError:  # to be found by a check, not to stop a plan
        return str(value)
