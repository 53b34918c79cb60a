"""Transformer Engine: recipes that Megatron makes, variables, requirements and factories of quantizers."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import megatron.core
import pytest
import torch
from megatron.core.enums import Fp4Recipe, Fp8Recipe
from megatron.core.transformer import TransformerConfig

from bridge.errors import BackendUnavailableError, PrecisionConfigError
from bridge.precision.schemes import find_scheme
from bridge.rules.environment_variables import check_environment, format_set_variables, load_nvte_variables
from bridge.runtime.megatron import backend
from bridge.runtime.megatron.backend import get_te_recipe
from bridge.runtime.megatron.emulation.parallel_linear import get_layer_scheme
from bridge.runtime.megatron.te import machine as machine_module
from bridge.runtime.megatron.te.layers import layer_factory, name_te_modules, te_quantizers
from bridge.runtime.megatron.te.machine import list_missing_for_te
from bridge.target.declaration import parse_target
from bridge.target.gpus import CPU
from bridge.target.target import Target

TE = Path(sys.prefix) / "te"
FILE = Path(os.environ.get("BRIDGE_TE_RECIPE", TE / "transformer_engine/common/recipe/__init__.py"))
SHAPE = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "bf16": True,
    "use_cpu_initialization": True,  # Megatron asks for the CUDA device otherwise
}
MEGATRON = Path(megatron.core.__file__).parent


@pytest.fixture(scope="module")
def recipes():
    """Transformer Engine's recipe module, alone: the package around it cannot be imported without its CUDA parts."""
    if not FILE.is_file():
        pytest.skip(f"needs Transformer Engine's recipe module at {FILE}: run make setup, or set BRIDGE_TE_RECIPE")
    before = list(sys.path)
    sys.path.append(str(TE))
    try:
        pytest.importorskip("pydantic.dataclasses", reason=f"needs pydantic, here or in {TE}: run make setup")
    finally:
        sys.path[:] = before
    return load(FILE, "te_recipes")


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def config_of(**fields):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(**SHAPE, **fields)


CONFIGS = {
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_margin": 2, "fp8_amax_history_len": 16},
    "delayed-max": {"fp8": "e4m3", "fp8_recipe": Fp8Recipe.delayed, "fp8_amax_compute_algo": "max"},
    "delayed-attention": {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_dot_product_attention": True,
        "fp8_multi_head_attention": True,
    },
    "delayed-wgrad": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_wgrad": False},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "tensorwise-attention": {"fp8": "e4m3", "fp8_recipe": "tensorwise", "fp8_dot_product_attention": True},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "blockwise-hybrid": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "custom": {"fp8": "hybrid", "fp8_recipe": "custom", "fp8_quantizer_factory": "operator.itemgetter"},
    "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
    "nvfp4-custom": {"fp4": "e2m1", "fp4_recipe": Fp4Recipe.custom, "fp4_quantizer_factory": "operator.itemgetter"},
}


