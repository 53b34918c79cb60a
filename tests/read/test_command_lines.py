"""Launch lines of systems other than Megatron-LM: recognised one by one, read as their own system reads them."""

import pytest

from bridge.convert.conversion import ImportedRun, import_runs
from bridge.convert.systems import SYSTEM_MODULES
from bridge.errors import BridgeError, PayloadError
from bridge.precision.mode import get_mode
from bridge.read.launch.shell_word import ShellWord
from bridge.read.text.command_arguments import CommandArguments, nest_dotted_keys
from bridge.read.text.document import Document

TRAINER = "run_clm.py --per_device_train_batch_size 8 --output_dir out"
NEMO = "python megatron_gpt_pretraining.py exp_manager.name=x trainer.devices=8"

READ = {
    "trainer": (f"torchrun {TRAINER} --bf16", "huggingface", "amp_o1", {"autocast_dtype": "bf16"}),
    "trainer, value": (f"torchrun {TRAINER} --fp16 True", "huggingface", "amp_o1", {"fp16": True}),
    "trainer, off": (f"torchrun {TRAINER} --bf16 False", "huggingface", "unstated", {"fp32": None}),
    "trainer, dashes": (
        "python t.py --per-device-train-batch-size 8 --bf16=true",
        "huggingface",
        "amp_o1",
        {"autocast_dtype": "bf16"},
    ),
    "trainer, launcher": (
        f"accelerate launch --mixed_precision bf16 {TRAINER}",
        "huggingface",
        "amp_o1",
        {"autocast_dtype": "bf16"},
    ),
    "Megatron-LM, launcher": (
        "accelerate launch pretrain_gpt.py --num-layers 2 --hidden-size 8 --bf16",
        "megatron-lm",
        "megatron_o2",
        {"bf16": True},
    ),
    "ms-swift": (
        "swift rlhf --bf16 true --external_plugins plugin.py --per_device_train_batch_size 1 --output_dir out",
        "huggingface",
        "amp_o1",
        {"autocast_dtype": "bf16"},
    ),
    "bridge": ("torchrun train.py mixed_precision=bf16_mixed", "megatron-bridge", "megatron_o2", {"bf16": True}),
    "bridge, fields": (
        "torchrun train.py mixed_precision=bf16_mixed mixed_precision.grad_reduce_in_fp32=false",
        "megatron-bridge",
        "megatron_o2",
        {"bf16": True, "grad_reduce_in_fp32": False},
    ),
}


def script(text: str) -> Document:
    return Document.from_text(f"#!/bin/bash\n{text}\n", "run.sh")


def only(text: str, chosen: str | None = None, **context: object) -> ImportedRun:
    (run,) = import_runs(script(text), chosen, context)
    return run


def lost(run: ImportedRun) -> dict[str, object]:
    return {loss.field: loss.value for loss in run.imported.unmapped}


@pytest.mark.parametrize("name", READ)
def test_a_launch_line_is_read_as_its_own_system_reads_it(name: str) -> None:
    text, system, semantics, fields = READ[name]
    run = only(text)
    said = run.imported.config.to_dict()
    assert (run.system.name, run.imported.semantics) == (system, semantics)
    assert {key: said.get(key) for key in fields} == fields
    assert run.source["run"].startswith("line ")


ELSEWHERE = {
    "deepspeed --num_gpus 8 train.py --deepspeed --deepspeed_config ds.json": "ds.json",
    "python train.py --deepspeed ds.json --lr 1": "ds.json",
    NEMO: "the configuration composed of the program's file and the overrides, which",
    f"{NEMO} --config-name=gpt_175b": "composed of gpt_175b.yaml and the overrides",
    f"{NEMO} --config-name=gpt_5b.yaml trainer.precision=bf16": "composed of gpt_5b.yaml and the overrides",
}


def test_a_script_of_many_launches_is_refused_in_one_sentence() -> None:
    lines = [f"deepspeed train.py --deepspeed --deepspeed_config ds_{number}.json" for number in range(12)]
    with pytest.raises(PayloadError, match=r"ds_1\.json, which is not read; and 10 more launches\. ") as caught:
        import_runs(script("\n".join(lines)))
    assert len(str(caught.value)) < 600


def test_a_script_of_thousands_of_lines_is_refused_soon() -> None:
    launch = "torchrun pretrain_gpt.py --num-layers 2 --bf16\n"
    for text, rule in (
        (launch * 2_500, "must not start more than 2000 programs, got 2500"),
        ("cat > x <<EOF\ny\nEOF\n" * 20_000 + launch, "must not have more than 500 open '<<'"),
    ):
        with pytest.raises(PayloadError, match=rule):
            import_runs(script(text))


def test_a_word_that_looks_like_a_here_document_is_a_word() -> None:
    for word in ("__heredoc_0__", "__heredoc_7__", f"__heredoc_{'9' * 5000}__"):
        text = f'cat > x <<< {word}\nbash -c "cat > y <<< {word}"\ntorchrun pretrain_gpt.py --num-layers 2 --bf16'
        (run,) = import_runs(script(text))
        assert get_mode(run.imported.config) == "bf16"


