"""verl's runs: launch scripts with overrides of Hydra, and YAML files with its whole configuration.

The strategy of the actor chooses the engine: `megatron` trains on Megatron Core, and the others on PyTorch. What a
script does not state is what verl's own YAML files state, which are part of its package; rows of the table have them.

Source: verl-project/verl 1dda039b verl/workers/engine/megatron/transformer_impl.py; verl/trainer/config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from bridge.errors import Finding, UnreadFileError
from bridge.preflight.file_reading import FileReading
from bridge.preflight.megatron_release import MegatronRelease
from bridge.preflight.run_choice import RunChoice
from bridge.read import framework_signs
from bridge.read.framework.checkpoint import Checkpoint, read_checkpoint
from bridge.read.framework.framework_table import load_framework_table
from bridge.read.framework.hf_config import MBRIDGE, MEGATRON_BRIDGE
from bridge.read.framework.npu import NPU_CHANGES, find_npu_variable
from bridge.read.framework.reading_from_tree import build_reading_from_tree
from bridge.read.framework.tree import TreeReading, is_late, read_tree
from bridge.read.framework_fields import list_all_framework_fields
from bridge.read.launch.launch import Launch
from bridge.read.launch.launched_ranks import count_launched_ranks
from bridge.read.launch.shell_word import ShellWord
from bridge.read.text.document import Document
from bridge.read.text.dotted import get_dotted_value
from bridge.read.text.hydra_overrides import (
    HydraOverride,
    apply_hydra_overrides,
    parse_hydra_overrides,
)
from bridge.read.text.inherited_config import ConfigTree, resolve_interpolations
from bridge.rules.facts.near_names import find_near_fields
from bridge.target.fields import OWNER_FIELDS
from bridge.target.versions import parse_version

TABLE_NAME = "verl"

# Keys of its files.
ACTOR_BLOCK = "actor_rollout_ref.actor"
MODEL_BLOCK = "actor_rollout_ref.model"
NODES_KEY = "trainer.nnodes"
DEVICE_KEY = "trainer.device"
DEVICES_KEY = "trainer.n_gpus_per_node"
DTYPE_KEY = f"{ACTOR_BLOCK}.megatron.dtype"
OVERRIDES_KEY = f"{ACTOR_BLOCK}.megatron.override_transformer_config"
"""Fields of the model that go to Megatron Bridge by their names."""
VANILLA_MBRIDGE = "megatron.vanilla_mbridge"
"""Key below the actor that asks for the older bridge; the rows of the table read it by this name."""
ADAPTER = f"{MODEL_BLOCK}.lora"
RANK = f"{ADAPTER}.rank"
REFERENCE = (f"{ACTOR_BLOCK}.use_kl_loss", "algorithm.use_kl_in_reward")
"""Switches of a reference model."""

# Words of its command lines.
HYDRA_GROUPS = frozenset({"model_engine", "engine", "optim", "actor", "model", "critic", "data"})
"""Groups of Hydra whose option is named without a dot."""
READ_KEYS = re.compile(
    r"model_engine|trainer\.(?:nnodes|n_gpus_per_node|device)|algorithm\.adv_estimator"
    r"|actor_rollout_ref\.actor\.(?:strategy|use_dynamic_bsz|ppo_\w+_per_gpu)"
    r"|actor_rollout_ref\.model\.(?:path|mtp\.enable|override_config\..+)"
)
"""Keys of its configuration that this module reads, besides those of the table."""
STRATEGY_OF_ENGINE = {
    "dp": "fsdp",
    "megatron": "megatron",
    "veomni": "veomni",
    "torchtitan": "torchtitan",
}
"""Option of the group `model_engine` -> the strategy of its actor."""
ACTOR_GROUP = f"actor@{ACTOR_BLOCK}"
"""Group of Hydra whose option is the actor's file."""
ACTOR_FILE = re.compile(r"(?P<engine>\w+)_actor(?:\.ya?ml)?\Z")
"""An actor's file of verl, which has the name of its engine."""
SUPERVISED_PROGRAM = re.compile(r"\bsft_trainer|\bsft\b")
"""In the name of a program of supervised training."""
GENERATING_PROGRAM = re.compile(r"\bmain_(?:generation|eval)")
"""In the name of a program that trains nothing."""

