"""Recipes of Megatron Bridge in Python, and launches of its run_recipe.py, read by their syntax alone."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.cli.main import main
from bridge.convert.conversion import import_runs
from bridge.errors import RunConfigError, UnreadFileError
from bridge.front.loader import load_run
from bridge.precision.mode import get_mode
from bridge.preflight.rule_check import check
from bridge.preflight.run import Run
from bridge.preflight.run_choice import RunChoice
from bridge.read.text.document import Document

CONFIG = """\
from dataclasses import dataclass, field
from megatron.core.optimizer import OptimizerConfig as CoreOptimizer
@dataclass
class OptimizerConfig(CoreOptimizer):
    use_distributed_optimizer: bool = True
@dataclass
class TrainingConfig:
    micro_batch_size: int | None = None
@dataclass
class DataConfig:
    seq_length: int | None = None
@dataclass
class ConfigContainer:
    train: TrainingConfig
    dataset: DataConfig = field(default_factory=DataConfig)
    mixed_precision: object = None
"""
PROVIDER = """\
class GPTModelProvider:
    num_layers: int = 0
    hidden_size: int = 0
    num_attention_heads: int = 0
    share_embeddings_and_output_weights: bool = True
    make_vocab_size_divisible_by: int = 128
    vocab_size: int | None = None
"""
COMMON = """\
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.bridge.training.config import ConfigContainer, OptimizerConfig, TrainingConfig
def _base(precision="bf16_mixed"):
    optimizer = OptimizerConfig(optimizer="adam", bf16=precision == "bf16_mixed")
    return ConfigContainer(
        model=None,
        train=TrainingConfig(micro_batch_size=2),
        optimizer=optimizer,
        ddp=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        mixed_precision=precision,
    )
def _sizes(cfg, layers=4):
    cfg.model.num_layers = layers
def _of(layers):
    return layers
def _first(numbers):
    for number in numbers:
        if number > 4:
            return number
    return 4
"""
IMPORTS = """\
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.recipes.common import _base, _first, _of, _sizes
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig, bf16_with_mxfp8_mixed
from elsewhere import tuned
"""
TINY = """\
def tiny_pretrain_config() -> ConfigContainer:
    cfg = _base()
    cfg.model = GPTModelProvider(hidden_size=64, num_attention_heads=4, vocab_size=512, seq_length=32)
    _sizes(cfg)
    return cfg
"""
Recipe = Callable[..., Path]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Return a function that writes a file of recipes into a checkout with the source of Megatron Bridge."""
    package = tmp_path / "src" / "megatron" / "bridge"
    for name, text in (
        ("training/config.py", CONFIG),
        ("models/gpt_provider.py", PROVIDER),
        ("recipes/common.py", COMMON),
        ("recipes/tiny.py", IMPORTS + TINY),
        ("recipes/__init__.py", "from megatron.bridge.recipes.tiny import tiny_pretrain_config as tiny_config\n"),
    ):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)

    def write(body: str, name: str = "mine.py") -> Path:
        path = tmp_path / name
        path.write_text(body if name.endswith(".sh") else IMPORTS + body)
        return path

    return write


def of_function(recipe: Recipe, statements: str, parameters: str = "") -> Run:
    """Return the run of a recipe with these statements behind those of the tiny recipe."""
    lines = [
        f"def mine({parameters}) -> ConfigContainer:",
        "    cfg = _base()",
        "    cfg.model = GPTModelProvider(hidden_size=64, num_attention_heads=4, num_layers=4, seq_length=32)",
        *(f"    {line}" for line in statements.splitlines()),
        "    return cfg",
    ]
    return load_run(config_file=recipe("\n".join(lines)), strict=False)


def test_a_recipe_is_planned_with_the_functions_that_it_calls(recipe: Recipe) -> None:
    run = load_run(config_file=recipe(TINY))
    assert get_mode(run.precision) == "bf16"
    assert run.model["num_layers"] == 4
    assert run.section("train")["micro_batch_size"] == 2
    assert run.plan


def test_each_value_has_the_statement_that_sets_it_as_its_origin(recipe: Recipe) -> None:
    run = load_run(config_file=recipe(TINY))
    assert run.origin_of("model.hidden_size") == "mine.py:10, GPTModelProvider"
    assert run.origin_of("model.num_layers") == "recipes/common.py:13, cfg.model.num_layers"
    assert run.origin_of("mixed_precision.bf16") == "recipe bf16_mixed"
    assert run.origin_of("optimizer.use_distributed_optimizer") == "default of OptimizerConfig"


