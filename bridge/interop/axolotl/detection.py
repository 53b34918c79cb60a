"""Axolotl's own decisions, replayed for a stated GPU: what `bf16: auto` becomes, and what is refused.

The order is Axolotl's: capabilities of the GPU (cli/config.py), the schema's validators (utils/schemas), then
`resolve_dtype` (utils/config) and what its builder hands to transformers (core/builders/base.py).
Source: Axolotl 0.19.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.interop.settings import Settings

__all__ = ["RECIPES", "Detected", "capabilities", "detect", "refuse"]

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@dataclass(frozen=True, kw_only=True)
class Detected:
    """The dtypes that Axolotl detects."""

    bf16: bool
    fp16: bool
    """`TrainingArguments.fp16`: autocast to FP16 under a loss scale."""
    load_dtype: str
    """Dtype the weights are loaded in: bf16, fp16 or fp32."""
    tf32: bool | None
    """None: the GPU decides, and none was stated."""
    guessed: tuple[str, ...] = ()
    """Settings whose "auto" was decided without a stated GPU."""


def capabilities(compute_capability: tuple[int, int] | None) -> dict[str, bool]:
    """Return what Axolotl takes a GPU of this compute capability for (None: no GPU).

    BF16 counts as supported on every CUDA card: torch.cuda.is_bf16_supported includes emulation by default.
    """
    if compute_capability is None:
        return {"bf16": False, "fp8": False, "tf32": False}
    return {"bf16": True, "fp8": compute_capability >= (9, 0), "tf32": compute_capability >= (8, 0)}


def detect(settings: Settings, gpu: dict[str, bool] | None) -> Detected:
    """Return Axolotl's decision; without a stated GPU, "auto" is taken for one from Ampere on."""
    guessed = []
    fp16, float16, bfloat16 = (settings.switch(name) for name in ("fp16", "float16", "bfloat16"))
    bf16_auto = "bf16" not in settings or settings["bf16"] == "auto"
    bf16 = None if bf16_auto else settings.switch("bf16")
    if bf16_auto and not fp16:
        bf16 = gpu["bf16"] if gpu else True
        if gpu is None:
            guessed.append("bf16")
        if not bf16 and fp16 is None and not float16:
            fp16 = True
    if bf16:
        fp16 = False
    tf32_auto = "tf32" not in settings or settings["tf32"] == "auto"
    tf32: bool | None = bool(settings.switch("tf32")) if not tf32_auto else gpu["tf32"] if gpu else None
    load = "bf16" if bf16 or bfloat16 else "fp16" if settings.switch("load_in_8bit") or fp16 or float16 else "fp32"
    half = bool(bf16 or bfloat16)
    return Detected(bf16=half, fp16=bool(fp16) and not half, load_dtype=load, tf32=tf32, guessed=tuple(guessed))


def refuse(settings: Settings, gpu: dict[str, bool] | None, gpu_name: object) -> None:
    """Raise PayloadError for what Axolotl's schema refuses to start with."""
    if settings.values.get("bf16") == "full":
        remedy = (
            "Up to 0.4.0, which had no schema, it meant BF16 weights without autocast and evaluation in BF16; "
            "bf16: true is the nearest today and adds autocast"
        )
        rule = "is in Axolotl's documentation, and its schema refuses it (0.18 and 0.19)"
        raise settings.wrong("bf16", rule, "full", remedy)
    if settings.values.get("deepspeed") and settings.values.get("fsdp"):
        raise settings.wrong("fsdp", "must not stand together with deepspeed", settings["fsdp"], "Keep one of the two")
    fp8 = bool(settings.switch("fp8"))
    config = settings.section("fp8_config")
    recipe = config.word("recipe", RECIPES) or RECIPES[0]
    unknown = [key for key in config.values if key != "recipe"]
    if unknown:
        raise settings.wrong("fp8_config", "has `recipe` and nothing else", unknown[0], "Drop the other key")
    if settings.given("fp8_config") and not fp8:
        raise settings.wrong("fp8_config", "needs fp8: true", config.values, "Set fp8: true, or drop it")
    gather = settings.switch("fp8_enable_fsdp_float8_all_gather")
    if gather and recipe != RECIPES[0]:
        rule = "works with the tensorwise recipe only"
        raise settings.wrong("fp8_enable_fsdp_float8_all_gather", rule, True, f"Drop it, or {recipe}")
    if gather and not (type(settings.values.get("fsdp_version")) is int and settings["fsdp_version"] == 2):
        rule = "needs fsdp_version: 2 as a number at the top of the file"
        rule = f"{rule} (which says {settings.values.get('fsdp_version')!r:.20})"
        raise settings.wrong("fp8_enable_fsdp_float8_all_gather", rule, True, "Add it")
    if fp8 and gpu is not None and not gpu["fp8"]:
        rule = f"needs compute capability 9.0 or later in Axolotl, and gpu={gpu_name!r:.20} has less"
        raise settings.wrong("fp8", rule, True, "Use bf16, or another trainer on Ada (8.9)")
    if settings.switch("fp32_norms"):
        if not settings.given("fsdp_config"):
            raise settings.wrong("fp32_norms", "needs an fsdp_config block", True, "Add one, or drop it")
        inner = settings.section("fsdp_config").values
        version = settings.values.get("fsdp_version") or inner.get("version") or inner.get("fsdp_version")
        if str(version) != "2":
            raise settings.wrong("fp32_norms", "needs fsdp_version: 2", True, "Use FSDP2, or drop it")
