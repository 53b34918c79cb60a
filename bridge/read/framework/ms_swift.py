"""ms-swift's runs on Megatron Core: command lines of `megatron`, and YAML or JSON files of its arguments.

Its arguments have Megatron's names, with `true` and `false` as values. Nothing of the model stands in them:
mcore-bridge makes its config of the checkpoint's `config.json`. Where no argument states the mode, the checkpoint's
`torch_dtype` decides it: bfloat16 becomes bf16, and both float16 and float32 become fp16.

Source: modelscope/ms-swift 3602360a swift/megatron/arguments/megatron_args.py; swift/arguments/base_args/model_args.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from bridge.errors import PayloadError, UnreadFileError
from bridge.preflight.file_reading import FileReading
from bridge.preflight.megatron_release import MegatronRelease
from bridge.preflight.run_choice import RunChoice
from bridge.read.framework.checkpoint import Checkpoint, read_checkpoint
from bridge.read.framework.framework_options import GENERATION_PURPOSE
from bridge.read.framework.framework_table import FrameworkTable, load_framework_table
from bridge.read.framework.hf_config import MCORE_BRIDGE
from bridge.read.framework.npu import NPU_CHANGES, find_npu_variable
from bridge.read.framework.reading_from_tree import build_reading_from_tree
from bridge.read.framework.tree import TreeReading, is_late, read_tree
from bridge.read.launch.launch import Launch
from bridge.read.launch.shell_word import ShellWord
from bridge.read.text.command_arguments import OPTIONS_VARIABLE_PATTERN
from bridge.read.text.document import Document
from bridge.read.text.hydra_overrides import parse_override_value
from bridge.read.text.repository_files import find_repository_file
from bridge.target.fields import OWNER_FIELDS, TE_ADAPTER
from bridge.target.versions import parse_version

TABLE_NAME = "ms_swift"

# Words of its files and command lines.
TRAINING_COMMANDS = frozenset({"sft", "pt", "rlhf"})
ENVIRONMENT_SECTION = "ENV"
"""Section of a YAML file with environment variables."""
FILE_SUFFIXES = (".yaml", ".yml", ".json")
SCHEDULER_KEY = "multi_turn_scheduler"
"""Argument with the class that makes further turns of a sample."""

# Values.
OWNERS = ("model", "optimizer", "ddp")
MODE_DEPENDENT_SETTINGS = (
    "model.params_dtype",
    "model.pipeline_dtype",
    "ddp.grad_reduce_in_fp32",
)
MODE_OF_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp16"}
"""Value of `torch_dtype` -> the mode that it becomes where none is stated."""
RELEASE_ON_NPU = MegatronRelease(
    version=parse_version("0.16.1"),
    reason="the nearest known release to 0.16.0, which ms-swift's guide to NPUs of Ascend installs",
)
"""Source: docs/source_en/BestPractices/NPU-support.md."""

# Sentences.
TRAINS_ON_NPU = f"{{name}} is set, which NPUs of Ascend alone read: {NPU_CHANGES}"
CONVERTS_A_CHECKPOINT = (
    "{path}: starts megatron {command}, which converts a checkpoint and trains nothing. "
    "Give the command that trains."
)
FILE_NOT_FOUND = "{path}: starts megatron with the file {name}, which is not found from here. Give that file itself."
MODE_DECIDER = "the torch_dtype of {checkpoint}"
FP32_BECOMES_FP16 = (
    "torch_dtype=float32: ms-swift trains in fp16 with it, where neither bf16 nor fp16 is stated."
)
MODE_FROM_CHECKPOINT = (
    "The mode is {mode}, since {source} has torch_dtype={dtype} and no argument states a mode."
)
ADAPTER_NOT_COUNTED = (
    "{name}={value}: weights are frozen and adapters train; all weights are counted as trained."
)
REFERENCE_NOT_COUNTED = (
    "rlhf_type={kind}: a reference model computes too, and its weights are not counted."
)
OTHER_LINEAR_ATTENTION = (
    "USE_MCORE_GDN={value}: linear attention is that of transformers, which cannot be planned."
)
FURTHER_TURNS_NOT_COUNTED = (
    f"{SCHEDULER_KEY}={{scheduler}}: a sample may have further turns; one completion is counted."
)
NUMBER_OF_GPUS = "The number of GPUs: {stated}. Add --target h100x{all}, for example."
ADAPTER_TYPE_NAMES = ("tuner_type", "train_type")
"""Names of the argument that chooses between full training and adapters."""
FULL_TRAINING, LORA = "full", "lora"
ADAPTER_FILES = ("adapters", "ref_adapters", "mcore_adapter", "mcore_ref_adapter")
"""Arguments with the files of an adapter. With one of them adapters train whatever `tuner_type` is."""
UNCOUNTED_ADAPTER_ARGUMENTS = (*ADAPTER_FILES, "target_regex", "modules_to_save")
"""Arguments with which the layers and widths of the adapters are not known, or others train too."""
ALL_LINEAR, ALL_ROUTER, ALL_EMBEDDING = "all-linear", "all-router", "all-embedding"
"""Values of `target_modules` that stand for layers of a kind."""
ROUTER = "router"
DEFAULT_RANK, DEFAULT_DROPOUT = 8, 0.05
LINEAR_ATTENTION_VARIABLE = "USE_MCORE_GDN"
"""Variable that chooses between linear attention of Megatron Core, by default, and of transformers.

