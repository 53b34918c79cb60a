"""NeMo-RL's files of a run: YAML whose `defaults` name the files below it, and launch scripts of its programs.

Its policy trains on Megatron Core where `policy.megatron_cfg.enabled` is true, and on PyTorch's DTensor where
`policy.dtensor_cfg.enabled` is. The model's config is made of the checkpoint that `policy.model_name` names, and the
settings of `policy.megatron_cfg` are copied onto it, one by one.

Source: NVIDIA-NeMo/RL 7ea279ab nemo_rl/models/megatron/setup.py; nemo_rl/models/policy/lm_policy.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from bridge.errors import Finding, PayloadError, UnreadFileError
from bridge.preflight.file_reading import FileReading
from bridge.preflight.run_choice import RunChoice
from bridge.read import framework_signs
from bridge.read.framework import hf_config
from bridge.read.framework.checkpoint import read_checkpoint
from bridge.read.framework.framework_table import load_framework_table
from bridge.read.framework.reading_from_tree import build_reading_from_tree
from bridge.read.framework.tree import TreeReading, read_tree
from bridge.read.launch.launch import Launch
from bridge.read.launch.shell_word import ShellWord
from bridge.read.text.document import Document
from bridge.read.text.dotted import get_dotted_value
from bridge.read.text.hydra_overrides import (
    HydraOverride,
    apply_hydra_overrides,
    parse_hydra_overrides,
)
from bridge.read.text.inherited_config import (
    ConfigTree,
    is_unresolved,
    read_inherited_config,
    resolve_interpolations,
)
from bridge.read.text.repository_files import find_repository_file

SUITES_FOLDER, RECIPES_FOLDER = "tests/test_suites", "examples/configs/recipes"
"""Folder of the scripts of NeMo-RL's test suites, and that of their YAML files.

