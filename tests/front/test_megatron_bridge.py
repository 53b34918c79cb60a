"""Megatron Bridge's YAML of a run: each kind of file is read whole, with its release and what is set at start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge.cli.main import main
from bridge.errors import RunConfigError
from bridge.front.loader import load_run
from bridge.precision.statements import is_stated
from bridge.preflight.file_reading import MEGATRON_BRIDGE
from bridge.preflight.megatron_release import INSTALLED_FOR_OPEN_FILE, get_installed_reason
from bridge.preflight.rule_check import get_report
from bridge.preflight.run import Run
from bridge.read.foreign.effective_fields import compute_effective_fields
from bridge.read.megatron_bridge import importer as megatron_bridge
from bridge.read.megatron_bridge import start_rows as megatron_bridge_start
from bridge.registry.registry import get_mixed_precision_config
from bridge.target.fields import OWNER_FIELDS, list_known_releases
from bridge.target.versions import Version, get_installed_version

MXFP8 = get_mixed_precision_config("bf16_with_mxfp8_mixed")
BF16 = {"_target_": "torch.bfloat16", "_call_": False}
PROVIDER = "megatron.bridge.models.gpt_provider.GPTModelProvider"
SIZES = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 512, "vocab_size": 1000}
PRECISION = {
    "_target_": "megatron.bridge.training.mixed_precision.MixedPrecisionConfig",
    "bf16": True,
    "fp8": "hybrid",
    "fp8_recipe": "tensorwise",
    "params_dtype": BF16,
}
OVERLAP = {"_target_": "megatron.bridge.training.comm_overlap.CommOverlapConfig", "tp_comm_overlap": False}


def container(model: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    """Return a container as Megatron Bridge writes one."""
    return {
        "_target_": "megatron.bridge.training.config.ConfigContainer",
        "model": {"_target_": PROVIDER, **SIZES, "params_dtype": BF16, **(model or {})},
        "optimizer": {"_target_": "megatron.bridge.training.config.OptimizerConfig", "use_distributed_optimizer": True},
        "ddp": {
            "_target_": "megatron.bridge.training.config.DistributedDataParallelConfig",
            "use_distributed_optimizer": True,
        },
        "train": {"_target_": "megatron.bridge.training.config.TrainingConfig", "micro_batch_size": 1},
        "mixed_precision": PRECISION,
        **sections,
    }


def saved_model(release: Version) -> dict[str, Any]:
    """Return every field of a release's model with its default, and the sizes."""
    rows = OWNER_FIELDS["model"].values()
    return {row.name: row.default for row in rows if row.has is None or row.has.holds(release)} | SIZES


def read(folder: Path, content: dict[str, Any], *words: str, strict: bool = True) -> Run:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return load_run(words, config_file=path, strict=strict)


def test_a_field_that_our_recipe_left_to_the_model_is_unstated_in_its_saved_file(tmp_path: Path) -> None:
    saved = {name: value for name, value in MXFP8.to_cfg_dict().items() if not name.endswith("_dtype")}
    run = read(tmp_path, container({"first_last_layers_bf16": True}, mixed_precision=saved), "target=b200x8")
    assert not is_stated(run.precision, "first_last_layers_bf16")
    assert run.prediction.values["model"]["first_last_layers_bf16"] is True


def test_a_saved_container_is_read_with_what_is_set_at_start(tmp_path: Path) -> None:
    model = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    run = read(tmp_path, container(model, comm_overlap=OVERLAP), "target=h100x8")
    assert run.reading.framework == MEGATRON_BRIDGE
    assert run.model["params_dtype"] == "torch.bfloat16"
    assert {one.path: one.value for one in run.reading.derived} == {
        "model.overlap_p2p_comm": True,
        "model.batch_p2p_comm": False,
        "ddp.bucket_size": 128 * 2**20,
        "ddp.overlap_grad_reduce": True,
        "ddp.overlap_param_gather": True,
        "ddp.align_param_gather": True,
        "optimizer.overlap_param_gather": True,
    }
    (named,) = (line for line in run.reading.lines if line.startswith("Megatron Bridge sets at start: "))
    assert "ddp.align_param_gather=True" in named
    assert named.endswith(" (comm_overlap).")
    assert run.section("ddp")["align_param_gather"] is True
    assert run.origin_of("ddp.align_param_gather") == "Megatron Bridge at start"


