"""Hand-over to serving systems: names and configs against the real libraries, and configs that were published."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bridge.cli.main import main
from bridge.convert.serving.comparison import compare_with_serving
from bridge.convert.serving.exporter import export
from bridge.convert.serving.formats import SERVED_SCHEMES, SERVING_SYSTEMS
from bridge.convert.serving.manifest import Manifest
from bridge.convert.serving.serving_config import ServingConfig
from bridge.errors import PayloadError, RunConfigError
from bridge.runtime.audit.record import GemmRow, Record
from bridge.runtime.numerics.quantise import quantise
from bridge.runtime.numerics.spec import GemmPrecision
from tests.convert.serving.models import FAMILIES, HUGGING_FACE, SCHEMES, manifest, names, planned

SAMPLES = Path(__file__).parent / "samples"
PLAIN = ("norm", "embed_tokens", "e_score_correction_bias")
"""Parameters that belong to no linear layer."""
pytestmark = pytest.mark.filterwarnings("ignore")


def served(of: Any, system: str, **more: Any) -> ServingConfig:
    return ServingConfig.from_mapping({"quantization_config": export(of, system).payload, **more})


def test_the_names_are_those_of_the_checkpoint_that_transformers_writes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra [interop]")
    from safetensors import safe_open

    for model_type in FAMILIES:
        config = transformers.AutoConfig.for_model(model_type, **HUGGING_FACE)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / model_type)
        with safe_open(tmp_path / model_type / "model.safetensors", "pt") as file:
            keys = {key.rpartition(".")[0] for key in file.keys() if not any(word in key for word in PLAIN)}  # noqa: SIM118
        assert names(manifest(model_type)) == keys, model_type


def test_every_config_reads_back_as_the_training_had_it() -> None:
    for scheme, recipe in SCHEMES.items():
        for model_type in FAMILIES:
            trained = manifest(model_type, recipe)
            assert set(trained.schemes) == {scheme}, model_type
            for system in SERVING_SYSTEMS:
                found = compare_with_serving(trained, served(trained, system), system)
                assert found.differences == (), (scheme, model_type, system)


def test_first_and_last_layers_in_bf16_and_the_router_are_listed() -> None:
    trained = manifest("qwen3_moe", SCHEMES["mxfp8"], first_last_layers_bf16=True)
    ignored = export(trained, "vllm").payload["ignore"]
    assert r"re:model\.layers\.0\.mlp\.experts\.\d+\.down_proj$" in ignored
    assert "model.layers.3.self_attn.k_proj" in ignored
    assert "model.layers.1.self_attn.k_proj" not in ignored
    assert {f"model.layers.{number}.mlp.gate" for number in range(4)} < set(ignored)
    fp8 = export(manifest("qwen3_moe", SCHEMES["blockwise"], first_last_layers_bf16=True), "sglang").payload
    assert fp8["scale_fmt"] == "ue8m0"
    assert "model.layers.0.mlp.experts" in fp8["modules_to_not_convert"]


def test_two_schemes_become_two_groups_where_the_system_reads_them() -> None:
    rows = [{"select": "*.linear_fc2", "precision": "mxfp8"}]
    trained = manifest("llama", SCHEMES["tensorwise"], modules=rows, fp8_param_gather=False)
    report = export(trained, "vllm")
    assert report.payload["format"] == "mixed-precision"
    assert [len(group["targets"]) for group in report.payload["config_groups"].values()] == [12, 2]
    assert compare_with_serving(trained, served(trained, "vllm")).differences == ()
    lost = export(trained, "sglang")
    assert list(lost.payload["modules_to_not_convert"])[:1] == ["model.layers.0.self_attn.q_proj"]
    assert str(lost.unmapped[-1]) == (
        "scheme='mxfp8' (unsupported): SGLang reads it where the model has no other scheme; 2 rows of the manifest are "
        "listed as not quantised. Serve these modules in high precision."
    )


def test_compressed_tensors_reads_the_configs_and_gives_each_module_its_scheme() -> None:
    pytest.importorskip("compressed_tensors", reason="needs the extra [interop]")
    import torch
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
    from compressed_tensors.utils.match import match_named_modules

    presets = {"FP8": "delayed", "FP8_BLOCK": "blockwise", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}
    for preset, scheme in presets.items():
        for role, own in (
            ("weights", SERVED_SCHEMES[scheme]["weights"]),
            ("input_activations", SERVED_SCHEMES[scheme]["inputs"]),
        ):
            theirs = PRESET_SCHEMES[preset][role].model_dump()
            assert {key: str(theirs[key]) for key in own} == {key: str(own[key]) for key in own}, (preset, role)
    rows = [{"select": "*.linear_fc2", "precision": "mxfp8"}]
    mixed = manifest("qwen3_moe", SCHEMES["tensorwise"], modules=rows, fp8_param_gather=False)
    for trained in (mixed, *(manifest("qwen3_moe", recipe) for recipe in SCHEMES.values())):
        payload = export(trained, "compressed-tensors").payload
        config = QuantizationConfig.model_validate(payload)
        tree = torch.nn.Module()  # a module of each name, as vLLM and older releases of transformers have them
        for name in names(trained):
            parent = tree
            for part in name.split(".")[:-1]:
                if not hasattr(parent, part):
                    parent.add_module(part, torch.nn.Module())
                parent = parent.get_submodule(part)
            parent.add_module(name.rpartition(".")[2], torch.nn.Linear(1, 1, device="meta"))
        found = {}
        for group, written in zip(config.config_groups.values(), payload["config_groups"].values(), strict=True):
            scheme = next(name for name, row in SERVED_SCHEMES.items() if row["weights"] == written["weights"])
            scheme = next(
                name for name in trained.schemes if SERVED_SCHEMES[name]["weights"] == SERVED_SCHEMES[scheme]["weights"]
            )
            for name, _ in match_named_modules(tree, group.targets, config.ignore):
                found[name] = scheme
        expected = {
            name: row.scheme for row in trained.rows for name in row.iterate_served_names() if row.scheme is not None
        }
        assert found == expected


def test_compressed_tensors_has_the_scales_of_mxfp8_except_at_448_times_a_power_of_two() -> None:
    pytest.importorskip("compressed_tensors", reason="needs the extra [interop]")
    import torch
    from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

    spec = GemmPrecision(scheme="mxfp8", format="e4m3").spec("weight")
    amaxes = torch.linspace(1, 4, 3001).repeat_interleave(32).reshape(-1, 32)
    ours = quantise(amaxes, spec, columnwise=False).scale_inv
    assert ours is not None
    theirs = generate_mx_scales(amaxes[:, 0], num_bits=8)
    extra = theirs - ours[:, 0].float()
    assert extra.unique().tolist() == [0, 1]
    assert amaxes[:, 0][extra == 1].tolist() == [1.75, 3.5]


def test_transformers_reads_the_configs_and_leaves_the_same_modules_alone() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra [interop]")
    from transformers.quantizers.quantizers_utils import should_convert_module

    for model_type in FAMILIES:
        trained = manifest(model_type, SCHEMES["blockwise"], first_last_layers_bf16=True)
        payload = dict(export(trained, "hf").payload)
        config = transformers.FineGrainedFP8Config(**payload)
        assert tuple(config.weight_block_size) == (128, 128)
        for row in trained.rows:
            for name in row.served:
                module = name.partition(".*")[0]  # its experts are one module there
                converted = should_convert_module(module, config.modules_to_not_convert)
                assert converted == (row.scheme is not None), name


def test_published_configs_are_held_against_a_training() -> None:
    """Each sample names its source. The NVFP4 one lists the attention's projections except q_a_proj and o_proj."""
    attention = ["self_attention.linear_kv_down_proj", "self_attention.linear_q_up_proj"]
    cases = {
        ("qwen3_30b_a3b_fp8.json", "qwen3_moe", "blockwise"): [],
        ("deepseek_v3.json", "deepseek_v3", "blockwise"): [],
        ("deepseek_v3.json", "deepseek_v3", "mxfp8"): ["Serving has", "training: MXFP8."],
        ("llama_3_1_8b_fp8.json", "llama", "delayed"): [],
        ("llama_3_1_8b_fp8.json", "llama", "tensorwise"): ["Serving has", "inputs by a stored scale; training:"],
        ("deepseek_r1_nvfp4_hf_quant_config.json", "deepseek_v3", "nvfp4"): [
            f"{each} (4 modules" for each in attention
        ],
    }
    for (sample, model_type, scheme), words in cases.items():
        trained = manifest(model_type, SCHEMES[scheme])
        found = compare_with_serving(trained, ServingConfig.from_file(SAMPLES / sample))
        text = " ".join(row.sentence(found.mode) for row in found.differences)
        assert bool(text) == bool(words), (sample, text)
        assert all(word in text for word in words), (sample, text)