def definition(path, name):
    """The source of a function or class of Megatron, wherever in its file it is defined with Transformer Engine."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            source = ast.unparse(node)
            if "TE is not available" not in source and "Transformer Engine is not available" not in source:
                return source
    raise AssertionError(f"{path} defines no {name}")


@pytest.fixture(scope="module")
def megatrons_recipe(recipes):
    """Megatron's own get_fp8_recipe and get_fp4_recipe, run on Transformer Engine's recipe module."""
    from packaging.version import Version

    engine = SimpleNamespace(common=SimpleNamespace(recipe=recipes))
    scope = {
        "te": engine,
        "transformer_engine": engine,
        "HAVE_TE": True,
        "Fp8Recipe": Fp8Recipe,
        "Fp4Recipe": Fp4Recipe,
        "TransformerConfig": TransformerConfig,
        "ModelParallelConfig": TransformerConfig,
        "PkgVersion": Version,
        "get_te_version": lambda: Version("2.20.2"),
        "is_te_min_version": lambda floor, **_: Version("2.20.2") >= Version(floor),
        "torch": torch,
        "warnings": warnings,
    }
    extension = MEGATRON / "extensions/transformer_engine.py"
    exec("from __future__ import annotations\nimport importlib\nfrom typing import *", scope)  # noqa: S102
    for path, name in (
        (extension, "_get_extra_te_kwargs"),
        (extension, "TEDelayedScaling"),
        (MEGATRON / "fp8_utils.py", "_resolve_callable_from_python_import_path"),
        (MEGATRON / "fp8_utils.py", "_get_custom_recipe"),
        (MEGATRON / "fp8_utils.py", "get_fp8_recipe"),
        (MEGATRON / "fp4_utils.py", "get_fp4_recipe"),
    ):
        exec("from __future__ import annotations\n" + definition(path, name), scope)  # noqa: S102
    return lambda config: scope["get_fp8_recipe" if config.fp8 else "get_fp4_recipe"](config)


@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_the_table_of_schemes_has_the_class_and_the_keywords_that_megatron_passes(fields, megatrons_recipe):
    config = config_of(**fields)
    row = find_scheme(get_layer_scheme(config), "fp8" if config.fp8 else "fp4")
    made = megatrons_recipe(config)
    assert row.te_class in [kind.__name__ for kind in type(made).__mro__]
    assert {key: getattr(made, key) for key in row.te_keywords} == {
        key: getattr(config, path) for key, path in row.te_keywords.items()
    }
    if config.fp8 and row.name != "custom":
        assert made.fp8_format.name == config.fp8.upper()


def test_a_run_names_its_recipe_and_its_variables_a_line_each(monkeypatch, megatrons_recipe):
    monkeypatch.setattr(backend, "get_te_recipe", megatrons_recipe)
    recipe, variable, *others = backend._make_te_notes(config_of(**CONFIGS["tensorwise"]), {"NVTE_USE_FAST_MATH": "0"})
    assert recipe.startswith("Recipe: recipe_type=Float8CurrentScaling, format=HYBRID, ")
    assert "\n" not in recipe
    assert variable.startswith("NVTE_USE_FAST_MATH=0 (read at run time): no effect")
    assert others == []


def test_a_bf16_config_has_no_recipe():
    assert get_te_recipe(config_of()) is None


class TestEnvironment:
    def test_every_import_time_variable_is_a_default_that_transformer_engine_reads(self, recipes):
        """Each row in turn, in a process of its own: the variable changes its keyword's default, and that alone."""
        rows = [row for row in load_nvte_variables().values() if row.keyword is not None]
        values = {row.name: (row.choices[0] if row.kind == "text" else "1") for row in rows}
        values |= {"NVTE_NVFP4_4OVER6": "all", "NVTE_NVFP4_4OVER6_ERR_MODE": "mse"}
        code = (
            "import sys, json, dataclasses, importlib.util\n"
            f"sys.path.append({str(TE)!r})\n"
            f"spec = importlib.util.spec_from_file_location('r', {str(FILE)!r})\n"
            "r = importlib.util.module_from_spec(spec); sys.modules['r'] = r; spec.loader.exec_module(r)\n"
            "names = [name for name in dir(r) if name.endswith('Scaling')]\n"
            "print(json.dumps({f.name: f.default for name in names for f in dataclasses.fields(getattr(r, name))"
            " if isinstance(f.default, (bool, str, type(None)))}))"
        )
        clean = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
        changed = subprocess.run(
            [sys.executable, "-c", code], env={**clean, **values}, capture_output=True, text=True, check=True
        )
        defaults = json.loads(changed.stdout)
        for row in rows:
            assert defaults[row.keyword] == row.parse(values[row.name]), row.name
            assert row.is_active(values[row.name]), row.name

    def test_the_table_has_every_variable_that_the_recipe_module_reads(self, recipes):
        text = FILE.read_text(encoding="utf-8")
        read = {name.split('"')[1] for name in text.split("os.getenv(")[1:]}
        assert read <= set(load_nvte_variables())
        assert {row.name for row in load_nvte_variables().values() if row.keyword} == read

    def test_variables_are_read_once_and_said(self):
        values = {"NVTE_NVFP4_DISABLE_RHT": "1", "NVTE_UNFUSED_FP8_UPDATE": "x", "HOME": "/", "NVTE_FUSED_ATTN": "1"}
        assert format_set_variables(values) == [
            "NVTE_NVFP4_DISABLE_RHT=1 (read at import): leaves out the random Hadamard transform before the weight "
            "gradient's GEMM.",
            "NVTE_UNFUSED_FP8_UPDATE=x (read at run time): Transformer Engine accepts only a whole number.",
            "NVTE_FUSED_ATTN=1 (read at run time): no effect, this is what Transformer Engine does anyway.",
        ]
        assert format_set_variables({}) == []

    @pytest.mark.parametrize(
        ("scheme", "values", "expected"),
        [
            ("nvfp4", {"NVTE_NVFP4_DISABLE_RHT": "1"}, [("NVTE_NVFP4_DISABLE_RHT", "error")]),
            ("nvfp4", {"NVTE_NVFP4_DISABLE_RHT": "0"}, []),
            ("nvfp4", {"NVTE_NVFP4_DISABLE_RHT": "true"}, [("NVTE_NVFP4_DISABLE_RHT", "warning")]),
            ("nvfp4", {"NVTE_NVFP4_4OVER6": "weights"}, [("NVTE_NVFP4_4OVER6", "warning")]),
            ("nvfp4", {"NVTE_NVFP4_4OVER6": "some"}, [("NVTE_NVFP4_4OVER6", "error")]),
            ("nvfp4", {"NVTE_NVFP4_4OVER6_ERR_MODE": "mae"}, []),
            ("tensorwise", {"NVTE_NVFP4_DISABLE_RHT": "1"}, []),
            ("tensorwise", {"NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1"}, [
                ("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "warning")
            ]),
            ("blockwise", {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}, [
                ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "error")
            ]),
            ("delayed", {"NVTE_BACKWARD_OVERRIDE": "dequantized"}, [("NVTE_BACKWARD_OVERRIDE", "error")]),
            ("mxfp8", {"NVTE_BACKWARD_OVERRIDE": "dequantized"}, [("NVTE_BACKWARD_OVERRIDE", "warning")]),
            ("mxfp8", {"NVTE_BACKWARD_OVERRIDE": ""}, [("NVTE_BACKWARD_OVERRIDE", "error")]),
            ("delayed", {"NVTE_UNFUSED_FP8_UPDATE": "1"}, [("NVTE_UNFUSED_FP8_UPDATE", "warning")]),
            ("delayed", {"NVTE_UNFUSED_FP8_UPDATE": "00"}, []),
            ("delayed", {"NVTE_DPA_FP8_RECIPE": "F16"}, []),
            ("delayed-attention", {"NVTE_DPA_FP8_RECIPE": "F16"}, [("NVTE_DPA_FP8_RECIPE", "error")]),
            ("delayed-attention", {"NVTE_DPA_FP8_RECIPE": "DelayedScaling"}, []),
            ("delayed-attention", {"NVTE_DPA_FP8_RECIPE": "Float8CurrentScaling"}, [
                ("NVTE_DPA_FP8_RECIPE", "warning")
            ]),
            ("delayed", {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NVTE_PLUGIN": "x"}, []),
            ("nvfp4", {"NVTE_NVFP4_DISABLE_RTH": "1"}, [("NVTE_NVFP4_DISABLE_RTH", "warning")]),
            ("nvfp4", {"NVTE_CUDA_INCLUDE_DIR": "/usr", "NVTE_FLASH_ATTN": "0"}, []),
        ],
    )  # fmt: skip
    def test_what_a_variable_changes_is_found(self, scheme, values, expected):
        found = check_environment(scheme.partition("-")[0], values, attention=scheme.endswith("attention"))
        assert [(finding.path, finding.severity) for finding in found] == expected

    def test_a_contradiction_is_one_sentence(self):
        [finding] = check_environment("nvfp4", {"NVTE_NVFP4_DISABLE_RHT": "1"})
        assert str(finding) == (
            "NVTE_NVFP4_DISABLE_RHT: NVFP4BlockScaling is not what the config says: it leaves out the random Hadamard "
            "transform before the weight gradient's GEMM, got '1' (environment). Unset it before transformer_engine is "
            "imported, so that the config alone says what the run is."
        )

    def test_a_bf16_run_has_no_findings(self):
        assert check_environment(None, {"NVTE_BACKWARD_OVERRIDE": "nonsense"}) == []


H100 = parse_target("h100,cuda12.10,te2.20.2")
NOTHING = Target(gpu=CPU)


class TestMachine:
    @pytest.mark.parametrize(
        ("scheme", "machine", "expected"),
        [
            (None, H100, []),
            ("delayed", H100, []),
            ("blockwise", H100, []),
            ("custom", H100, []),
            (None, NOTHING, ["a CUDA device (torch is built for the CPU alone)", "transformer_engine (not installed)"]),
            ("mxfp8", H100, ["compute capability 10.0 for mxfp8 (the GPU has 9.0)"]),
            ("mxfp8", parse_target("sm120,cuda12.9,te2.20"), [
                "a compute capability below 12.0 for mxfp8 (the GPU has 12.0)"
            ]),
            ("nvfp4", parse_target("b200,cuda12.4,te2.3"), [
                "CUDA 12.8 for nvfp4 (torch is built with 12.4)",
                "transformer_engine 2.8 for nvfp4 (2.3 is installed)",
            ]),
            ("tensorwize", H100, []),
        ],
    )  # fmt: skip
    def test_what_is_missing_is_named(self, scheme, machine, expected, monkeypatch):
        monkeypatch.setattr(torch.version, "cuda", None)
        assert list_missing_for_te(scheme, machine) == expected

    def test_a_package_that_cannot_be_loaded_is_named(self, monkeypatch):
        monkeypatch.setattr(machine_module, "detect_target", lambda: H100)
        monkeypatch.setattr(machine_module, "find_load_error", lambda: "no libcudnn")
        assert list_missing_for_te() == ["a transformer_engine that can be loaded (2.20.2: no libcudnn)"]

    def test_this_machine_is_read(self):
        missing = list_missing_for_te()
        assert bool(missing) is (
            importlib.util.find_spec("transformer_engine") is None or not torch.cuda.is_available()
        )
        assert any("CUDA device" in clause for clause in missing) is not torch.cuda.is_available()

    def test_a_package_without_its_cuda_parts_is_told(self):
        if not (TE / "transformer_engine").is_dir():
            pytest.skip(f"needs Transformer Engine's Python files in {TE}: run make setup")
        path = Path(sys.modules["bridge.runtime.megatron.te.machine"].__file__)
        code = (
            "import importlib.util, sys\n"
            f"spec = importlib.util.spec_from_file_location('m', {str(path)!r})\n"
            "m = importlib.util.module_from_spec(spec); sys.modules['m'] = m; spec.loader.exec_module(m)\n"
            "print(m.detect_target().te, m.find_load_error(), sep=': ')"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(TE), str(Path(__file__).parents[3])))},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.startswith("2.20.2: Found empty `transformer-engine` meta package installed")