def test_one_rank_reduces_nothing_and_a_stated_switch_stays(tmp_path: Path) -> None:
    stated = dict(OVERLAP, overlap_grad_reduce=True)
    run = read(tmp_path, container(comm_overlap=stated), "target=h100x1")
    assert {one.path for one in run.reading.derived if one.path.startswith("ddp.")} == {"ddp.overlap_grad_reduce"}


def test_a_file_from_after_the_runtime_is_changed_no_more(tmp_path: Path) -> None:
    before = container(comm_overlap=OVERLAP)
    run = read(tmp_path, before, "target=h100x8")
    runtime = container(run.model, comm_overlap=OVERLAP)
    runtime |= {role: {**before[role], **run.section(role)} for role in ("optimizer", "ddp")}
    assert read(tmp_path, runtime, "target=h100x8").reading.derived == ()


def test_a_nested_model_is_one_model_and_an_override_may_name_either_place(tmp_path: Path) -> None:
    inner = {"_target_": "megatron.bridge.models.transformer_config.TransformerConfig", **SIZES}
    vocab = inner.pop("vocab_size")
    nested = {
        "_target_": "megatron.bridge.models.gpt.model_config.BridgeGPTModelConfig",
        "_builder_": "megatron.bridge.models.gpt.gpt_builder.GPTModelBuilder",
        "vocab_size": vocab,
        "rope_scaling": True,
        "transformer": inner,
    }
    content = {**container(), "model": nested}
    run = read(tmp_path, content, "model.transformer.num_layers=2", "model.hidden_size=256")
    assert (run.model["num_layers"], run.model["hidden_size"], run.model["vocab_size"]) == (2, 256, 1000)
    assert "transformer" not in run.model
    assert run.reading.own_fields == {"model.rope_scaling": True}


def test_enums_partials_sets_and_lost_objects_are_plain_data(tmp_path: Path) -> None:
    enums = "megatron.core.transformer.enums"
    scope = {"_target_": f"{enums}.CudaGraphModule", "_call_": True, "_args_": [1], "_name_": "attn"}
    model = {
        "attention_backend": {"_target_": f"{enums}.AttnBackend", "_call_": True, "_args_": [5], "_name_": "auto"},
        "cuda_graph_modules": [scope],
        "init_method": {"_target_": "torch.nn.init.normal_", "_partial_": True, "_args_": [], "std": 0.02},
        "pipeline_model_parallel_layout": {"_target_": "megatron.core.x.PipelineParallelLayerLayout", "_call_": True},
    }
    path = tmp_path / "run.yaml"
    text = yaml.safe_dump(container(model, peft={"_target_": "megatron.bridge.peft.lora.LoRA", "dim": 16}))
    path.write_text(
        text.replace("  dim: 16", "  dim: 16\n  params_to_save: !!set {a: null, b: null}"), encoding="utf-8"
    )
    run = load_run((), config_file=path)
    assert run.model["attention_backend"] == "auto"
    assert run.model["cuda_graph_modules"] == ["attn"]
    assert run.model["init_method"] == "torch.nn.init.normal_"
    assert run.sections["peft"] == {"type": "LoRA", "dim": 16, "params_to_save": ["a", "b"]}
    lost = "model.pipeline_model_parallel_layout: the file names a PipelineParallelLayerLayout without its content."
    assert run.reading.uncertainty.open_points == (lost,)