Source: mcore-bridge 1.6.5 config/parser.py, model/gpts/qwen3_next.py and model/mm_gpts/qwen3_5.py.
"""
OFF_WORDS = ("0", "false", "no", "n", "f", "off")
LINEAR_ATTENTION = "gated_delta_net"
"""Value of `experimental_attention_variant` for linear attention of Megatron Core."""
TYPES_WITHOUT_REFERENCE = ("rm", "gkd")
"""Values of `rlhf_type` whose trainer loads no reference model.

Source: swift/megatron/trainers/rlhf_mixin.py prepare_model.
"""
TYPES_WITH_ROLLOUT = ("grpo", "gkd")
"""Values of `rlhf_type` whose samples are prompts with the completions that the model generates.

Source: swift/megatron/trainers/grpo_trainer.py _maybe_replace_response_token, gkd_trainer.py _encode_samples.
"""
TYPES_WITH_PAIRS = ("dpo", "rm")
"""Values of `rlhf_type` whose samples are pairs. A pack of samples is as long as is stated.

Source: swift/template/base.py _rlhf_data_collator.
"""
PACKING_KEY = "packing"
LENGTH_KEY, COMPLETION_LENGTH_KEY = "max_length", "max_completion_length"
DEFAULT_COMPLETION_LENGTH = 512
RAY_GROUPS = ("train", "rollout", "teacher")
"""Groups of a file for Ray, each with the arguments of the processes of a role."""
GROUP_GPUS_KEY = "gpus"
"""Argument of a group that is none of Megatron's: the GPUs of the role."""
TRAINING_GPUS_KEY = "train.gpus"


def read_config(config: Mapping[str, object], path: Path, choice: RunChoice) -> FileReading:
    """Return what a YAML file of arguments says of a run."""
    variables = config.get(ENVIRONMENT_SECTION)
    environment = {}
    if isinstance(variables, Mapping):
        environment = {str(name): str(value) for name, value in variables.items()}
    arguments = _select_training_arguments(config)
    return _build_reading(
        arguments,
        environment,
        read_checkpoint(_get_checkpoint_name(arguments), path, choice, MCORE_BRIDGE),
    )


