"""A run's values from the training script's configs and from single files."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bridge.errors import BridgeError, RunConfigError
from bridge.front.container import build_container
from bridge.front.loader import load_run
from bridge.precision.mode import format_label, get_scheme
from bridge.precision.statements import get_recipe_name, get_source
from bridge.preflight.run import Run
from bridge.registry.registry import REGISTRY

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"


LEVELS = [f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]" for before, name in itertools.pairwise("abcdef")]
BOMB = f"model: {{a: &a [{','.join('1' * 10)}], {', '.join(LEVELS)}}}"


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture
def file(tmp_path):
    return written(
        tmp_path,
        """
        mixed_precision: bf16_with_fp8_current_scaling_mixed
        model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4}
        optimizer: {use_distributed_optimizer: true}
        target: h100x8
        """,
    )


def test_the_tree_of_the_training_script_is_composed_as_it_composes_it():
    values = load_run(["model=gpt_tiny", "mixed_precision=fp16_mixed", "mixed_precision.loss_scale=128"], CONF)
    assert values.model["hidden_size"] == 64
    assert values.section("ddp")["use_distributed_optimizer"] is True  # a reference, resolved
    assert values.precision is not None
    assert get_recipe_name(values.precision) == "fp16_mixed"
    assert get_source(values.precision, "loss_scale") == "command line"
    assert get_source(values.precision, "fp16") == "recipe fp16_mixed"
    assert values.origin_of("model.hidden_size") == "model/gpt_tiny.yaml"


def test_a_file_takes_the_same_overrides(file):
    words = ["mixed_precision.fp8=e4m3", "model.num_layers=8", "~model.num_attention_heads", "target=b200x64"]
    values = load_run(words, config_file=file)
    assert values.model == {"num_layers": 8, "hidden_size": 64}
    assert values.precision is not None
    assert (values.precision.fp8, get_recipe_name(values.precision)) == ("e4m3", "bf16_with_fp8_current_scaling_mixed")
    assert values.sections["target"] == "b200x64"
    assert [values.origin_of(key) for key in ("model.num_layers", "model.hidden_size", "mixed_precision.fp8")] == [
        "command line",
        "run.yaml",
        "command line",
    ]


def test_a_recipe_on_the_command_line_replaces_the_files(file):
    values = load_run(["mixed_precision=bf16_mixed"], config_file=file)
    assert values.precision is not None
    assert values.precision.to_dict() == load_run(["mixed_precision=bf16_mixed"], CONF).precision.to_dict()
    assert load_run(["mixed_precision=null"], config_file=file).precision is None


def test_a_precision_without_a_recipe_is_a_mapping(tmp_path):
    path = written(tmp_path, "mixed_precision: {bf16: true, fp8: hybrid}\nmodel: {num_layers: 2}\n")
    precision = load_run(config_file=path).precision
    assert precision is not None
    assert (get_recipe_name(precision), get_scheme(precision)) == (None, "tensorwise")
    assert get_source(precision, "fp8") == "run.yaml"


def test_a_saved_run_is_called_by_its_recipe(tmp_path):
    text = "mixed_precision: {_recipe_: %s, bf16: true, params_dtype: bf16, pipeline_dtype: bf16, fp8: %s}\n"
    path = written(tmp_path, text % ("bf16_mixed", "hybrid"))
    precision = load_run(["mixed_precision.hysteresis=4"], config_file=path).precision
    assert precision is not None
    assert format_label(precision) == "bf16_mixed, fp8=hybrid, hysteresis=4"
    unknown = load_run(config_file=written(tmp_path, text % ("a_recipe_of_another_project", "null"))).precision
    assert unknown is not None
    assert format_label(unknown) == "a_recipe_of_another_project"


def test_auto_is_what_it_comes_to_on_the_declared_target(tmp_path):
    text = "mixed_precision: auto\nmodel: {num_layers: 80, hidden_size: 8192, num_attention_heads: 64}\n"
    path = written(tmp_path, text)
    large = ("model.num_layers=80", "model.hidden_size=8192", "model.num_attention_heads=64")
    for values in (
        load_run(["target=v100x8"], config_file=path),
        load_run(["mixed_precision=auto", "target=v100x8", *large], CONF),
    ):
        assert values.precision is not None
        assert get_recipe_name(values.precision) == "fp16_mixed"
    stated = load_run(["target=v100x8", "mixed_precision.loss_scale=64"], config_file=path).precision
    assert stated is not None
    assert (get_recipe_name(stated), stated.loss_scale) == ("fp16_mixed", 64)
    with pytest.raises(
        BridgeError,
        match="no GPU is visible here, got 'auto'. Resolve it on the worker, or declare the target: target=h100x8",
    ):
        load_run(config_file=path)


def test_what_megatron_bridge_writes_is_read_as_data(tmp_path):
    path = written(
        tmp_path,
        """
        _target_: megatron.bridge.training.config.ConfigContainer
        mixed_precision:
          _target_: megatron.bridge.training.mixed_precision.MixedPrecisionConfig
          bf16: true
          params_dtype: {_call_: false, _target_: torch.bfloat16}
          fp8: null
        model:
          _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
          num_layers: 2
          activation_func: {_call_: false, _target_: torch.nn.functional.silu}
          transformer_impl: {_target_: megatron.core.enums.Impl, _args_: [transformer_engine], _call_: true}
        scheduler: {_target_: anything.at.all, lr_decay_style: cosine}
        """,
    )
    values = load_run(config_file=path)
    assert values.model == {
        "num_layers": 2,
        "activation_func": "torch.nn.functional.silu",
        "transformer_impl": "transformer_engine",
    }
    assert values.precision is not None
    assert values.precision.to_dict()["params_dtype"] == "bf16"


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("model: {}", ["modle.x=1"], "modle.x: no such section, got '1' (command line). Did you mean 'model'?"),
        ("modle: {}", [], "modle: no such section, got {} (run.yaml). Did you mean 'model'?"),
        ("- 1", [], "run.yaml: must hold sections such as model and mixed_precision, got list"),
        ("model: 3", [], "model: must be a mapping of fields, got 3 (run.yaml). Write model.FIELD=VALUE."),
        ("model: [", [], "run.yaml, line 2: must be YAML"),
        ("model: {a: 1, a: 2}", [], "run.yaml, line 1: the key 'a' must not stand twice in one mapping"),
        ("model: {}\n---\nmodel: {}", [], "run.yaml: must hold one document, got 2."),
        ("model: &a [*a]", [], "run.yaml, line 1: the alias *a must follow its anchor"),
        (f"model: {{num_layers: {'9' * 6000}}}", [], "run.yaml, line 1: a number must have fewer digits"),
        (f"model: {'[' * 500}", [], "run.yaml, line 1: nesting must not be deeper than 64"),
        (BOMB, [], "must not hold more than 200000 values"),
        (f"model: {{a: '{'x' * 50_000_000}'}}", [], "run.yaml: a configuration must not be larger than"),
        ("model: {x: {_target_: os.system}}", [], "model.x._target_: configurations are data"),
        (
            "model: {}",
            ["model=gpt_5m"],
            "model: a file has no options to choose from, got 'gpt_5m' (command line). Write model.FIELD=VALUE.",
        ),
        ("model: {}", ["model.x=1,2"], "model.x: takes one value, got '1,2' (command line). Give one."),
        ("mixed_precision: bf16_mixd", [], "Unknown mixed-precision recipe 'bf16_mixd'. Did you mean 'bf16_mixed'"),
        ("mixed_precision: {fp9: true}", [], "mixed_precision.fp9: no such field, got True (run.yaml)."),
        ("model: {num_layers: {a: 1}}", [], "model.num_layers: must be a whole number, got {'a': 1} (run.yaml)."),
        ("mixed_precision: {bf16: true, fp16: true}", [], "The mixed-precision config can never be right:"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(text, words, message, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(BridgeError) as raised:
        load_run(words, config_file=path)
    assert message in str(raised.value)


def test_values_are_read_without_torch_and_megatron(file):
    code = (
        "import sys\nfrom bridge.front.loader import load_run\n"
        f"load_run([], config_file={str(file)!r}); load_run(['model=gpt_tiny'], {str(CONF)!r})\n"
        "print([m for m in ('torch', 'megatron', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert Run(precision=None).origin_of("model.x") == "default"


def test_a_named_pipe_is_refused_instead_of_read_for_ever(tmp_path):
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(RunConfigError, match="must be a regular file, got a named pipe"):
        load_run(config_file=tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("num_layers=-3", "model.num_layers: must be at least 1, got -3 (command line). Use 1 or more."),
        (
            "num_attention_heads=0",
            "model.num_attention_heads: must be at least 1, got 0 (command line). Use 1 or more.",
        ),
        *(
            (f"{name}={value}", f"model.{name}: must be at least 1, got {value} (command line). Use 1 or more.")
            for name, value in (
                ("hidden_size", -4),
                ("kv_channels", 0),
                ("num_query_groups", -1),
                ("ffn_hidden_size", 0),
            )
        ),
        (
            "hidden_size=100",
            "model.hidden_size: must be a multiple of the 8 attention heads while model.kv_channels is not set, "
            "got 100 (command line). Use 10 heads, or state model.kv_channels.",
        ),
        (
            "num_query_groups=3",
            "model.num_query_groups: must divide the 8 attention heads, got 3 (command line). Use a divisor.",
        ),
        (
            "num_attention_heads=3",
            "model.hidden_size: must be a multiple of the 3 attention heads while model.kv_channels is not set, "
            "got 256 (model/gpt_5m.yaml). Use 2 heads, or state model.kv_channels.",
        ),
        (
            "hidden_size=200",
            "model.hidden_size: must make heads of an even size under rotary position embeddings, and 8 make 25, "
            "got 200 (command line). Use a multiple of 16.",
        ),
        (
            "kv_channels=25",
            "model.kv_channels: must be even under rotary position embeddings, got 25 (command line). "
            "Use an even number.",
        ),
    ],
)
def test_sizes_that_no_model_has_are_one_sentence_each(word, sentence):
    for strict in (True, False):  # `plan` and `check`
        with pytest.raises(RunConfigError) as raised:
            load_run([f"model.{word}"], CONF, strict=strict)
        assert str(raised.value) == sentence
    with pytest.raises(RunConfigError) as raised:  # the run itself, before Megatron Core's classes
        build_container(load_run([f"model.{word}"], CONF))
    assert str(raised.value) == sentence


def test_sizes_of_other_architectures_pass(tmp_path):
    mamba = "{num_layers: 2, hidden_size: 100, num_attention_heads: 0, hybrid_override_pattern: MM}"
    load_run(config_file=written(tmp_path, f"model: {mamba}"))
    load_run(["model.hidden_size=100", "model.kv_channels=16"], CONF)


def test_the_registry_makes_a_recipe_once_for_a_run(monkeypatch):
    made = []
    original = REGISTRY.get
    monkeypatch.setattr(REGISTRY, "get", lambda name: made.append(name) or original(name))
    build_container(load_run(["model=gpt_tiny", "mixed_precision=fp8_current", "mixed_precision.fp8_margin=2"], CONF))
    assert made == ["bf16_with_fp8_current_scaling_mixed"]