# Values.
MODE_OF_DTYPE = {"bfloat16": "bf16", "float16": "fp16"}
"""Value of `megatron.dtype` -> the switch of the model that is on."""
SET_OVER_THE_BRIDGE = ("attention_backend", "moe_token_dispatcher_type")
"""Fields that a bridge gives a model and that verl sets itself, by a row of the table."""
ADAPTERS = {
    "lora": "LoRA",
    "vlm_lora": "VLMLoRA",
    "canonical_lora": "CanonicalLoRA",
    "dora": "DoRA",
}
"""Value of `lora.type` -> the class of Megatron Bridge."""
ADAPTER_FIELDS = ("target_modules", "exclude_modules", "dropout")
"""Keys of `lora` that are fields of that class."""
OPTIMIZER_DTYPES = {
    "optim.main_grads_dtype": "fp32",
    "optim.exp_avg_dtype": "fp32",
    "optim.exp_avg_sq_dtype": "fp32",
}
"""Dtypes of the precision-aware optimizer that verl's own files state."""

NPU = "npu"
"""Value of `trainer.device` for the NPUs of Ascend."""
RELEASE_ON_NPU = MegatronRelease(
    version=parse_version("0.16.1"),
    reason="the nearest known release to core_r0.16.0, which verl's guide to NPUs of Ascend installs",
)
"""Source: docs/ascend_tutorial/get_start/install_guidance.rst."""

# Sentences.
TRAINS_NOTHING = (
    "{path}: starts {name}, which generates or evaluates samples and trains nothing. "
    "Give a run that trains."
)
TRAINS_ON_PYTORCH = (
    "{path}: starts {name} with the strategy {strategy}, which trains on PyTorch, without Megatron Core. "
    "Give a run of the strategy megatron."
)
STRATEGY_NOT_KNOWN = (
    "{path}: starts {name} with the strategy {strategy}, which only the run knows. "
    "State the variable: --context variables='NAME=VALUE'."
)
ACTOR_NOT_KNOWN = (
    "{path}: starts {name} with the actor {actor}, which is not a file of verl. "
    "Its strategy is not known from here. Give a run of the strategy megatron."
)
DTYPE_RULE = "takes bfloat16 or float16 alone, and stops at the start"
TRAINS_ON_NPU = f"trainer.device=npu: {NPU_CHANGES}"
NPU_VARIABLE_IS_SET = (
    "{name} is set, which NPUs of Ascend alone read: the run counts as one with trainer.device=npu."
)
NUMBER_OF_GPUS = (
    "The number of GPUs: trainer states nnodes={nodes} and n_gpus_per_node={each}. "
    "Add --target h100x{all}, for example."
)
FIELD_NOT_KNOWN_RULE = (
    "no known release of Megatron Core has this field, and with such a release Megatron Bridge from "
    "0.5.0 on stops at the start (models/model_provider.py apply_overrides_and_finalize)"
)
CRITIC_NOT_COUNTED = "algorithm.adv_estimator=gae: a critic trains too, and is not counted."
ADAPTER_NOT_KNOWN = (
    "{key}={value}: where it is above 0 the model is frozen and adapters train; "
    "all weights are counted as trained."
)
REFERENCE_NOT_COUNTED = (
    "{key}=True: a reference model computes too, and its weights are not counted."
)
ROLLOUT_IS_QUANTISED = (
    "{key}={value}: the engine of the rollout quantises its weights by it, and trains nothing."
)


