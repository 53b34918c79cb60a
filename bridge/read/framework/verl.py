"""verl's runs: launch scripts with overrides of Hydra, and YAML files with its whole configuration.

The strategy of the actor chooses the engine: `megatron` trains on Megatron Core, and the others on PyTorch. What a
script does not state is what verl's own YAML files state, which are part of its package; rows of the table have them.

Source: verl-project/verl 1dda039b verl/workers/engine/megatron/transformer_impl.py; verl/trainer/config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bridge.errors import Finding, UnreadFileError
from bridge.preflight.file_reading import MEGATRON_CORE, FileReading, RunChoice
from bridge.read import framework_signs
from bridge.read.framework.checkpoint import Checkpoint, read_checkpoint
from bridge.read.framework.hf_config import MBRIDGE, MEGATRON_BRIDGE
from bridge.read.framework.table import framework_table
from bridge.read.framework.tree import TreeReading, is_late, read_tree
from bridge.read.framework.tree_run import reading_of_tree
from bridge.read.launch.launches import Launch
from bridge.read.launch.word import Word
from bridge.read.text.composed import Tree, resolved
from bridge.read.text.document import Document
from bridge.read.text.dotted import value_at
from bridge.read.text.hydra_words import HydraWord, hydra_words, write_over

TABLE_NAME = "verl"

# Keys of its files.
ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
DTYPE = f"{ACTOR}.megatron.dtype"
ADAPTER = f"{MODEL}.lora"
RANK = f"{ADAPTER}.rank"
REFERENCE = (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")
"""Switches of a reference model."""

# Words of its command lines.
HYDRA_GROUPS = frozenset({"model_engine", "engine", "optim", "actor", "model", "critic", "data"})
"""Groups of Hydra whose option is named without a dot."""
STRATEGY_OF_ENGINE = {
    "dp": "fsdp",
    "megatron": "megatron",
    "veomni": "veomni",
    "torchtitan": "torchtitan",
}
"""Option of the group `model_engine` -> the strategy of its actor."""
SUPERVISED_PROGRAM = re.compile(r"\bsft_trainer|\bsft\b")
"""In the name of a program of supervised training."""
GENERATING_PROGRAM = re.compile(r"\bmain_(?:generation|eval)")
"""In the name of a program that trains nothing."""

# Values.
MODES = {"bfloat16": "bf16", "float16": "fp16"}
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
DTYPE_RULE = "takes bfloat16 or float16 alone, and stops at the start"
NUMBER_OF_GPUS = (
    "The number of GPUs: trainer states {nodes} nodes with {each} GPUs. "
    "Add --target h100x{all}, for example."
)
CRITIC_NOT_COUNTED = "algorithm.adv_estimator=gae: a critic trains too, and is not counted."
ADAPTER_NOT_KNOWN = (
    "{key}={value}: where it is above 0 the model is frozen and adapters train; "
    "all weights are counted as trained."
)
REFERENCE_NOT_COUNTED = (
    "{key}=True: the reference model's weights lie on GPUs too, and are not counted."
)
ROLLOUT_IS_QUANTISED = (
    "{key}={value}: the engine of the rollout quantises its weights by it, and trains nothing."
)


def read(whole: Mapping[str, object], path: Path, choice: RunChoice) -> FileReading:
    """Return what a YAML file with verl's whole configuration says of a run.

    Raises:
        UnreadFileError: Its actor trains on PyTorch.
    """
    values = resolved(dict(whole))
    strategy = value_at(values, f"{ACTOR}.strategy")
    if strategy != "megatron":
        found = framework_signs.recognise_file(
            Document(path=str(path), text="", kind="yaml", of=whole)
        )
        if found is not None:
            raise UnreadFileError(
                replace(found, tree="").refusal(str(path)), kind=f"looks like {found.name}"
            )
    return _reading(values, path, choice)


def read_launch(launch: Launch, script: Path, choice: RunChoice) -> FileReading:
    """Return what one launch of a script says.

    Raises:
        UnreadFileError: Its actor trains on PyTorch, or only the run knows on what.
    """
    words = hydra_words(launch.arguments)
    strategy = _strategy(launch, words)
    facts = {"path": script, "name": launch.name, "strategy": strategy}
    if GENERATING_PROGRAM.search(launch.program):
        raise UnreadFileError(TRAINS_NOTHING.format(**facts), kind="trains nothing")
    if Word(strategy).is_unknown:
        raise UnreadFileError(
            STRATEGY_NOT_KNOWN.format(**facts), kind="only the run knows its engine"
        )
    if strategy != "megatron":
        raise UnreadFileError(TRAINS_ON_PYTORCH.format(**facts), kind="verl without Megatron Core")
    values: Tree = {}
    settings = [word for word in words if word.key not in HYDRA_GROUPS]
    write_over(values, settings, is_whole=False)
    if SUPERVISED_PROGRAM.search(launch.program):
        values = _as_actor(values)
    reading = _reading(values, script, choice)
    late = [word for word in launch.arguments if word.startswith("$")]
    sources = [f"{word}: may hold further overrides, which are not read." for word in late]
    sources += [f"{note}: is not read." for note in launch.notes]
    exported = {
        name: str(value) for name, value in launch.environment.items() if not value.is_unknown
    }
    return replace(reading, environment=exported, unknown=(*reading.unknown, *sources))


def _strategy(launch: Launch, words: Sequence[HydraWord]) -> str:
    """Return the strategy of the actor, or of the engine of supervised training."""
    stated = {word.key: str(word.value) for word in words}
    if SUPERVISED_PROGRAM.search(launch.program):
        return stated.get("engine.strategy", stated.get("engine", "fsdp"))
    named = stated.get(f"{ACTOR}.strategy")
    if named is not None:
        return named
    engine = stated.get("model_engine", stated.get(f"{ACTOR}.model_engine"))
    if engine is not None:
        return STRATEGY_OF_ENGINE.get(engine, engine)
    config = _config_name(launch)
    if config.is_unknown:
        return config
    for strategy in ("megatron", "veomni", "torchtitan"):
        if strategy in config:
            return strategy
    return "fsdp"


def _config_name(launch: Launch) -> Word:
    """Return the primary config that a command line names; empty where it names none."""
    for word, behind in zip(launch.arguments, (*launch.arguments[1:], Word()), strict=True):
        name, sign, value = word.partition("=")
        if name in ("--config-name", "-cn"):
            return Word(value) if sign else behind
    return Word()


def _as_actor(values: Tree) -> Tree:
    """Return the tree of supervised training with its engine where the actor of the others has it."""
    actor = {"megatron": values.get("engine", {}), "optim": values.get("optim", {})}
    model = values.get("model", {})
    return {**values, "actor_rollout_ref": {"actor": actor, "model": model}}


def _reading(values: Tree, path: Path, choice: RunChoice) -> FileReading:
    """Return the reading of a tree of verl's settings, whose actor trains on Megatron Core."""
    table = framework_table(TABLE_NAME)
    found = read_tree(table, values)
    _read_mode(found, values)
    _read_batch(found, values)
    _read_adapter(found, values)
    for role in ("model", "optimizer", "ddp"):
        found.sections.setdefault(role, {})
    absent = [*SET_OVER_THE_BRIDGE]
    if value_at(values, f"{MODEL}.mtp.enable") is not True:
        absent.append("mtp_num_layers")
    checkpoint = _checkpoint(values, path, choice)
    known = ("moe_router_load_balancing_type",)
    reading = reading_of_tree(table, found, checkpoint, absent=absent, known=known)
    own_fields: dict[str, object] = dict(OPTIMIZER_DTYPES)
    optim = value_at(values, f"{ACTOR}.optim")
    if isinstance(optim, Mapping):
        own_fields |= {f"optim.{key}": value for key, value in optim.items()}
    mode_decider = None
    dtype = value_at(values, DTYPE)
    if is_late(dtype):
        mode_decider = f"{DTYPE}={dtype}"
    return replace(
        reading,
        base=MEGATRON_CORE,
        own_fields=own_fields,
        unknown=(*_unknown(found, values), *reading.unknown),
        mode_decided_by=mode_decider,
        refused=tuple(_refused(values)),
    )