def role(name="", tensor="weight", module="linear"):
    return SimpleNamespace(module_type=module, tensor_type=tensor, name=name)


class TestLayers:
    def test_a_factory_leaves_the_chosen_layers(self, recipes, monkeypatch):
        te = SimpleNamespace(IdentityQuantizer=lambda: "bf16")
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", te)
        factory = layer_factory(lambda role: ("low", role.name if role else None), bf16_layers={0, 3})
        recipe = recipes.CustomRecipe(qfactory=factory)
        names = [f"layers.{number}.mlp.linear_fc1" for number in range(5)]
        assert [recipe.qfactory(role(name)) for name in names] == [
            "bf16",
            ("low", names[1]),
            ("low", names[2]),
            "bf16",
            ("low", names[4]),
        ]
        assert factory(role("output_layer")) == ("low", "output_layer")
        assert factory(role("mtp.layers.0.mlp.linear_fc1"))[0] == "low"
        assert factory(None) == ("low", None)

    def test_a_linear_without_a_name_is_refused(self):
        factory = layer_factory(lambda role: "low", bf16_layers={0})
        with pytest.raises(PrecisionConfigError, match=r"needs a name .* Call name_te_modules\(model\) once"):
            factory(role())

    def test_only_schemes_with_a_factory_are_taken(self):
        with pytest.raises(PrecisionConfigError, match="scheme: must be delayed, tensorwise"):
            te_quantizers("custom")
        with pytest.raises(PrecisionConfigError, match="only delayed takes settings"):
            te_quantizers("mxfp8", margin=1)
        for scheme in ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"):
            assert callable(te_quantizers(scheme))

    def test_modules_are_named_by_their_number_in_the_whole_model(self):
        class Linear(torch.nn.Module):
            name = None

            def get_quantizer_roles(self):
                return None

        def layer(number):
            part = torch.nn.Module()
            part.layer_number = number  # counts from 1
            part.mlp = torch.nn.Module()
            part.mlp.linear_fc1 = Linear()
            return part

        model = torch.nn.Module()
        model.module = torch.nn.Module()
        model.module.decoder = torch.nn.Module()
        model.module.decoder.layers = torch.nn.ModuleList([layer(5), layer(6)])
        model.module.output_layer = Linear()
        assert name_te_modules(model) == 3
        assert [part.mlp.linear_fc1.name for part in model.module.decoder.layers] == [
            "layers.4.mlp.linear_fc1",
            "layers.5.mlp.linear_fc1",
        ]
        assert model.module.output_layer.name == "module.output_layer"