Source: NVIDIA-NeMo/RL 7ea279ab tests/test_suites/llm/common.env, CONFIG_PATH."""
SUITE_CONFIG_PATTERN = re.compile(
    rf"\$\(echo \$SCRIPT_DIR/\$\{{EXP_NAME\}}\.yaml \| sed 's#{SUITES_FOLDER}#{RECIPES_FOLDER}#'\)"
)
TABLE_NAME = "nemo_rl"

# Keys of its files.
MEGATRON_BLOCK = "policy.megatron_cfg"
FP8_BLOCK = f"{MEGATRON_BLOCK}.fp8_cfg"
MEGATRON_SWITCH = f"{MEGATRON_BLOCK}.enabled"
DTENSOR_SWITCH = "policy.dtensor_cfg.enabled"
PRECISION_KEY = "policy.precision"

# Words of its command lines.
DEFAULT_CONFIG_OF_PROGRAM = {
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

SECTIONS_OF_OVERRIDES = frozenset(
    {"policy", "cluster", "value", "teacher", "on_policy_distillation"}
)
"""Sections of its files that are read, and that a run of ours does not have."""

# Values.
SWITCHES_OF_PRECISION = {"float32": (), "bfloat16": ("bf16",), "float16": ("fp16",)}
"""Value of `policy.precision` -> the switches of the model that are on."""

COLOCATED_SWITCH = "policy.generation.colocated.enabled"
"""Whether generation has the GPUs of training; otherwise it has GPUs of its own."""
GENERATION_RESOURCES = "policy.generation.colocated.resources"
"""The GPUs of generation, where they are not those of training."""
GPUS_OF_OTHERS = {
    "on_policy_distillation.non_colocated_teachers.enabled": True,
    "data.default.env_name": "reward_model",
    "data.train.env_name": "reward_model",
}
"""Key of a file -> the value with which another model than the policy takes GPUs of the cluster."""

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
    "The number of GPUs: cluster states num_nodes={nodes} and gpus_per_node={each}. "
    "Add --target h100x{training}, for example."
)
GPUS_WITHOUT_NODES_OF_GENERATION = (
    "The number of GPUs: cluster states num_nodes={nodes} and gpus_per_node={each}, "
    "and generation has {generating} of these nodes. Add --target h100x{training}, for example."
)
GPUS_WITHOUT_GPUS_OF_GENERATION = (
    "The number of GPUs: cluster states num_nodes={nodes} and gpus_per_node={each}, "
    "and generation has {generating} of these GPUs. Add --target h100x{training}, for example."
)
GPUS_SHARED_WITH_OTHERS = (
    "The number of GPUs: cluster states num_nodes={nodes} and gpus_per_node={each}, "
    "and {others} has some of them. Add a target with the GPUs of training, --target h100x8 for example."
)
GENERATION_PRECISION = "{key}={value}: {engine} generates samples in it, and trains nothing."


class TrainingGpus(NamedTuple):
    """The GPUs of a cluster that train the policy."""

    sentence: str
    """How many there are, for a reader."""
    number: int | None = None
    """Their number; None where the file does not decide it."""


def read_config(
    whole: Mapping[str, object],
    path: Path,
    choice: RunChoice,
    overrides: list[HydraOverride] | None = None,
) -> FileReading:
    """Return what a file says of a run.

    Args:
        whole: The file's mapping.
        path: Its path, from whose folder `defaults` are looked up.
        choice: What the command line says of it.
        overrides: Overrides of a command line, which are written over it.

    Raises:
        UnreadFileError: Its policy trains on PyTorch's DTensor, or it trains none.
    """
    try:
        config = read_inherited_config(path, whole)
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    own_overrides = _select_overrides(choice)
    all_overrides = [*(overrides or []), *own_overrides]
    refused = apply_hydra_overrides(config.values, all_overrides, is_complete=not config.missing)
    values = resolve_interpolations(config.values)
    _refuse_other_backends(values, path, config.missing)
    table = load_framework_table(TABLE_NAME)
    tree = read_tree(table, _drop_disabled_blocks(values))
    _write_mode(tree, values)
    _write_recomputation(tree, values)
    _write_batch_sizes(tree, values)
    checkpoint = read_checkpoint(
        get_dotted_value(values, table.checkpoint["named"]),
        path,
        choice,
        hf_config.MEGATRON_BRIDGE,
        _get_block(_get_block(values, "policy"), "hf_config_overrides"),
    )
    reading = build_reading_from_tree(table, tree, checkpoint)
    origins = dict(reading.origins)
    for key, path_of_setting in tree.names.items():
        if key in config.origins:
            origins[path_of_setting] = config.origins[key]
    origins |= tree.find_overridden_settings(own_overrides)
    decider = None
    if config.missing:
        missing = ", ".join(config.missing)
        decider = f"{missing}, which `defaults` names and which is not found"
    gpus = _count_training_gpus(values)
    training_gpus = None
    if gpus is not None:
        training_gpus = gpus.number
    first, *others = reading.notes
    bases = [f"defaults: {name} is read below the file." for name in config.read]
    open_settings = _describe_open_settings(tree, values)
    uncertainty = replace(
        reading.uncertainty,
        open_points=(*open_settings, *reading.uncertainty.open_points),
        default_decider=decider,
    )
    option_faults = replace(
        reading.option_faults, refused=(*refused, *_find_refused_settings(values))
    )
    return replace(
        reading,
        origins=origins,
        read_overrides=tuple(override.word for override in own_overrides),
        environment=_collect_environment(values),
        training_gpus=training_gpus,
        notes=(first, *bases, *others),
        uncertainty=uncertainty,
        option_faults=option_faults,
    )


def _select_overrides(choice: RunChoice) -> list[HydraOverride]:
    """Return the overrides of our command line whose keys are in sections of NeMo-RL's files."""
    selected: list[HydraOverride] = []
    for override in parse_hydra_overrides(map(ShellWord, choice.overrides)):
        if override.key.partition(".")[0] in SECTIONS_OF_OVERRIDES:
            selected.append(override)
    return selected


def _refuse_other_backends(values: ConfigTree, path: Path, missing: list[str]) -> None:
    """Raise UnreadFileError where the policy does not train on Megatron Core."""
    is_megatron, is_dtensor = (
        get_dotted_value(values, MEGATRON_SWITCH),
        get_dotted_value(values, DTENSOR_SWITCH),
    )
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


def _drop_disabled_blocks(values: ConfigTree) -> ConfigTree:
    """Return the tree without the blocks that are switched off, which NeMo-RL does not read."""
    policy = dict(_get_block(values, "policy"))
    megatron = dict(_get_block(policy, "megatron_cfg"))
    for name in ("fp8_cfg", "peft"):
        if _get_block(megatron, name).get("enabled") is not True:
            megatron.pop(name, None)
    if megatron.get("activation_checkpointing") is not True:
        for name in ("recompute_granularity", "recompute_modules"):
            megatron.pop(name, None)
    policy["megatron_cfg"] = megatron
    return {**values, "policy": policy}


