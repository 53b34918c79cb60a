"""NeMo-RL's files of a run: YAML whose `defaults` name the files below it, and launch scripts of its programs.

Its policy trains on Megatron Core where `policy.megatron_cfg.enabled` is true, and on PyTorch's DTensor where
`policy.dtensor_cfg.enabled` is. The model's config is made of the checkpoint that `policy.model_name` names, and the
settings of `policy.megatron_cfg` are copied onto it, one by one.

Source: NVIDIA-NeMo/RL 7ea279ab nemo_rl/models/megatron/setup.py; nemo_rl/models/policy/lm_policy.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from bridge.errors import Finding, PayloadError, UnreadFileError
from bridge.preflight.file_reading import MEGATRON_BRIDGE, FileReading, RunChoice
from bridge.read import framework_signs
from bridge.read.framework import hf_config
from bridge.read.framework.checkpoint import read_checkpoint
from bridge.read.framework.table import framework_table
from bridge.read.framework.tree import TreeReading, read_tree
from bridge.read.framework.tree_run import reading_of_tree
from bridge.read.launch.launches import Launch
from bridge.read.launch.word import Word
from bridge.read.text.composed import Tree, composed, is_open, resolved
from bridge.read.text.document import Document
from bridge.read.text.dotted import value_at
from bridge.read.text.hydra_words import HydraWord, hydra_words, write_over
from bridge.read.text.neighbours import found_above

TABLE_NAME = "nemo_rl"

# Keys of its files.
MEGATRON_BLOCK = "policy.megatron_cfg"
FP8_BLOCK = f"{MEGATRON_BLOCK}.fp8_cfg"
MEGATRON_SWITCH = f"{MEGATRON_BLOCK}.enabled"
DTENSOR_SWITCH = "policy.dtensor_cfg.enabled"
PRECISION = "policy.precision"

# Words of its command lines.
PROGRAMS = {
    "run_distillation.py": "distillation_math.yaml",
    "run_dpo.py": "dpo.yaml",
    "run_eval.py": "evals/eval.yaml",
    "run_grpo.py": "grpo_math_1B.yaml",
    "run_grpo_single_controller.py": "grpo_math_1B_megatron_single_controller.yaml",
    "run_grpo_sliding_puzzle.py": "grpo_sliding_puzzle.yaml",
    "run_ppo.py": "ppo_math_1B.yaml",
    "run_rm.py": "rm.yaml",
    "run_sft.py": "sft.yaml",
    "run_vlm_grpo.py": "vlm_grpo_3B.yaml",
    "run_xtoken_off_policy_distillation.py": "xtoken_off_policy_distillation.yaml",
}
"""Program of NeMo-RL's examples -> the file that it takes without `--config`, in `configs` next to it."""

# Values.
MODES = {"float32": (), "bfloat16": ("bf16",), "float16": ("fp16",)}
"""Value of `policy.precision` -> the switches of the model that are on."""

# Sentences.
TWO_BACK_ENDS = (
    "{path}: states {megatron} and {dtensor}, and NeMo-RL refuses both. Set one of them to false."
)
NO_BACK_END = "{path}: states neither {megatron} nor {dtensor}, and {decides}. {remedy}"
BASE_NOT_FOUND = "`defaults` names {names}, which is not found"
PRECISION_RULE = "takes float32, bfloat16 or float16 alone, and stops at the start"
FP8_SETTING_RULE = (
    "is read where fp8_cfg.enabled is true, and NeMo-RL stops at the start without it"
)
STATED_TWICE_RULE = "stands in megatron_cfg too, and NeMo-RL refuses to start"
NUMBER_OF_GPUS = (
    "The number of GPUs: cluster states {nodes} nodes with {each} GPUs. "
    "Add --target h100x{all}, for example."
)
GENERATION_PRECISION = "{key}={value}: {engine} generates samples in it, and trains nothing."