def test_a_field_assigned_behind_the_precision_is_stated_over_its_recipe(recipe: Recipe) -> None:
    statements = "cfg.mixed_precision = bf16_with_mxfp8_mixed()\ncfg.mixed_precision.grad_reduce_in_fp32 = False"
    run = of_function(recipe, statements)
    fields = run.precision.to_dict()
    assert (fields["fp8_recipe"], fields["grad_reduce_in_fp32"]) == ("mxfp8", False)
    assert run.origin_of("mixed_precision.grad_reduce_in_fp32") == (
        "mine.py:12, cfg.mixed_precision.grad_reduce_in_fp32"
    )


def test_a_constructed_precision_has_the_defaults_of_its_class(recipe: Recipe) -> None:
    statements = "cfg.mixed_precision = MixedPrecisionConfig(bf16=True, params_dtype=torch.bfloat16, fp8='hybrid')"
    fields = of_function(recipe, statements).precision.to_dict()
    assert (fields["fp8"], fields["fp8_recipe"], fields["grad_reduce_in_fp32"]) == ("hybrid", "tensorwise", True)


def test_the_default_of_a_parameter_answers_a_condition(recipe: Recipe) -> None:
    statements = "if scheme.lower() in ('low', 'lower'):\n    cfg.mixed_precision = 'bf16_with_mxfp8_mixed'"
    run = of_function(recipe, statements, parameters="scheme='LOW'")
    assert run.precision.to_dict()["fp8_recipe"] == "mxfp8"


@pytest.mark.parametrize(
    ("statements", "path", "decider"),
    [
        ("if wide:\n    cfg.model.ffn_hidden_size = 512", "model.ffn_hidden_size", "the value `wide`"),
        ("cfg.model.ffn_hidden_size = wide * 2", "model.ffn_hidden_size", "the value `wide * 2`"),
        (
            "try:\n    cfg.model.ffn_hidden_size = wide()\nexcept OSError:\n    cfg.model.ffn_hidden_size = 8",
            "model.ffn_hidden_size",
            "the value `try: cfg.model.ffn_hidden_size = wide()`",
        ),
        ("for i in wide:\n    cfg.train.micro_batch_size = i", "train.micro_batch_size", "the value `wide`"),
        ("while wide:\n    cfg.train.micro_batch_size = 8", "train.micro_batch_size", "the value `wide`"),
        (
            "match wide:\n    case 1:\n        cfg.train.micro_batch_size = 8",
            "train.micro_batch_size",
            "the value `wide`",
        ),
        (
            "for i in (1, 2):\n    cfg.train.micro_batch_size = i\n    break",
            "train.micro_batch_size",
            "the value `(1, 2)`",
        ),
        ("cfg.model.num_layers += 4", "model.num_layers", "the value `cfg.model.num_layers`"),
        ("with wide as layers:\n    cfg.model.num_layers = layers", "model.num_layers", "the value `wide`"),
        ("def layers():\n    return 8\ncfg.model.num_layers = layers()", "model.num_layers", "the value `layers()`"),
        ("cfg.model.num_layers = _of(*wide)", "model.num_layers", "the value `_of(*wide)`"),
        ("cfg.model.num_layers = _first(wide)", "model.num_layers", "the value `numbers`"),
    ],
)
def test_what_only_the_run_decides_is_open(recipe: Recipe, statements: str, path: str, decider: str) -> None:
    run = of_function(recipe, statements, parameters="wide")
    assert run.find_decider(path) == decider
    assert get_mode(run.precision) == "bf16"


def test_an_import_that_may_fail_decides_what_depends_on_it(recipe: Recipe) -> None:
    body = "try:\n    from megatron.core.graphs import modules\nexcept ImportError:\n    modules = None\n"
    lines = ["def mine() -> ConfigContainer:", "    cfg = _base()", "    if modules is None:"]
    lines += ["        cfg.train.micro_batch_size = 1", "    return cfg"]
    run = load_run(config_file=recipe(body + "\n".join(lines)), strict=False)
    assert run.find_decider("train.micro_batch_size") == "the value `modules is None`"