def _get_block(values: Mapping[str, object], name: str) -> Mapping[str, object]:
    block = values.get(name)
    if isinstance(block, dict):
        return block
    return {}


def _write_mode(tree: TreeReading, values: ConfigTree) -> None:
    """Write the switches of the mode that `policy.precision` asks for."""
    precision = get_dotted_value(values, PRECISION_KEY)
    if precision is None:
        return
    if is_unresolved(precision):
        for name in ("bf16", "fp16"):
            tree.put(f"model.{name}", precision, PRECISION_KEY)
        return
    for name in ("bf16", "fp16"):
        is_on = name in SWITCHES_OF_PRECISION.get(str(precision), ())
        tree.put(f"model.{name}", is_on, PRECISION_KEY)
    if precision in SWITCHES_OF_PRECISION:
        tree.put("model.params_dtype", precision, PRECISION_KEY)


def _write_recomputation(tree: TreeReading, values: ConfigTree) -> None:
    """Write what `activation_checkpointing` asks for: whole layers, one by one, where nothing else is stated."""
    if get_dotted_value(values, f"{MEGATRON_BLOCK}.activation_checkpointing") is not True:
        return
    model = tree.sections.setdefault("model", {})
    if model.setdefault("recompute_granularity", "full") == "full":
        model |= {"recompute_method": "uniform", "recompute_num_layers": 1}
        model.pop("recompute_modules", None)
    elif model.get("recompute_modules") is None:
        model.pop("recompute_modules", None)


def _write_batch_sizes(tree: TreeReading, values: ConfigTree) -> None:
    """Write the tokens of a micro-batch: one sequence of packed samples, or samples of the greatest length."""
    if get_dotted_value(values, "policy.sequence_packing.enabled") is True:
        tokens: object = get_dotted_value(values, "policy.sequence_packing.train_mb_tokens")
        samples: object = 1
    else:
        tokens = get_dotted_value(values, "policy.max_total_sequence_length")
        samples = get_dotted_value(values, "policy.train_micro_batch_size")
    if tokens is not None:
        tree.put("model.seq_length", tokens)
    if samples is not None:
        tree.put("train.micro_batch_size", samples)


def _collect_environment(values: ConfigTree) -> dict[str, str]:
    variables = _get_block(_get_block(_get_block(values, "policy"), "megatron_cfg"), "env_vars")
    return {
        name: str(value)
        for name, value in variables.items()
        if value is not None and not is_unresolved(value)
    }


def _describe_open_settings(tree: TreeReading, values: ConfigTree) -> list[str]:
    """Return what the file leaves open, as sentences."""
    sentences = []
    gpus = _count_training_gpus(values)
    if gpus is not None:
        sentences.append(gpus.sentence)
    engine = tree.generation.get("policy.generation.backend")
    for key, value in tree.generation.items():
        if (
            key.endswith(".precision")
            and f".{engine}_cfg." in key
            and value != get_dotted_value(values, PRECISION_KEY)
        ):
            sentences.append(GENERATION_PRECISION.format(key=key, value=value, engine=engine))
    return sentences


def _count_training_gpus(values: ConfigTree) -> TrainingGpus | None:
    """Return the GPUs of `cluster` that train; None where the file states no cluster.

    Source: nemo_rl/algorithms/grpo.py setup, distillation.py setup, ppo.py setup.
    """
    nodes, each = (
        get_dotted_value(values, "cluster.num_nodes"),
        get_dotted_value(values, "cluster.gpus_per_node"),
    )
    if not isinstance(nodes, int) or not isinstance(each, int):
        return None
    facts: dict[str, object] = {"nodes": nodes, "each": each}
    for key, value in GPUS_OF_OTHERS.items():
        if get_dotted_value(values, key) == value:
            return TrainingGpus(
                sentence=GPUS_SHARED_WITH_OTHERS.format(**facts, others=f"{key}={value}")
            )
    if get_dotted_value(values, COLOCATED_SWITCH) is not False:
        count = nodes * each
        return TrainingGpus(number=count, sentence=NUMBER_OF_GPUS.format(**facts, training=count))
    sentence, counted = GPUS_WITHOUT_NODES_OF_GENERATION, "num_nodes"
    if nodes == 1:
        sentence, counted = GPUS_WITHOUT_GPUS_OF_GENERATION, "gpus_per_node"
    generating = get_dotted_value(values, f"{GENERATION_RESOURCES}.{counted}")
    count = 0
    if isinstance(generating, int) and nodes == 1:
        count = each - generating
    elif isinstance(generating, int):
        count = (nodes - generating) * each
    if count < 1:
        others = f"{COLOCATED_SWITCH}=False"
        return TrainingGpus(sentence=GPUS_SHARED_WITH_OTHERS.format(**facts, others=others))
    return TrainingGpus(
        number=count, sentence=sentence.format(**facts, generating=generating, training=count)
    )


