"""What decides about a run of Megatron-LM besides its arguments: each is read, or there is no plan or no verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bridge.cli.main import main
from bridge.errors import RunConfigError, bounded
from bridge.front.loader import load_run
from bridge.preflight.rule_check import get_report
from bridge.preflight.run import Run
from bridge.read.megatron_lm.importer import import_all
from bridge.read.text.document import Document

RUN = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 8 --bf16 "
    "--seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --vocab-size 1024 --hidden-dropout 0 "
    "--attention-dropout 0 --use-distributed-optimizer "
)
FP8 = f"{RUN} --fp8-format e4m3 --fp8-recipe mxfp8 "
RECIPE = """\
configs:
  high: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
matchers:
  projections: {type: glob, pattern: "*.self_attention.*", config: high, enabled: true}
"""
OPTION = "--te-precision-config-file"


def read(folder: Path, script: str, *words: str) -> Run:
    """Return the run of a script."""
    (folder / "run.sh").write_text(script)
    return load_run(words, config_file=folder / "run.sh")


def answered(folder: Path, script: str, *words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code of a command about a script, and all that it prints."""
    (folder / "run.sh").write_text(script)
    code = main([words[0], "--config", str(folder / "run.sh"), *words[1:]])
    return code, "".join(capsys.readouterr())