def test_scales_per_channel_and_per_token_are_another_scheme() -> None:
    pytest.importorskip("compressed_tensors", reason="needs the extra [interop]")
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    group = {role: args.model_dump() for role, args in PRESET_SCHEMES["FP8_DYNAMIC"].items()}
    payload = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {**group, "targets": ["Linear"]}}}
    found = compare_with_serving(
        manifest("llama", SCHEMES["tensorwise"]), ServingConfig.from_mapping({**payload, "ignore": ["lm_head"]})
    )
    assert {row.serving for row in found.differences} == {
        "8-bit float per channel weights, dynamic 8-bit float per token inputs"
    }


def test_modules_that_vllm_fuses_need_one_scheme(tmp_path: Path) -> None:
    trained = manifest("deepseek_v3", SCHEMES["nvfp4"])
    sample = SAMPLES / "deepseek_r1_nvfp4_hf_quant_config.json"
    latent = "fuses q_a_proj and kv_a_proj_with_mqa, whose schemes differ in self_attn of layers 1-4."
    assert compare_with_serving(trained, ServingConfig.from_file(sample)).refused == (
        f"vLLM refuses the config: it {latent}",
    )
    own = export(trained, "vllm").payload
    config = ServingConfig.from_mapping(
        {**own, "ignore": [*own["ignore"], "model.layers.2.mlp.shared_experts.up_proj"]}
    )
    assert (
        "fuses gate_proj and up_proj, whose schemes differ in mlp.shared_experts of"
        in compare_with_serving(trained, config).refused[0]
    )
    assert compare_with_serving(trained, config, "sglang").refused == ()
    assert compare_with_serving(trained, ServingConfig.from_mapping(own), "vllm").refused == ()
    rows = [{"select": "*.linear_q_down_proj", "precision": "bf16"}]
    mixed = manifest("deepseek_v3", SCHEMES["mxfp8"], modules=rows, fp8_param_gather=False)
    assert [str(entry) for entry in export(mixed, "vllm").unmapped if latent in str(entry)]
    assert not [entry for entry in export(mixed, "sglang").unmapped if latent in str(entry)]
    assert compare_with_serving(mixed, served(mixed, "vllm"), "vllm").differences == ()
    stored, config_file = tmp_path / "manifest.json", tmp_path / "config.json"
    stored.write_text(json.dumps(asdict(mixed)))
    config_file.write_text(json.dumps(export(mixed, "vllm").payload))
    assert main(["manifest", "--run", str(stored), "--against", str(config_file)]) == 1