def test_a_constant_that_a_function_imports_has_its_value(recipe: Recipe) -> None:
    package = recipe("").parent / "src" / "megatron" / "bridge"
    (package / "recipes" / "sizes.py").write_text("LENGTH = 2 * 48\n")
    statements = "from megatron.bridge.recipes.sizes import LENGTH\ncfg.model.seq_length = LENGTH"
    assert of_function(recipe, statements).model["seq_length"] == 96


def test_branches_that_agree_and_branches_that_raise_leave_nothing_open(recipe: Recipe) -> None:
    statements = (
        "if wide:\n    cfg.model.ffn_hidden_size = 512\nelse:\n    cfg.model.ffn_hidden_size = 512\n"
        "if not wide:\n    raise ValueError\nelse:\n    cfg.train.micro_batch_size = 8"
    )
    run = of_function(recipe, statements, parameters="wide")
    assert run.reading.uncertainty.open_values == {}
    assert (run.model["ffn_hidden_size"], run.section("train")["micro_batch_size"]) == (512, 8)


def test_a_branch_that_ends_the_program_makes_no_run(recipe: Recipe) -> None:
    imported = "import sys\nfrom megatron.bridge.training.pretrain import pretrain\n"
    body = (
        "def main(args):\n    cfg = tiny_pretrain_config()\n"
        "    if args.dryrun:\n        cfg.mixed_precision = None\n        sys.exit(0)\n"
        "    pretrain(config=cfg)\n"
    )
    run = load_run(config_file=recipe(imported + TINY + body))
    assert get_mode(run.precision) == "bf16"


def test_a_precision_that_differs_between_branches_is_no_fp32(recipe: Recipe) -> None:
    statements = "if low:\n    cfg.mixed_precision = 'bf16_with_mxfp8_mixed'"
    run = of_function(recipe, statements, parameters="low")
    with pytest.raises(RunConfigError, match="the mode is not stated; `low`, which only the run knows, decides"):
        run.require_mode()


def test_a_checkpoint_decides_the_model_that_is_made_of_it(recipe: Recipe) -> None:
    statements = (
        "cfg.model = AutoBridge.from_hf_pretrained('org/model-1b').to_megatron_provider(load_weights=False)\n"
        "cfg.model.tensor_model_parallel_size = 2"
    )
    run = of_function(recipe, statements)
    assert run.model["tensor_model_parallel_size"] == 2
    assert run.find_decider("model.hidden_size") == "the checkpoint org/model-1b"
    assert get_mode(run.precision) == "bf16"


def test_without_a_precision_the_checkpoint_decides_the_mode(recipe: Recipe) -> None:
    statements = (
        "cfg.model = AutoBridge.from_hf_pretrained('org/model-1b').to_megatron_provider()\ncfg.mixed_precision = None"
    )
    run = of_function(recipe, statements)
    with pytest.raises(RunConfigError, match="the checkpoint org/model-1b, as no mixed_precision is set, decides"):
        run.require_mode()


def test_a_function_of_elsewhere_that_gets_the_container_may_change_its_precision(recipe: Recipe) -> None:
    run = of_function(recipe, "tuned(cfg)")
    with pytest.raises(RunConfigError, match="the function tuned, whose source is not at hand, decides"):
        run.require_mode()


def test_a_mode_that_nothing_states_replaces_no_value(recipe: Recipe) -> None:
    statements = "cfg.mixed_precision = tuned()\ncfg.model.pipeline_dtype = torch.bfloat16"
    report = check(of_function(recipe, statements))
    assert not report.context.is_mode_known
    assert [finding.id for finding in report.findings if finding.id == "PB123"] == []


def test_rows_of_single_modules_that_are_not_read_leave_the_run_without_a_plan(recipe: Recipe) -> None:
    run = of_function(recipe, "cfg.model.quant_recipe = tuned('modules.yaml')")
    assert run.reading.uncertainty.no_plan_reason is not None
    assert run.reading.uncertainty.no_plan_reason.startswith(
        "model.quant_recipe: `tuned('modules.yaml')` makes the rows"
    )


