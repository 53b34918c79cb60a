"""The lists of modules against the code of vLLM and of SGLang themselves.

Functions of their source are taken at the time of the test, so that neither engine has to be installed: an engine's
folder is named by a variable, `VLLM_SOURCE=.../vllm` and `SGLANG_SOURCE=.../sglang`, the folder with its
`__init__.py`. Without it the engine's tests are skipped. They passed with vLLM 0.33.0 and SGLang 0.5.23.
"""

import ast
import fnmatch
import functools
import os
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, Optional

import pytest

from bridge.convert.serving.formats import COMPRESSED_TENSORS, FUSED_MODULES, MODELOPT, SGLANG, VLLM
from bridge.convert.serving.kept_modules import SGLANG_LAYER_NAMES, is_kept

ROUNDS = 4000
"""Lists that are drawn for each kind of config."""
NAMESPACE = {
    "re": re,
    "fnmatch": fnmatch.fnmatch,
    "MappingProxyType": MappingProxyType,
    "Mapping": Mapping,
    "Iterable": Iterable,
    "Literal": Literal,
    "Any": Any,
    "Optional": Optional,
    "List": list,
    "lru_cache": functools.lru_cache,
}
"""Names that the functions use from modules outside their engine."""
DENSE = "model.layers.0."
SPARSE = "model.layers.1."
LAYERS = {
    f"{DENSE}self_attn.qkv_proj": ["q_proj", "k_proj", "v_proj"],
    f"{DENSE}self_attn.o_proj": [],
    f"{DENSE}mlp.gate_up_proj": ["gate_proj", "up_proj"],
    f"{DENSE}mlp.down_proj": [],
    f"{SPARSE}self_attn.kv_b_proj": [],
    f"{SPARSE}mlp.gate": [],
    f"{SPARSE}mlp.shared_experts.gate_up_proj": ["gate_proj", "up_proj"],
    f"{SPARSE}mlp.shared_experts.down_proj": [],
    "lm_head": [],
}
"""An engine's name of a layer -> the last parts of the names that its checkpoint has in its place."""
EXPERTS = f"{SPARSE}mlp.experts"
ENTRIES = [
    *LAYERS,
    f"{DENSE}self_attn.q_proj",
    f"{DENSE}self_attn.k_proj",
    f"{DENSE}self_attn.v_proj",
    f"{DENSE}mlp.gate_proj",
    f"{DENSE}mlp.up_proj",
    f"{DENSE}mlp.gate",
    f"{DENSE}mlp",
    "model.layers.0",
    "model.layers.1",
    "mlp.gate",
    "self_attn",
    "self_attn.kv_b_proj",
    "gate_up_proj",
    EXPERTS,
    "mlp.experts",
    f"{EXPERTS}.3.down_proj",
    f"{EXPERTS}.3",
    f"{SPARSE}mlp.shared_experts",
    f"{SPARSE}mlp.shared_experts.gate_proj",
    f"{SPARSE}mlp.shared_experts.up_proj",
]
PATTERNS = ["*.mlp.gate*", "*self_attn*", "model.layers.1*", "*experts*", "lm_head*", "*.mlp.gate_proj"]
EXPRESSIONS = [r"re:.*self_attn.*", r"re:.*mlp\.gate$", r"re:.*gate_up_proj", r"re:.*experts.*", r"re:.*(gate|up)_proj"]


