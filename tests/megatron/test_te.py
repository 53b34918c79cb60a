"""The Transformer Engine recipe of a config, against Transformer Engine's own classes and Megatron's own code."""

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
from bridge.megatron.te.environment import NVTE_VARIABLES, environment_findings, read_environment, set_lines
from bridge.megatron.te.layers import layer_factory, name_te_modules, te_quantizers
from bridge.megatron.te.machine import Machine, missing_for_te
from bridge.megatron.te.recipe import TERecipe, import_recipes, te_recipe

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


def environment(**values):
    return read_environment(values)


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
def test_recipe_equals_the_one_that_megatron_makes(fields, recipes, megatrons_recipe):
    config = config_of(**fields)
    theirs, ours = megatrons_recipe(config), te_recipe(config).build(recipes)
    assert isinstance(theirs, type(ours))
    for field in vars(ours):
        if field != "_cached_repr":
            assert getattr(theirs, field) == getattr(ours, field), field
    assert ours._make_repr().partition(", ")[2] == theirs._make_repr().partition(", ")[2]


def test_a_bf16_config_has_no_recipe():
    assert te_recipe(config_of()) is None


def test_a_recipe_reads_as_a_call():
    assert str(te_recipe(config_of(**CONFIGS["delayed"]))) == (
        "DelayedScaling(fp8_format=HYBRID, margin=2, amax_history_len=16, amax_compute_algo=most_recent, "
        "fp8_dpa=False, fp8_mha=False)"
    )
    assert str(te_recipe(config_of(**CONFIGS["nvfp4"]))) == (
        "NVFP4BlockScaling(fp8_dpa=False, disable_rht=False, disable_stochastic_rounding=False, "
        "disable_2d_quantization=False)"
    )


def test_what_does_not_reach_transformer_engine_is_noted():
    fields = {"fp8_margin": 1, "fp8_dot_product_attention": True, "fp8_wgrad": False, "tp_only_amax_red": True}
    recipe = te_recipe(config_of(fp8="hybrid", fp8_recipe="blockwise", **fields))
    assert recipe.keywords == {"fp8_format": "HYBRID", "use_f32_scales": False}
    assert recipe.notes == (
        "fp8_margin=1 has no effect: Float8BlockScaling gets no such keyword.",
        "fp8_dot_product_attention=True has no effect: Float8BlockScaling gets no such keyword.",
        "fp8_wgrad=False has no effect: Transformer Engine 2.0 dropped it, and wgrad runs in FP8.",
        "fp8='hybrid' under blockwise makes gradients E5M2; Transformer Engine's default is E4M3.",
        "tp_only_amax_red=True is no keyword: it chooses the group that autocast reduces amaxes over.",
    )


def test_all_faults_of_a_config_are_named():
    config = SimpleNamespace(fp8="e5m2", fp8_recipe="tensorwize", fp4="e2m1")
    with pytest.raises(PrecisionConfigError) as raised:
        te_recipe(config)
    assert str(raised.value).splitlines() == [
        "No Transformer Engine recipe can be made of this config:",
        "  fp4: must be None together with fp8='e5m2', got 'e2m1'. Choose one of the two.",
        "  fp8: must be e4m3 or hybrid, got 'e5m2'. Use one of these, or None for no FP8.",
        "  fp8_recipe: must be one of delayed, tensorwise, blockwise, mxfp8, custom, got 'tensorwize'. "
        "Did you mean 'tensorwise'?",
    ]


def test_custom_without_a_factory_is_refused():
    config = SimpleNamespace(fp8="hybrid", fp8_recipe=Fp8Recipe.custom, fp8_quantizer_factory=None)
    with pytest.raises(PrecisionConfigError, match="fp8_quantizer_factory: must name a function where fp8_recipe is"):
        te_recipe(config)


