"""ROLL's files of a run: YAML with a section for each worker, and launch scripts of its pipelines.

The strategy of the worker that trains chooses the engine: `megatron_train` trains on Megatron Core by mcore_adapter,
which is a part of ROLL. It makes the model's config of the checkpoint, and writes `strategy_config` over it. The worker
is the actor of reinforcement learning and of DPO, `sft_train`, or the student of a distillation. The table has the keys
of the actor, which stand for those of each such worker.

Source: alibaba/ROLL 8eb27cc2 roll/distributed/strategy/megatron_strategy.py; roll/configs/worker_config.py;
mcore_adapter/src/mcore_adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from bridge.errors import PayloadError, UnreadFileError
from bridge.preflight.file_reading import FileReading
from bridge.preflight.run_choice import RunChoice
from bridge.read import framework_signs
from bridge.read.framework.checkpoint import Checkpoint, read_checkpoint
from bridge.read.framework.framework_table import load_framework_table
from bridge.read.framework.hf_config import MCORE_ADAPTER
from bridge.read.framework.reading_from_tree import build_reading_from_tree
from bridge.read.framework.tree import TreeReading, is_late, read_tree
from bridge.read.launch.launch import Launch
from bridge.read.text.document import Document
from bridge.read.text.dotted import get_dotted_value
from bridge.read.text.inherited_config import ConfigTree, resolve_interpolations
from bridge.read.text.repository_files import find_repository_file

TABLE_NAME = "roll"

# Keys of its files.
ACTOR = "actor_train"
TRAINERS = (ACTOR, "sft_train", "student", "student_train")
"""Workers that train the model.

Source: roll/pipeline/rlvr, agentic, dpo, sft and distill.
"""
STRATEGY_NAME = "strategy_args.strategy_name"
STRATEGY_CONFIG = f"{ACTOR}.strategy_args.strategy_config"
DTYPE_KEY = f"{ACTOR}.model_args.dtype"
MODEL_KEYS = (f"{ACTOR}.model_args.model_name_or_path", "pretrain", "student_pretrain")
DEVICES = "device_mapping"
BATCH_SIZE_KEY = f"{ACTOR}.training_args.per_device_train_batch_size"
LENGTH_KEY = "sequence_length"
PROMPT_LENGTH_KEY, RESPONSE_LENGTH_KEY = "prompt_length", "response_length"
DEFAULT_PROMPT_LENGTH = 1024
PACKING_KEY = f"{ACTOR}.use_sequence_packing"
PACKING_ALGORITHM_KEY = f"{ACTOR}.sequence_packing_args.algorithm"
PACK_LENGTH_KEY = f"{ACTOR}.sequence_packing_args.max_packed_sequence_length_train"
BALANCED = "load_balance"
"""Value of the packing's algorithm with which a micro-batch is a pack of a stated length.

Source: roll/utils/sequence_packing.py make_micro_batch_iter_for_sequence_packing.
"""
PAIR_KEYS = ("chosen_key", "rejected_key")
"""Keys of DPO alone: its micro-batch has a chosen and a rejected sample for each that is stated.

Source: roll/pipeline/dpo/dpo_config.py DPOConfig.
"""

REFERENCE, CRITIC = "reference", "critic"
REFERENCE_SWITCHES = ("enable_reference", "use_kl_loss", "is_pure_opd", "use_opd")
KL_KEY, ESTIMATOR_KEY = "init_kl_coef", "adv_estimator"
"""Keys of the penalty that needs a reference model, and of the estimator that needs a critic.

