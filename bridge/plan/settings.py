"""Settings that the plan depends on, as Megatron Core holds them after a precision was written into its configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.errors import RunConfigError
from bridge.model.compressed import COMPRESSED_HYBRID
from bridge.model.layout import sent_between_stages
from bridge.precision.config import settings_of
from bridge.precision.copies import Copies, copies_of, with_backward, with_nvfp4_options
from bridge.precision.factories import shipped_factory
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.matchers import Effect, Matchers, matchers_in, quant_recipes
from bridge.precision.schemes import Scheme, scheme_row
from bridge.rules.variables import concerning, recipe_options
from bridge.sync.prediction import Prediction
from bridge.target.fields import FUSED_RECIPES, gradient_dtypes
from bridge.target.versions import Version, at_least

ATTENTION = ("fp8_dot_product_attention", "fp8_multi_head_attention")
LATE_ATTENTION = {"mxfp8": "0.18", "nvfp4": "0.17"}
"""Scheme -> first megatron-core that hands it FP8 attention."""
HYBRID_FP4 = "0.17"
"""First megatron-core whose hybrid blocks enter the FP4 context."""
OWN_MASTERS = "0.17"
"""First megatron-core whose Megatron-FSDP reads `megatron_fsdp_main_params_dtype`."""
DECOUPLED = "0.18"
"""First megatron-core whose Megatron-FSDP hands the precision-aware optimizer gradients in their own dtype."""
UNITS = "0.20"
"""First megatron-core whose Megatron-FSDP makes a unit of each layer under every strategy that shards."""
ABSORBED = "0.17"
"""First megatron-core whose sparse attention multiplies by the weight of the key-value up projection itself."""

MAPPED_WEIGHTS = "0.17"
"""First megatron-core that maps BF16 weights into their buffer where MXFP8 weights are gathered through the gradients'.

