"""`read_rollout`: reads the rollout of a run from the options of its engine in the run's file.

Each framework has a function, since its code decides which options reach the engine, and which
quantization config the engine gets. `foreign/tables/rollout.yaml` names the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bridge.convert.rollout.engine import (
    FP32,
    MODEL_DTYPE,
    POWERS_OF_TWO,
    ROLLOUT_ROWS,
    Rollout,
    Scales,
)
from bridge.convert.serving.formats import SGLANG, VLLM
from bridge.errors import RunConfigError
from bridge.preflight.run import Run

FRAMEWORKS: Mapping[str, Mapping[str, Any]] = ROLLOUT_ROWS["frameworks"]
DTYPE_TOKENS = {
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
}
BY_GPU = "the GPU and the release of {engine}: DeepGEMM on Blackwell asks for powers of two"
OTHER_ENGINE = "the engine {engine}, whose use of {framework}'s options is not read"
NAMED_ENGINE = "the engine that {key} names, whose use of {framework}'s options is not read"
HANDED_OVER = "{option}, which is handed to the engine over the options that are read"
BY_CHECKPOINT = (
    "{checkpoint}: its config.json has a quantization_config or none (--rollout config.json)"
)
NEMO_RL_PREFIX = "policy.generation."
VERL_PREFIX = "actor_rollout_ref.rollout."


def read_rollout(run: Run) -> Rollout:
    """Return the rollout of a run of reinforcement learning.

    Raises:
        RunConfigError: The framework of the run is not NeMo-RL, verl, slime or miles, or its file
            has no rollout.
    """
    framework = run.reading.framework
    options = run.reading.generation
    if framework not in FRAMEWORKS or not options:
        rule = "is no run of NeMo-RL, verl, slime or miles that states its rollout"
        remedy = "Give the serving config: --rollout config.json."
        raise RunConfigError.of("--rollout", rule, run.name, remedy)
    return _READERS[framework](run, options)


class _EngineConfig(NamedTuple):
    """The quantization config that a framework passes to its engine, or its source."""

    config: Mapping[str, Any] | None
    """The config. Empty: the engine quantises nothing. None: it is not known."""
    decided_by: str = ""
    """The source that decides a config that is not known, as a noun."""

    @classmethod
    def from_scheme(cls, framework: str, scheme: str) -> _EngineConfig:
        """Return the config that a framework's code writes for a scheme."""
        return cls(FRAMEWORKS[framework]["quantised"][scheme])

    @classmethod
    def without(cls) -> _EngineConfig:
        """Return the config of an engine that quantises nothing."""
        return cls({})

    @classmethod
    def unknown(cls, decided_by: str) -> _EngineConfig:
        """Return a config that is not known, with the source that decides it."""
        return cls(None, decided_by)


def _read_nemo_rl(run: Run, options: Mapping[str, Any]) -> Rollout:
    """Return the rollout of a run of NeMo-RL.

    Args:
        options: `policy.generation.*`, by their dotted keys.
    """
    engine = str(options.get(f"{NEMO_RL_PREFIX}backend", ""))
    if engine != VLLM:
        return _make_unread_rollout(run, engine, f"{NEMO_RL_PREFIX}backend")
    vllm_options = _get_vllm_options(options)
    precision = vllm_options.get("precision")
    engine_config = _make_nemo_rl_config(options, vllm_options)
    scales = Scales()
    dtype = DTYPE_TOKENS.get(str(precision))
    if precision == "fp8":
        dtype = "bf16"
        if not vllm_options.get("is_mx"):
            scales = _make_nemo_rl_scales(vllm_options)
    return Rollout(
        engine=engine,
        framework=run.reading.framework,
        quantization=engine_config.config,
        quantization_decided_by=engine_config.decided_by,
        first=int(vllm_options.get("num_first_layers_in_bf16", 0)),
        last=int(vllm_options.get("num_last_layers_in_bf16", 0)),
        kept_parts=tuple(map(str, vllm_options.get("quantization_ignored_layer_kws", ()))),
        dtype=dtype,
        cache=str(vllm_options.get("kv_cache_dtype", MODEL_DTYPE)),
        scales=scales,
        sent=_describe_nemo_rl_transfer(run, is_quantised=bool(engine_config.config)),
    )


def _get_vllm_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of NeMo-RL's block `vllm_cfg` that have a value, without their prefix."""
    prefix = f"{NEMO_RL_PREFIX}vllm_cfg."
    vllm_options: dict[str, Any] = {}
    for name, value in options.items():
        if name.startswith(prefix) and value is not None:
            vllm_options[name.removeprefix(prefix)] = value
    return vllm_options


def _make_nemo_rl_config(
    options: Mapping[str, Any], vllm_options: Mapping[str, Any]
) -> _EngineConfig:
    """Return the quantization config that NeMo-RL passes to vLLM.

    Without precision=fp8 nothing is quantised. Then a checkpoint in FP8 would stop the run when
    weights are first sent, since fp8.load_weights reads settings that only init_fp8 makes.

    Args:
        options: The options of the run.
        vllm_options: The options of the block `vllm_cfg`.
    """
    for name, value in options.items():
        is_engine_option = name.startswith(f"{NEMO_RL_PREFIX}vllm_kwargs.")
        overrides_config = is_engine_option and ("quantization" in name or "hf_overrides" in name)
        if value is not None and (overrides_config or name == f"{NEMO_RL_PREFIX}quant_cfg"):
            return _EngineConfig.unknown(HANDED_OVER.format(option=name))
    precision = vllm_options.get("precision")
    if precision is None:
        decider = f"{NEMO_RL_PREFIX}vllm_cfg.precision, which is not stated"
        return _EngineConfig.unknown(decider)
    if precision != "fp8":
        return _EngineConfig.without()
    scheme = "blockwise"
    if vllm_options.get("is_mx"):
        scheme = "mxfp8"
    return _EngineConfig.from_scheme("NeMo-RL", scheme)