class TestPerModuleFile:
    """The file behind --te-precision-config-file."""

    @pytest.mark.parametrize(
        "name", ["te.yaml", "conf/te.yaml", "$FOLDER/te.yaml", "${HERE:-.}/te.yaml", "/not/there/te.yaml", "{}/te.yaml"]
    )
    def test_it_is_read_where_it_lies_and_every_answer_follows_it(self, tmp_path, name, capsys):
        (tmp_path / "conf").mkdir()
        place = tmp_path / "conf" / "te.yaml" if name.startswith("conf") else tmp_path / "te.yaml"
        place.write_text(RECIPE)
        place_as_written = name.replace("{}", str(tmp_path))
        script = f"{FP8} {OPTION} {place_as_written}"
        run = read(tmp_path, script)
        assert run.plan.format_of(1, "linear_qkv", "fprop") == "bf16"
        assert run.plan.format_of(1, "linear_fc1", "fprop") == "e4m3"
        assert run.reading.uncertainty.no_plan_reason is None
        (sentence,) = run.reading.notes
        assert sentence.startswith(OPTION)
        assert sentence.endswith("te.yaml.")
        assert not [one for one in run.reading.uncertainty.open_points if OPTION in one]
        code, printed = answered(tmp_path, script, "plan", capsys=capsys)
        assert (code, "8 of 17 linear layers compute in FP8" in printed) == (0, True)
        code, printed = answered(tmp_path, script, "manifest", "--for", "vllm", "--model-type", "llama", capsys=capsys)
        assert "q_proj" in printed

    @pytest.mark.parametrize("name", ["gone.yaml", "$RECIPE", "other.yaml", "x" * 300])
    @pytest.mark.parametrize("command", ["plan", "memory", "plan --align", "plan --modules", "manifest", "rehearse"])
    def test_one_that_is_not_there_is_named_and_there_is_no_plan(self, tmp_path, name, command, capsys):
        (tmp_path / "run").mkdir()
        (tmp_path / "other.yaml").write_text(RECIPE)  # elsewhere
        code, printed = answered(tmp_path / "run", f"{FP8} {OPTION} {name}", *command.split(), capsys=capsys)
        assert code == 2
        rule = f"{OPTION} names {name}, which is not found; the precision of the layers that it selects is not known"
        assert printed == bounded(f"model.quant_recipe: {rule}. Put the file next to the run's own.\n")

    def test_check_answers_without_it_and_names_it(self, tmp_path, capsys):
        code, printed = answered(tmp_path, f"{FP8} {OPTION} gone.yaml", "check", "--target", "b200x8", capsys=capsys)
        assert code == 0
        assert "names gone.yaml, which is not found" in printed
        reading = read(tmp_path, f"{FP8} {OPTION} gone.yaml").reading
        assert reading.uncertainty.unread_sources["model.quant_recipe"] == f"{OPTION} gone.yaml"
        assert reading.to_dict()["unplanned"] in reading.to_dict()["open"]

    def test_a_file_that_is_given_takes_its_place(self, tmp_path, capsys):
        (tmp_path / "mine.yaml").write_text(RECIPE)
        words = ("plan", "--modules", "--file", str(tmp_path / "mine.yaml"))
        code, printed = answered(tmp_path, f"{FP8} {OPTION} gone.yaml", *words, capsys=capsys)
        assert code == 0
        assert "linear_qkv, linear_proj of 1-4" in printed
        assert "gone.yaml" not in printed

    def test_one_that_megatron_refuses_is_refused_with_its_fault(self, tmp_path):
        (tmp_path / "te.yaml").write_text(RECIPE.replace("config: high", "config: hihg"))
        with pytest.raises(RunConfigError, match=r"te\.yaml: matchers\.projections\.config: no payload has this name"):
            read(tmp_path, f"{FP8} {OPTION} te.yaml")

    def test_a_file_of_the_same_name_that_is_no_recipe_is_another_file(self, tmp_path):
        (tmp_path / "te.yaml").write_text("bf16: true\n")
        assert "which is not found" in str(
            read(tmp_path, f"{FP8} {OPTION} /opt/te.yaml").reading.uncertainty.no_plan_reason
        )

    def test_a_matcher_without_enabled_is_dead_and_check_and_modules_say_so(self, tmp_path, capsys):
        for content in (RECIPE.replace(", enabled: true", ""), RECIPE.replace("enabled: true", "enabled: null")):
            (tmp_path / "te.yaml").write_text(content)
            script = f"{FP8} {OPTION} te.yaml"
            for words in (
                ("check",),
                ("plan", "--modules"),
                ("plan", "--modules", "--file", str(tmp_path / "te.yaml")),
            ):
                code, printed = answered(tmp_path, script, *words, capsys=capsys)
                assert (code, "PB290" in printed, "matcher projections is off" in printed) == (0, True, True), words
            _, printed = answered(tmp_path, script, "plan", "--modules", "--json", capsys=capsys)
            assert [one["id"] for one in json.loads(printed)["findings"]] == ["PB290"]

    def test_check_asks_no_width_of_layers_that_it_keeps_in_bf16(self, tmp_path, capsys):
        script = f"{RUN} --ffn-hidden-size 100 --fp8-format hybrid --fp8-recipe tensorwise"
        for pattern, is_found in (("", True), ("*.mlp.*", False), ("*.self_attention.*", True), ("*", False)):
            option = f"{OPTION} te.yaml" if pattern else ""
            (tmp_path / "te.yaml").write_text(RECIPE.replace("*.self_attention.*", pattern))
            words = ("check", "--target", "h100x8,te2.9,cuda12.9")
            _, printed = answered(tmp_path, f"{script} {option}", *words, capsys=capsys)
            assert ("PB502" in printed) is is_found, pattern

    def test_arguments_in_a_file_of_yaml_name_one_too(self, tmp_path):
        (tmp_path / "te.yaml").write_text(RECIPE)
        sizes = (
            "--num-layers: 4\n  --hidden-size: 64\n  --num-attention-heads: 4\n  --bf16: true\n  --fp8-format: hybrid"
        )
        (tmp_path / "model_config.yaml").write_text(f"MODEL_ARGS:\n  {sizes}\n  {OPTION}: te.yaml\n")
        run = load_run((), config_file=tmp_path / "model_config.yaml")
        assert run.model["quant_recipe"]["matchers"].keys() == {"projections"}