def read_config(config: Mapping[str, object], path: Path, choice: RunChoice) -> FileReading:
    """Return what a YAML file with verl's whole configuration says of a run.

    Raises:
        UnreadFileError: Its actor trains on PyTorch.
    """
    own_overrides = _select_overrides(choice)
    overridden = deepcopy(dict(config))
    apply_hydra_overrides(overridden, own_overrides, is_complete=False)
    values = resolve_interpolations(overridden)
    strategy = get_dotted_value(values, f"{ACTOR_BLOCK}.strategy")
    if strategy != "megatron":
        framework = framework_signs.recognise_file(
            Document(path=str(path), text="", kind="yaml", of=config)
        )
        if framework is not None:
            raise UnreadFileError(
                replace(framework, tree="").refusal(str(path)), kind=f"looks like {framework.name}"
            )
    return _build_reading(values, path, choice)


def _select_overrides(choice: RunChoice) -> list[HydraOverride]:
    """Return the overrides of our command line whose keys are read of verl's configuration."""
    table = load_framework_table(TABLE_NAME)
    selected: list[HydraOverride] = []
    for override in parse_hydra_overrides(map(ShellWord, choice.overrides)):
        is_of_table = table.find_option(override.key) or table.get_megatron_settings(override.key)
        if is_of_table or READ_KEYS.fullmatch(override.key):
            selected.append(override)
    return selected


def read_launch(launch: Launch, script: Path, choice: RunChoice) -> FileReading:
    """Return what one launch of a script says.

    Raises:
        UnreadFileError: Its actor trains on PyTorch, or what it trains on is not known from here.
    """
    own_overrides = _select_overrides(choice)
    overrides = [*parse_hydra_overrides(launch.arguments), *own_overrides]
    strategy = _find_strategy(launch, overrides)
    facts = {"path": script, "name": launch.name, "strategy": strategy}
    if GENERATING_PROGRAM.search(launch.program):
        raise UnreadFileError(TRAINS_NOTHING.format(**facts), kind="trains nothing")
    if strategy is None:
        actor = _get_stated_values(overrides)[ACTOR_GROUP]
        sentence = ACTOR_NOT_KNOWN.format(path=script, name=launch.name, actor=actor)
        raise UnreadFileError(sentence, kind="names an actor that is not verl's")
    if ShellWord(strategy).is_open:
        raise UnreadFileError(
            STRATEGY_NOT_KNOWN.format(**facts), kind="only the run knows its engine"
        )
    if strategy != "megatron":
        raise UnreadFileError(TRAINS_ON_PYTORCH.format(**facts), kind="verl without Megatron Core")
    values: ConfigTree = {}
    settings = [word for word in overrides if not _is_group(word.key)]
    apply_hydra_overrides(values, settings, is_complete=False)
    if SUPERVISED_PROGRAM.search(launch.program):
        values = _move_engine_to_actor(values)
    device_sentences = _write_unstated_device(values, launch)
    reading = _build_reading(values, script, choice)
    if SUPERVISED_PROGRAM.search(launch.program):
        reading = replace(reading, training_gpus=count_launched_ranks(launch.runner))
    late = [word for word in launch.arguments if word.startswith("$")]
    sources = [f"{word}: may hold further overrides, which are not read." for word in late]
    sources += [f"{note}: is not read." for note in launch.notes]
    exported = {name: str(value) for name, value in launch.environment.items() if not value.is_open}
    open_points = (*reading.uncertainty.open_points, *sources, *device_sentences)
    uncertainty = replace(reading.uncertainty, open_points=open_points)
    return replace(reading, environment=exported, uncertainty=uncertainty)


def _write_unstated_device(values: ConfigTree, launch: Launch) -> list[str]:
    """Write the device npu if a launch sets a variable of NPUs and states no device.

    verl finds the device itself, so that a script need not state it.

    Source: verl/utils/device.py auto_set_device.

    Returns:
        A sentence about the variable, if there is one.
    """
    if get_dotted_value(values, DEVICE_KEY) is not None:
        return []
    name = find_npu_variable(launch.environment)
    if name is None:
        return []
    device = HydraOverride(key=DEVICE_KEY, value=NPU)
    apply_hydra_overrides(values, [device], is_complete=False)
    return [NPU_VARIABLE_IS_SET.format(name=name)]