def _make_nemo_rl_scales(vllm_options: Mapping[str, Any]) -> Scales:
    """Return the scales of the blocks of NeMo-RL's rollout.

    The scales are known only with DeepGEMM. NeMo-RL then sets VLLM_USE_DEEP_GEMM_E8M0=0. So the
    scales are FP32 numbers, unless an option asks for powers of two.
    """
    if not vllm_options.get("use_deep_gemm"):
        return Scales(decided_by=BY_GPU.format(engine="vLLM"))
    weights = FP32
    inputs = FP32
    if vllm_options.get("pow2_weight_scaling_factors"):
        weights = POWERS_OF_TWO
    if vllm_options.get("pow2_activation_scaling_factors"):
        inputs = POWERS_OF_TWO
    return Scales(weights=weights, inputs=inputs)


def _describe_nemo_rl_transfer(run: Run, *, is_quantised: bool) -> str:
    """Return the sentence about the form in which NeMo-RL sends the weights."""
    is_exported = run.model.get("fp8_param") and run.model.get("fp8_recipe") == "blockwise"
    if is_exported:
        return "Weights are sent as the FP8 values and scales that training stores (fp8_param with blockwise)."
    if is_quantised:
        return "Weights are sent in the dtype of training, and quantised where they are loaded."
    return "Weights are sent in the dtype of training."


def _read_verl(run: Run, options: Mapping[str, Any]) -> Rollout:
    """Return the rollout of a run of verl.

    Args:
        options: `actor_rollout_ref.rollout.*`, by their dotted keys.
    """
    engine = str(options.get(f"{VERL_PREFIX}name") or "")
    if engine not in FRAMEWORKS["verl"]["engines"]:
        return _make_unread_rollout(run, engine, f"{VERL_PREFIX}name")
    engine_config = _make_verl_config(options, engine)
    scales = Scales()
    kept_ends: tuple[str, ...] = ()
    sent = "Weights are sent in the dtype of training."
    if options.get(f"{VERL_PREFIX}quantization") == "fp8":
        scales = Scales(decided_by=BY_GPU.format(engine=engine))
        sent = "Weights of linear layers are quantised by their names before they are sent."
        if engine == VLLM:
            kept_ends = (".mlp.gate",)
            sent = "Weights are sent in the dtype of training, and quantised where they are loaded."
    cache = options.get(f"{VERL_PREFIX}engine_kwargs.{engine}.kv_cache_dtype") or MODEL_DTYPE
    dtype = options.get(f"{VERL_PREFIX}dtype") or "bfloat16"
    return Rollout(
        engine=engine,
        framework="verl",
        quantization=engine_config.config,
        quantization_decided_by=engine_config.decided_by,
        kept_ends=kept_ends,
        dtype=DTYPE_TOKENS.get(str(dtype)),
        cache=str(cache),
        scales=scales,
        sent=sent,
    )


def _make_verl_config(options: Mapping[str, Any], engine: str) -> _EngineConfig:
    """Return the quantization config that verl passes to its engine."""
    other_sources = (f"{VERL_PREFIX}quantization_config_file", f"{VERL_PREFIX}qat.enable")
    for name, value in options.items():
        is_engine_option = name.startswith(f"{VERL_PREFIX}engine_kwargs.{engine}.")
        overrides_config = is_engine_option and ("quantization" in name or "override" in name)
        is_on = value not in (None, False)
        if is_on and (overrides_config or name.startswith(other_sources)):
            return _EngineConfig.unknown(HANDED_OVER.format(option=name))
    method = options.get(f"{VERL_PREFIX}quantization")
    if method is None:
        return _EngineConfig.unknown(BY_CHECKPOINT.format(checkpoint="the checkpoint"))
    if method != "fp8":
        return _EngineConfig.unknown(f"{VERL_PREFIX}quantization={method}, which is not read")
    return _EngineConfig.from_scheme("verl", "blockwise")


def _read_slime(run: Run, options: Mapping[str, Any]) -> Rollout:
    """Return the rollout of a run of slime or miles, whose engine reads the checkpoint's config.

    Args:
        options: The arguments `--sglang-*`.
    """
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
        dtype=DTYPE_TOKENS.get(str(dtype)),
        cache=str(cache),
        scales=Scales(decided_by=BY_GPU.format(engine="SGLang")),
        quantised_by_name=frozenset(FRAMEWORKS["slime"]["quantised_by_name"]),
        sent="Weights are quantised by training before they are sent, where the checkpoint is quantised.",
    )


def _make_unread_rollout(run: Run, engine: str, key: str) -> Rollout:
    """Return the rollout of an engine whose use of the framework's options is not read.

    Args:
        engine: The engine's name; empty if the file does not state it.
        key: The option that names the engine.
    """
    framework = run.reading.framework
    decider = OTHER_ENGINE.format(engine=engine, framework=framework)
    if not engine:
        decider = NAMED_ENGINE.format(key=key, framework=framework)
    return Rollout(
        engine="",
        framework=framework,
        quantization=None,
        quantization_decided_by=decider,
        cache=None,
    )


_READERS: Mapping[str, Callable[[Run, Mapping[str, Any]], Rollout]] = {
    "NeMo-RL": _read_nemo_rl,
    "verl": _read_verl,
    "slime": _read_slime,
    "miles": _read_slime,
    "slime or miles": _read_slime,
}
