"""The modules that an entry of a list keeps, by each system's rule."""

from bridge.convert.serving.kept_modules import is_kept

GATE = "model.layers.0.mlp.gate_proj"
UP = "model.layers.0.mlp.up_proj"
ROUTER = "model.layers.0.mlp.gate"
EXPERT = "model.layers.1.mlp.experts.7.up_proj"
QUERY_DOWN = "model.layers.0.self_attn.q_a_proj"
LATENT_DOWN = "model.layers.0.self_attn.kv_a_proj_with_mqa"


def systems_that_keep(name: str, *entries: str, dialect: str = "modelopt") -> set[str]:
    systems = {"modelopt": ("vllm", "sglang"), "fp8": ("vllm", "sglang", "hf")}[dialect]
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
    assert systems_that_keep(EXPERT, "model.layers.1.mlp.experts.3.down_proj", dialect="fp8") == {"vllm"}


def test_a_short_name_is_enough_in_some_systems_of_the_fp8_dialect() -> None:
    assert systems_that_keep(GATE, "mlp.gate_proj", dialect="fp8") == {"sglang", "hf"}
    assert systems_that_keep(GATE, "mlp.gate", dialect="fp8") == set()
