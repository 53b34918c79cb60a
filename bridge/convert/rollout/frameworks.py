"""The rollout of a run, from the options of its engine that the run's file states.

Each framework has a function: its own code decides which options reach the engine, and which config it hands over.
Sources stand in `rows/rollout.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bridge.convert.rollout.engine import FP32, MODEL_DTYPE, POWERS_OF_TWO, ROWS, Rollout, Scales
from bridge.convert.serving.formats import SGLANG, VLLM
from bridge.errors import RunConfigError
from bridge.preflight.run import Run

FRAMEWORKS: Mapping[str, Mapping[str, Any]] = ROWS["frameworks"]
DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}
BY_GPU = "the GPU and the release of {engine}: DeepGEMM on Blackwell asks for powers of two"
OTHER_ENGINE = "the engine {engine}, whose use of {framework}'s options is not read"
HANDED_OVER = "{option}, which is handed to the engine over the options that are read"
BY_CHECKPOINT = (
    "{checkpoint}: its config.json has a quantization_config or none (--rollout config.json)"
)
GENERATION = "policy.generation."
ROLLOUT = "actor_rollout_ref.rollout."


def rollout_of(run: Run) -> Rollout:
    """Return the rollout of a run of reinforcement learning.

    Raises:
        RunConfigError: Its file states no engine.
    """
    framework = run.reading.framework
    options = run.reading.generation
    if framework not in FRAMEWORKS or not options:
        rule = "is no run of NeMo-RL, verl, slime or miles that states its rollout"
        remedy = "Give the serving config: --rollout config.json."
        raise RunConfigError.of("--rollout", rule, run.name, remedy)
    return _READERS[framework](run, options)


def _nemo_rl(run: Run, options: Mapping[str, Any]) -> Rollout:
    engine = str(options.get(f"{GENERATION}backend", ""))
    if engine != VLLM:
        return _unread(run, engine or "that policy.generation.backend names")

    def stated(name: str, default: object = None) -> Any:
        value = options.get(f"{GENERATION}vllm_cfg.{name}", default)
        return default if value is None else value

    precision = stated("precision")
    table = FRAMEWORKS["NeMo-RL"]["quantised"]
    # Without precision=fp8 a checkpoint in FP8 stops at the first sending: fp8.load_weights asks for the settings of
    # init_fp8, which did not run.
    quantization: Mapping[str, Any] | None = {}
    scales = Scales()
    dtype = DTYPES.get(str(precision))
    decided_by = ""
    if precision == "fp8":
        dtype = "bf16"
        is_mx = bool(stated("is_mx", False))
        quantization = table["mxfp8" if is_mx else "blockwise"]
        if not is_mx:
            scales = _nemo_scales(stated)
    elif precision is None:
        quantization, decided_by = None, f"{GENERATION}vllm_cfg.precision, which is not stated"
    for name in options:
        is_over = name.startswith(f"{GENERATION}vllm_kwargs.") and (
            "quantization" in name or "hf_overrides" in name
        )
        is_over = is_over or name == f"{GENERATION}quant_cfg"
        if is_over and options[name] is not None:
            quantization, decided_by = None, HANDED_OVER.format(option=name)
    parts = stated("quantization_ignored_layer_kws", ())
    return Rollout(
        engine=engine,
        framework=run.reading.framework,
        quantization=quantization,
        quantization_decided_by=decided_by,
        first=int(stated("num_first_layers_in_bf16", 0)),
        last=int(stated("num_last_layers_in_bf16", 0)),
        kept_parts=tuple(str(part) for part in parts),
        dtype=dtype,
        cache=str(stated("kv_cache_dtype", MODEL_DTYPE)),
        scales=scales,
        sent=_sent_by_nemo_rl(run, is_quantised=bool(quantization)),
    )


def _nemo_scales(stated: Callable[..., Any]) -> Scales:
    """Return the scales of NeMo-RL's blocks: its own cast of weights; of inputs DeepGEMM's where that is asked for."""
    weights, inputs = FP32, FP32
    if stated("pow2_weight_scaling_factors", False):
        weights = POWERS_OF_TWO
    if stated("pow2_activation_scaling_factors", False):
        inputs = POWERS_OF_TWO
    if stated("use_deep_gemm", False):  # sets VLLM_USE_DEEP_GEMM_E8M0=0
        return Scales(weights=weights, inputs=inputs)
    return Scales(decided_by=BY_GPU.format(engine="vLLM"))


def _sent_by_nemo_rl(run: Run, *, is_quantised: bool) -> str:
    is_exported = run.model.get("fp8_param") and run.model.get("fp8_recipe") == "blockwise"
    if is_exported:
        return "Weights are sent as the FP8 values and scales that training stores (fp8_param with blockwise)."
    if is_quantised:
        return "Weights are sent in the dtype of training, and quantised where they are loaded."
    return "Weights are sent in the dtype of training."


def _verl(run: Run, options: Mapping[str, Any]) -> Rollout:
    engine = str(options.get(f"{ROLLOUT}name") or "")
    if engine not in FRAMEWORKS["verl"]["engines"]:
        return _unread(run, engine or "that actor_rollout_ref.rollout.name names")
    method = options.get(f"{ROLLOUT}quantization")
    quantization: Mapping[str, Any] | None
    decided_by, scales = "", Scales()
    ends: tuple[str, ...] = ()
    sent = "Weights are sent in the dtype of training."
    if method is None:
        quantization = None
        decided_by = BY_CHECKPOINT.format(checkpoint="the checkpoint")
    elif method == "fp8":
        quantization = FRAMEWORKS["verl"]["quantised"]["blockwise"]
        scales = Scales(decided_by=BY_GPU.format(engine=engine))
        if engine == VLLM:
            ends = (".mlp.gate",)
            sent = "Weights are sent in the dtype of training, and quantised where they are loaded."
        else:
            sent = "Weights of linear layers are quantised by their names before they are sent."
    else:
        quantization, decided_by = None, f"{ROLLOUT}quantization={method}, which is not read"
    for name, value in options.items():
        is_over = name.startswith(f"{ROLLOUT}engine_kwargs.{engine}.") and (
            "quantization" in name or "override" in name
        )
        is_file = name.startswith((f"{ROLLOUT}quantization_config_file", f"{ROLLOUT}qat.enable"))
        if (is_over or is_file) and value not in (None, False):
            quantization, decided_by = None, HANDED_OVER.format(option=name)
    cache = options.get(f"{ROLLOUT}engine_kwargs.{engine}.kv_cache_dtype") or MODEL_DTYPE
    dtype = DTYPES.get(str(options.get(f"{ROLLOUT}dtype") or "bfloat16"))
    return Rollout(
        engine=engine,
        framework="verl",
        quantization=quantization,
        quantization_decided_by=decided_by,
        kept_ends=ends,
        dtype=dtype,
        cache=str(cache),
        scales=scales,
        sent=sent,
    )


def _slime(run: Run, options: Mapping[str, Any]) -> Rollout:
    cache = options.get("--sglang-kv-cache-dtype") or MODEL_DTYPE
    dtype = options.get("--sglang-dtype")
    checkpoint = run.reading.own_fields.get("argument.hf_checkpoint", "--hf-checkpoint")
    decided_by = BY_CHECKPOINT.format(checkpoint=f"the checkpoint {checkpoint}")
    if options.get("--sglang-quantization"):
        decided_by = f"--sglang-quantization {options['--sglang-quantization']}, and {decided_by}"
    return Rollout(
        engine=SGLANG,
        framework=run.reading.framework,
        quantization=None,
        quantization_decided_by=decided_by,
        dtype=None if dtype is None else DTYPES.get(str(dtype)),
        cache=str(cache),
        scales=Scales(decided_by=BY_GPU.format(engine="SGLang")),
        quantised_by_name=frozenset(FRAMEWORKS["slime"]["quantised_by_name"]),
        sent="Weights are quantised by training before they are sent, where the checkpoint is quantised.",
    )


def _unread(run: Run, engine: str) -> Rollout:
    framework = run.reading.framework
    return Rollout(
        engine="",
        framework=framework,
        quantization=None,
        quantization_decided_by=OTHER_ENGINE.format(engine=engine, framework=framework),
        cache=None,
    )


_READERS: Mapping[str, Callable[[Run, Mapping[str, Any]], Rollout]] = {
    "NeMo-RL": _nemo_rl,
    "verl": _verl,
    "slime": _slime,
    "miles": _slime,
    "slime or miles": _slime,
}