def _find_refused_settings(values: ConfigTree) -> list[Finding]:
    """Return what NeMo-RL refuses of a file."""
    faults = []
    precision = get_dotted_value(values, PRECISION_KEY)
    if (
        precision is not None
        and precision not in SWITCHES_OF_PRECISION
        and not is_unresolved(precision)
    ):
        faults.append(
            Finding(
                path=PRECISION_KEY,
                rule=PRECISION_RULE,
                value=precision,
                remedy="Write one of these",
            )
        )
    scheme = get_dotted_value(values, FP8_BLOCK)
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
    block = _get_block(_get_block(values, "policy"), "megatron_cfg")
    for name, value in _get_block(block, "model_overrides").items():
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
    config = _find_config_option(launch)
    if config is None:
        name = _find_default_config(launch)
    else:
        name = str(config)
    suite_config = _find_suite_config(name, script)
    if suite_config is not None:
        name = suite_config
    if name is None:
        rule = f"starts {launch.name} without --config, and its default is not known"
        raise UnreadFileError(
            f"{script}: {rule}. Give the YAML file of the run.", kind="names no file of the run"
        )
    path = find_repository_file(name, script)
    if path is None:
        rule = f"starts {launch.name} with the file {name}, which is not found from here"
        raise UnreadFileError(
            f"{script}: {rule}. Give that YAML file itself.", kind="its file is not found"
        )
    try:
        whole = Document.load(path).mapping
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    reading = read_config(whole, path, choice, parse_hydra_overrides(launch.arguments))
    late = [word for word in launch.arguments if word.startswith("$") and word != config]
    open_points = [*reading.uncertainty.open_points]
    for word in late:
        open_points.append(f"{word}: may hold further overrides, which are not read.")
    # The first note names the framework; the file of the run comes next.
    first, *others = reading.notes
    return replace(
        reading,
        environment={**_collect_exported_variables(launch), **reading.environment},
        notes=(first, f"--config {name}: read from {path}.", *others),
        uncertainty=replace(reading.uncertainty, open_points=tuple(open_points)),
    )


def _find_suite_config(name: str | None, script: Path) -> str | None:
    """Return the file of a script of NeMo-RL's test suites: that of its name among the recipes.

    It is None for any other script, and for one that sets the name of its experiment.

    Args:
        name: The file as the command line names it.
    """
    if name is None or SUITE_CONFIG_PATTERN.fullmatch(name) is None:
        return None
    if "EXP_NAME=" in script.read_text(encoding="utf-8"):
        return None
    own_path = script.resolve().with_suffix(".yaml").as_posix()
    return own_path.replace(SUITES_FOLDER, RECIPES_FOLDER, 1)


def _find_config_option(launch: Launch) -> ShellWord | None:
    """Return the file that a command line names; None where it names none."""
    for word, next_word in zip(launch.arguments, (*launch.arguments[1:], ShellWord()), strict=True):
        name, sign, value = word.partition("=")
        if name == "--config":
            return ShellWord(value) if sign else next_word
    return None


def _find_default_config(launch: Launch) -> str | None:
    """Return the file that a program of NeMo-RL takes without `--config`, by the path of the program."""
    program = PurePosixPath(launch.program)
    default = DEFAULT_CONFIG_OF_PROGRAM.get(program.name)
    if default is None:
        return None
    return str(program.parent / "configs" / default)


def _collect_exported_variables(launch: Launch) -> dict[str, str]:
    return {name: str(value) for name, value in launch.environment.items() if not value.is_open}