Source: roll/configs/base_config.py PPOConfig; roll/pipeline/rlvr/rlvr_pipeline.py RLVRPipeline.
"""
DEFAULT_KL, DEFAULT_ESTIMATOR = 0.2, "gae"
ADAPTER_KEY = f"{ACTOR}.model_args.lora_target"

# Values.
MEGATRON_STRATEGY = "megatron_train"
DEFAULT_DTYPE = "bf16"
DEVICE_RANGE = re.compile(r"list\(range\((\d+),\s*(\d+)\)\)")
DEVICE_LIST = re.compile(r"(?:list\()?\[([\d,\s]+)\]\)?")
"""Devices of a worker, as its files list them."""
DEFAULTS_ENTRY = re.compile(r"(?P<name>.+?)(?:@_here_)?")
"""An entry of `defaults`: a file whose content is the base of the file."""
OWN_FIELDS = ("moe_grouped_gemm", "moe_token_dispatcher_type", "moe_router_dtype")
"""Fields of experts that mcore_adapter takes from its own arguments, whatever the checkpoint is."""

# Sentences.
NUMBER_OF_GPUS = (
    "The number of GPUs: {key} has {count} of them. Add --target h100x{count}, for example."
)
BASE_NOT_READ = "defaults: {name} may state settings of the actor, and is not read."
OTHER_STRATEGY = (
    "{path}: states {key}={strategy}, which trains without Megatron Core. Give a run of the strategy "
    f"{MEGATRON_STRATEGY}."
)
NO_STRATEGY = "{path}: does not state {key}, and describes no training that is read. Give a file that states it."
FILE_WAS_READ = "--config_name {stem}: read from {path}."
NO_FILE = "{path}: starts {name} with the file {file}, which is not found from here. Give that YAML file itself."


def read_config(config: Mapping[str, object], path: Path, choice: RunChoice) -> FileReading:
    """Return what a YAML file says of a run.

    Raises:
        UnreadFileError: Its actor trains without Megatron Core.
    """
    values = resolve_interpolations(dict(config))
    trainer = _find_trainer(values)
    _refuse_other_trainers(config, values, trainer, path)
    values = _drop_unused_workers(_rename_trainer(values, trainer))
    table = load_framework_table(TABLE_NAME)
    tree = read_tree(table, values)
    _read_mode(tree, values)
    _read_batch(tree, values)
    for key, setting in list(tree.names.items()):
        if key.startswith(f"{ACTOR}."):
            tree.names[trainer + key.removeprefix(ACTOR)] = setting
    for owner_name in ("model", "optimizer", "ddp"):
        tree.sections.setdefault(owner_name, {})
    reading = build_reading_from_tree(
        table, tree, _read_checkpoint(values, path, choice), absent=OWN_FIELDS, known=OWN_FIELDS
    )
    open_points = (
        *_describe_gpus(values, trainer),
        *_describe_unread_bases(config, path),
        *reading.uncertainty.open_points,
    )
    return replace(
        reading,
        uncertainty=replace(reading.uncertainty, open_points=open_points),
    )


def read_launch(launch: Launch, script: Path, choice: RunChoice) -> FileReading:
    """Return what one launch of a script says: the YAML file that its two options name.

    Raises:
        UnreadFileError: The file is not found, or its actor trains without Megatron Core.
    """
    options = {str(word): str(value) for word, value in pairwise(launch.arguments)}
    folder, stem = options.get("--config_path", ""), options.get("--config_name", "")
    file = f"{folder}/{stem.removesuffix('.yaml')}.yaml"
    path = find_repository_file(file, script)
    if path is None:
        sentence = NO_FILE.format(path=script, name=launch.name, file=file)
        raise UnreadFileError(sentence, kind="its file is not found")
    try:
        config = Document.load(path).mapping
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    reading = read_config(config, path, choice)
    environment: dict[str, str] = {}
    for name, value in launch.environment.items():
        if not value.is_open:
            environment[name] = str(value)
    reading = replace(reading, environment=environment)
    return reading.with_notes(FILE_WAS_READ.format(stem=stem, path=path))


def _find_trainer(values: ConfigTree) -> str:
    """Return the worker that trains: the first with a strategy, or the actor if none has one."""
    for name in TRAINERS:
        if get_dotted_value(values, f"{name}.{STRATEGY_NAME}") is not None:
            return name
    return ACTOR


def _rename_trainer(values: ConfigTree, trainer: str) -> ConfigTree:
    """Return the tree with the worker that trains under the name of the actor."""
    if trainer == ACTOR:
        return values
    renamed: ConfigTree = {}
    for name, value in values.items():
        if name == trainer:
            renamed[ACTOR] = value
        elif name != ACTOR:
            renamed[name] = value
    return renamed


def _drop_unused_workers(values: ConfigTree) -> ConfigTree:
    """Return the tree without a reference model and a critic that the run does not start."""
    unused: set[str] = set()
    if not _starts_reference(values):
        unused.add(REFERENCE)
    if values.get(ESTIMATOR_KEY, DEFAULT_ESTIMATOR) != DEFAULT_ESTIMATOR:
        unused.add(CRITIC)
    return {name: value for name, value in values.items() if name not in unused}


def _starts_reference(values: ConfigTree) -> bool:
    """Return whether the run starts a reference model, or only the run knows that.

    DPO always starts one. With adapters the frozen model is the reference.
    """
    if any(key in values for key in PAIR_KEYS):
        return True
    if get_dotted_value(values, ADAPTER_KEY) is not None:
        return False
    if any(values.get(key) for key in REFERENCE_SWITCHES):
        return True
    return values.get(KL_KEY, DEFAULT_KL) not in (0, None)


def _refuse_other_trainers(
    config: Mapping[str, object], values: ConfigTree, trainer: str, path: Path
) -> None:
    """Raise UnreadFileError where the worker that trains does not do so on Megatron Core."""
    key = f"{trainer}.{STRATEGY_NAME}"
    strategy = get_dotted_value(values, key)
    if strategy == MEGATRON_STRATEGY:
        return
    if strategy is not None:
        sentence = OTHER_STRATEGY.format(path=path, key=key, strategy=strategy)
        raise UnreadFileError(sentence, kind="ROLL without Megatron Core")
    document = Document(path=str(path), text="", kind="yaml", of=config)
    framework = framework_signs.recognise_file(document)
    if framework is not None:
        sentence = replace(framework, tree="").refusal(str(path))
        raise UnreadFileError(sentence, kind=f"looks like {framework.name}")
    raise UnreadFileError(NO_STRATEGY.format(path=path, key=key), kind="states no strategy")


def _read_mode(tree: TreeReading, values: ConfigTree) -> None:
    """Write the switches of the mode: those of the strategy, or the dtype of the actor's model."""
    dtype = get_dotted_value(values, DTYPE_KEY) or DEFAULT_DTYPE
    for mode in ("bf16", "fp16"):
        key = f"{STRATEGY_CONFIG}.{mode}"
        switch = get_dotted_value(values, key)
        if switch is not None:
            tree.put(f"model.{mode}", switch, key)
        elif is_late(dtype):
            tree.put(f"model.{mode}", dtype, DTYPE_KEY)
        else:
            tree.put(f"model.{mode}", dtype == mode, DTYPE_KEY)