def test_a_checkpoint_is_read_by_the_config_of_its_newest_iteration(tmp_path: Path) -> None:
    for number, layers in ((100, 2), (200, 6)):
        folder = tmp_path / f"iter_{number:07}"
        folder.mkdir()
        content = container({"num_layers": layers})
        (folder / "run_config.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    assert load_run((), config_file=tmp_path).model["num_layers"] == 6
    assert load_run((), config_file=tmp_path / "iter_0000100").model["num_layers"] == 2


def test_variables_and_the_switch_of_the_loss_check_are_those_of_the_run(tmp_path: Path) -> None:
    machine = {"_target_": "megatron.bridge.training.config.RerunStateMachineConfig", "check_for_nan_in_loss": False}
    content = container(env_vars={"NVTE_FLASH_ATTN": 0}, rerun_state_machine=machine)
    run = read(tmp_path, content)
    assert run.reading.environment == {"NVTE_FLASH_ATTN": "0"}
    assert run.section("train")["check_for_nan_in_loss"] is False
    run = read(tmp_path, content, "rerun_state_machine.check_for_nan_in_loss=true")
    assert run.section("train")["check_for_nan_in_loss"] is True


def test_sections_of_early_releases_are_named_without_their_ending(tmp_path: Path) -> None:
    now = container(dataset={"_target_": "x.GPTDatasetConfig", "seq_length": 512})
    early = {key if key.startswith("_") or key == "mixed_precision" else f"{key}_config": now[key] for key in now}
    run, same = read(tmp_path, early, "model_config.num_layers=2"), read(tmp_path, now, "model.num_layers=2")
    assert run.sections == same.sections
    assert run.section("data")["seq_length"] == 512


def test_null_is_off_where_megatron_takes_no_null(tmp_path: Path) -> None:
    content = container({"gradient_accumulation_fusion": None, "fp8": None})
    content["ddp"]["overlap_grad_reduce"] = None
    run = read(tmp_path, content)
    assert run.model["fp8"] is None
    assert run.model["gradient_accumulation_fusion"] is False
    assert run.section("ddp")["overlap_grad_reduce"] is False


def test_a_field_of_the_provider_is_its_own_and_a_misspelt_one_is_refused(tmp_path: Path) -> None:
    run = read(tmp_path, container({"hf_model_id": "acme/model"}))
    assert run.reading.own_fields == {"model.hf_model_id": "acme/model"}
    with pytest.raises(RunConfigError, match=r"model.num_layerss: no such field.*Did you mean 'num_layers'"):
        read(tmp_path, container({"num_layerss": 4}))


def test_an_override_is_misspelt_where_it_resembles_a_field_of_its_section(tmp_path: Path) -> None:
    data = {"_target_": "megatron.bridge.training.config.GPTDatasetConfig", "seq_length": 512}
    content = container(comm_overlap=OVERLAP, dataset=data)
    for word, sentence in (
        ("train.micro_batch_siz=4", "train.micro_batch_siz: no such field.*Did you mean 'micro_batch_size'"),
        ("dataset.seq_lenght=4", r"data.seq_lenght: no such field.*\(command line\). Did you mean 'seq_length'"),
        ("comm_overlap.tp_comm_overlp=true", "comm_overlap.tp_comm_overlp: no such.*Did you mean 'tp_comm_overlap'"),
    ):
        with pytest.raises(RunConfigError, match=sentence):
            read(tmp_path, content, word)
    assert read(tmp_path, content, "train.eval_interval=4").section("train")["eval_interval"] == 4


def test_a_saved_run_may_have_fields_that_no_known_release_has(tmp_path: Path) -> None:
    newest = list_known_releases()[-1]
    saved = saved_model(newest)
    run = read(tmp_path, container(saved | {"p_lora_rank": 4}))
    assert run.reading.uncertainty.open_points == (
        "model.p_lora_rank: no known release of Megatron Core has these fields, and nothing here reads them.",
    )
    del saved["q_lora_rank"]
    with pytest.raises(RunConfigError, match="model.p_lora_rank: no such field"):
        read(tmp_path, container(saved | {"p_lora_rank": 4}))


def test_a_precision_by_itself_is_checked_as_convert_reads_it(tmp_path: Path) -> None:
    """No section around it names a class, and the file is Megatron Bridge's by the class of its one section."""
    run = read(tmp_path, {"mixed_precision": PRECISION})
    assert run.reading.framework == MEGATRON_BRIDGE
    imported = megatron_bridge.import_({"mixed_precision": PRECISION})
    assert run.precision is not None
    assert compute_effective_fields(run.precision) == compute_effective_fields(imported.config)
    with pytest.raises(RunConfigError, match=r"mixed_precision\._target_: configurations are data"):
        read(tmp_path, {"mixed_precision": {"_target_": "os.system", "bf16": True}})


def test_the_release_is_that_of_the_newest_field_unless_the_target_states_one(tmp_path: Path) -> None:
    *_, before, newest = list_known_releases()
    saved = container(saved_model(newest))
    run = read(tmp_path, saved)
    assert run.reading.release.version == newest
    assert run.sections["target"] == f"mcore{newest}"
    assert re.fullmatch(
        rf"megatron-core {newest} \(model\.\w+ stands in the file, and {before} does not have it\)\.",
        run.reading.lines[0],
    )
    run = read(tmp_path, saved, "target='b200x8,mcore0.18'")
    assert run.reading.lines[0] == "megatron-core 0.18 (stated by the target)."
    oldest = list_known_releases()[0]
    assert read(tmp_path, container(saved_model(oldest))).reading.release.version == oldest
    written = read(tmp_path, container())
    assert written.reading.release.version == get_installed_version("mcore")
    assert written.reading.release.reason == get_installed_reason(INSTALLED_FOR_OPEN_FILE)
    assert written.reading.release.is_installed


def test_megatron_fsdp_turns_the_shared_buffer_off_in_the_precision_too(tmp_path: Path) -> None:
    content = container(dist={"_target_": "megatron.bridge.training.config.DistributedInitConfig"})
    content["dist"]["use_megatron_fsdp"] = True
    content["mixed_precision"] = dict(PRECISION, fp8_recipe="mxfp8", fp8="e4m3", reuse_grad_buf_for_mxfp8_param_ag=True)
    run = read(tmp_path, content)
    assert run.section("ddp")["use_megatron_fsdp"] is True
    assert run.precision is not None
    assert run.precision.reuse_grad_buf_for_mxfp8_param_ag is False


def test_every_command_refuses_a_diffusion_model_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    wan = "megatron.bridge.diffusion.models.wan.wan_provider.WanModelProvider"
    path.write_text(yaml.safe_dump(container({"_target_": wan})), encoding="utf-8")
    said = set()
    for command in ("check", "plan", "memory", "plan --align", "plan --modules", "rehearse"):
        assert main([*command.split(), "--config", str(path)]) == 2
        said.add(capsys.readouterr().err)
    (sentence,) = said
    assert sentence.startswith("model: a diffusion model has no layers of a language model, got ")


def test_a_command_that_trains_refuses_a_run_of_another_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(container()), encoding="utf-8")
    assert main(["quantisation-error", "--config", str(path)]) == 2
    rule = f"{path}: describes a run of Megatron Bridge, which cannot be started here."
    assert capsys.readouterr().err == f"{rule} Rehearse it: precision-bridge rehearse --config {path}.\n"