class TestLayerSource:
    """Options that have another module build the layers."""

    @pytest.mark.parametrize(
        ("option", "named"),
        [
            ("--spec my_plugins.models.linear get_spec", "--spec my_plugins.models.linear get_spec"),
            ("--spec 'my_plugins.models.linear' \"get_spec\"", "--spec my_plugins.models.linear get_spec"),
            ("--spec $SPEC", "--spec $SPEC"),
            ("--spec my.models mamba_stack_spec", "--spec my.models mamba_stack_spec"),
            (
                "--spec megatron.core.models.hybrid.hybrid_layer_specs gdp_stack_spec",
                "--spec megatron.core.models.hybrid.hybrid_layer_specs gdp_stack_spec",
            ),
            ("--custom-model-provider-path my.models.provide", "--custom-model-provider-path my.models.provide"),
            ("--model-provider mine", "--model-provider mine"),
        ],
    )
    def test_there_is_no_plan_of_layers_that_another_module_builds(self, tmp_path, option, named, capsys):
        sentence = f"{named}: the layers are built by that module and cannot be planned."
        for command in ("plan", "memory", "manifest", "rehearse"):
            assert answered(tmp_path, f"{RUN} {option}", command, capsys=capsys) == (2, f"{sentence}\n")
        code, printed = answered(tmp_path, f"{RUN} {option}", "check", "--target", "h100x8", capsys=capsys)
        assert (code, sentence in printed) == (0, True)

    @pytest.mark.parametrize(
        "option",
        [
            "",
            "--spec megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_with_transformer_engine_spec",
            "--model-provider gpt",
            "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --hybrid-layer-pattern M*-M",
        ],
    )
    def test_layers_of_megatron_core_are_planned(self, tmp_path, option):
        run = read(tmp_path, f"{RUN} {option}")
        assert run.reading.uncertainty.no_plan_reason is None
        assert run.plan.layers

    def test_the_local_spec_is_the_local_implementation(self, tmp_path):
        option = "--spec megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_local_spec"
        assert read(tmp_path, f"{RUN} {option}").model["transformer_impl"] == "local"

    @pytest.mark.parametrize(
        ("option", "sentence"),
        [
            ("--kitchen-recipe-number 12", "Kitchen's layers compute as it says, and cannot be planned."),
            (
                "--modelopt-enabled",
                "ModelOpt changes the layers as its configuration says, and they cannot be planned.",
            ),
        ],
    )
    def test_a_library_that_changes_the_layers_leaves_no_plan(self, tmp_path, option, sentence):
        assert read(tmp_path, f"{RUN} {option}").reading.uncertainty.no_plan_reason == f"{option}: {sentence}"


class TestUnreadOptions:
    """Options that bear on the bytes and that nothing reads."""

    WITHOUT_A_VOCABULARY = RUN.replace("--vocab-size 1024 ", "")
    OPTIONS = "--ds-sequence-parallel-size 4 --extra-vocab-size 128 --zero-stage 1"

    def test_they_are_named_and_memory_has_no_verdict(self, tmp_path, capsys):
        run = self.WITHOUT_A_VOCABULARY.replace("--num-layers 4", "--num-layers 400")
        script = f"{run} --hidden-size 16384 {self.OPTIONS}"
        reading = read(tmp_path, script).reading
        named = "--ds-sequence-parallel-size, --extra-vocab-size, --zero-stage"
        assert (
            f"{named}: not read here; the layout, the layers or the bytes may be others than those that are counted."
            in (reading.uncertainty.open_points)
        )
        assert reading.uncertainty.unread_options == tuple(named.split(", "))
        assert reading.uncertainty.unread_sources["model.vocab_size"] == "--extra-vocab-size"
        assert reading.uncertainty.unread_sources["optimizer.use_distributed_optimizer"] == "--zero-stage"
        code, printed = answered(tmp_path, script, "memory", "--target", "h100x8", capsys=capsys)
        assert code == 0
        assert f"no verdict, since {named} may change what is counted." in printed
        assert "fit" not in printed
        assert "at least" not in printed
        code, printed = answered(tmp_path, script, "check", "--target", "h100x8", capsys=capsys)
        assert (code, "PB618" in printed) == (0, False)
        code, printed = answered(tmp_path, script, "memory", "--target", "h100x8", "--fit", capsys=capsys)
        assert (code, printed.endswith("Drop --fit.\n")) == (2, True)

    def test_the_same_run_without_them_has_a_verdict(self, tmp_path, capsys):
        script = f"{RUN.replace('--num-layers 4', '--num-layers 400')} --hidden-size 16384 --rollout-batch-size 4"
        assert read(tmp_path, script).reading.uncertainty.unread_options == ()
        _, printed = answered(tmp_path, script, "check", "--target", "h100x8", capsys=capsys)
        assert "error PB618" in printed

    def test_a_split_of_deepspeed_by_an_unknown_method_is_named_once(self, tmp_path):
        split = "--pipeline-model-parallel-size 2 --pp-partition-method parameters"
        reading = read(tmp_path, f"{RUN} {split}").reading
        assert reading.uncertainty.unread_options == ("--pp-partition-method",)
        assert [one for one in reading.uncertainty.open_points if "partition" in one] == [
            "--pp-partition-method: DeepSpeed splits the layers by it; Megatron-LM's even split counts here."
        ]
        assert reading.uncertainty.unread_sources["model.num_layers_in_first_pipeline_stage"] == "--pp-partition-method"

    def test_a_misspelt_argument_may_change_the_field_that_is_meant(self, tmp_path):
        reading = read(tmp_path, f"{RUN} --tensor-model-paralel-size 4").reading
        assert reading.uncertainty.unread_sources["model.tensor_model_parallel_size"] == "--tensor-model-paralel-size"
        assert reading.uncertainty.unread_options == ("--tensor-model-paralel-size",)
        assert [one for one in reading.uncertainty.open_points if "paralel" in one] == [
            "--tensor-model-paralel-size: no argument of Megatron-LM that is known, and it is not read. "
            "Did you mean --tensor-model-parallel-size?"
        ]

    @pytest.mark.parametrize(
        ("stated", "option", "rule"),
        [
            ("--pipeline-model-parallel-size 3", "--pp-partition-method type:transformer", "PB413"),
            ("--tensor-model-parallel-size 3", "--my-tensor-parallel-size 8", "PB408"),
            ("--ffn-hidden-size 100 --fp8-format hybrid", "--spec my.layers spec", "PB502"),
            ("--num-experts 6 --expert-model-parallel-size 4", "--moe-expert-parallel-size 3", "PB408"),
        ],
    )
    def test_no_error_rests_on_a_setting_that_an_option_may_change(self, tmp_path, stated, option, rule, capsys):
        words = ("check", "--target", "h100x24,te2.9,cuda12.9")
        code, printed = answered(tmp_path, f"{RUN} {stated}", *words, capsys=capsys)
        assert (code, f"error {rule}" in printed) == (2, True)
        code, printed = answered(tmp_path, f"{RUN} {stated} {option}", *words, capsys=capsys)
        assert (code, f"info {rule}" in printed, "cannot be judged" in printed) == (0, True, True)
        assert f"since {option.split()[0]}" in printed