Source: distributed/param_and_grad_buffer.py, where 0.17.0 asks for ``not is_mxfp8tensor(param)`` and 0.16.1 does not.
"""


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
    scheme: str | None = None
    factory: str | None = None
    """Import path of the quantizer factory, under the scheme `custom`."""
    te_options: tuple[tuple[str, object], ...] = ()
    """Keywords of Transformer Engine's recipe classes whose values environment variables of the run change."""
    start: int = 0
    """Layers at the start kept in the mode's dtype."""
    end: int = 0
    attention: bool = False
    multi_head_attention: bool = False
    """FP8 between the attention core and its projections."""
    output_layer: bool = False
    """The output layer runs in MXFP8: of a GPTModel, from megatron-core 0.18 on."""
    reaches_layers: bool = True
    """The model's blocks enter the low-precision context; those of a hybrid model know FP4 from 0.17 on."""
    are_experts_grouped: bool = False
    """The experts of a layer are one layer of Transformer Engine, `GroupedLinear`."""
    absorbs: bool = True
    """Sparse attention multiplies by the weight of the key-value up projection outside of any linear."""
    low_parameters: bool = False
    unused_weight_buffer: bool = False
    """The other weights of an MXFP8 model stay outside the buffer that Megatron allocates for them."""
    grad_reduce: str = "fp32"
    """Dtype that gradients are accumulated in."""
    grad_sent: str = "fp32"
    """Dtype that they are reduced in."""
    reduce_in_fp32: bool = False
    """Gradients are sent in their dtype and summed in FP32 (reduce_scatter_with_fp32_accumulation)."""
    fp32_residual: bool = False
    sent: tuple[str | None, ...] = ()
    """Dtypes of what a pipeline stage can send: with Transformer Engine's layers and with Megatron's own."""
    router: str | None = None
    """Dtype of the router's GEMM where it is not the mode's."""
    distributed: bool = False
    """Masters and optimizer state are sharded over the data-parallel ranks."""
    fsdp: bool = False
    """Megatron-FSDP shards what its strategy says."""
    has_units: bool = True
    """Megatron-FSDP makes a unit of each layer, also where it does not shard the parameters."""
    owns_masters: bool = False
    """Precision-aware optimizer: the fused Adam holds the masters itself."""
    casts_gradients: bool = True
    """The optimizer's step makes FP32 gradients of narrower ones."""
    master: str | None = "fp32"
    """Dtype of the optimizer's copy of the weights; None: it steps on the weights."""
    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"
    remainders: bool = False
    """The masters are kept as the 16 bits that a BF16 weight lacks."""
    is_hybrid_device: bool = False
    """HybridDeviceOptimizer steps (optimizer_cpu_offload): in FP32 alone, on the host or the GPU."""
    offload_share: float = 0.0
    """Share of masters and optimizer state that it keeps on the host."""
    optimizer: str = "adam"
    layer_wise: bool = False
    """Masters and states of whole parameters are dealt out to the data-parallel ranks (dist_muon)."""
    amax_history: int = 0
    """Steps of amax history that delayed scaling keeps, 0 under other schemes."""
    recipes: tuple[Matchers, ...] = field(default=(), compare=False)
    """Per-module recipes: one for all model chunks, or one for each in order of execution."""
    notes: tuple[str, ...] = ()
    """Fields that are set and that this Megatron Core does not have, and what is frozen, as sentences."""

    @property
    def row(self) -> Scheme | None:
        """The scheme's row."""
        return scheme_row(self.scheme, self.family)

    def copies(self, *, is_grouped: bool = False) -> Copies | None:
        """Return the copies of the operands of a linear layer, or of grouped experts; None without FP8 and FP4."""
        copies = self._copies_in_forward(is_grouped=is_grouped)
        if (
            copies is None or self.scheme == "delayed"
        ):  # whose recipe class refuses `backward_override`
            return copies
        override = dict(self.te_options).get("backward_override")
        return with_backward(copies, str(override) if override is not None else None)

    def _copies_in_forward(self, *, is_grouped: bool) -> Copies | None:
        """Return the copies without `backward_override`."""
        factory = shipped_factory(self.factory) if self.scheme == "custom" else None
        if factory is not None:
            return factory.copies(is_grouped=is_grouped)
        if self.row is None:
            return None
        copies = copies_of(self.row, self.format or "")
        return (
            with_nvfp4_options(copies, dict(self.te_options)) if self.scheme == "nvfp4" else copies
        )

    def stored_format(self, *, is_grouped: bool) -> str:
        """Return the format of a weight that is stored in FP8 or FP4; "custom" where its copies have two formats."""
        copies = self._copies_in_forward(is_grouped=is_grouped)
        if copies is None:
            return self.mode
        row, column = copies.weight.row, copies.weight.column
        if row.format != column.format:
            return "custom"
        return row.format or self.mode

    @property
    def in_fp32(self) -> Settings:
        """The settings of modules whose parameters Megatron keeps in FP32: they have no masters."""
        return replace(
            self,
            mode="fp32",
            autocast=None,
            family=None,
            format=None,
            scheme=None,
            grad_reduce="fp32",
            grad_sent="fp32",
            master=None,
            remainders=False,
        )

    def row_of(self, scheme: str) -> Scheme | None:
        """Return the row of a module's scheme, by its name."""
        return self.row if scheme == self.scheme else scheme_row(scheme)

    def enters(self, index: int, num_layers: int) -> bool:
        """Return whether a layer enters the low-precision context, by its number from 0."""
        return (
            self.family is not None
            and self.reaches_layers
            and self.start <= index < num_layers - self.end
        )

    def of_module(self, effect: Effect | None, *, low: bool) -> tuple[Settings, bool]:
        """Return the settings of a module, and whether it runs in FP8 or FP4, under a per-module recipe."""
        if effect is None or not effect.acts(is_low=low):
            return self, low
        if effect.family is None:
            return self, False
        of_module: dict[str, Any] = {
            "family": effect.family,
            "format": effect.format,
            "scheme": effect.scheme,
        }
        return replace(self, **of_module, factory=effect.factory), True

    @classmethod
    def of(cls, run: Prediction) -> Settings:
        """Return the settings of a run after the sync, as its version of Megatron Core reads them."""
        model, optimizer, ddp, mcore = (
            run.read("model"),
            run.read("optimizer"),
            run.read("ddp"),
            run.target.mcore,
        )
        mode = [*(name for name in ("bf16", "fp16") if model[name]), "fp32"][0]
        family = [*(name for name in ("fp8", "fp4") if model[name]), None][0]
        scheme = str(model[f"{family}_recipe"]) if family is not None else None
        reads = _read_by(scheme_row(scheme, family), mcore)
        keeps = family is not None and model["first_last_layers_bf16"]
        start, end = (model[name] or 0 if keeps else 0 for name in LAYER_COUNTS)
        recipe, is_hybrid = model["quant_recipe"], run.shape_and_faults[0].is_hybrid
        if isinstance(recipe, str) and recipe:
            rule, remedy = (
                "is the content of a file of configs and matchers, not its path",
                "Write the content.",
            )
            raise RunConfigError.of("model.quant_recipe", rule, recipe, remedy)
        return cls(
            mode=mode,
            autocast=(model["autocast_dtype"] or mode) if model["enable_autocast"] else None,
            family=family,
            format=str(model[family]) if family is not None else None,
            scheme=scheme,
            factory=model[f"{family}_quantizer_factory"] if scheme == "custom" else None,
            te_options=recipe_options(run.environment),
            are_experts_grouped=bool(model["moe_grouped_gemm"]),
            start=start,
            end=end,
            attention="fp8_dot_product_attention" in reads
            and bool(model["fp8_dot_product_attention"]),
            multi_head_attention="fp8_multi_head_attention" in reads
            and bool(model["fp8_multi_head_attention"]),
            output_layer=scheme == "mxfp8" and bool(model["fp8_output_proj"]) and not is_hybrid,
            reaches_layers=not is_hybrid
            or family != "fp4"
            or at_least(mcore, HYBRID_FP4) is not False,
            low_parameters=family is not None and bool(model[f"{family}_param"]),
            absorbs=at_least(mcore, ABSORBED) is not False,
            fp32_residual=bool(model["fp32_residual_connection"]),
            sent=tuple(
                dict.fromkeys(
                    sent_between_stages(model, mcore, is_local=local) for local in (False, True)
                )
            ),
            router=model["moe_router_dtype"],
            amax_history=(model["fp8_amax_history_len"] or 0) if scheme == "delayed" else 0,
            recipes=quant_recipes(recipe),
            notes=(*_notes(run), *_factory_notes(run, scheme, mode), *_variable_notes(run, scheme)),
            **_gradients(ddp, mode, mcore),
            **_sharding(
                optimizer,
                ddp,
                is_mapped=scheme != "mxfp8" or at_least(mcore, MAPPED_WEIGHTS) is not False,
            ),
            **{**_states(optimizer, mode), **_fsdp(optimizer, ddp, mcore)},
        )