def test_memory_says_that_activations_are_not_counted_without_a_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    content = container({"seq_length": None})
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    main(["memory", "--config", str(path), "--target", "h100x8"])
    assert "note: Activations are not counted: the sequence length (model.seq_length) is not stated." in (
        " ".join(capsys.readouterr().out.split())
    )


def test_every_row_of_the_start_names_a_field_and_its_source() -> None:
    for row in megatron_bridge_start.START_ROWS:
        role, _, name = row.path.partition(".")
        assert role == "mixed_precision" or name in OWNER_FIELDS[role], row.path
        assert row.source.partition(": ")[2], row.path


AWARE = {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True, "exp_avg_dtype": "bf16"}
FP4 = {**PRECISION, "fp8": None, "fp4": "e2m1", "fp4_param": True, "fp4_param_gather": True}
B200 = "target='b200x8,te2.16,cuda13.0,mcore0.19'"


@pytest.mark.parametrize("held", [None, "tensorwise"], ids=["before its runtime", "after it"])
@pytest.mark.parametrize("precision", [{**PRECISION, "fp8": None}, FP4], ids=["bf16", "nvfp4"])
def test_the_precision_writes_the_optimizers_recipe_in_every_mode(
    precision: dict[str, Any], held: str | None, tmp_path: Path
) -> None:
    run = read(tmp_path, container(optimizer={**AWARE, "fp8_recipe": held}, mixed_precision=precision), B200)
    assert run.prediction.values["optimizer"]["fp8_recipe"] == "tensorwise"
    settings = run.plan.settings
    assert (settings.owns_masters, settings.master, settings.remainders) == (False, "fp32", False)
    assert {one.id: one.severity for one in get_report(run).findings if one.id in ("PB347", "PB356")} == (
        {} if precision is FP4 else {"PB347": "info"}
    )