def test_without_the_source_the_function_that_makes_the_container_decides(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        f"{IMPORTS}def mine() -> ConfigContainer:\n    cfg = _base()\n    cfg.model.num_layers = 4\n    return cfg\n"
    )
    run = load_run(config_file=tmp_path / "mine.py", strict=False)
    decider = "`_base()` of megatron.bridge.recipes.common, whose source is not at hand,"
    assert run.find_decider("model.hidden_size") == decider
    with pytest.raises(RunConfigError, match="the mode is not stated"):
        run.require_mode()


def test_each_recipe_of_a_file_is_a_run(recipe: Recipe) -> None:
    body = TINY + TINY.replace("tiny_pretrain", "low_pretrain").replace("_base()", "_base('fp16_mixed')")
    run = load_run(config_file=recipe(body), choice=RunChoice(number=2))
    assert run.reading.launches.labels == ("line 8, tiny_pretrain_config", "line 13, low_pretrain_config")
    assert get_mode(run.precision) == "fp16"


def test_the_container_that_a_program_starts_a_training_with_is_its_run(recipe: Recipe) -> None:
    body = (
        "from megatron.bridge.recipes import tiny_config\n"
        "from megatron.bridge.training.pretrain import pretrain\n"
        "def main():\n    cfg = tiny_config()\n    cfg.train.micro_batch_size = 1\n    pretrain(config=cfg)\n"
    )
    run = load_run(config_file=recipe(body))
    assert run.section("train")["micro_batch_size"] == 1


def test_the_overrides_of_a_program_and_its_yaml_file_are_named(recipe: Recipe) -> None:
    imported = "from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides\n"
    called = "    cfg = process_config_with_overrides(cfg, config_filepath='conf/default.yaml')\n    return"
    run = load_run(config_file=recipe(imported + TINY.replace("    return", called)), strict=False)
    assert any("the YAML file that it reads by default" in line for line in run.reading.lines)


@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        ("from megatron.bridge.recipes import tiny_config\n", "It names recipes of other files: give one of those."),
        ("def lower(cfg):\n    cfg.train = 1\n", "Give the program, or the recipe, that uses it."),
    ],
)
def test_a_file_without_a_recipe_is_no_run(recipe: Recipe, body: str, remedy: str) -> None:
    path = recipe(body)
    with pytest.raises(UnreadFileError) as error:
        load_run(config_file=path)
    rule = (
        "imports Megatron Bridge, and no public function of it returns a new ConfigContainer or calls pretrain() "
        "or finetune()"
    )
    assert str(error.value) == f"{path}: {rule}. {remedy}"


LAUNCH = "torchrun --nproc-per-node 8 scripts/training/run_recipe.py --recipe {name} {words}\n"


def launched(recipe: Recipe, words: str, name: str = "tiny_config") -> Run:
    """Return the run of a launch script that starts a recipe."""
    return load_run(config_file=recipe(LAUNCH.format(name=name, words=words), name="run.sh"), strict=False)


def test_the_recipe_of_a_launch_is_the_lower_layer_and_its_words_are_the_upper_one(recipe: Recipe) -> None:
    run = launched(recipe, "-mb 4 --tensor_model_parallel_size=2 mixed_precision.grad_reduce_in_fp32=false")
    assert run.section("train")["micro_batch_size"] == 4
    assert run.model["tensor_model_parallel_size"] == 2
    assert run.model["num_layers"] == 4
    assert run.precision.to_dict()["grad_reduce_in_fp32"] is False
    assert run.origin_of("model.tensor_model_parallel_size") == "run.sh:1, model.tensor_model_parallel_size"
    assert run.origin_of("model.num_layers") == "recipes/common.py:13, cfg.model.num_layers"


def test_the_program_takes_the_length_of_the_dataset_for_the_model(recipe: Recipe) -> None:
    run = launched(recipe, "--seq_length 128")
    assert run.model["seq_length"] == 128
    assert run.origin_of("model.seq_length") == "run_recipe.py sets model.seq_length to that of the dataset"


@pytest.mark.parametrize("name", ["absent_config", "$RECIPE"])
def test_a_recipe_that_is_not_at_hand_decides_and_is_no_fp32(recipe: Recipe, name: str) -> None:
    run = launched(recipe, "model.num_layers=2", name=name)
    assert run.find_decider("model.hidden_size") == f"the recipe {name}, which is not at hand,"
    with pytest.raises(RunConfigError) as error:
        run.require_mode()
    assert f"the mode is not stated; the recipe {name}, which is not at hand, decides." in str(error.value)