def test_a_list_means_other_modules_in_other_systems() -> None:
    """The short name that left 56 SwiGLU projections of a rollout in BF16, in verl pull request 7519."""
    keys = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    trained = manifest("llama")
    config = ServingConfig.from_mapping({**keys, "modules_to_not_convert": ["lm_head", "mlp.down_proj"]})
    rows = {row.readers: row.role for row in compare_with_serving(trained, config).differences}
    assert rows == {("sglang", "hf"): "mlp.linear_fc2"}  # vLLM asks for whole names
    modelopt = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "mlp.gate"]}
    modelopt["kv_cache_quant_algo"] = "FP8"
    found = compare_with_serving(manifest("llama", SCHEMES["nvfp4"]), ServingConfig.from_mapping(modelopt)).differences
    rows_of_modelopt = [(row.readers, row.role, row.modules) for row in found]
    # vLLM loads gate_proj and up_proj as gate_up_proj, which mlp.gate is a part of; SGLang asks for whole parts.
    assert rows_of_modelopt == [(("vllm",), "mlp.linear_fc1", 8), ((), "key-value cache", 4)]
    assert found[1].sentence("bf16") == (
        "Serving quantises key-value cache (4 modules, layers 1-4): FP8; training has it in bf16."
    )
    with pytest.raises(PayloadError, match="is read by sglang and hf, got 'vllm'"):
        compare_with_serving(trained, ServingConfig.from_mapping({"quant_method": "mxfp8"}), "vllm")