ENGINE = (
    "deepspeed pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 "
    "--micro-batch-size 1 --vocab-size 1024 --checkpoint-activations --deepspeed --deepspeed_config ds.json "
)
JSON = '{"train_batch_size": $GBS, "zero_optimization": {"stage": $STAGE}, "fp16": {"enabled": true, "loss_scale": 0}}'


def heredoc(content: str = JSON, *, stage: str = "1") -> str:
    """Return the lines that write the engine's JSON."""
    return f"STAGE={stage}\ncat <<EOT > ds.json\n{content}\nEOT\n"


class TestDeepSpeed:
    """The engine's JSON, which decides instead of the arguments."""

    @pytest.mark.parametrize("is_beside", [False, True])
    def test_what_the_engine_keeps_is_what_its_json_says(self, tmp_path, is_beside, capsys):
        script = f"{ENGINE} --fp16"
        if is_beside:
            (tmp_path / "ds.json").write_text(JSON.replace("$GBS", "8").replace("$STAGE", "1"))
        else:
            script = heredoc() + script
        run = read(tmp_path, script, "target=h100x64")
        planned = run.planned
        settings = planned.plan.settings
        assert (settings.mode, settings.grad_reduce, settings.grad_sent) == ("fp16", "fp16", "fp16")
        assert settings.distributed
        rank, parameters = planned.memory.largest, planned.memory.largest.parameters
        for kind, each in {"weights": 2, "gradients": 2, "master weights": 4 / 64, "optimizer state": 8 / 64}.items():
            assert rank.bytes_of[kind] == pytest.approx(each * parameters, rel=0.01), kind
        assert run.model["recompute_granularity"] == "full"
        assert run.reading.uncertainty.unread_options == ("--deepspeed",)
        place = str(tmp_path / "ds.json") if is_beside else "the script, which writes it"
        assert run.reading.notes == (f"--deepspeed_config ds.json: read from {place}.",)
        _, printed = answered(tmp_path, script, "memory", "--target", "h100x64", capsys=capsys)
        assert "no verdict, since --deepspeed, " in printed

    @pytest.mark.parametrize(
        "script",
        [
            ENGINE,
            f"{heredoc()}sed -i 's/true/false/' ds.json\n{ENGINE}",
            f"{heredoc()}python change.py > ds.json\n{ENGINE}",
            f"{heredoc(stage='$1')}{ENGINE}",
            f"{heredoc('{not json')}{ENGINE}",
        ],
    )
    def test_a_json_that_is_not_known_is_named_and_nothing_is_said_of_its_shards(self, tmp_path, script):
        run = read(tmp_path, f"{script} --fp16")
        assert "--deepspeed: the engine does what its JSON says about formats and shards; ds.json is not read." in (
            run.reading.uncertainty.open_points
        )
        assert run.reading.notes == ()
        assert run.reading.uncertainty.unread_sources["optimizer.use_distributed_optimizer"] == "DeepSpeed's engine"
        assert run.plan.settings.grad_reduce == "fp16"

    def test_bf16_masters_are_sharded_without_zero_too(self, tmp_path):
        content = '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 0}}'
        settings = read(tmp_path, f"{heredoc(content)}{ENGINE} --bf16").plan.settings
        assert (settings.mode, settings.distributed) == ("bf16", True)

    @pytest.mark.parametrize(
        ("block", "clause"),
        [
            ('"zero_optimization": {"stage": 1}', ""),
            (
                '"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32", '
                '"zero_optimization": {"stage": 1}',
                "",
            ),
            (
                '"data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}',
                "the engine accumulates gradients in fp32 and sends them between ranks in bf16",
            ),
            (
                '"zero_optimization": {"stage": 0}',
                "without ZeRO the engine accumulates gradients in fp32 before DeepSpeed 0.17.6",
            ),
        ],
    )
    def test_gradients_that_no_switch_of_megatron_describes_are_open(self, tmp_path, block, clause, capsys):
        script = heredoc(f'{{"bf16": {{"enabled": true}}, {block}}}') + f"{ENGINE} --bf16\n"
        _, printed = answered(tmp_path, script, "check", capsys=capsys)
        chain = next(line for line in printed.splitlines() if "gradients:" in line)
        assert ("ddp.grad_reduce_in_fp32" in chain) is bool(clause)
        assert (f"  ddp.grad_reduce_in_fp32: {clause}" in printed) is bool(clause)

    @pytest.mark.parametrize(
        ("block", "setting"),
        [
            ('"compression_training": {"weight_quantization": {}}', "compression_training"),
            ('"fp16": {"enabled": true, "fp16_master_weights_and_grads": true}', "fp16.fp16_master_weights_and_grads"),
            ('"fp16": {"enabled": false}, "torch_autocast": {"enabled": true}', "torch_autocast.enabled"),
            ('"amp": {"enabled": true}', "amp"),
        ],
    )
    def test_a_block_that_changes_formats_leaves_no_plan(self, tmp_path, block, setting):
        unplanned = read(tmp_path, f"{heredoc(f'{{{block}}}')}{ENGINE} --fp16").reading.uncertainty.no_plan_reason
        rule = f"{setting} changes formats, and the plan does not follow it."
        assert unplanned == f"--deepspeed_config ds.json: {rule}"

    @pytest.mark.parametrize(("stage", "sharded"), [("2", "gradients"), ("3", "gradients and weights")])
    def test_a_higher_stage_is_named(self, tmp_path, stage, sharded):
        unknown = read(tmp_path, f"{heredoc(stage=stage)}{ENGINE} --fp16").reading.uncertainty.open_points
        assert f"--deepspeed: ZeRO stage {stage} shards {sharded} too, and is counted as stage 1." in unknown

    def test_without_zero_the_masters_of_fp16_are_whole(self, tmp_path):
        settings = read(tmp_path, f"{heredoc(stage='0')}{ENGINE} --fp16").plan.settings
        assert (settings.distributed, settings.grad_reduce) == (False, "fp16")