def _read_by(row: Scheme | None, mcore: Version | None) -> tuple[str, ...]:
    if row is None:
        return ()
    late = LATE_ATTENTION.get(row.name)
    is_early = late is not None and at_least(mcore, late) is False
    return tuple(name for name in settings_of(row) if not (is_early and name in ATTENTION))


def _gradients(ddp: Mapping[str, Any], mode: str, mcore: Version | None) -> dict[str, Any]:
    accumulated, reduced = gradient_dtypes(ddp, mode, mcore)
    in_fp32 = bool(ddp["reduce_scatter_with_fp32_accumulation"])
    return {"grad_reduce": accumulated, "grad_sent": reduced, "reduce_in_fp32": in_fp32}


def _sharding(
    optimizer: Mapping[str, Any], ddp: Mapping[str, Any], *, is_mapped: bool
) -> dict[str, Any]:
    """Return the settings about what is sharded; `is_mapped`: every weight lies in Megatron's buffer."""
    fsdp = bool(ddp["use_megatron_fsdp"])
    return {
        "distributed": fsdp
        or bool(optimizer["use_distributed_optimizer"] or ddp["use_distributed_optimizer"]),
        "unused_weight_buffer": not is_mapped
        and not fsdp
        and bool(ddp["reuse_grad_buf_for_mxfp8_param_ag"]),
    }


def _fsdp(
    optimizer: Mapping[str, Any], ddp: Mapping[str, Any], mcore: Version | None
) -> dict[str, Any]:
    """Return the settings of Megatron-FSDP, which keeps masters of its own: of FP32 weights too."""
    if not ddp["use_megatron_fsdp"]:
        return {}
    if at_least(mcore, OWN_MASTERS) is False:
        master = "fp32" if ddp["preserve_fp32_weights"] else None
    else:
        master = ddp["megatron_fsdp_main_params_dtype"]
    is_decoupled = (
        optimizer["use_precision_aware_optimizer"] and at_least(mcore, DECOUPLED) is not False
    )
    return {
        "fsdp": True,
        "has_units": at_least(mcore, UNITS) is not False,
        "master": master,
        "remainders": False,
        "offload_share": 0.0,
        "casts_gradients": not is_decoupled,
    }