def _is_group(key: str) -> bool:
    """Return whether a key of an override is a group of Hydra, whose option is a file."""
    return key in HYDRA_GROUPS or "@" in key


def _get_stated_values(overrides: Sequence[HydraOverride]) -> dict[str, str]:
    """Return the key of each override -> its value as text."""
    return {word.key: str(word.value) for word in overrides}


def _find_strategy(launch: Launch, overrides: Sequence[HydraOverride]) -> str | None:
    """Return the strategy of the actor, or of the engine of supervised training.

    It is None if the command line names an actor's file that is not verl's.
    """
    stated = _get_stated_values(overrides)
    if SUPERVISED_PROGRAM.search(launch.program):
        return stated.get("engine.strategy", stated.get("engine", "fsdp"))
    named = stated.get(f"{ACTOR_BLOCK}.strategy")
    if named is not None:
        return named
    actor = stated.get(ACTOR_GROUP)
    if actor is not None:
        file = ACTOR_FILE.fullmatch(actor)
        if ShellWord(actor).is_open:
            return actor
        if file is None:
            return None
        return STRATEGY_OF_ENGINE.get(file["engine"])
    engine = stated.get("model_engine", stated.get(f"{ACTOR_BLOCK}.model_engine"))
    if engine is not None:
        return STRATEGY_OF_ENGINE.get(engine, engine)
    config = _find_config_name(launch)
    if config.is_open:
        return config
    for strategy in ("megatron", "veomni", "torchtitan"):
        if strategy in config:
            return strategy
    return "fsdp"


def _find_config_name(launch: Launch) -> ShellWord:
    """Return the primary config that a command line names; empty where it names none."""
    for word, next_word in zip(launch.arguments, (*launch.arguments[1:], ShellWord()), strict=True):
        name, sign, value = word.partition("=")
        if name in ("--config-name", "-cn"):
            return ShellWord(value) if sign else next_word
    return ShellWord()


def _move_engine_to_actor(values: ConfigTree) -> ConfigTree:
    """Return the tree of supervised training with its engine where the actor of the others has it."""
    actor = {"megatron": values.get("engine", {}), "optim": values.get("optim", {})}
    model = values.get("model", {})
    return {**values, "actor_rollout_ref": {"actor": actor, "model": model}}


def _build_reading(values: ConfigTree, path: Path, choice: RunChoice) -> FileReading:
    """Return the reading of a tree of verl's settings, whose actor trains on Megatron Core."""
    table = load_framework_table(TABLE_NAME)
    tree = read_tree(table, values)
    _write_mode(tree, values)
    _write_batch_sizes(tree, values)
    _read_adapter(tree, values)
    _read_device(tree, values)
    for owner_name in ("model", "optimizer", "ddp"):
        tree.sections.setdefault(owner_name, {})
    absent = [*SET_OVER_THE_BRIDGE]
    if get_dotted_value(values, f"{MODEL_BLOCK}.mtp.enable") is not True:
        absent.append("mtp_num_layers")
    checkpoint = _read_actor_checkpoint(values, path, choice)
    known = []
    if not _is_on_mbridge(values):
        known.append("moe_router_load_balancing_type")
    reading = build_reading_from_tree(table, tree, checkpoint, absent=absent, known=known)
    own_fields: dict[str, object] = dict(OPTIMIZER_DTYPES)
    optim = get_dotted_value(values, f"{ACTOR_BLOCK}.optim")
    if isinstance(optim, Mapping):
        own_fields |= {f"optim.{key}": value for key, value in optim.items()}
    own_fields[VANILLA_MBRIDGE] = _is_on_mbridge(values)
    release = reading.release
    if _is_on_npu(values):
        release = RELEASE_ON_NPU
    mode_decider = None
    dtype = get_dotted_value(values, DTYPE_KEY)
    if is_late(dtype):
        mode_decider = f"{DTYPE_KEY}={dtype}"
    open_settings = _describe_open_settings(tree, values)
    uncertainty = replace(
        reading.uncertainty,
        open_points=(*open_settings, *reading.uncertainty.open_points),
        mode_decider=mode_decider,
    )
    option_faults = replace(
        reading.option_faults,
        refused=tuple(_find_refused_settings(values)),
        misdirected=tuple(_find_unknown_overrides(values)),
    )
    own_overrides = _select_overrides(choice)
    return replace(
        reading,
        origins={**reading.origins, **tree.find_overridden_settings(own_overrides)},
        read_overrides=tuple(override.word for override in own_overrides),
        own_fields=own_fields,
        training_gpus=_count_gpus(values),
        release=release,
        uncertainty=uncertainty,
        option_faults=option_faults,
    )