@pytest.mark.parametrize("text", ELSEWHERE)
def test_a_precision_that_lies_in_another_file_is_not_guessed(text: str) -> None:
    with pytest.raises(PayloadError, match=r"^run.sh: line \d, .* takes its precision from") as caught:
        import_runs(script(text))
    assert ELSEWHERE[text] in str(caught.value)


ACCELERATE = (
    "accelerate launch --config_file fsdp.yaml train.py",
    f"accelerate launch --config_file fsdp.yaml {TRAINER}",
    f"accelerate launch --mixed_precision fp8 --fp8_backend TE --fp8_margin 2 {TRAINER}",
    "accelerate launch --multi_gpu --mixed_precision=fp16 train.py --lr 1",
    "accelerate launch --use_megatron_lm --mixed_precision bf16 train.py",
    "python -m accelerate.commands.launch --mixed_precision bf16 --use_fsdp train.py",
    'accelerate launch dreambooth.py --instance_prompt "a b" --mixed_precision="fp16"',
)


@pytest.mark.parametrize("text", ACCELERATE)
def test_a_loop_under_accelerates_launcher_is_named_and_not_read(text: str) -> None:
    with pytest.raises(PayloadError, match=r"^run.sh: looks like Accelerate \(it starts with `accelerate"):
        import_runs(script(text))


def test_a_loop_that_takes_the_accelerators_word_is_not_read() -> None:
    text = "torchrun train.py --dataset_name x --output_dir out --gradient_checkpointing --mixed_precision=bf16"
    with pytest.raises(PayloadError, match="no system here knows the program's arguments"):
        import_runs(script(text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it starts no training program"),
        ("pip install torch", "it starts no training program"),
        ("python prep.py --input x", "it starts prep.py, whose arguments no system here knows"),
    ],
)
def test_a_script_that_says_nothing_is_not_an_fp32_run(text: str, says: str) -> None:
    with pytest.raises(PayloadError, match=says):
        import_runs(script(text))


def test_every_launch_of_a_script_is_of_its_own_system() -> None:
    text = f"python prep.py\ntorchrun pretrain_gpt.py --num-layers 2 --bf16\npython {TRAINER} --fp16\n"
    runs = import_runs(script(text))
    assert [(run.system.name, run.source["run"]) for run in runs] == [
        ("megatron-lm", "line 3, pretrain_gpt.py"),
        ("huggingface", "line 4, run_clm.py"),
    ]
    assert runs[0].imported.recipe == "bf16_mixed"


def test_what_a_line_leaves_open_is_recorded() -> None:
    run = only(
        "export NVTE_FP8_DPA_BWD=1\n"
        f'if [ -n "$FAST" ]; then P="--bf16 True"; else P="--fp16 True"; fi\n'
        f"torchrun {TRAINER} $P --tf32 $TF32 --deepspeed ds.json $EXTRA_ARGS",
        variables="FAST=1",
    )
    found = lost(run)
    assert get_mode(run.imported.config) == "bf16"  # DeepSpeed casts the weights and keeps FP32 masters
    assert {"--tf32", "deepspeed", "$EXTRA_ARGS", "NVTE_FP8_DPA_BWD"} <= found.keys()
    assert found["--tf32"] == "$TF32"


def test_each_way_through_a_branch_is_a_run_that_says_which() -> None:
    runs = import_runs(
        script(f'if [ "$1" = fast ]; then P="--bf16 True"; else P="--fp16 True"; fi\ntorchrun {TRAINER} $P')
    )
    assert [get_mode(run.imported.config) for run in runs] == ["fp16", "fp32"]
    assert all("fast" in run.source["run"] for run in runs)
    assert all(any("fast" in loss.field for loss in run.imported.unmapped) for run in runs)


def test_launches_beside_the_one_that_is_read_are_recorded() -> None:
    run = only(f"python {TRAINER} --bf16\naccelerate launch --config_file a.yaml x.py\npython eval.py --dtype fp16")
    found = lost(run)
    assert found["line 3, x.py"] == "Accelerate"
    assert found["line 4, eval.py"] == "--dtype fp16"


def test_a_launch_that_only_the_run_decides_is_kept_or_recorded() -> None:
    runs = import_runs(
        script(f"torchrun pretrain_gpt.py $GPT_ARGS\npython {TRAINER} --bf16\npython eval.py $EVAL_ARGS\n")
    )
    assert [run.system.name for run in runs] == ["megatron-lm", "huggingface"]
    assert {"$GPT_ARGS": None, "line 4, eval.py": "$EVAL_ARGS"}.items() <= lost(runs[0]).items()


def test_what_the_shell_itself_drops_is_recorded() -> None:
    run = only(f"python {TRAINER} \\ \n  --bf16 \\\n  --tf32 True")
    assert get_mode(run.imported.config) == "fp32"
    assert any("options belong to no command" in loss.field for loss in run.imported.unmapped)