def _read_batch(tree: TreeReading, values: ConfigTree) -> None:
    """Write the tokens of a micro-batch: samples of the greatest length, or samples up to a number of tokens.

    Without a greatest length it is that of a prompt and a response. DPO trains on pairs of samples.

    Source: roll/configs/base_config.py BaseConfig.
    """
    samples = get_dotted_value(values, BATCH_SIZE_KEY)
    if isinstance(samples, int) and any(key in values for key in PAIR_KEYS):
        tree.put("train.micro_batch_size", 2 * samples)
    tokens = _get_tokens_of_micro_batch(values)
    if tokens is not None:
        tree.put("model.seq_length", tokens)
        tree.put("train.micro_batch_size", 1)
        return
    length = values.get(LENGTH_KEY)
    prompt = values.get(PROMPT_LENGTH_KEY, DEFAULT_PROMPT_LENGTH)
    response = values.get(RESPONSE_LENGTH_KEY)
    if length is None and isinstance(prompt, int) and isinstance(response, int):
        length = prompt + response
    if length is not None:
        tree.put("model.seq_length", length)


def _get_tokens_of_micro_batch(values: ConfigTree) -> object:
    """Return the greatest number of tokens of a micro-batch; None if it is one of samples.

    Dynamic batching goes before packing.
    """
    if get_dotted_value(values, f"{ACTOR}.use_dynamic_batching_in_train") is True:
        return get_dotted_value(values, f"{ACTOR}.max_tokens_per_microbatch_in_train")
    is_packed = get_dotted_value(values, PACKING_KEY) is True
    if is_packed and get_dotted_value(values, PACKING_ALGORITHM_KEY) == BALANCED:
        return get_dotted_value(values, PACK_LENGTH_KEY)
    return None


def _read_checkpoint(values: ConfigTree, path: Path, choice: RunChoice) -> Checkpoint:
    """Return the checkpoint of the worker that trains."""
    name = None
    for key in reversed(MODEL_KEYS):
        value = get_dotted_value(values, key)
        if value is not None:
            name = value
    return read_checkpoint(name, path, choice, MCORE_ADAPTER)


def _describe_gpus(values: ConfigTree, trainer: str) -> Iterator[str]:
    """Yield a sentence about the number of the trainer's GPUs if the file lists them."""
    count = _count_devices(str(get_dotted_value(values, f"{ACTOR}.{DEVICES}")))
    if count is not None:
        yield NUMBER_OF_GPUS.format(key=f"{trainer}.{DEVICES}", count=count)


def _count_devices(text: str) -> int | None:
    """Return the number of devices in a list, or a sum of lists; None if the text is neither."""
    count = 0
    for part in text.split("+"):
        device_range = DEVICE_RANGE.fullmatch(part.strip())
        device_list = DEVICE_LIST.fullmatch(part.strip())
        if device_range is not None:
            count += int(device_range[2]) - int(device_range[1])
        elif device_list is not None:
            count += len(device_list[1].split(","))
        else:
            return None
    return count


def _describe_unread_bases(config: Mapping[str, object], path: Path) -> Iterator[str]:
    """Yield a sentence for each file that `defaults` names and that may state settings of the actor."""
    entries = config.get("defaults")
    if not isinstance(entries, list):
        return
    for entry in entries:
        name = DEFAULTS_ENTRY.fullmatch(str(entry))
        if name is None or name["name"] == "_self_":
            continue
        try:
            base = Document.load(path.parent / f"{name['name']}.yaml").mapping
        except PayloadError:
            yield BASE_NOT_READ.format(name=entry)
            continue
        if any(name in base for name in TRAINERS):
            yield BASE_NOT_READ.format(name=entry)
