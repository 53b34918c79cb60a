"""Reads a rollout from a served checkpoint's config.json, or from the flags of vLLM or SGLang."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge.convert.rollout.engine import MODEL_DTYPE, Rollout, Scales
from bridge.convert.rollout.frameworks import BY_CHECKPOINT, BY_GPU, DTYPE_TOKENS
from bridge.convert.serving.formats import SGLANG, VLLM
from bridge.convert.serving.manifest import MAX_FILE_BYTES
from bridge.convert.serving.serving_config import ServingConfig
from bridge.errors import PayloadError, RunConfigError
from bridge.precision import strict_yaml
from bridge.read.text import strict_json

SETTING_BY_FLAG = {
    "--quantization": "quantization",
    "-q": "quantization",
    "--kv-cache-dtype": "cache",
    "--dtype": "dtype",
}
"""Flag of both engines that affects the precision -> the setting that it states."""
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}
ONLINE_QUANTIZATION: Mapping[str, Mapping[str, Any]] = {
    "fp8": PER_TENSOR,
    "fp8_per_tensor": PER_TENSOR,
    "fp8_per_block": {**PER_TENSOR, "weight_block_size": [128, 128]},
}
"""`--quantization` of vLLM for a BF16 checkpoint -> the config by which it quantises the weights.

Source: vLLM 0071b24b model_executor/layers/quantization/fp8.py
(Fp8LinearMethod.process_weights_after_loading), and 0.33.0 config/quantization.py
(_ONLINE_SHORTHANDS), which refuses `fp8` for such a checkpoint.
"""
UNREAD_METHOD = "--quantization {method} of {engine}, which is not read,"
UNNAMED_ENGINE = "an engine"


def add_serving_config(rollout: Rollout, path: Path) -> Rollout:
    """Return the rollout with the quantization config of the served checkpoint.

    Args:
        rollout: The rollout so far. If it has a dtype, the dtype of the file does not count.
        path: The config.json.

    Raises:
        PayloadError: The file is not a config.json, or has a method that is not supported.
    """
    config_bytes = strict_yaml.read_bytes(path, error=PayloadError, limit=MAX_FILE_BYTES)
    content = strict_json.loads(config_bytes.decode(errors="replace"), str(path))
    config = ServingConfig.from_mapping(content, str(path))
    settings: Mapping[str, Any] = {}
    if isinstance(content, Mapping):
        settings = content
    cache = rollout.cache
    if config.kv_cache is not None:
        cache = "fp8"
    dtype = rollout.dtype
    if dtype is None:
        dtype = DTYPE_TOKENS.get(str(settings.get("dtype") or settings.get("torch_dtype")))
    quantization = _get_quantization_config(settings)
    return replace(rollout, quantization=quantization, dtype=dtype, cache=cache)


def _get_quantization_config(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantization config in a file; empty if nothing is quantised.

    Args:
        settings: The content of a config.json, of its quantization config, or of ModelOpt's
            hf_quant_config.json.
    """
    for name in ("quantization_config", "compression_config"):
        if isinstance(settings.get(name), Mapping):
            return dict(settings[name])
    if isinstance(settings.get("quantization"), Mapping):
        return {"quant_method": "modelopt", **settings["quantization"]}
    if "quant_method" in settings:
        return dict(settings)
    return {}


def read_model_type(path: Path) -> str | None:
    """Return the `model_type` of a config.json; None if it has none."""
    return ServingConfig.from_file(path).model_type


def make_engine_rollout(engine: str | None) -> Rollout:
    """Return a rollout of which at most the engine is known. A config.json or flags state the rest.

    Args:
        engine: The engine; None: not known.
    """
    return Rollout(
        engine=engine or "",
        quantization=None,
        quantization_decided_by=BY_CHECKPOINT.format(checkpoint="the served checkpoint"),
        cache=None,
        scales=Scales(decided_by=BY_GPU.format(engine=engine or UNNAMED_ENGINE)),
    )


def parse_engine_flags(command_line: str, engine: str | None) -> Rollout:
    """Return the rollout of an engine's command line.

    Args:
        command_line: The command, or only its flags.
        engine: The engine. None: the command names it.

    Raises:
        RunConfigError: Neither names the engine.
    """
    tokens = shlex.split(command_line)
    name = engine or ""
    if "vllm" in command_line:
        name = VLLM
    elif "sglang" in command_line:
        name = SGLANG
    if not name:
        remedy = "Begin with `vllm serve` or `sglang.launch_server`, or add --for vllm."
        raise RunConfigError.of(
            "--rollout", "must name the engine of its flags", command_line, remedy
        )
    stated = _parse_flag_values(tokens)
    rollout = replace(
        make_engine_rollout(name),
        cache=stated.get("cache", MODEL_DTYPE),
        dtype=DTYPE_TOKENS.get(stated.get("dtype", "")),
    )
    method = stated.get("quantization")
    if method is None:
        return rollout
    if method in ONLINE_QUANTIZATION and name == VLLM:
        return replace(rollout, quantization=ONLINE_QUANTIZATION[method])
    return replace(
        rollout, quantization_decided_by=UNREAD_METHOD.format(method=method, engine=name)
    )


def _parse_flag_values(tokens: list[str]) -> dict[str, str]:
    """Return setting of a flag in `SETTING_BY_FLAG` -> its value."""
    stated: dict[str, str] = {}
    for index, token in enumerate(tokens):
        flag, has_value, value = token.partition("=")
        if flag not in SETTING_BY_FLAG:
            continue
        if not has_value and index + 1 < len(tokens):
            value = tokens[index + 1]
        stated[SETTING_BY_FLAG[flag]] = value
    return stated