def test_from_overrules_what_a_line_looks_like() -> None:
    run = only("python x.py --fp16", "huggingface")
    assert (run.system.name, get_mode(run.imported.config)) == ("huggingface", "fp16")


@pytest.mark.parametrize("system", sorted(set(SYSTEM_MODULES) - {"megatron-lm"}))
def test_from_a_system_that_has_no_command_line_says_so(system: str) -> None:
    try:
        runs = import_runs(script("python prep.py --input x"), system)
    except BridgeError as error:
        assert str(error).startswith("run.sh")
    else:
        assert all(run.system.name == system and run.imported.unmapped for run in runs)


def test_a_program_is_no_configuration_of_the_trainer() -> None:
    document = Document.from_text("TrainingArguments(bf16=True)", "x.py")
    with pytest.raises(PayloadError, match=r"^x.py: huggingface takes .*, and this is a Python program\. "):
        import_runs(document, "huggingface")


def test_a_complaint_of_an_import_names_the_file_and_the_run() -> None:
    with pytest.raises(PayloadError, match=r"^run.sh, line 2, run_clm.py: .*fp16"):
        import_runs(script(f"python {TRAINER} --bf16 --fp16"))


def test_words_are_options_and_overrides() -> None:
    words = CommandArguments(
        map(ShellWord, ("fit", "--bf16", "--lr", "-1e-3", "--a-b=c", "++x.y=1", "~z=2", "x@k=v", "--last", "--lr", "2"))
    )
    assert words.options == {"bf16": True, "lr": "2", "a_b": "c", "last": True}
    assert words.overrides == {"x.y": "1", "x@k": "v"}
    assert words.open_words == []
    assert nest_dotted_keys({"a.b": 1, "a": {"b": 2}, "c.d.e": 3, "c.d.f": 4}) == {
        "a": {"b": 2},
        "c": {"d": {"e": 3, "f": 4}},
    }


# -- lines that say too little, and ways that say nothing -------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "python scripts/pissa_init.py --model_name_or_path x --output_dir y",
        "torchrun main_ds.py --model_name_or_path=x --output_dir=y --num_epochs=1",
    ],
)
def test_two_options_of_a_trainer_without_one_of_training_are_no_training(text: str) -> None:
    with pytest.raises(PayloadError, match="whose arguments no system here knows"):
        import_runs(script(text))
    assert only(f"{text} --bf16").system.name == "huggingface"


BRANCHES = f'if [ -n "$MX" ]; then A="--bf16"; fi\naccelerate launch --config_file x.yaml {TRAINER} $A'


def test_a_branch_that_is_not_read_is_reported() -> None:
    run = only(BRANCHES)
    assert run.system.name == "huggingface"
    assert run.imported.label == 'line 3, run_clm.py; line 2, if [ -n "$MX" ]'
    found = lost(run)
    assert found["--config_file"] == "x.yaml"
    assert found['line 3, run_clm.py; line 2, not [ -n "$MX" ]'] == "Accelerate"
    assert 'line 2, if [ -n "$MX" ]' in found
    with pytest.raises(PayloadError, match="looks like Accelerate"):
        import_runs(script(BRANCHES), None, {"variables": "MX="})


def test_a_way_through_a_fragment_that_sets_nothing_is_told() -> None:
    run = only('if [ -n "$MX" ]; then A="--num-layers 2 --bf16"; else A=""; fi')
    assert run.imported.label == 'arguments in A; line 2, if [ -n "$MX" ]'
    assert 'line 2, not [ -n "$MX" ]' in lost(run)


def test_a_default_of_a_launcher_is_named_and_no_other() -> None:
    launcher = "accelerate launch --mixed_precision ${MP:-bf16}"
    run = only(f"{launcher} {TRAINER} --fp8_project ${{NAME:-x}} --lr ${{LR:-1}}")
    assert [loss.field for loss in run.imported.unmapped if loss.reason == "implied default" and "$" in loss.field] == [
        "$MP",
        "$NAME",
    ]


def test_an_exported_variable_is_named() -> None:
    for value in ("$MP", "bf16"):
        imported = only(f"export ACCELERATE_MIXED_PRECISION={value}\npython {TRAINER}").imported
        assert imported.decided_by is not None
        assert ("ACCELERATE_MIXED_PRECISION", value) in [(loss.field, loss.value) for loss in imported.unmapped]


@pytest.mark.parametrize(
    ("launcher", "semantics"),
    [("--mixed_precision fp16 --use_fsdp", "fsdp_policy"), ("--config_file fsdp.yaml", "amp_o1")],
)
def test_a_trainers_switch_overrides_the_launcher(launcher: str, semantics: str) -> None:
    run = only(f"accelerate launch {launcher} run_clm.py --bf16 --output_dir o")
    assert (run.system.name, run.imported.semantics) == ("huggingface", semantics)
    assert "fp16" not in run.imported.config.to_dict()