def read(
    whole: Mapping[str, object],
    path: Path,
    choice: RunChoice,
    words: list[HydraWord] | None = None,
) -> FileReading:
    """Return what a file says of a run.

    Args:
        whole: The file's mapping.
        path: Its path, from whose folder `defaults` are looked up.
        choice: What the command line says of it.
        words: Overrides of a command line, which are written over it.

    Raises:
        UnreadFileError: Its policy trains on PyTorch's DTensor, or it trains none.
    """
    try:
        config = composed(path, whole)
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    refused = write_over(config.values, words or [], is_whole=not config.missing)
    values = resolved(config.values)
    _refuse_other_backends(values, path, config.missing)
    table = framework_table(TABLE_NAME)
    found = read_tree(table, _policy(values))
    _read_mode(found, values)
    _read_recomputation(found, values)
    _read_batch(found, values)
    checkpoint = read_checkpoint(
        value_at(values, table.checkpoint["named"]),
        path,
        choice,
        hf_config.MEGATRON_BRIDGE,
        _block(_block(values, "policy"), "hf_config_overrides"),
    )
    reading = reading_of_tree(table, found, checkpoint)
    origins = dict(reading.origins)
    for key, path_of_setting in found.names.items():
        if key in config.origins:
            origins[path_of_setting] = config.origins[key]
    decider = None
    if config.missing:
        missing = ", ".join(config.missing)
        decider = f"{missing}, which `defaults` names and which is not found"
    first, *others = reading.read_too
    bases = [f"defaults: {name} is read below the file." for name in config.read]
    return replace(
        reading,
        base=MEGATRON_BRIDGE,
        origins=origins,
        environment=_environment(values),
        unknown=(*_unknown(found, values), *reading.unknown),
        read_too=(first, *bases, *others),
        unstated_by=decider,
        refused=(*refused, *_refused(values)),
    )


def _refuse_other_backends(values: Tree, path: Path, missing: list[str]) -> None:
    """Raise UnreadFileError where the policy does not train on Megatron Core."""
    is_megatron, is_dtensor = value_at(values, MEGATRON_SWITCH), value_at(values, DTENSOR_SWITCH)
    names = {"megatron": MEGATRON_SWITCH, "dtensor": DTENSOR_SWITCH}
    if is_megatron is True and is_dtensor is True:
        raise UnreadFileError(TWO_BACK_ENDS.format(path=path, **names), kind="states two back ends")
    if is_megatron is True:
        return
    document = Document(path=str(path), text="", kind="yaml", of=values)
    other = framework_signs.recognise_file(document)
    if is_dtensor is True or not missing:
        if other is not None:
            raise UnreadFileError(
                replace(other, tree="").refusal(str(path)), kind=f"looks like {other.name}"
            )
        decides, remedy = "NeMo-RL stops at the start", f"Set {MEGATRON_SWITCH}=true."
    else:
        decides, remedy = (
            BASE_NOT_FOUND.format(names=", ".join(missing)),
            "Put it where the file expects it.",
        )
    sentence = NO_BACK_END.format(path=path, decides=decides, remedy=remedy, **names)
    raise UnreadFileError(sentence, kind="states no back end")


def _policy(values: Tree) -> Tree:
    """Return the tree without the blocks that are switched off, which NeMo-RL does not read."""
    policy = dict(_block(values, "policy"))
    megatron = dict(_block(policy, "megatron_cfg"))
    for name in ("fp8_cfg", "peft"):
        if _block(megatron, name).get("enabled") is not True:
            megatron.pop(name, None)
    if megatron.get("activation_checkpointing") is not True:
        for name in ("recompute_granularity", "recompute_modules"):
            megatron.pop(name, None)
    policy["megatron_cfg"] = megatron
    return {**values, "policy": policy}


def _block(values: Mapping[str, object], name: str) -> Mapping[str, object]:
    block = values.get(name)
    if isinstance(block, dict):
        return block
    return {}


def _read_mode(found: TreeReading, values: Tree) -> None:
    """Write the switches of the mode that `policy.precision` asks for."""
    precision = value_at(values, PRECISION)
    if precision is None:
        return
    if is_open(precision):
        for name in ("bf16", "fp16"):
            found.put(f"model.{name}", precision)
        return
    for name in ("bf16", "fp16"):
        found.put(f"model.{name}", name in MODES.get(str(precision), ()))
    if precision in MODES:
        found.put("model.params_dtype", precision, PRECISION)


def _read_recomputation(found: TreeReading, values: Tree) -> None:
    """Write what `activation_checkpointing` asks for: whole layers, one by one, where nothing else is stated."""
    if value_at(values, f"{MEGATRON_BLOCK}.activation_checkpointing") is not True:
        return
    model = found.sections.setdefault("model", {})
    if model.setdefault("recompute_granularity", "full") == "full":
        model |= {"recompute_method": "uniform", "recompute_num_layers": 1}
        model.pop("recompute_modules", None)
    elif model.get("recompute_modules") is None:
        model.pop("recompute_modules", None)


def _read_batch(found: TreeReading, values: Tree) -> None:
    """Write the tokens of a micro-batch: one sequence of packed samples, or samples of the greatest length."""
    if value_at(values, "policy.sequence_packing.enabled") is True:
        tokens: object = value_at(values, "policy.sequence_packing.train_mb_tokens")
        samples: object = 1
    else:
        tokens = value_at(values, "policy.max_total_sequence_length")
        samples = value_at(values, "policy.train_micro_batch_size")
    if tokens is not None:
        found.put("model.seq_length", tokens)
    if samples is not None:
        found.put("train.micro_batch_size", samples)