def _read_actor_checkpoint(values: ConfigTree, path: Path, choice: RunChoice) -> Checkpoint:
    """Return what is known of the checkpoint that the actor starts from."""
    table = load_framework_table(TABLE_NAME)
    bridge = MEGATRON_BRIDGE
    if _is_on_mbridge(values):
        bridge = MBRIDGE
    overrides = get_dotted_value(values, f"{MODEL_BLOCK}.override_config")
    if not isinstance(overrides, Mapping):
        overrides = {}
    name = get_dotted_value(values, table.checkpoint["named"])
    return read_checkpoint(name, path, choice, bridge, overrides)


def _is_on_mbridge(values: ConfigTree) -> bool:
    """Return whether the older bridge, mbridge, makes the model, and not Megatron Bridge."""
    return get_dotted_value(values, f"{ACTOR_BLOCK}.{VANILLA_MBRIDGE}") is True


def _write_mode(tree: TreeReading, values: ConfigTree) -> None:
    """Write the switches of the mode that `megatron.dtype` asks for; its default is a row of the table."""
    dtype = get_dotted_value(values, DTYPE_KEY)
    if dtype is None or is_late(dtype):
        return
    for name in ("bf16", "fp16"):
        tree.put(f"model.{name}", MODE_OF_DTYPE.get(str(dtype)) == name, DTYPE_KEY)


def _write_batch_sizes(tree: TreeReading, values: ConfigTree) -> None:
    """Write the tokens of a micro-batch: packed samples up to a number of tokens, or samples of the greatest length."""
    tokens = get_dotted_value(values, f"{ACTOR_BLOCK}.ppo_max_token_len_per_gpu")
    samples = get_dotted_value(values, f"{ACTOR_BLOCK}.ppo_micro_batch_size_per_gpu")
    ranks = get_dotted_value(values, f"{ACTOR_BLOCK}.megatron.context_parallel_size")
    if get_dotted_value(values, f"{ACTOR_BLOCK}.use_dynamic_bsz") is True and isinstance(
        tokens, int
    ):
        if isinstance(ranks, int):
            tokens *= ranks
        tree.put("model.seq_length", tokens)
        tree.put("train.micro_batch_size", 1)
        return
    prompt = get_dotted_value(values, "data.max_prompt_length")
    response = get_dotted_value(values, "data.max_response_length")
    if isinstance(prompt, int) and isinstance(response, int):
        tree.put("model.seq_length", prompt + response)
    if isinstance(samples, int):
        tree.put("train.micro_batch_size", samples)


def _read_adapter(found: TreeReading, values: ConfigTree) -> None:
    """Write the adapter of Megatron Bridge that trains in the place of the model's weights.

    Source: verl/workers/config/megatron_peft.py get_peft_cls.
    """
    rank = get_dotted_value(values, RANK)
    if is_late(rank):
        found.unknown.append(ADAPTER_NOT_KNOWN.format(key=RANK, value=rank))
        found.uncounted.append(RANK)
        found.opened.setdefault("optimizer.use_distributed_optimizer", RANK)
        return
    if not isinstance(rank, int) or rank <= 0:
        return
    kind = str(get_dotted_value(values, f"{ADAPTER}.type") or "lora")
    adapter: dict[str, object] = {"type": ADAPTERS.get(kind, kind), "dim": rank}
    for name in ADAPTER_FIELDS:
        value = get_dotted_value(values, f"{ADAPTER}.{name}")
        if value is not None and not is_late(value):
            adapter[name] = value
    found.sections["peft"] = adapter