class TestBuild:
    def test_transformer_engine_drops_unknown_keywords(self, recipes):
        assert not hasattr(recipes.Float8CurrentScaling(margin=3), "margin")

    def test_an_unknown_keyword_is_an_error(self, recipes):
        recipe = TERecipe(name="DelayedScaling", scheme="delayed", keywords={"amax_history_length": 4, "xyz": 1})
        with pytest.raises(PrecisionConfigError) as raised:
            recipe.build(recipes)
        first, second = raised.value.findings
        assert str(first) == (
            "DelayedScaling.amax_history_length: DelayedScaling of this Transformer Engine has no such keyword, and "
            "would drop it in silence, got 4. Did you mean 'amax_history_len'?"
        )
        assert second.remedy.startswith("It has margin, fp8_format, amax_history_len, ")

    def test_a_refused_value_is_one_line(self, recipes):
        recipe = TERecipe(name="DelayedScaling", scheme="delayed", keywords={"amax_history_len": 1.5})
        with pytest.raises(PrecisionConfigError) as raised:
            recipe.build(recipes)
        assert str(raised.value).splitlines()[1:] == [
            "  DelayedScaling: amax_history_len: Input should be a valid integer, got a number with a fractional part, "
            "got 'DelayedScaling(amax_history_len=1.5)'. Correct the value."
        ]

    def test_a_value_that_is_turned_into_another_type_is_an_error(self, recipes):
        assert recipes.DelayedScaling(margin="3").margin == 3
        recipe = TERecipe(name="DelayedScaling", scheme="delayed", keywords={"margin": "3", "fp8_dpa": "yes"})
        with pytest.raises(PrecisionConfigError) as raised:
            recipe.build(recipes)
        assert [finding.path for finding in raised.value.findings] == [
            "DelayedScaling.margin",
            "DelayedScaling.fp8_dpa",
        ]

    @pytest.mark.parametrize(
        ("scheme", "name", "keyword", "power_of_two"),
        [
            ("tensorwise", "Float8CurrentScaling", "use_power_2_scales", True),
            ("blockwise", "Float8BlockScaling", "use_f32_scales", False),
        ],
    )
    def test_the_scale_rule_reaches_the_linear_layers(self, recipes, scheme, name, keyword, power_of_two):
        recipe = TERecipe(name=name, scheme=scheme, keywords={keyword: True})
        untouched = getattr(recipes, name)(**{keyword: True})
        assert untouched.fp8_quant_fwd_inp.power_2_scale is not power_of_two
        assert [finding.path for finding in recipe.differences(untouched, recipes)] == [
            f"{name}.fp8_quant_fwd_inp",
            f"{name}.fp8_quant_fwd_weight",
            f"{name}.fp8_quant_bwd_grad",
        ]
        made = recipe.build(recipes)
        for params in (made.fp8_quant_fwd_inp, made.fp8_quant_fwd_weight, made.fp8_quant_bwd_grad):
            assert params.power_2_scale is power_of_two
        assert getattr(recipes, name)().fp8_quant_fwd_inp.power_2_scale is not power_of_two

    def test_a_class_that_is_missing_names_the_version(self):
        with pytest.raises(BackendUnavailableError) as raised:
            te_recipe(config_of(**CONFIGS["nvfp4"])).build(SimpleNamespace())
        assert str(raised.value) == (
            "NVFP4BlockScaling: this Transformer Engine has no such recipe. Install version 2.8 or later."
        )

    def test_a_factory_that_cannot_be_found_is_named(self, recipes):
        config = config_of(fp8="hybrid", fp8_recipe="custom", fp8_quantizer_factory="nowhere.factory")
        with pytest.raises(PrecisionConfigError, match=r"quantizer_factory: .*'nowhere.factory'. Check the spelling"):
            te_recipe(config).build(recipes)

    def test_another_recipe_than_the_configs_is_told(self, recipes):
        recipe = te_recipe(config_of(**CONFIGS["delayed"]))
        assert recipe.differences(recipe.build(recipes), recipes) == []
        other = recipes.DelayedScaling(margin=1, amax_history_len=16, amax_compute_algo="most_recent")
        assert [str(finding) for finding in recipe.differences(other, recipes)] == [
            "DelayedScaling.margin: must be 2, as the config says, got 1. Find where it was changed."
        ]
        assert len(recipe.differences(recipes.MXFP8BlockScaling(), recipes)) == 1

    def test_without_transformer_engine_the_error_says_so(self):
        if importlib.util.find_spec("transformer_engine") is not None:
            pytest.skip("needs an environment without Transformer Engine")
        with pytest.raises(BackendUnavailableError, match="transformer_engine: must be importable, and is not"):
            import_recipes()