class TestEngineOfDeepSpeed:
    """What DeepSpeed's engine and the forks for it decide."""

    WRITTEN = 'cat > ds.json <<X\n{"fp16": {"enabled": true, "loss_scale": 0}, "zero_optimization": {"stage": 1}}\nX\n'

    @pytest.mark.parametrize("mode", ["--fp16", "--bf16"])
    def test_check_says_what_convert_says_of_a_file_that_the_script_writes(self, tmp_path, mode):
        started = RUN.replace("torchrun --nproc-per-node 8", "deepspeed").replace("--bf16", mode)
        script = f"{self.WRITTEN}{started} --loss-scale 12 --deepspeed --deepspeed_config ds.json\n"
        run = read(tmp_path, script)
        assert [one.id for one in get_report(run).findings if one.id == "PB123"] == []
        assert get_report(run).precision == "fp16_mixed, but initial_loss_scale=65536"
        assert (
            "--loss-scale: without effect under --deepspeed, whose engine scales the loss and reduces gradients by its "
            "JSON." in run.reading.uncertainty.open_points
        )
        (converted,) = import_all(Document.load(tmp_path / "run.sh"))
        assert run.precision is not None
        assert converted.config.to_dict() == run.precision.to_dict()

    def test_a_fork_decides_which_layers_have_experts(self, tmp_path):
        script = RUN.replace("--bf16", "--fp16") + "--num-experts 64 --deepspeed --deepspeed_config ds.json\n"
        reading = read(tmp_path, script).reading
        assert {"model.moe_layer_freq", "model.moe_router_topk"} <= {*reading.uncertainty.unread_sources}
        assert [one for one in reading.uncertainty.open_points if one.startswith("--num-experts: ")]
        dense = read(tmp_path, script.replace("--num-experts 64", "")).reading
        assert "model.moe_layer_freq" not in dense.uncertainty.unread_sources
        assert [one for one in dense.uncertainty.open_points if one.startswith("--num-experts: ")] == []