def _describe_open_settings(tree: TreeReading, values: ConfigTree) -> list[str]:
    """Return what the run leaves open, as sentences."""
    sentences = []
    if "peft" not in tree.sections:  # with an adapter the frozen model is the reference
        for key in REFERENCE:
            if get_dotted_value(values, key) is True:
                sentences.append(REFERENCE_NOT_COUNTED.format(key=key))
    count = _count_gpus(values)
    if count is not None and not _is_on_npu(values):
        nodes, each = get_dotted_value(values, NODES_KEY), get_dotted_value(values, DEVICES_KEY)
        sentences.append(NUMBER_OF_GPUS.format(nodes=nodes, each=each, all=count))
    if (
        get_dotted_value(values, "algorithm.adv_estimator") == "gae"
        and get_dotted_value(values, "critic.enable") is not False
    ):
        sentences.append(CRITIC_NOT_COUNTED)
    for key, value in tree.generation.items():
        if key.endswith(".quantization") and value is not None:
            sentences.append(ROLLOUT_IS_QUANTISED.format(key=key, value=value))
    return sentences


def _is_on_npu(values: ConfigTree) -> bool:
    """Return whether a run states that it trains on NPUs."""
    return bool(get_dotted_value(values, DEVICE_KEY) == NPU)


def _read_device(found: TreeReading, values: ConfigTree) -> None:
    """Write that the changes of MindSpeed, which runs on NPUs alone, are not known."""
    if _is_on_npu(values):
        found.unknown.append(TRAINS_ON_NPU)
        found.uncounted.append(DEVICE_KEY)


def _count_gpus(values: ConfigTree) -> int | None:
    """Return the number of devices that train; None if the run does not state it."""
    nodes, each = get_dotted_value(values, NODES_KEY), get_dotted_value(values, DEVICES_KEY)
    if isinstance(nodes, int) and isinstance(each, int):
        return nodes * each
    return None


def _find_refused_settings(values: ConfigTree) -> list[Finding]:
    """Return what verl refuses of a run."""
    faults = []
    dtype = get_dotted_value(values, DTYPE_KEY)
    if dtype is not None and not is_late(dtype) and dtype not in MODE_OF_DTYPE:
        faults.append(
            Finding(path=DTYPE_KEY, rule=DTYPE_RULE, value=dtype, remedy="Write one of these")
        )
    if get_dotted_value(values, f"{ACTOR_BLOCK}.megatron.use_mbridge") is False:
        rule = "must be True: verl stops at the start without a bridge"
        faults.append(
            Finding(
                path=f"{ACTOR_BLOCK}.megatron.use_mbridge",
                rule=rule,
                value=False,
                remedy="Remove it",
            )
        )
    return faults


def _find_unknown_overrides(values: ConfigTree) -> list[Finding]:
    """Return the overrides of the model that neither Megatron Core nor Megatron Bridge has as fields.

    A name that resembles a field is not among them, since the check of misspelt fields reports it.
    MindSpeed adds fields in runs on NPUs. mbridge does not take the names one by one.

    Source: verl/workers/engine/megatron/transformer_impl.py _build_tf_config.
    """
    overrides = get_dotted_value(values, OVERRIDES_KEY)
    is_other_bridge = get_dotted_value(values, f"{ACTOR_BLOCK}.{VANILLA_MBRIDGE}") not in (
        None,
        False,
    )
    if not isinstance(overrides, Mapping) or is_other_bridge or _is_on_npu(values):
        return []
    known = list_all_framework_fields(MEGATRON_BRIDGE)
    faults = []
    for name, value in overrides.items():
        if name in OWNER_FIELDS["model"] or name in known or find_near_fields("model", name):
            continue
        fault = Finding(
            path=f"{OVERRIDES_KEY}.{name}",
            rule=FIELD_NOT_KNOWN_RULE,
            value=value,
            remedy="Drop it; or use the release that has it",
            severity="warning",
        )
        faults.append(fault)
    return faults