def read_launch(launch: Launch, script: Path, choice: RunChoice) -> FileReading:
    """Return what one launch of a script says: its arguments, and the file that stands before them.

    Raises:
        UnreadFileError: It trains nothing, or its file is not found.
    """
    tokens = list(launch.arguments)
    command = ""
    if launch.program.endswith(".py"):
        command = PurePosixPath(launch.program).stem
    elif tokens and not tokens[0].startswith("-"):
        command = tokens.pop(0)
    if command and command not in TRAINING_COMMANDS:
        raise UnreadFileError(
            CONVERTS_A_CHECKPOINT.format(path=script, command=command), kind="trains nothing"
        )
    environment = {
        name: str(value) for name, value in launch.environment.items() if not value.is_open
    }
    arguments: dict[str, object] = {}
    read_too = []
    name = _pop_file_name(tokens)
    if name is not None:
        path = find_repository_file(name, script)
        if path is None:
            raise UnreadFileError(
                FILE_NOT_FOUND.format(path=script, name=name), kind="its file is not found"
            )
        arguments, variables = _load_arguments_file(path)
        environment = {**variables, **environment}
        read_too.append(f"{name}: read from {path}.")
    arguments |= _parse_arguments(tokens)
    checkpoint = read_checkpoint(_get_checkpoint_name(arguments), script, choice, MCORE_BRIDGE)
    reading = _build_reading(arguments, environment, checkpoint)
    late = _list_words_with_arguments(tokens)
    open_points = (*reading.uncertainty.open_points, *late)
    uncertainty = replace(reading.uncertainty, open_points=open_points)
    return replace(reading, uncertainty=uncertainty).with_notes(*read_too)


def _list_words_with_arguments(tokens: Sequence[ShellWord]) -> list[str]:
    """Return a sentence for each word that only the run knows and that may hold arguments.

    A word directly behind an option is its value, unless the name of its variable says otherwise.
    """
    words: list[str] = []
    previous = ""
    for word in tokens:
        is_value = previous.startswith("--") and "=" not in previous
        if OPTIONS_VARIABLE_PATTERN.search(word):
            is_value = False
        if word.startswith("$") and not is_value and word not in words:
            words.append(str(word))
        previous = word
    return [f"{word}: may hold further arguments, which are not read." for word in words]


def _load_arguments_file(path: Path) -> tuple[dict[str, object], dict[str, str]]:
    """Return the arguments of a file, and its environment variables."""
    try:
        config = Document.load(path).mapping
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    variables = config.get(ENVIRONMENT_SECTION)
    environment = {}
    if isinstance(variables, Mapping):
        environment = {str(name): str(value) for name, value in variables.items()}
    return _select_training_arguments(config), environment


def _pop_file_name(tokens: list[ShellWord]) -> ShellWord | None:
    """Take the name of the file off a command line: its first word, or the value of `--config` for Ray."""
    if tokens and tokens[0].endswith(FILE_SUFFIXES):
        return tokens.pop(0)
    if "--use_ray" in tokens and "--config" in tokens[:-1]:
        index = tokens.index(ShellWord("--config"))
        tokens.pop(index)
        return tokens.pop(index)
    return None