def test_a_precision_on_the_command_line_states_the_mode_of_an_absent_recipe(recipe: Recipe) -> None:
    run = launched(recipe, "mixed_precision=bf16_with_mxfp8_mixed", name="absent_config")
    run.require_mode()
    assert run.precision.to_dict()["fp8_recipe"] == "mxfp8"


def test_a_word_that_may_hold_any_override_is_named_and_leaves_the_bytes_open(recipe: Recipe) -> None:
    run = launched(recipe, "$MORE")
    assert "$MORE: may hold further overrides, which are not read." in run.reading.uncertainty.open_points
    assert run.reading.uncertainty.unread_options == ("$MORE",)


def test_the_number_of_gpus_is_that_of_the_launch_before_that_in_the_name_of_a_recipe(
    recipe: Recipe, tmp_path: Path
) -> None:
    name = "tiny_pretrain_32gpu_gb200_bf16_config"
    recipes = tmp_path / "src" / "megatron" / "bridge" / "recipes"
    (recipes / "tiny.py").write_text(IMPORTS + TINY.replace("tiny_pretrain_config", name))
    (recipes / "__init__.py").write_text(f"from megatron.bridge.recipes.tiny import {name} as tiny_config\n")

    def sentence(runner: str, words: str) -> str:
        path = recipe(f"{runner} scripts/training/run_recipe.py --recipe tiny_config {words}\n", name="run.sh")
        points = load_run(config_file=path, strict=False).reading.uncertainty.open_points
        (found,) = [point for point in points if point.startswith("The number of GPUs")]
        return found

    assert "has 32 of them. Add --target gb200x32" in sentence("srun python", "-mb 4")
    sizes = "model.tensor_model_parallel_size=$TP"
    assert "states parallel sizes over those of the recipe" in sentence("srun python", sizes)
    started = sentence("torchrun --nproc_per_node=4 --nnodes=${NODES:-4}", sizes)
    assert "16, as many as the processes of the launch. Add --target gb200x16" in started


def test_the_data_of_the_option_have_the_length_of_the_recipes_model(recipe: Recipe) -> None:
    run = launched(recipe, "--dataset mock")
    assert run.section("data")["seq_length"] == run.model["seq_length"] == 32
    assert (
        run.origin_of("data.seq_length") == "run_recipe.py gives the data of --dataset the length of the recipe's model"
    )
    assert launched(recipe, "--dataset mock --seq_length 128").model["seq_length"] == 128


LAYOUT = "[['embedding', 'decoder', 'decoder'], ['decoder', 'decoder', 'loss']]"


@pytest.mark.parametrize(
    ("statements", "words", "answer"),
    [
        (f"pipeline_model_parallel_layout = {LAYOUT}", "", (2, False)),
        (f"pipeline_model_parallel_layout = {LAYOUT}", "-pp 1", (2, False)),
        (
            f"pipeline_model_parallel_layout = {LAYOUT}\n    cfg.model._pipeline_model_parallel_layout_builder = tuned",
            "-pp 1",
            (None, True),
        ),
        (
            f"pipeline_model_parallel_layout = {LAYOUT}\n    cfg.model._pipeline_model_parallel_layout_builder = tuned",
            f'-pp 2 "model.pipeline_model_parallel_layout={LAYOUT}"',
            (2, False),
        ),
    ],
    ids=["no other sizes", "no builder", "a builder", "stated"],
)
def test_a_layout_that_the_recipe_builds_is_open_for_other_stages(
    recipe: Recipe, tmp_path: Path, statements: str, words: str, answer: tuple[int | None, bool]
) -> None:
    tiny = tmp_path / "src" / "megatron" / "bridge" / "recipes" / "tiny.py"
    tiny.write_text(IMPORTS + TINY.replace("    return cfg", f"    cfg.model.{statements}\n    return cfg"))
    run = launched(recipe, words)
    layout = run.model.get("pipeline_model_parallel_layout")
    is_open = "model.pipeline_model_parallel_layout" in run.reading.uncertainty.unread_sources
    assert (layout and len(layout), is_open) == answer