def _environment(values: Tree) -> dict[str, str]:
    variables = _block(_block(_block(values, "policy"), "megatron_cfg"), "env_vars")
    return {
        name: str(value)
        for name, value in variables.items()
        if value is not None and not is_open(value)
    }


def _unknown(found: TreeReading, values: Tree) -> list[str]:
    """Return what the file leaves open, as sentences."""
    sentences = []
    nodes, each = value_at(values, "cluster.num_nodes"), value_at(values, "cluster.gpus_per_node")
    if isinstance(nodes, int) and isinstance(each, int):
        sentences.append(NUMBER_OF_GPUS.format(nodes=nodes, each=each, all=nodes * each))
    engine = found.generation.get("policy.generation.backend")
    for key, value in found.generation.items():
        if (
            key.endswith(".precision")
            and f".{engine}_cfg." in key
            and value != value_at(values, PRECISION)
        ):
            sentences.append(GENERATION_PRECISION.format(key=key, value=value, engine=engine))
    return sentences


def _refused(values: Tree) -> list[Finding]:
    """Return what NeMo-RL refuses of a file."""
    faults = []
    precision = value_at(values, PRECISION)
    if precision is not None and precision not in MODES and not is_open(precision):
        faults.append(
            Finding(
                path=PRECISION, rule=PRECISION_RULE, value=precision, remedy="Write one of these"
            )
        )
    scheme = value_at(values, FP8_BLOCK)
    if isinstance(scheme, dict) and scheme.get("enabled") is True:
        for name in ("fp8", "fp8_recipe", "fp8_param"):
            if name not in scheme:
                faults.append(
                    Finding(
                        path=f"{FP8_BLOCK}.{name}",
                        rule=FP8_SETTING_RULE,
                        remedy=f"State {FP8_BLOCK}.{name}",
                    )
                )
    block = _block(_block(values, "policy"), "megatron_cfg")
    for name, value in _block(block, "model_overrides").items():
        if name in block:
            key = f"{MEGATRON_BLOCK}.model_overrides.{name}"
            faults.append(
                Finding(
                    path=key,
                    rule=STATED_TWICE_RULE,
                    value=value,
                    remedy=f"Remove {MEGATRON_BLOCK}.{name}",
                )
            )
    return faults


def read_launch(launch: Launch, script: Path, choice: RunChoice) -> FileReading:
    """Return what one launch of a script says: its YAML file, and the overrides on its command line.

    Raises:
        UnreadFileError: The file is not found, or only the run knows its name.
    """
    config = _config_of(launch)
    if config is None:
        name = _default_of(launch)
    else:
        name = str(config)
    if name is None:
        rule = f"starts {launch.name} without --config, and its default is not known"
        raise UnreadFileError(
            f"{script}: {rule}. Give the YAML file of the run.", kind="names no file of the run"
        )
    path = found_above(name, script)
    if path is None:
        rule = f"starts {launch.name} with the file {name}, which is not found from here"
        raise UnreadFileError(
            f"{script}: {rule}. Give that YAML file itself.", kind="its file is not found"
        )
    try:
        whole = Document.load(path).mapping
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    reading = read(whole, path, choice, hydra_words(launch.arguments))
    late = [word for word in launch.arguments if word.startswith("$") and word != config]
    return replace(
        reading,
        environment={**_exported(launch), **reading.environment},
        read_too=(
            reading.read_too[0],
            f"--config {name}: read from {path}.",
            *reading.read_too[1:],
        ),
        unknown=(
            *reading.unknown,
            *(f"{word}: may hold further overrides, which are not read." for word in late),
        ),
    )


def _config_of(launch: Launch) -> Word | None:
    """Return the file that a command line names; None where it names none."""
    for word, behind in zip(launch.arguments, (*launch.arguments[1:], Word()), strict=True):
        name, sign, value = word.partition("=")
        if name == "--config":
            return Word(value) if sign else behind
    return None


def _default_of(launch: Launch) -> str | None:
    """Return the file that a program of NeMo-RL takes without `--config`, by the path of the program."""
    program = PurePosixPath(launch.program)
    default = PROGRAMS.get(program.name)
    if default is None:
        return None
    return str(program.parent / "configs" / default)


def _exported(launch: Launch) -> dict[str, str]:
    return {name: str(value) for name, value in launch.environment.items() if not value.is_unknown}