def _select_training_arguments(config: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of the processes that train.

    In a file for Ray the group `train` stands over the arguments of all roles, and the engine of the rollout has a
    group of its own (swift/ray/megatron/driver_utils.py parse_ray_yaml).
    """
    groups: dict[str, Mapping[str, object]] = {}
    for role in RAY_GROUPS:
        group = config.get(role)
        if isinstance(group, Mapping):
            groups[role] = group
    arguments: dict[str, object] = {}
    for name, value in config.items():
        if name != ENVIRONMENT_SECTION and name not in groups:
            arguments[str(name)] = value
    for name, value in groups.get("rollout", {}).items():
        row = load_framework_table(TABLE_NAME).find_option(name)
        if row is not None and row.purpose == GENERATION_PURPOSE:
            arguments[name] = value
    for name, value in groups.get("train", {}).items():
        key = TRAINING_GPUS_KEY if name == GROUP_GPUS_KEY else str(name)
        arguments[key] = value
    return arguments


def _parse_arguments(tokens: Iterable[ShellWord]) -> dict[str, object]:
    """Return name -> value of the arguments of a command line; several values are a list."""
    values_of_name: dict[str, list[ShellWord]] = {}
    name = ""
    for word in tokens:
        if word.startswith("--"):
            option, sign, value = word.partition("=")
            name = option.lstrip("-").replace("-", "_")
            values_of_name[name] = [ShellWord(value)] if sign else []
        elif name and not word.startswith("$@"):
            values_of_name[name].append(word)
    return {name: _parse_value(values) for name, values in values_of_name.items()}


def _parse_value(tokens: list[ShellWord]) -> object:
    values: list[object] = []
    for word in tokens:
        if word.is_open:
            values.append(str(word))
        else:
            values.append(parse_override_value(word))
    if not values:
        return True
    if len(values) == 1:
        return values[0]
    return values


def _get_checkpoint_name(arguments: Mapping[str, object]) -> object:
    """Return the name of the checkpoint that arguments state; None where they state none."""
    return arguments.get("model", arguments.get("mcore_model"))


def _build_reading(
    arguments: Mapping[str, object], environment: Mapping[str, str], checkpoint: Checkpoint
) -> FileReading:
    table = load_framework_table(TABLE_NAME)
    tree = _read_settings(table, arguments)
    _read_adapter(tree, arguments)
    decider = _write_mode(tree, arguments, checkpoint)
    _write_batch_sizes(tree, arguments)
    for owner_name in OWNERS:
        tree.sections.setdefault(owner_name, {})
    if decider is not None:
        tree.opened = {**dict.fromkeys(MODE_DEPENDENT_SETTINGS, decider), **tree.opened}
    npu_variable = find_npu_variable(environment)
    if npu_variable is not None:
        tree.unknown.append(TRAINS_ON_NPU.format(name=npu_variable))
        tree.uncounted.append(npu_variable)
    known = ("moe_router_dtype", "moe_grouped_gemm")
    reading = build_reading_from_tree(table, tree, checkpoint, known=known)
    release = reading.release
    if npu_variable is not None:
        release = RELEASE_ON_NPU
    granularity = str(arguments.get("recompute_granularity"))
    open_settings = _describe_open_settings(arguments, environment, checkpoint)
    uncertainty = replace(
        reading.uncertainty,
        open_points=(*open_settings, *reading.uncertainty.open_points),
        mode_decider=decider,
        no_plan_reason=reading.uncertainty.no_plan_reason
        or _find_other_linear_attention(environment, checkpoint),
    )
    return replace(
        reading,
        own_fields={"argument.recompute_granularity": granularity},
        environment=environment,
        release=release,
        uncertainty=uncertainty,
    )


def _read_settings(table: FrameworkTable, arguments: Mapping[str, object]) -> TreeReading:
    """Return what arguments say: those of the table by its rows, and the others by Megatron's names."""
    tree = read_tree(table, arguments)
    for name, value in arguments.items():
        if (
            name in table.fields
            or table.find_option(name) is not None
            or isinstance(value, Mapping)
        ):
            continue
        for owner_name in OWNERS:
            if name in OWNER_FIELDS[owner_name]:
                tree.put(f"{owner_name}.{name}", _normalise_value(name, value), name)
    return tree


def _normalise_value(name: str, value: object) -> object:
    """Return a value as Megatron has it: "none" is None, and Flash Attention is one back end in all versions."""
    if value == "none" and name in ("recompute_granularity", "moe_router_dtype"):
        return None
    if name == "attention_backend" and str(value).startswith("flash_"):
        return "flash"
    return value


def _read_adapter(tree: TreeReading, arguments: Mapping[str, object]) -> None:
    """Write the adapter that trains in the place of the model's weights, if any.

    Source: swift/megatron/utils/utils.py prepare_adapter; mcore-bridge 1.6.5 tuners/lora.py.
    """
    name, value = _find_adapter_argument(arguments)
    if not name:
        return
    targets = arguments.get("target_modules", ALL_LINEAR)
    if not isinstance(targets, list):
        targets = [targets]
    rank = arguments.get("lora_rank", DEFAULT_RANK)
    dropout = arguments.get("lora_dropout", DEFAULT_DROPOUT)
    is_plain = value == LORA and arguments.get("lora_bias", "none") == "none"
    is_whole_model = arguments.get("freeze_llm") is True or arguments.get("task_type") == "seq_cls"
    has_others = any(arguments.get(other) for other in UNCOUNTED_ADAPTER_ARGUMENTS)
    is_late_value = any(is_late(late) for late in (rank, dropout, *targets))
    is_known = isinstance(rank, int) and isinstance(dropout, int | float)
    if not is_plain or is_whole_model or has_others or is_late_value or not is_known:
        tree.unknown.append(ADAPTER_NOT_COUNTED.format(name=name, value=value))
        tree.uncounted.append(name)
        tree.opened.setdefault("optimizer.use_distributed_optimizer", name)
        return
    tree.sections["peft"] = {
        "type": TE_ADAPTER,
        "dim": rank,
        "dropout": dropout,
        "share_expert_adapters": False,
        **_select_targets([str(target) for target in targets]),
    }


def _find_adapter_argument(arguments: Mapping[str, object]) -> tuple[str, object]:
    """Return name and value of the argument with which adapters train; an empty name for full training."""
    for name in ADAPTER_TYPE_NAMES:
        if arguments.get(name, FULL_TRAINING) != FULL_TRAINING:
            return name, arguments[name]
    for name in ADAPTER_FILES:
        if arguments.get(name):
            return name, arguments[name]
    return "", None


def _select_targets(names: list[str]) -> dict[str, list[str]]:
    """Return the linear layers that adapters take, or those that they leave out, as fields of `peft`.

    A name stands for each layer whose path ends with it.
    """
    if ALL_LINEAR in names:
        excluded = [ROUTER]
        if ALL_ROUTER in names:
            excluded = []
        return {"target_modules": [], "exclude_modules": excluded}
    targets: list[str] = []
    for name in names:
        if name == ALL_ROUTER:
            targets.append(ROUTER)
        else:
            targets += [name, f"*.{name}"]
    return {"target_modules": targets}


def _write_mode(
    tree: TreeReading, arguments: Mapping[str, object], checkpoint: Checkpoint
) -> str | None:
    """Write the switches of the mode, and return what decides it where nothing states it."""
    stated = [arguments.get(name) for name in ("bf16", "fp16")]
    if any(value is True for value in stated):
        for name in ("bf16", "fp16"):
            tree.put(f"model.{name}", arguments.get(name) is True)
            tree.put(f"optimizer.{name}", arguments.get(name) is True)
        return None
    if any(is_late(value) for value in (*stated, arguments.get("torch_dtype"))):
        return _get_first_late(*stated, arguments.get("torch_dtype"))
    dtype = _get_dtype(arguments, checkpoint)
    if dtype in MODE_OF_DTYPE:
        for name in ("bf16", "fp16"):
            is_on = MODE_OF_DTYPE[dtype] == name and arguments.get(name) is not False
            tree.put(f"model.{name}", is_on, "torch_dtype")
            tree.put(f"optimizer.{name}", is_on)
        return None
    if stated == [False, False]:
        return None
    return MODE_DECIDER.format(
        checkpoint=_get_checkpoint_name(arguments) or "the checkpoint of the run"
    )


def _get_first_late(*values: object) -> str:
    """Return the first of values that only the run knows."""
    late = [str(value) for value in values if is_late(value)]
    return late[0]


def _get_dtype(arguments: Mapping[str, object], checkpoint: Checkpoint) -> str:
    """Return the dtype of the weights: that of the arguments, or that of the checkpoint; empty where none is known."""
    return str(arguments.get("torch_dtype") or checkpoint.model.dtype or "")


def _write_batch_sizes(tree: TreeReading, arguments: Mapping[str, object]) -> None:
    """Write the tokens of a sequence: a pack of samples, or the greatest length of one.

    `max_length` is the greatest length of a prompt alone if the model generates the completions,
    and that of each of the two texts of a pair.
    """
    length = arguments.get("packing_length", arguments.get(LENGTH_KEY))
    is_paired = arguments.get("rlhf_type") in TYPES_WITH_PAIRS
    if is_paired and not arguments.get(PACKING_KEY) and isinstance(length, int):
        length = 2 * length
    if arguments.get("rlhf_type") in TYPES_WITH_ROLLOUT:
        prompt = arguments.get(LENGTH_KEY)
        completion = arguments.get(COMPLETION_LENGTH_KEY, DEFAULT_COMPLETION_LENGTH)
        length = None
        if isinstance(prompt, int) and isinstance(completion, int):
            length = prompt + completion
        scheduler = arguments.get(SCHEDULER_KEY)
        if scheduler:
            tree.unknown.append(FURTHER_TURNS_NOT_COUNTED.format(scheduler=scheduler))
            tree.uncounted.append(SCHEDULER_KEY)
    if isinstance(length, int):
        tree.put("model.seq_length", length)


def _has_unstated_reference(arguments: Mapping[str, object]) -> bool:
    """Return whether the trainer loads a reference model that no argument names.

    With an adapter the frozen model is the reference.
    """
    kind = arguments.get("rlhf_type")
    if kind is None or kind in TYPES_WITHOUT_REFERENCE or _find_adapter_argument(arguments)[0]:
        return False
    return not (arguments.get("ref_model") or arguments.get("mcore_ref_model"))


def _find_other_linear_attention(
    environment: Mapping[str, str], checkpoint: Checkpoint
) -> str | None:
    """Return why a model whose linear attention is that of transformers has no plan; None for others."""
    value = environment.get(LINEAR_ATTENTION_VARIABLE, "")
    if value.lower() not in OFF_WORDS:
        return None
    if checkpoint.model.fields.get("experimental_attention_variant") != LINEAR_ATTENTION:
        return None
    return OTHER_LINEAR_ATTENTION.format(value=value)


def _describe_open_settings(
    arguments: Mapping[str, object], environment: Mapping[str, str], checkpoint: Checkpoint
) -> list[str]:
    """Return what the run leaves open, as sentences."""
    sentences = []
    if _has_unstated_reference(arguments):
        sentences.append(REFERENCE_NOT_COUNTED.format(kind=arguments["rlhf_type"]))
    dtype = _get_dtype(arguments, checkpoint)
    is_stated = arguments.get("bf16") is True or arguments.get("fp16") is True
    if dtype == "float32" and not is_stated:
        sentences.append(FP32_BECOMES_FP16)
    elif dtype in MODE_OF_DTYPE and not is_stated and arguments.get("torch_dtype") is None:
        sentences.append(
            MODE_FROM_CHECKPOINT.format(
                mode=MODE_OF_DTYPE[dtype], dtype=dtype, source=checkpoint.source
            )
        )
    if find_npu_variable(environment) is not None:
        return sentences
    gpus = arguments.get(TRAINING_GPUS_KEY)
    if gpus is not None:
        sentences.append(NUMBER_OF_GPUS.format(stated=f"{TRAINING_GPUS_KEY}={gpus}", all=gpus))
        return sentences
    each, nodes = environment.get("NPROC_PER_NODE", ""), environment.get("NNODES", "1")
    if each.isdecimal() and nodes.isdecimal():
        stated = f"NPROC_PER_NODE={each} and NNODES={nodes}"
        sentences.append(NUMBER_OF_GPUS.format(stated=stated, all=int(each) * int(nodes)))
    return sentences