def functions_of(folder: Path, wanted: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return functions and constants of an engine's files, each file with the names that are wanted of it."""
    space: dict[str, Any] = dict(NAMESPACE)
    for file, names in wanted.items():
        tree = ast.parse((folder / file).read_text(encoding="utf-8"))
        found = [node for node in ast.walk(tree) if _name_of(node) in names]
        assert {_name_of(node) for node in found} == set(names), f"{file} has other names"
        for node in found:
            plain = ast.unparse(_without_hints(node))
            exec(compile(plain, file, "exec"), space)  # noqa: S102  the engine's own function, which the test asks
    return space


def _without_hints(node: ast.AST) -> ast.AST:
    """Return a function without the types of its arguments, whose names an engine defines."""
    if not isinstance(node, ast.FunctionDef):
        return node
    for argument in [*node.args.args, *node.args.kwonlyargs]:
        argument.annotation = None
    node.returns = None
    node.decorator_list = [one for one in node.decorator_list if "lru_cache" in ast.unparse(one)]
    return node


def _name_of(node: ast.AST) -> str:
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return ""


def engine(variable: str, wanted: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return an engine's functions, or skip the test where its source is not named."""
    folder = os.environ.get(variable)
    if not folder:
        pytest.skip(f"needs the source of an engine: {variable}=FOLDER, its package")
    return functions_of(Path(folder), wanted)


@pytest.fixture
def vllm() -> dict[str, Any]:
    quantization = "model_executor/layers/quantization"
    return engine(
        "VLLM_SOURCE",
        {
            f"{quantization}/utils/quant_utils.py": ["is_layer_skipped"],
            f"{quantization}/utils/config_utils.py": ["find_matching_patterns", "is_equal_or_regex_match"],
            f"{quantization}/modelopt.py": ["is_layer_excluded"],
            f"{quantization}/compressed_tensors/utils.py": ["should_ignore_layer"],
        },
    )


@pytest.fixture
def sglang() -> dict[str, Any]:
    quantization = "srt/layers/quantization"
    return engine(
        "SGLANG_SOURCE",
        {
            f"{quantization}/utils.py": ["_module_path_match", "_FALLBACK_FUSED_SHARDS", "is_layer_skipped"],
            f"{quantization}/modelopt_quant.py": ["_compile_exclusion_pattern", "is_layer_excluded"],
            f"{quantization}/compressed_tensors/utils.py": [
                "_is_equal_or_regex_match",
                "check_equal_or_regex_match",
                "should_ignore_layer",
            ],
        },
    )


Asked = Callable[[list[str], str], bool]


def differing(ask: Asked, entries: Sequence[str], *, dialect: str, system: str) -> list[str]:
    """Return where an engine and `is_kept` differ over random lists, each as a sentence.

    Parts of one layer with different schemes are refused by the engines. Of ModelOpt's lists only whole names are,
    which `comparison.py` looks for. Experts of compressed-tensors have a scheme by the name of each.
    """
    layers = {}
    for layer, parts in LAYERS.items():
        layers[layer] = [f"{layer.rpartition('.')[0]}.{part}" for part in parts] or [layer]
    if dialect != COMPRESSED_TENSORS:
        layers[EXPERTS] = [f"{EXPERTS}.3.gate_proj", f"{EXPERTS}.3.up_proj"]
    draw = random.Random(0)  # noqa: S311  lists for a test
    found = []
    for _ in range(ROUNDS):
        chosen = draw.sample(entries, draw.randint(1, 4))
        for layer, names in layers.items():
            ours = {is_kept(chosen, name, dialect=dialect, system=system) for name in names}
            try:
                theirs = {bool(ask(chosen, layer))}
            except ValueError:
                if dialect == MODELOPT:
                    continue
                theirs = {True, False}
            if ours != theirs:
                found.append(f"{layer} by {chosen}: {system} {theirs}, here {ours}")
    return found


def packed(names: Mapping[str, str]) -> dict[str, list[str]]:
    return {names.get(layer, layer): parts for layer, parts in FUSED_MODULES.items()}


def test_vllm_reads_a_list_of_the_fp8_dialect_so(vllm: dict[str, Any]) -> None:
    def ask(entries: list[str], layer: str) -> bool:
        return vllm["is_layer_skipped"](layer, entries, packed({}))

    assert differing(ask, ENTRIES, dialect="fp8", system=VLLM)[:5] == []


def test_vllm_reads_a_list_of_modelopt_so(vllm: dict[str, Any]) -> None:
    def ask(entries: list[str], layer: str) -> bool:
        config = SimpleNamespace(exclude_modules=entries, packed_modules_mapping=packed({}))
        return vllm["is_layer_excluded"](config, layer)

    assert differing(ask, [*ENTRIES, *PATTERNS], dialect=MODELOPT, system=VLLM)[:5] == []


def test_vllm_reads_a_list_of_compressed_tensors_so(vllm: dict[str, Any]) -> None:
    def ask(entries: list[str], layer: str) -> bool:
        return vllm["should_ignore_layer"](layer, entries, packed({}))

    assert differing(ask, [*ENTRIES, *EXPRESSIONS], dialect=COMPRESSED_TENSORS, system=VLLM)[:5] == []


def test_sglang_reads_a_list_of_the_fp8_dialect_so(sglang: dict[str, Any]) -> None:
    def ask(entries: list[str], layer: str) -> bool:
        doubled = []
        for entry in entries:  # as Fp8Config.from_config
            base = entry.removeprefix("model.")
            doubled += [base, f"model.{base}"]
        return sglang["is_layer_skipped"](layer, doubled, {})

    assert differing(ask, ENTRIES, dialect="fp8", system=SGLANG)[:5] == []


def test_sglang_reads_a_list_of_modelopt_so(sglang: dict[str, Any]) -> None:
    def ask(entries: list[str], layer: str) -> bool:
        config = SimpleNamespace(exclude_modules=entries)
        excluded = sglang["is_layer_excluded"](config, layer)
        if layer == EXPERTS:
            return excluded
        return sglang["is_layer_skipped"](layer, entries, packed(SGLANG_LAYER_NAMES)) or excluded

    assert differing(ask, [*ENTRIES, *PATTERNS], dialect=MODELOPT, system=SGLANG)[:5] == []


def test_sglang_reads_a_list_of_compressed_tensors_so(sglang: dict[str, Any]) -> None:
    def ask(entries: list[str], layer: str) -> bool:
        return sglang["should_ignore_layer"](layer, entries, packed(SGLANG_LAYER_NAMES))

    assert differing(ask, [*ENTRIES, *EXPRESSIONS], dialect=COMPRESSED_TENSORS, system=SGLANG)[:5] == []