class TestEmulation:
    """The variables of Transformer Engine in a run that the emulation computes."""

    def test_the_emulation_follows_a_backward_override(self):
        found = backend.choose_backend(
            "emulated", config_of(**CONFIGS["tensorwise"]), {"NVTE_BACKWARD_OVERRIDE": "dequantized"}
        )
        assert found.backward_override == "dequantized"
        assert found.notes[-1] == (
            "NVTE_BACKWARD_OVERRIDE=dequantized: the emulation follows it, and runs both GEMMs of the backward pass in "
            "high precision."
        )

    def test_delayed_scaling_has_no_backward_override(self):
        config = config_of(**CONFIGS["delayed"])
        found = backend.choose_backend("emulated", config, {"NVTE_BACKWARD_OVERRIDE": "dequantized"})
        assert found.backward_override is None

    @pytest.mark.parametrize(
        ("name", "keyword"),
        [("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "row_scaled_activation"), ("NVTE_NVFP4_DISABLE_RHT", "disable_rht")],
    )
    def test_other_variables_that_change_the_recipe_are_refused(self, name, keyword):
        with pytest.raises(BackendUnavailableError) as error:
            backend.choose_backend("emulated", config_of(**CONFIGS["nvfp4"]), {name: "1"})
        assert str(error.value) == (
            f"precision_backend: the emulation has no {keyword}, which {name}=1 switches on for nvfp4, got 'emulated'. "
            "Unset it."
        )
        found = backend.choose_backend("emulated", config_of(**CONFIGS["tensorwise"]), {name: "1"})
        assert found.notes[-1] == f"{name}=1: the emulation does not read it."