@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_fp4_weights_of_a_file_that_leaves_their_masters_to_the_fused_adam_are_an_error(
    recipe: str | None, tmp_path: Path
) -> None:
    content = container(optimizer=AWARE, mixed_precision={**FP4, "fp8_recipe": recipe})
    (finding,) = (one for one in get_report(read(tmp_path, content, B200)).findings if one.id == "PB356")
    assert (finding.severity, finding.value) == ("error", recipe)
    assert finding.remedies[0] == "set mixed_precision.fp8_recipe=tensorwise"
    repaired = read(tmp_path, content, B200, "mixed_precision.fp8_recipe=tensorwise")
    assert "PB356" not in {one.id for one in get_report(repaired).findings}


@pytest.mark.parametrize(("stored", "rule"), [(False, "PB341"), (True, "PB342")])
def test_a_check_of_megatron_lms_parser_alone_is_a_warning(tmp_path: Path, stored: bool, rule: str) -> None:
    content = container(mixed_precision={**PRECISION, "fp8_param": stored, "fp8_param_gather": stored})
    content["optimizer"] |= {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": stored}
    findings = get_report(read(tmp_path, content)).findings
    assert [one.severity for one in findings if one.id == rule] == ["warning"]


def test_the_remedy_for_masters_outside_the_fused_adam_works(tmp_path: Path) -> None:
    content = container(optimizer=AWARE, mixed_precision={**PRECISION, "fp8": None})
    run = read(tmp_path, content, B200, "mixed_precision.fp8_recipe=null")
    assert run.plan.settings.remainders
    assert "PB347" not in {one.id for one in get_report(run).findings}


INSPECTED = "megatron.bridge.training.config.TensorInspectConfig"
LAYERS = {"layer_types": ["fc1"]}
LOGGED = {
    "stats": {"enabled": True, "layers": LAYERS, "transformer_engine": {"LogFp8TensorStats": {"enabled": True}}},
}
OFF_ENTRY = {"one": {"enabled": False, "transformer_engine": {"FakeQuant": {"enabled": True}}}}
OFF_FEATURE = {"one": {"enabled": True, "layers": LAYERS, "transformer_engine": {"FakeQuant": {"enabled": False}}}}


def inspect(features: Any, *, enabled: bool = True) -> dict[str, Any]:
    """Return the section of Transformer Engine's debugger."""
    return {"tensor_inspect": {"_target_": INSPECTED, "enabled": enabled, "features": features}}


@pytest.mark.parametrize(
    ("feature", "name"),
    [
        ({"MyFeature": {"enabled": True}, "LogTensorStats": {"enabled": True}}, "MyFeature"),
        ({"MyFeature": {}, "DisableFP8Layer": {"enabled": True}, "Other": {}}, "MyFeature, Other"),
    ],
)
def test_an_unknown_feature_of_the_debugger_leaves_no_plan(
    tmp_path: Path, feature: dict[str, Any], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"enabled": True, "layers": {"layer_name_regex_pattern": ".*fc1.*"}, "transformer_engine": feature}
    content = container(**inspect({"one": row}))
    sentence = (
        f"tensor_inspect.features: {name} changes the precision of layers, and the plan does not follow it. "
        "Set tensor_inspect.enabled=false to plan the run without it."
    )
    run = read(tmp_path, content)
    assert run.reading.uncertainty.no_plan_reason == sentence
    for command in ("plan", "manifest", "memory"):
        assert main([command, "--config", str(tmp_path / "run.yaml")]) == 2
        assert capsys.readouterr().err == f"{sentence}\n"
    assert main(["check", "--config", str(tmp_path / "run.yaml")]) == 0
    assert sentence in capsys.readouterr().out
    assert read(tmp_path, content, "tensor_inspect.enabled=false").plan.layers


@pytest.mark.parametrize(
    "section",
    [
        {"tensor_inspect": None},
        inspect(LOGGED),
        inspect(LOGGED | OFF_ENTRY),
        inspect(OFF_FEATURE),
        inspect({"one": {"enabled": True, "transformer_engine": {"FakeQuant": {"enabled": True}}}}, enabled=False),
        inspect("gone.yaml", enabled=False),
    ],
)
def test_a_debugger_that_only_looks_leaves_the_plan(tmp_path: Path, section: dict[str, Any]) -> None:
    run = read(tmp_path, container(**section))
    assert run.reading.uncertainty.no_plan_reason is None
    assert run.plan.layers


def test_the_features_of_the_debugger_are_read_from_their_file(tmp_path: Path) -> None:
    (tmp_path / "stats.yaml").write_text(yaml.safe_dump(LOGGED))
    reading = read(tmp_path, container(**inspect("stats.yaml"))).reading
    assert (reading.uncertainty.no_plan_reason, reading.notes) == (
        None,
        (f"tensor_inspect.features: read from {tmp_path / 'stats.yaml'}.",),
    )
    (tmp_path / "stats.yaml").write_text(yaml.safe_dump(LOGGED).replace("LogFp8TensorStats", "MyFeature"))
    assert "MyFeature changes" in str(
        read(tmp_path, container(**inspect("stats.yaml"))).reading.uncertainty.no_plan_reason
    )
    unplanned = read(tmp_path, container(**inspect("gone.yaml"))).reading.uncertainty.no_plan_reason
    assert str(unplanned).startswith("tensor_inspect.features names gone.yaml, which is not found; the layers")


@pytest.mark.parametrize(
    ("spec", "is_planned"),
    [
        ("megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec", True),
        ("megatron.bridge.models.gpt_provider.default_layer_spec", True),
        ("my_models.specs.linear_attention_spec", False),
    ],
)
def test_layers_of_a_spec_of_somebody_else_have_no_plan(tmp_path: Path, spec: str, is_planned: bool) -> None:
    model = {"transformer_layer_spec": {"_target_": spec, "_call_": False}}
    unplanned = read(tmp_path, container(model)).reading.uncertainty.no_plan_reason
    sentence = f"model.transformer_layer_spec: {spec} builds the layers, and they cannot be planned."
    assert unplanned == (None if is_planned else sentence)
    kitchen = read(tmp_path, container({"use_kitchen": True})).reading.uncertainty.no_plan_reason
    assert (
        kitchen == "model.use_kitchen: Kitchen computes its layers by a recipe of its own, and they cannot be planned."
    )
    restored = read(tmp_path, container({"restore_modelopt_state": True})).reading.uncertainty.no_plan_reason
    assert str(restored).startswith("model.restore_modelopt_state: ModelOpt changes the layers")