def test_an_activation_of_a_fork_is_named_and_opens_the_width_of_the_layers(tmp_path):
    reading = read(tmp_path, f"{RUN} --glu-activation swiglu\n").reading
    assert reading.uncertainty.unread_options == ("--glu-activation",)
    assert reading.uncertainty.unread_sources["model.gated_linear_unit"] == "--glu-activation"
    assert [one for one in reading.uncertainty.open_points if one.startswith("--glu-activation: not read here")]


@pytest.mark.parametrize(("pattern", "has_effect"), [("M-M-", False), ("M-ME", True)])
def test_experts_that_a_pattern_does_not_have_are_not_counted(tmp_path, pattern, has_effect):
    script = f"{RUN} --is-hybrid-model --hybrid-override-pattern {pattern} --num-experts 6 --moe-ffn-hidden-size 64\n"
    run = read(tmp_path, script, "target=h100x3")
    setup = get_report(run).context
    said = [one for one in run.reading.uncertainty.open_points if one.startswith("--num-experts 6: has no effect")]
    assert (said == []) is has_effect
    assert setup.shape.is_moe is has_effect
    assert [one for one in setup.planned.memory.notes if "experts" in one] == [] or has_effect


DUMMIES = "--num-layers -1 --hidden-size -1 --num-attention-heads -1 --seq-length -1 --max-position-embeddings -1"


def test_sizes_of_an_evaluation_are_those_of_its_checkpoint(tmp_path, capsys):
    start = f"deepspeed tasks/eval_harness/evaluate.py {DUMMIES} --micro-batch-size 1 --fp16 --eval_fp32"
    code, out = answered(tmp_path, f"{start} --load ckpt\n", "check", capsys=capsys)
    assert code == 0
    assert f"{DUMMIES}: evaluate.py evaluates the checkpoint --load ckpt, whose sizes replace these." in out
    assert "--eval_fp32: evaluate.py computes in FP32, whatever the mode is." in out
    assert "The run trains nothing" in out
    code, out = answered(tmp_path, f"{start} --load ckpt\n", "plan", capsys=capsys)
    assert code == 2
    assert "does not state model.num_layers, model.hidden_size, model.num_attention_heads" in out
    assert "Use 1 or more" not in out
    stated = ("model.num_layers=2", "model.hidden_size=64", "model.num_attention_heads=4", "model.vocab_size=96")
    assert answered(tmp_path, f"{start} --load ckpt\n", "plan", *stated, capsys=capsys)[0] == 0
    code, out = answered(tmp_path, f"{start}\n", "check", capsys=capsys)
    assert (code, "Use 1 or more" in out) == (2, True)