@pytest.mark.parametrize(("words", "first"), [("-pp 2", 1), ("-pp 4", None), ("-mb 1", 1)])
def test_the_layers_of_a_first_stage_that_do_not_fit_other_stages_are_dropped(
    recipe: Recipe, tmp_path: Path, words: str, first: int | None
) -> None:
    tiny = tmp_path / "src" / "megatron" / "bridge" / "recipes" / "tiny.py"
    stage = "    cfg.model.num_layers_in_first_pipeline_stage = 1\n    cfg.model.num_layers = 6\n    return cfg"
    tiny.write_text(IMPORTS + TINY.replace("    return cfg", stage))
    assert launched(recipe, words).model.get("num_layers_in_first_pipeline_stage") == first


def test_check_plan_and_memory_answer_a_recipe(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(recipe(TINY))
    assert main(["check", "--config", path]) == 0
    assert "Read by its syntax: line 8, tiny_pretrain_config, with the source of Megatron Bridge" in (
        capsys.readouterr().out
    )
    assert main(["plan", "--config", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert main(["memory", "--config", path]) == 0


def test_a_precision_that_only_the_launch_knows_is_not_that_of_the_recipe(recipe: Recipe) -> None:
    run = launched(recipe, "mixed_precision=$PRECISION")
    with pytest.raises(RunConfigError, match=r"the mode is not stated; mixed_precision=\$PRECISION decides"):
        run.require_mode()


SAVING = """\
class Saved:
    def to_yaml(self, path):
        with open(path, "w") as file:
            file.write("_target_: megatron.bridge.training.config.ConfigContainer\\n")
            file.write("mixed_precision: bf16_with_mxfp8_mixed\\n")
            file.write("model: {_target_: megatron.bridge.models.gpt_provider.GPTModelProvider, num_layers: 3}\\n")
def saved_config() -> "ConfigContainer":
    return Saved()
def failing_config() -> "ConfigContainer":
    raise OSError("no network")
"""


def test_megatron_bridge_itself_makes_the_container_on_request(recipe: Recipe) -> None:
    path = recipe("x = 1\n")
    path.write_text(f"if False:\n    import megatron.bridge\n{SAVING}")
    run = load_run(config_file=path, strict=False, choice=RunChoice(asks_megatron_bridge=True))
    assert run.model["num_layers"] == 3
    assert run.precision.to_dict()["fp8_recipe"] == "mxfp8"
    assert run.reading.notes == (
        f"Megatron Bridge itself made the container: saved_config of {path}, in a process of its own.",
    )


def test_a_recipe_that_fails_in_its_process_is_refused_with_the_error(recipe: Recipe) -> None:
    path = recipe("x = 1\n")
    path.write_text(f"if False:\n    import megatron.bridge\n{SAVING}")
    with pytest.raises(RunConfigError) as error:
        load_run(config_file=path, choice=RunChoice(number=2, asks_megatron_bridge=True))
    assert str(error.value) == (
        f"--ask-megatron-bridge: failing_config of {path} makes no container here; OSError: no network. "
        "Drop the option: the file is read by its syntax then."
    )


def test_a_file_that_is_no_recipe_is_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("mixed_precision: bf16_mixed\n")
    with pytest.raises(RunConfigError, match="--ask-megatron-bridge: calls a recipe of Megatron Bridge"):
        load_run(config_file=tmp_path / "run.yaml", choice=RunChoice(asks_megatron_bridge=True))


def test_convert_follows_the_functions_of_the_checkout(recipe: Recipe) -> None:
    body = "from megatron.bridge.training.mixed_precision import get_mixed_precision_config\ndef mine():\n"
    body += "    cfg = _base()\n    cfg.mixed_precision = get_mixed_precision_config(cfg.mixed_precision)\n"
    (run,) = import_runs(Document.load(recipe(f"{body}    cfg.mixed_precision.grad_reduce_in_fp32 = False\n")))
    assert (run.imported.label, run.imported.decided_by) == ("line 9, mine", None)
    assert get_mode(run.imported.config) == "bf16"
    assert run.imported.config.grad_reduce_in_fp32 is False


CHECKPOINT = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32003,
}
OF_CHECKPOINT = """\
def mine(hf_path="org/model-1b") -> ConfigContainer:
    cfg = _base()
    cfg.model = AutoBridge.from_hf_pretrained(hf_path).to_megatron_provider(load_weights=False)
    cfg.model.seq_length = 32
    cfg.model.hidden_size = 256
    return cfg
"""
OF_CONFIG = OF_CHECKPOINT.replace("from_hf_pretrained(hf_path)", "from_hf_config(tuned())")


def checkpoint_in(folder: Path, **keys: object) -> RunChoice:
    """Return the choice of a folder with the `config.json` of a checkpoint."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CHECKPOINT, **keys}))
    return RunChoice(checkpoint=str(folder))


@pytest.mark.parametrize("is_launched", [False, True])
def test_the_sizes_of_a_stated_checkpoint_are_below_what_the_recipe_states(recipe: Recipe, is_launched: bool) -> None:
    path = recipe(OF_CHECKPOINT, name="src/megatron/bridge/recipes/more.py")
    if is_launched:
        (path.parent / "__init__.py").write_text("from megatron.bridge.recipes.more import mine\n")
        path = recipe(LAUNCH.format(name="mine", words="model.num_query_groups=4"), name="run.sh")
    run = load_run(config_file=path, choice=checkpoint_in(path.parent / "here"))
    assert run.plan.shape.num_layers == 6
    assert run.plan.shape.padded_vocab_size() == 32003
    assert run.origin_of("model.num_layers") == "config.json of org/model-1b"
    assert run.model["hidden_size"] == 256
    assert run.model["num_query_groups"] == (4 if is_launched else 2)
    assert run.find_decider("model.num_layers") is None
    assert run.model["bias_activation_fusion"] is True
    assert run.find_decider("model.moe_token_dispatcher_type") == "the checkpoint org/model-1b"


def test_the_checkpoint_of_a_recipe_is_found_by_its_name(recipe: Recipe) -> None:
    path = recipe(OF_CHECKPOINT)
    checkpoint_in(path.parent / "org" / "model-1b")
    run = load_run(config_file=path)
    assert run.model["num_layers"] == 6
    assert any("org/model-1b/config.json decides the model's sizes" in line for line in run.reading.notes)


def test_the_vocabulary_of_the_tokenizer_is_padded_as_the_checkpoint_says(recipe: Recipe) -> None:
    tokenizer = "TokenizerConfig(tokenizer_type='NullTokenizer', vocab_size=1030, use_tokenizer_vocab_size=True)"
    imported = "from megatron.bridge.training.tokenizers.config import TokenizerConfig\n"
    body = OF_CHECKPOINT.replace("    return", f"    cfg.tokenizer = {tokenizer}\n    return")
    path = recipe(imported + body)
    run = load_run(config_file=path, choice=checkpoint_in(path.parent / "here", vocab_size=32064))
    assert run.plan.shape.padded_vocab_size() == 1088  # 1031, padded to 64
    assert run.find_decider("model.vocab_size") is None
    large = checkpoint_in(path.parent / "large", vocab_size=128256)
    assert load_run(config_file=path, choice=large).plan.shape.padded_vocab_size() == 1152


def in_version(recipe: Recipe, body: str, minor: int, **choices: object) -> Run:
    """Return the run of a recipe whose checkout is Megatron Bridge 0.MINOR."""
    path = recipe(body)
    info = path.parent / "src" / "megatron" / "bridge" / "package_info.py"
    info.write_text(f"MAJOR = 0\nMINOR = {minor}\nPATCH = 0\n")
    return load_run(config_file=path, strict=False, **choices)


def test_the_version_of_the_checkout_decides_the_release_of_megatron_core(recipe: Recipe) -> None:
    assert str(in_version(recipe, TINY, 5).reading.release.version) == "0.18.2"
    assert "Megatron Bridge 0.7" in in_version(recipe, TINY, 7).reading.release.sentence
    assert in_version(recipe, TINY, 1).reading.release.is_installed  # a version without a row
    run = in_version(recipe, TINY, 7, overrides=["target='h100x8,mcore0.17.1'"])
    assert str(run.reading.release.version) == "0.17.1"


def test_a_fault_that_the_release_of_the_checkout_mended_is_not_found(recipe: Recipe) -> None:
    body = TINY.replace("    return", "    cfg.mixed_precision = bf16_with_mxfp8_mixed()\n    return")
    found = {minor: {finding.id for finding in check(in_version(recipe, body, minor)).findings} for minor in (4, 7)}
    assert "PB241" in found[4]
    assert "PB241" not in found[7]


def test_a_size_that_an_argument_of_the_recipe_decides_is_not_known(recipe: Recipe) -> None:
    body = TINY.replace("tiny_pretrain_config()", "tiny_pretrain_config(args)")
    body = body.replace("    return", "    cfg.model.num_layers = args.num_layers\n    return")
    with pytest.raises(RunConfigError, match=r"model\.num_layers, which the argument args .* decides\. Add"):
        load_run(config_file=recipe(body))


def test_the_program_that_starts_a_recipe_decides_which_of_two_lengths_counts(recipe: Recipe) -> None:
    body = TINY.replace("    return", "    cfg.dataset.seq_length = 64\n    return")
    run = load_run(config_file=recipe(body))
    assert "PB411" not in {finding.id for finding in check(run).findings}
    assert any("64 for the data and 32 for the model" in line for line in run.reading.lines)
    started = body + "def main():\n    cfg = tiny_pretrain_config()\n    pretrain(cfg)\n"
    imported = "from megatron.bridge.training.pretrain import pretrain\n"
    run = load_run(config_file=recipe(imported + started), strict=False)
    assert "PB411" in {finding.id for finding in check(run).findings}


@pytest.mark.parametrize(("minor", "size"), [(4, 1031), (5, 1030)])
def test_a_null_tokenizer_has_its_end_of_document_in_its_vocabulary_since_0_18(
    recipe: Recipe, minor: int, size: int
) -> None:
    tokenizer = "TokenizerConfig(tokenizer_type='NullTokenizer', vocab_size=1030, use_tokenizer_vocab_size=True)"
    imported = "from megatron.bridge.training.tokenizers.config import TokenizerConfig\n"
    body = TINY.replace("    return", f"    cfg.tokenizer = {tokenizer}\n    return")
    assert in_version(recipe, imported + body, minor).model["vocab_size"] == size


def test_the_vocabulary_of_a_tokenizer_that_is_not_known_is_open(recipe: Recipe) -> None:
    tokenizer = "TokenizerConfig(tokenizer_type='HuggingFaceTokenizer', use_tokenizer_vocab_size=True)"
    imported = "from megatron.bridge.training.tokenizers.config import TokenizerConfig\n"
    body = OF_CHECKPOINT.replace("    return", f"    cfg.tokenizer = {tokenizer}\n    return")
    path = recipe(imported + body)
    run = load_run(config_file=path, choice=checkpoint_in(path.parent / "here"), strict=False)
    assert run.model.get("vocab_size") is None
    assert run.find_decider("model.vocab_size") == "the tokenizer of the run"


def test_a_checkpoint_whose_name_only_the_run_knows_is_read_where_it_is_stated(recipe: Recipe) -> None:
    path = recipe(OF_CHECKPOINT.replace('="org/model-1b"', ""))
    assert load_run(config_file=path, strict=False).model.get("num_layers") is None
    run = load_run(config_file=path, choice=checkpoint_in(path.parent / "here"))
    assert run.model["num_layers"] == 6


def test_a_stated_checkpoint_that_cannot_be_read_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    path = recipe(OF_CHECKPOINT)
    with pytest.raises(RunConfigError, match=r"must be a folder with a config\.json"):
        load_run(config_file=path, choice=RunChoice(checkpoint=str(tmp_path / "gone")))
    choice = checkpoint_in(tmp_path / "here", model_type="new_one")
    with pytest.raises(RunConfigError, match="its model_type new_one is none whose layers are known here") as error:
        load_run(config_file=path, choice=choice)
    assert "--context checkpoint" not in str(error.value)
    assert "Add model.num_layers=VALUE" in str(error.value)


@pytest.mark.parametrize("body", [TINY, OF_CONFIG])
def test_a_checkpoint_is_refused_where_none_is_known_to_make_the_model(recipe: Recipe, body: str) -> None:
    path = recipe(body)
    choice = checkpoint_in(path.parent / "here")
    with pytest.raises(RunConfigError, match="is not known to make its model of one"):
        load_run(config_file=path, choice=choice)


def test_a_checkpoint_is_refused_for_a_recipe_that_is_not_at_hand(recipe: Recipe) -> None:
    path = recipe(LAUNCH.format(name="absent_config", words=""), name="run.sh")
    with pytest.raises(RunConfigError, match="is not known to make its model of one"):
        load_run(config_file=path, choice=checkpoint_in(path.parent / "here"))