def test_a_rollout_that_quantises_the_router_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = [f"model.{name}={value}" for name, value in {**FAMILIES["qwen3_moe"], "gated_linear_unit": True}.items()]
    words = [SCHEMES["mxfp8"], "model=gpt_tiny", *model]
    written = tmp_path / "config.json"
    assert main(["manifest", *words, "--model-type", "qwen3_moe", "--for", "vllm", "--out", str(written)]) == 0
    config = json.loads(written.read_text())
    assert main(["manifest", *words, "--model-type", "qwen3_moe", "--against", str(written)]) == 0
    config["model_type"] = "qwen3_moe"
    ignored = config["quantization_config"]["ignore"]
    config["quantization_config"]["ignore"] = [name for name in ignored if not name.endswith("mlp.gate")]
    written.write_text(json.dumps(config))
    capsys.readouterr()
    assert main(["manifest", *words, "--against", str(written)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "Serving quantises mlp.router (3 modules, layers 1-3): MXFP8; training has it in bf16." in printed


def test_only_families_that_have_a_name_for_every_module_are_offered() -> None:
    with pytest.raises(RunConfigError) as raised:
        Manifest.from_plan(planned("qwen3_moe", SCHEMES["mxfp8"])).require_names()
    types = "qwen3_moe, olmoe, qwen2_moe, mixtral, glm4_moe"
    assert f"State one of --model-type {types}, if the model is exported" in str(raised.value)
    with pytest.raises(RunConfigError) as raised:
        Manifest.from_plan(planned("deepseek_v3", SCHEMES["mxfp8"]), model_type="llama").require_names()
    assert "State one of --model-type deepseek_v3, deepseek_v2, kimi_k2, if" in str(raised.value)
    dense = Manifest.from_plan(planned("nemotron", SCHEMES["mxfp8"]))
    with pytest.raises(RunConfigError) as raised:
        dense.require_names()
    types = "llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3_text, nemotron"
    assert f"State one of --model-type {types}, if" in str(raised.value)  # none with experts
    trained = manifest("llama")
    renamed = [replace(row, module=row.module.replace("linear_fc1", "linear_fc9"), served=()) for row in trained.rows]
    with pytest.raises(RunConfigError, match="No known family of models has names for all of its linear layers"):
        replace(trained, rows=tuple(renamed)).require_names()


def test_modules_without_a_name_are_reported_and_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["manifest", SCHEMES["mxfp8"], "--json"]) == 0  # the default model has no gated MLP
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(row["served"] == [] for row in rows)
    assert main(["manifest", SCHEMES["mxfp8"], "--for", "vllm"]) == 2
    assert "are not known from the model's shape alone. State one of --model-type llama," in capsys.readouterr().err
    assert main(["manifest", SCHEMES["mxfp8"], "--for", "vllm", "--model-type", "qwen3_mo"]) == 2
    assert "--model-type: must be one of llama, mistral" in capsys.readouterr().err


def test_a_manifest_is_read_again_and_a_record_overrules_the_plan(tmp_path: Path) -> None:
    trained = manifest("qwen3_moe")
    file = tmp_path / "manifest.json"
    file.write_text(json.dumps(asdict(trained)))
    assert Manifest.from_file(file) == trained
    plan = planned("qwen3_moe", SCHEMES["blockwise"])
    rows = [("2", "linear_qkv", "bf16", "none"), ("3", "experts.linear_fc2", "e4m3", "blockwise")]
    gemms = [
        GemmRow(layer=layer, module=module, gemm="fprop", left=format_, right=format_, scheme=scheme)
        for layer, module, format_, scheme in rows
    ]
    ran = Manifest.from_plan(plan, record=Record(gemms=tuple(gemms)), model_type="qwen3_moe")
    changed = [row for row, before in zip(ran.rows, trained.rows, strict=True) if row != before]
    assert [(row.layer, row.role, row.scheme, row.format) for row in changed] == [
        ("2", "self_attention.linear_qkv", None, "bf16")
    ]
    assert ran.notes == ("The record of the run overrules the plan in 1 of 21 rows.",)


def test_a_file_that_is_no_serving_config_is_refused_in_one_sentence() -> None:
    groups = {"quant_method": "compressed-tensors", "config_groups": {}}
    cases = {
        "f: must be a config.json, its quantization_config, or an hf_quant_config.json. Give the file next to": {},
        "f: quant_method: must be one of compressed-tensors, fp8, mxfp8, modelopt, got 'gptq'.": {
            "quant_method": "gptq"
        },
        "f: config_groups: must be a mapping of groups.": {"quant_method": "compressed-tensors"},
        "f: list of modules: must be a regular expression (missing )": {**groups, "ignore": ["re:("]},
    }
    for message, content in cases.items():
        with pytest.raises(PayloadError) as error:
            ServingConfig.from_mapping(content, "f")
        assert str(error.value).startswith(message)


def test_a_run_in_bf16_has_nothing_to_state(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["manifest", "bf16_mixed", "--for", "hf", "--model-type", "nemotron"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "{}\n"
    assert printed.err == "bf16_mixed has every linear layer in bf16: there is nothing to state.\n"
