"""The modules that an entry of a list keeps, by each system's rule."""

from bridge.convert.serving.kept_modules import is_kept
from bridge.convert.serving.serving_config import DIALECT_READERS

GATE = "model.layers.0.mlp.gate_proj"
UP = "model.layers.0.mlp.up_proj"
ROUTER = "model.layers.0.mlp.gate"
EXPERT = "model.layers.1.mlp.experts.7.up_proj"
QUERY_DOWN = "model.layers.0.self_attn.q_a_proj"
LATENT_DOWN = "model.layers.0.self_attn.kv_a_proj_with_mqa"


def systems_that_keep(name: str, *entries: str, dialect: str = "modelopt") -> set[str]:
    systems = DIALECT_READERS[dialect]
    return {system for system in systems if is_kept(entries, name, dialect=dialect, system=system)}


def test_vllm_compares_an_entry_of_modelopt_with_its_name_of_merged_projections() -> None:
    """The fault of verl pull request 7918: the router's name is a part of gate_up_proj."""
    assert systems_that_keep(GATE, ROUTER) == {"vllm"}
    assert systems_that_keep(UP, ROUTER) == {"vllm"}
    assert systems_that_keep(ROUTER, ROUTER) == {"vllm", "sglang"}
    assert systems_that_keep(UP, GATE, UP) == {"vllm", "sglang"}  # each of them by its whole name


def test_an_expression_is_compared_with_the_merged_name_in_both_systems() -> None:
    assert systems_that_keep(UP, "*.mlp.gate*") == {"vllm", "sglang"}
    assert systems_that_keep(UP, "gate_up*") == {"sglang"}  # a part between dots


def test_sglang_keeps_both_projections_of_low_rank_by_one_name() -> None:
    """As the list of DeepSeek-R1 in NVFP4 has it; vLLM refuses that list."""
    assert systems_that_keep(QUERY_DOWN, LATENT_DOWN) == {"sglang"}


def test_the_experts_of_a_layer_are_one_module() -> None:
    assert systems_that_keep(EXPERT, "model.layers.1.mlp.experts") == {"vllm", "sglang"}
    other = "model.layers.1.mlp.experts.3.down_proj"
    assert systems_that_keep(EXPERT, other, dialect="fp8") == {"vllm", "sglang"}
    assert systems_that_keep(EXPERT, other, dialect="compressed-tensors") == set()


def test_the_entry_of_a_whole_layer_leaves_its_experts_quantised_in_sglang() -> None:
    """SGLang compares ModelOpt's entries with experts as a whole name or as one part of it."""
    assert systems_that_keep(EXPERT, "model.layers.1") == {"vllm"}
    assert systems_that_keep("model.layers.1.self_attn.o_proj", "model.layers.1") == {"vllm", "sglang"}


def test_the_name_of_merged_projections_keeps_them_in_vllm() -> None:
    merged = "model.layers.0.mlp.gate_up_proj"
    assert systems_that_keep(UP, merged, dialect="fp8") == {"vllm"}
    assert systems_that_keep(UP, merged, dialect="compressed-tensors") == {"vllm", "sglang"}
    assert systems_that_keep(UP, "re:.*gate_up_proj", dialect="compressed-tensors") == {"vllm"}


def test_sglang_takes_the_end_of_a_name_for_it_in_compressed_tensors() -> None:
    assert systems_that_keep(QUERY_DOWN, "self_attn.q_a_proj", dialect="compressed-tensors") == {"sglang"}
    assert systems_that_keep(QUERY_DOWN, QUERY_DOWN, dialect="compressed-tensors") == set(
        DIALECT_READERS["compressed-tensors"]
    )


def test_a_short_name_is_enough_in_some_systems_of_the_fp8_dialect() -> None:
    assert systems_that_keep(GATE, "mlp.gate_proj", dialect="fp8") == {"sglang", "hf"}
    assert systems_that_keep(GATE, "mlp.gate", dialect="fp8") == set()
