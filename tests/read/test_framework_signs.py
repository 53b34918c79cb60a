"""Frameworks whose files are recognised and not read: named by a sign that only they have, and refused alike."""

from pathlib import Path

import pytest

from bridge.cli.main import main
from bridge.convert.conversion import import_runs
from bridge.errors import PayloadError
from bridge.precision.statements import get_stated_values
from bridge.read import framework_signs
from bridge.read.foreign.row_files import load_rows
from bridge.read.framework_signs import SIGNS_FOLDER
from bridge.read.launch.script_launches import read_launches
from bridge.read.text.document import Document

NEMO_RL = (
    "policy: {precision: bfloat16, megatron_cfg: {enabled: true, fp8_cfg: {fp8: e4m3}}}\ngrpo: {max_num_steps: 5}\n"
)
PRIMUS = "modules:\n  pre_trainer: {framework: megatron, config: a.yaml, model: b.yaml, overrides: {fp8: hybrid}}\n"
ACTOR = "_target_: verl.workers.config.ActorConfig\ncheckpoint: {save_contents: [model]}\n"
AUTOMODEL = """\
recipe: TrainFinetuneRecipeForNextTokenPrediction
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config, torch_dtype: bfloat16}
optimizer: {_target_: torch.optim.AdamW}
"""
SWIFT = "model: m\ndataset: [d]\nmicro_batch_size: 1\nsplit_dataset_ratio: 0.01\nbf16: true\n"
PRIME = '[trainer.model]\nname = "m"\n[trainer.model.quantization]\ntype = "mxfp8"\n[inference.model]\nname = "m"\n'
ROLL = "sft_train: {strategy_args: {strategy_name: fsdp2_train}}\npretrain: m\n"
AREAL = "experiment_name: e\ntrial_name: t\ngconfig: {n: 1}\nactor: {backend: 'megatron:d4p1t1', dtype: bfloat16}\n"
TITAN = '[job]\ndump_folder = "out"\n[training]\nlocal_batch_size = 8\nmixed_precision_param = "bfloat16"\n'
FACTORY = (
    "model_name_or_path: m\nstage: sft\nfinetuning_type: full\nper_device_train_batch_size: 1\nbf16: true\nfp8: true\n"
)
LIGHTNING = "seed_everything: 1\ntrainer: {precision: bf16-mixed}\nmodel: {class_path: a.B}\n"
TRAINER = "trainer: {_target_: lightning.pytorch.trainer.Trainer, precision: 16}\nmodel: {_target_: a.B}\n"
SPEECH = "exp_manager: {name: x}\ntrainer: {precision: 16}\nmodel: {sample_rate: 1, preprocessor: {dither: 0.1}}\n"
ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: fp16\n"
PLUGIN = ACCELERATE.replace("MULTI_GPU", "MEGATRON_LM")
FILES = {
    "titan.toml": (TITAN, "torchtitan", "has `training.mixed_precision_param`", "without Megatron Core"),
    "factory.yaml": (
        FACTORY,
        "LLaMA-Factory",
        "has `finetuning_type` and `model_name_or_path`",
        "transformers' Trainer",
    ),
    "cli.yaml": (LIGHTNING, "Lightning", "has `trainer` and `seed_everything`", "without Megatron Core"),
    "hydra.yaml": (TRAINER, "Lightning", "makes `lightning.pytorch.trainer.Trainer`", "without Megatron Core"),
    "speech.yaml": (SPEECH, "NeMo 1.x", "has `exp_manager` and `model.preprocessor`", "on Lightning, without Megatron"),
    "launch.yaml": (ACCELERATE, "Accelerate", "has `distributed_type` and `compute_", "PyTorch here, without Megatron"),
    "plugin.yaml": (PLUGIN, "Accelerate", "has `distributed_type` and `compute_", "trains on Megatron-LM here"),
    "grpo.yaml": (
        NEMO_RL.replace("megatron_cfg", "dtensor_cfg"),
        "NeMo RL",
        "has `policy.dtensor_cfg`",
        "trains on PyTorch's DTensor here",
    ),
    "other.yaml": (PRIMUS.replace("megatron", "torchtitan"), "Primus", "has `modules`", "another framework than"),
    "actor.yaml": (ACTOR, "verl", "names the class `verl.workers.config.ActorConfig`", "under the strategy `megatron`"),
    "auto.yaml": (AUTOMODEL, "NeMo Automodel", "has the recipe `TrainFinetune", "none of Megatron Core's models"),
    "rl.toml": (PRIME, "prime-rl", "has `trainer.model` and `inference`", "without Megatron Core"),
    "roll.yaml": (ROLL, "ROLL", "has `sft_train.strategy_args`", "where the strategy of its trainer is megatron_train"),
    "rlinf.yaml": (
        "actor: {training_backend: fsdp}\nrunner: {a: 1}\n",
        "RLinf",
        "has `actor.tr",
        "PyTorch's FSDP here",
    ),
    "areal.yaml": (AREAL, "AReaL", "has `actor.backend` and `gconfig`", "trains on Megatron Core here"),
    "neox.yml": (
        '"pipe_parallel_size": 1\nfp16: {enabled: true}\n',
        "GPT-NeoX",
        "has `pipe_par",
        "without Megatron Core",
    ),
    "nano.yaml": ("general: {run: a}\nparallelism: {tp_mode: A}\n", "nanotron", "has `general`", "on PyTorch, without"),
    "olmo.yaml": (
        "model: {d_model: 8, n_layers: 2}\ndevice_train_microbatch_size: 1\nprecision: amp_bf16\n",
        "OLMo",
        "has `model.d_model` and",
        "on PyTorch, without",
    ),
    "mpt.yaml": (
        "model: {name: mpt_causal_lm}\ntrain_loader: {name: text}\nmax_duration: 8ba\nprecision: amp_bf16\n",
        "LLM Foundry",
        "has `train_loader`",
        "by Composer, without",
    ),
    "lingua.yaml": (
        "distributed: {fsdp_type: full_shard, model_dtype: bf16}\nmodel: {dim: 8}\n",
        "lingua",
        "has `distributed.fsdp_type`",
        "on PyTorch, without",
    ),
    "tune.yaml": ("model: {_component_: torchtune.models.a}\ndtype: bf16\n", "torchtune", "makes `torch", "without"),
    "train.py": ("import verl.trainer\n", "verl", "imports `verl`", "under the strategy `megatron`"),
}
LAUNCHES = {
    "torchrun -m torchtitan.train --job.config_file a.toml": ("torchtitan", "starts `torchtitan.train`"),
    "llamafactory-cli train a.yaml": ("LLaMA-Factory", "starts `llamafactory-cli train`"),
    "python src/train.py --finetuning_type lora --bf16 true": ("LLaMA-Factory", "has `--finetuning_type`, an option"),
    "accelerate launch --mixed_precision bf16 train.py": ("Accelerate", "starts with `accelerate`"),
    "colossalai run --nproc_per_node 2 train.py --mixed_precision bf16": ("ColossalAI", "starts with `colossalai`"),
    "bash ./runner/primus-cli direct -- train pretrain --config a.yaml": ("Primus", "starts `primus-cli direct`"),
    "torchrun primus/cli/main.py train pretrain --config a.yaml": ("Primus", "starts `primus/cli/main.py`"),
    "flagscale train aquila --config a.yaml": ("FlagScale", "starts `flagscale train`"),
    "automodel finetune llm -c a.yaml": ("NeMo Automodel", "starts `automodel finetune`"),
    "uv run automodel a.yaml --nproc-per-node 8": ("NeMo Automodel", "starts `automodel a.yaml`"),
    "uv run rl @ rl.toml --output-dir out": ("prime-rl", "starts `rl @`"),
    "uv run --extra megatron -m skyrl.train.entrypoints.main_base trainer.strategy=megatron": (
        "SkyRL",
        "starts `skyrl.",
    ),
    "python -m openrlhf.cli.train_ppo_ray --bf16": ("OpenRLHF", "starts `openrlhf.cli.train_ppo_ray`"),
}
PLANNED = {
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=megatron": ("verl", "starts `verl.trainer"),
    "python3 -m recipe.dapo.main +actor_rollout_ref.actor.strategy=megatron": ("verl", "has `actor_rollout_ref.actor."),
    "megatron sft --model m --fp8_recipe blockwise --num_train_epochs 1": ("ms-swift", "starts `megatron sft`"),
    "megatron pt --model m --train_iters 10": ("ms-swift", "starts `megatron pt`"),
    "megatron rlhf --rlhf_type grpo --model m --bf16 true": ("ms-swift", "starts `megatron rlhf`"),
}
LEFT_ALONE = (
    "python run_grpo.py --learning_rate 1e-4",
    "python train.py --mixed_precision bf16",
    "torchrun pretrain_gpt.py --bf16 --num-layers 2",
    "python megatron_gpt_pretraining.py trainer.precision=bf16",
    "am i --a b.yaml",
    "primus-cli direct -- preflight --quick",
    "sft --config a.toml",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusals(name: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Return what the commands about a run, and `convert`, print about a file that they refuse."""
    found = set()
    for words in (["check", "--config"], ["plan", "--config"], ["memory", "--config"], ["convert"]):
        assert main([*words, name]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        found.add(printed.err.strip())
    return found


@pytest.mark.parametrize("name", FILES)
def test_every_command_refuses_a_file_with_the_same_sentence(name: str, folder: Path, capsys) -> None:
    text, framework, evidence, runs = FILES[name]
    (folder / name).write_text(text)
    (sentence,) = refusals(name, capsys)
    assert sentence.startswith(f"{name}: looks like {framework} (it {evidence}")
    assert runs in sentence
    assert sentence.endswith("No command reads it, `convert` neither.")
    assert "\n" not in sentence


@pytest.mark.parametrize("command", LAUNCHES)
def test_every_command_refuses_a_launch_with_the_same_sentence(command: str, folder: Path, capsys) -> None:
    framework, evidence = LAUNCHES[command]
    (folder / "run.sh").write_text(f"#!/bin/bash\nexport A=1\n{command}\n")
    (sentence,) = refusals("run.sh", capsys)
    assert sentence.startswith(f"run.sh: looks like {framework} (it {evidence}")


@pytest.mark.parametrize("command", PLANNED)
def test_a_launch_that_is_checked_is_not_converted(command: str, folder: Path, capsys) -> None:
    framework, evidence = PLANNED[command]
    (folder / "run.sh").write_text(f"#!/bin/bash\nexport A=1\n{command}\n")
    assert main(["check", "--config", "run.sh"]) == 0
    capsys.readouterr()
    assert main(["convert", "run.sh"]) == 2
    sentence = capsys.readouterr().err.strip()
    assert sentence.startswith(f"run.sh: looks like {framework} (it {evidence}")
    assert sentence.endswith("`check`, `plan` and `memory` read it, and `convert` does not.")


def test_the_trainer_of_transformers_in_ms_swift_is_converted_and_not_planned(folder: Path, capsys) -> None:
    words = "swift sft --model m --torch_dtype bfloat16 --bf16 true --per_device_train_batch_size 1"
    (folder / "run.sh").write_text(f"#!/bin/bash\n{words}\n")
    assert main(["convert", "run.sh"]) == 0
    capsys.readouterr()
    assert main(["check", "--config", "run.sh"]) == 2
    sentence = capsys.readouterr().err
    assert "looks like ms-swift on transformers (it starts `swift sft`)" in sentence
    assert "`precision-bridge convert run.sh` reads what it states of the precision." in sentence


@pytest.mark.parametrize("command", LEFT_ALONE)
def test_a_launch_that_only_resembles_one_of_a_framework_is_left_alone(command: str) -> None:
    assert framework_signs.recognise_first_launch(read_launches(f"#!/bin/bash\n{command}\n")) is None


@pytest.mark.parametrize(
    "text",
    [
        "from nemotronh import x",
        "import verlog",
        "'import verl'",
        "# import verl",
        "from .verl import x",
        "import primusql",
        "x = (",
    ],
)
def test_a_part_of_a_word_is_no_import(text: str) -> None:
    assert framework_signs.recognise_file(Document.from_text(text, "a.py")) is None


def test_a_launch_of_a_framework_next_to_one_that_is_read_is_named_in_its_report() -> None:
    text = "#!/bin/bash\ntorchrun pretrain_gpt.py --bf16 --num-layers 2\npython3 -m verl.trainer.main_ppo a=fp8\n"
    (run,) = import_runs(Document.from_text(text, "run.sh"))
    (left,) = [one for one in run.imported.unmapped if one.value == "verl"]
    assert left.detail.startswith("it starts `verl.trainer.main_ppo`, so that it looks like verl, which trains on")
    assert left.detail.endswith("and is not read")


@pytest.mark.parametrize("given", ["--recipe llama3_8b_config", "--recipe=llama3_8b_config"])
def test_the_recipe_of_a_launcher_of_megatron_bridge_decides_the_mode(given: str, folder: Path, capsys) -> None:
    (folder / "run.sh").write_text(
        f"#!/bin/bash\ntorchrun scripts/training/run_recipe.py {given} --step_func gpt_step\n"
    )
    assert main(["plan", "--config", "run.sh"]) == 2
    printed = capsys.readouterr().err
    assert "the mode is not stated; the recipe llama3_8b_config, which is not at hand, decides." in printed


def test_a_file_of_flagscale_is_converted_and_checked(folder: Path, capsys) -> None:
    text = (
        "system: {use_distributed_optimizer: true, precision: {fp16: true, accumulate_allreduce_grads_in_fp32: true}}\n"
    )
    (folder / "train.yaml").write_text(f"{text}model: {{num_layers: 2, optimizer: {{initial_loss_scale: 1024}}}}\n")
    (run,) = import_runs(Document.load("train.yaml"))
    assert run.system.name == "megatron-lm"
    assert get_stated_values(run.imported.config)["initial_loss_scale"] == 1024.0
    assert run.imported.config.fp16
    assert main(["check", "--config", "train.yaml"]) == 0
    assert "Read as a run of FlagScale, by its code" in capsys.readouterr().out


def test_the_command_in_a_refusal_can_be_typed_for_a_name_with_a_space(folder: Path, capsys) -> None:
    (folder / "my run.sh").write_text("swift sft --model m\n")
    assert main(["check", "--config", "my run.sh"]) == 2
    assert "`precision-bridge convert 'my run.sh'`" in capsys.readouterr().err


def test_a_system_that_is_named_reads_a_file_of_a_framework_too() -> None:
    document = Document.from_text(SWIFT, "sft.yaml")
    with pytest.raises(PayloadError, match="looks like ms-swift"):
        import_runs(document)
    (run,) = import_runs(document, "megatron-lm")
    assert run.imported.config.bf16


def test_a_program_of_miles_is_not_called_one_of_megatron_core_alone() -> None:
    program = Document(path="run.py", text="import miles\nARGS = '--train-backend fsdp'\n", kind="python", of={})
    framework = framework_signs.recognise_file(program)
    assert framework is not None
    assert "or on PyTorch's FSDP with --train-backend fsdp" in framework.runs


def test_the_reference_lists_the_frameworks_as_they_are() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/systems.md").read_text(encoding="utf-8")
    for name, row in load_rows("framework_signs", SIGNS_FOLDER)["frameworks"].items():
        packages = ", ".join(f"`{one}`" for one in row["modules"].split())
        assert f"| {name} | {packages} | {row['runs']} |\n" in page


def test_every_row_of_the_table_can_be_recognised() -> None:
    for name, row in load_rows("framework_signs", SIGNS_FOLDER)["frameworks"].items():
        for package in row["modules"].split():
            found = framework_signs.recognise_file(Document.from_text(f"import {package}.x\n", "a.py"))
            assert found is not None
            assert found.name == name