class TestEnvironment:
    def test_every_import_time_variable_is_a_default_that_transformer_engine_reads(self, recipes):
        """Each row in turn, in a process of its own: the variable changes its keyword's default, and that alone."""
        rows = [row for row in NVTE_VARIABLES.values() if row.keyword is not None]
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
        assert read <= set(NVTE_VARIABLES)
        assert {row.name for row in NVTE_VARIABLES.values() if row.keyword} == read

    def test_variables_are_read_once_and_said(self):
        found = environment(NVTE_NVFP4_DISABLE_RHT="1", NVTE_UNFUSED_FP8_UPDATE="x", HOME="/", NVTE_FUSED_ATTN="1")
        assert set_lines(found) == [
            "NVTE_NVFP4_DISABLE_RHT=1 (read at import): leaves out the random Hadamard transform before the weight "
            "gradient's GEMM.",
            "NVTE_UNFUSED_FP8_UPDATE=x (read at run time): Transformer Engine accepts only a whole number.",
            "NVTE_FUSED_ATTN=1 (read at run time): no effect, this is what Transformer Engine does anyway.",
        ]
        assert set_lines(environment()) == []

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
            ("mxfp8", {"NVTE_BACKWARD_OVERRIDE": "dequantized"}, [("NVTE_BACKWARD_OVERRIDE", "error")]),
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
        recipe = te_recipe(config_of(**CONFIGS[scheme]))
        found = environment_findings(recipe, read_environment(values))
        assert [(finding.path, finding.severity) for finding in found] == expected

    def test_a_contradiction_is_one_sentence(self):
        recipe = te_recipe(config_of(**CONFIGS["nvfp4"]))
        [finding] = environment_findings(recipe, environment(NVTE_NVFP4_DISABLE_RHT="1"))
        assert str(finding) == (
            "NVTE_NVFP4_DISABLE_RHT: NVFP4BlockScaling is not what the config says: it leaves out the random Hadamard "
            "transform before the weight gradient's GEMM, got '1' (environment). Unset it before transformer_engine is "
            "imported, so that the config alone says what the run is."
        )

    def test_a_bf16_run_has_no_findings(self):
        assert environment_findings(None, environment(NVTE_BACKWARD_OVERRIDE="nonsense")) == []

    def test_what_adds_to_the_config_becomes_a_keyword(self, recipes):
        power = te_recipe(config_of(**CONFIGS["tensorwise"]), environment(NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES="1"))
        assert power.keywords["use_power_2_scales"] is True
        assert power.notes == ("use_power_2_scales=True comes from NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES=1.",)
        assert power.build(recipes).fp8_quant_bwd_grad.power_2_scale

    def test_what_contradicts_the_config_is_not_followed(self, recipes):
        config = config_of(**CONFIGS["nvfp4"])
        recipe = te_recipe(config, environment(NVTE_NVFP4_DISABLE_RHT="1", NVTE_NVFP4_4OVER6="x"))
        assert recipe.keywords == te_recipe(config).keywords
        assert recipe.notes == ("NVTE_NVFP4_DISABLE_RHT=1 is not followed: it contradicts the config.",)
        assert not recipe.build(recipes).disable_rht
        [finding] = recipe.differences(recipes.NVFP4BlockScaling(disable_rht=True), recipes)
        assert finding.path == "NVFP4BlockScaling.disable_rht"


H100 = Machine(device="NVIDIA H100", compute_capability=(9, 0), cuda="12.10", transformer_engine="2.20.2")
NOTHING = Machine()


class TestMachine:
    @pytest.mark.parametrize(
        ("scheme", "machine", "expected"),
        [
            (None, H100, []),
            ("delayed", H100, []),
            ("blockwise", H100, []),
            ("custom", H100, []),
            (None, NOTHING, ["a CUDA device (torch is built for the CPU alone)", "transformer_engine (not installed)"]),
            ("nvfp4", Machine(cuda="12.4"), [
                "a CUDA device",
                "transformer_engine (not installed)",
                "CUDA 12.8 for nvfp4 (torch is built with 12.4)",
            ]),
            ("mxfp8", H100, ["compute capability 10.0 for mxfp8 (NVIDIA H100 has 9.0)"]),
            (
                "mxfp8",
                Machine(device="RTX 5090", compute_capability=(12, 0), cuda="12.9", transformer_engine="2.20"),
                ["a compute capability below 12.0 for mxfp8 (RTX 5090 has 12.0)"],
            ),
            (
                "nvfp4",
                Machine(device="B200", compute_capability=(10, 0), cuda="13.0", transformer_engine="2.3.0+cu13"),
                ["transformer_engine 2.8 for nvfp4 (2.3.0+cu13 is installed)"],
            ),
            (
                None,
                Machine(device="H100", cuda="12.9", transformer_engine="2.8", load_error="no libcudnn"),
                ["a transformer_engine that can be loaded (2.8: no libcudnn)"],
            ),
            ("tensorwize", H100, []),
        ],
    )  # fmt: skip
    def test_what_is_missing_is_named(self, scheme, machine, expected):
        assert missing_for_te(scheme, machine) == expected

    def test_this_machine_is_read(self):
        missing = missing_for_te()
        assert bool(missing) is (
            importlib.util.find_spec("transformer_engine") is None or not torch.cuda.is_available()
        )
        assert any("CUDA device" in clause for clause in missing) is not torch.cuda.is_available()

    def test_a_package_without_its_cuda_parts_is_told(self):
        if not (TE / "transformer_engine").is_dir():
            pytest.skip(f"needs Transformer Engine's Python files in {TE}: run make setup")
        path = Path(sys.modules["bridge.megatron.te.machine"].__file__)
        code = (
            "import importlib.util, sys\n"
            f"spec = importlib.util.spec_from_file_location('m', {str(path)!r})\n"
            "m = importlib.util.module_from_spec(spec); sys.modules['m'] = m; spec.loader.exec_module(m)\n"
            "print(m.installed('te'), m._load_error(), sep=': ')"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(TE), str(Path(__file__).parents[2])))},
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
        recipe = TERecipe(name="CustomRecipe", scheme="custom", keywords={"qfactory": factory}).build(recipes)
        assert recipe.qfactory is factory
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
