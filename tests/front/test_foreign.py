"""Files of other frameworks and of nobody, given as a run's file: refused in one sentence."""

import pytest

from bridge.cli.main import main

POLICIES = "alpha: {x: 1}\nbeta: {y: 2}\ngamma: 3\ndelta: 4\nepsilon: 5\nmodel: {name: m}\n"


@pytest.mark.parametrize("command", ["check", "plan", "memory"])
def test_sections_of_nobody_are_refused_in_one_sentence(command: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.yaml").write_text(POLICIES)
    assert main([command, "--config", "other.yaml"]) == 2
    assert capsys.readouterr().err == (
        "other.yaml: must have the sections of a run, such as model and mixed_precision, got 'alpha', 'beta', 'gamma', "
        "'delta' and 1 more. Give a run's file of Precision Bridge, Megatron Bridge or Megatron-LM.\n"
    )


@pytest.mark.parametrize("text", ["model: {target: a.b, params: {x: 1}}\n", "job: {x: 1}\nmodel: {flavor: 8B}\n"])
def test_sections_without_a_field_of_a_run_are_no_run(text: str, tmp_path, capsys) -> None:
    (tmp_path / "other.yaml").write_text(text)
    assert main(["check", "--config", str(tmp_path / "other.yaml")]) == 2
    assert "must have the sections of a run, such as model and mixed_precision, got" in capsys.readouterr().err


def test_overrides_of_megatron_bridge_are_a_part_of_a_run(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    written = "model: {tensor_model_parallel_size: 1}\nscheduler: {lr_warmup_iters: 10}\nlogger: {log_interval: 1}\n"
    (tmp_path / "override.yaml").write_text(written)
    assert main(["check", "--config", "override.yaml"]) == 2
    assert capsys.readouterr().err == (
        "override.yaml: must be the file of a whole run, got overrides of Megatron Bridge, which are a part of one "
        "(scheduler, logger). Give the script that starts the run with them, or the run's saved configuration.\n"
    )
    (tmp_path / "run.yaml").write_text("model: {num_layers: 2}\nlogger: {log_interval: 1}\n")
    assert main(["check", "--config", "run.yaml"]) == 2
    assert "Did you mean 'logging'?" in capsys.readouterr().err


def test_a_field_that_is_misspelt_is_named_as_such(tmp_path, capsys) -> None:
    (tmp_path / "run.yaml").write_text("model: {num_layer: 2}\n")
    assert main(["plan", "--config", str(tmp_path / "run.yaml")]) == 2
    assert "Did you mean 'num_layers'" in capsys.readouterr().err


def test_a_file_that_convert_reads_is_refused_with_the_command(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "axolotl.yaml").write_text("base_model: m\nbf16: true\ndatasets: [d]\n")
    assert main(["check", "--config", "axolotl.yaml"]) == 2
    assert capsys.readouterr().err == (
        "axolotl.yaml: looks like a file of Axolotl (it has `base_model` and `datasets`, which Axolotl has together), "
        "and `check`, `plan` and `memory` do not read this form of it. `precision-bridge convert axolotl.yaml` reads "
        "what it states of the precision.\n"
    )
    assert main(["convert", "axolotl.yaml"]) == 0


@pytest.mark.parametrize("target", ["mine.Runner", "torch.nn.Linear", "verl.workers.ActorConfig"])
def test_a_class_next_to_a_sections_name_makes_no_file_of_megatron_bridge(target: str, tmp_path, capsys) -> None:
    (tmp_path / "actor.yaml").write_text(f"_target_: {target}\ncheckpoint: {{save_contents: [model]}}\n")
    assert main(["check", "--config", str(tmp_path / "actor.yaml")]) == 2
    assert capsys.readouterr().out == ""


def test_toml_is_named_as_such(tmp_path, capsys) -> None:
    (tmp_path / "run.toml").write_text("[model]\nnum_layers = 2\n")
    assert main(["check", "--config", str(tmp_path / "run.toml")]) == 2
    assert "must be a run's file, got TOML. Write it as YAML." in capsys.readouterr().err