def _states(optimizer: Mapping[str, Any], mode: str) -> dict[str, Any]:
    pao, is_hybrid = (
        bool(optimizer["use_precision_aware_optimizer"]),
        bool(optimizer["optimizer_cpu_offload"]),
    )
    master = _stored(optimizer["main_params_dtype"])
    owns = pao and (master != "fp32" or optimizer["fp8_recipe"] in FUSED_RECIPES or is_hybrid)
    has_own_dtypes = pao and not is_hybrid
    kept = master if owns and has_own_dtypes else "fp32"
    return {
        "optimizer": str(optimizer["optimizer"]),
        "is_hybrid_device": is_hybrid,
        "offload_share": min(1.0, float(optimizer["optimizer_offload_fraction"] or 0))
        if is_hybrid
        else 0.0,
        "layer_wise": bool(optimizer.get("use_layer_wise_distributed_optimizer"))
        or str(optimizer["optimizer"]).startswith("dist_"),
        "owns_masters": owns,
        "casts_gradients": not owns,
        "master": None if mode == "fp32" else kept,
        "exp_avg": _stored(optimizer["exp_avg_dtype"]) if has_own_dtypes else "fp32",
        "exp_avg_sq": _stored(optimizer["exp_avg_sq_dtype"]) if has_own_dtypes else "fp32",
        "remainders": owns
        and has_own_dtypes
        and bool(optimizer["store_param_remainders"])
        and mode == "bf16"
        and master == "fp32",
    }


def _stored(dtype: str) -> str:
    """Return the dtype of an optimizer's state; bytes are FP8 there."""
    return "fp8" if dtype == "uint8" else dtype


def _notes(run: Prediction) -> tuple[str, ...]:
    notes = [
        f"{role}.{name} has no effect: megatron-core {run.target.mcore} has no such field ({versions})."
        for role in ("model", "optimizer", "ddp")
        for name, versions in run.absent[role].items()
    ]
    model = run.values["model"]
    if model["keep_mtp_spec_in_bf16"] and (model["fp8"] or model["fp4"]):
        notes.append(
            "model.keep_mtp_spec_in_bf16 has no effect: neither Megatron Bridge nor Megatron Core reads it."
        )
    if model["experimental_attention_variant"] == COMPRESSED_HYBRID:
        notes.append(
            f"model.experimental_attention_variant={COMPRESSED_HYBRID} is in Megatron-LM's development branch alone "
            "(dev of 2026-08-21): no release of Megatron Core builds this model."
        )
    if model["freeze_language_model"]:
        notes.append(
            "The language model is frozen (model.freeze_language_model): none of its weights is trained."
        )
    return tuple(notes)


def _factory_notes(run: Prediction, scheme: str | None, mode: str) -> list[str]:
    """Return a sentence on each quantizer factory, of the run and of single modules, that the plan cannot follow."""
    model = run.values["model"]
    factories = []
    if scheme == "custom":
        factories = [
            model[f"{family}_quantizer_factory"] for family in ("fp8", "fp4") if model[family]
        ]
    for matcher in matchers_in(model["quant_recipe"]):
        factories += [effect.factory for effect in matcher.effects]
    notes = []
    for path in dict.fromkeys(factory for factory in factories if factory):
        shipped = shipped_factory(path)
        if shipped is None:
            notes.append(
                f"{path} is code that is not read: which quantizers it makes cannot be known, so its GEMMs are custom."
            )
        elif shipped.quantises_attention:
            notes.append(
                f"{shipped.name} quantises no attention: Megatron makes its CustomRecipe without fp8_dpa, so attention "
                f"stays in {mode}."
            )
    return notes


def _variable_notes(run: Prediction, scheme: str | None) -> list[str]:
    """Return a sentence on each environment variable of the run that changes its scheme."""
    if scheme is None:
        return []
    notes = []
    for row, text in concerning(scheme, run.environment, attention=False):
        if row.keyword and row.is_active(text) and scheme not in row.refused_by:
            notes.append(f"{row.name}={text}: it {row.effect}.")
    return notes