def test_only_a_value_that_has_a_default_is_said_to_have_one(tmp_path):
    script = RUN.replace("--num-layers 4", "--num-layers $N").replace("--micro-batch-size 1", "--micro-batch-size $B")
    unknown = read_open(tmp_path, f"{script} --rotary-base $BASE\n")
    late = "is decided when the run starts"
    assert f"model.num_layers: the value $N {late}, and there is no default. Add model.num_layers=VALUE." in unknown
    assert (
        f"train.micro_batch_size: the value $B {late}, and there is no default. Add train.micro_batch_size=VALUE."
        in (unknown)
    )
    assert f"model.rotary_base: the value $BASE {late}; the default counts here." in unknown


def read_open(folder: Path, script: str) -> tuple[str, ...]:
    """Return what the file of a run leaves open, which need not have sizes."""
    (folder / "run.sh").write_text(script)
    return load_run((), config_file=folder / "run.sh", strict=False).reading.uncertainty.open_points


@pytest.mark.parametrize(("written", "given"), [("[--bf16]", "['--bf16']"), ("'--bf16'", "'--bf16'"), ("{}", "{}")])
def test_arguments_that_are_no_mapping_are_shown(tmp_path, written, given):
    (tmp_path / "args.yaml").write_text(f"MODEL_ARGS: {written}\n")
    with pytest.raises(RunConfigError) as raised:
        load_run((), config_file=tmp_path / "args.yaml")
    assert f"got {given}. " in str(raised.value)


@pytest.mark.parametrize(("length", "counted"), [(64, "them instead of the activations"), (4096, "the activations")])
def test_the_columns_of_memory_and_the_step_of_the_optimizer_add_up_to_the_total(tmp_path, length, counted, capsys):
    run = RUN.replace("--nproc-per-node 8", "--nproc-per-node 1").replace("--seq-length 512", f"--seq-length {length}")
    script = f"{run} --grad-reduce-in-bf16\n"
    _, out = answered(tmp_path, script, "memory", capsys=capsys)
    assert f"FP32 gradients, after the activations: the total counts {counted}" in out
    (rank,) = read(tmp_path, script).planned.memory.ranks
    largest = rank.step_bytes if "instead" in counted else rank.bytes_of["activations"]
    assert rank.total == rank.static + largest


@pytest.mark.parametrize(("words", "is_shown"), [("--attention-backend unfused", True), ("--bf16", False)])
def test_memory_shows_what_recomputing_the_core_of_attention_frees(tmp_path, words, is_shown, capsys):
    _, out = answered(tmp_path, f"{RUN} {words}\n", "memory", capsys=capsys)
    assert ("selective (core_attn)" in out) is is_shown


def test_memory_of_a_run_that_trains_nothing_is_not_counted(tmp_path, capsys):
    script = RUN.replace("pretrain_gpt.py", "generate_samples_gpt.py")
    code, out = answered(tmp_path, script, "memory", capsys=capsys)
    assert code == 2
    assert "trains nothing, and the memory of a run without optimizer and gradients is not counted" in out
    code, out = answered(tmp_path, script, "check", capsys=capsys)
    assert (code, "gradients:" in out) == (0, False)


def test_a_run_whose_arguments_stand_in_a_yaml_file_is_refused_with_its_name(tmp_path, capsys):
    code, out = answered(tmp_path, "torchrun pretrain_gpt.py --yaml-cfg a.yaml\n", "check", capsys=capsys)
    assert code == 2
    assert "takes its arguments from the file of --yaml-cfg, got 'a.yaml'" in out


def test_a_launch_of_too_few_ranks_names_those_that_the_layout_needs(tmp_path):
    layout = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2"
    points = read(tmp_path, f"{RUN} {layout}").reading.uncertainty.open_points
    (sentence,) = (point for point in points if point.startswith("The number of GPUs"))
    assert "The layout needs a multiple of 16: with 8 Megatron stops at the start. Add --target h100x16" in sentence
    points = read(tmp_path, f"{RUN} --tensor-model-parallel-size 8").reading.uncertainty.open_points
    assert "Add --target h100x8, for example." in " ".join(points)