def _checkpoint(values: Tree, path: Path, choice: RunChoice) -> Checkpoint:
    """Return what is known of the checkpoint that the actor starts from."""
    table = framework_table(TABLE_NAME)
    bridge = MEGATRON_BRIDGE
    if value_at(values, f"{ACTOR}.megatron.vanilla_mbridge") is True:
        bridge = MBRIDGE
    overrides = value_at(values, f"{MODEL}.override_config")
    if not isinstance(overrides, Mapping):
        overrides = {}
    name = value_at(values, table.checkpoint["named"])
    return read_checkpoint(name, path, choice, bridge, overrides)


def _read_mode(found: TreeReading, values: Tree) -> None:
    """Write the switches of the mode that `megatron.dtype` asks for; its default is a row of the table."""
    dtype = value_at(values, DTYPE)
    if dtype is None or is_late(dtype):
        return
    for name in ("bf16", "fp16"):
        found.put(f"model.{name}", MODES.get(str(dtype)) == name, DTYPE)


def _read_batch(found: TreeReading, values: Tree) -> None:
    """Write the tokens of a micro-batch: packed samples up to a number of tokens, or samples of the greatest length."""
    tokens = value_at(values, f"{ACTOR}.ppo_max_token_len_per_gpu")
    samples = value_at(values, f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    ranks = value_at(values, f"{ACTOR}.megatron.context_parallel_size")
    if value_at(values, f"{ACTOR}.use_dynamic_bsz") is True and isinstance(tokens, int):
        if isinstance(ranks, int):
            tokens *= ranks
        found.put("model.seq_length", tokens)
        found.put("train.micro_batch_size", 1)
        return
    prompt = value_at(values, "data.max_prompt_length")
    response = value_at(values, "data.max_response_length")
    if isinstance(prompt, int) and isinstance(response, int):
        found.put("model.seq_length", prompt + response)
    if isinstance(samples, int):
        found.put("train.micro_batch_size", samples)


def _read_adapter(found: TreeReading, values: Tree) -> None:
    """Write the adapter of Megatron Bridge that trains in the place of the model's weights.

    Source: verl/workers/config/megatron_peft.py get_peft_cls.
    """
    rank = value_at(values, RANK)
    if is_late(rank):
        found.unknown.append(ADAPTER_NOT_KNOWN.format(key=RANK, value=rank))
        found.uncounted.append(RANK)
        found.opened.setdefault("optimizer.use_distributed_optimizer", RANK)
        return
    if not isinstance(rank, int) or rank <= 0:
        return
    kind = str(value_at(values, f"{ADAPTER}.type") or "lora")
    adapter: dict[str, object] = {"type": ADAPTERS.get(kind, kind), "dim": rank}
    for name in ADAPTER_FIELDS:
        value = value_at(values, f"{ADAPTER}.{name}")
        if value is not None and not is_late(value):
            adapter[name] = value
    found.sections["peft"] = adapter


def _unknown(found: TreeReading, values: Tree) -> list[str]:
    """Return what the run leaves open, as sentences."""
    sentences = []
    if "peft" not in found.sections:  # with an adapter the frozen model is the reference
        for key in REFERENCE:
            if value_at(values, key) is True:
                sentences.append(REFERENCE_NOT_COUNTED.format(key=key))
    nodes, each = value_at(values, "trainer.nnodes"), value_at(values, "trainer.n_gpus_per_node")
    if isinstance(nodes, int) and isinstance(each, int):
        sentences.append(NUMBER_OF_GPUS.format(nodes=nodes, each=each, all=nodes * each))
    if (
        value_at(values, "algorithm.adv_estimator") == "gae"
        and value_at(values, "critic.enable") is not False
    ):
        sentences.append(CRITIC_NOT_COUNTED)
    for key, value in found.generation.items():
        if key.endswith(".quantization") and value is not None:
            sentences.append(ROLLOUT_IS_QUANTISED.format(key=key, value=value))
    return sentences


def _refused(values: Tree) -> list[Finding]:
    """Return what verl refuses of a run."""
    faults = []
    dtype = value_at(values, DTYPE)
    if dtype is not None and not is_late(dtype) and dtype not in MODES:
        faults.append(
            Finding(path=DTYPE, rule=DTYPE_RULE, value=dtype, remedy="Write one of these")
        )
    if value_at(values, f"{ACTOR}.megatron.use_mbridge") is False:
        rule = "must be True: verl stops at the start without a bridge"
        faults.append(
            Finding(
                path=f"{ACTOR}.megatron.use_mbridge", rule=rule, value=False, remedy="Remove it"
            )
        )
    return faults
