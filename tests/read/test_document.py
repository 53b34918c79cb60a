import contextlib
import os
from pathlib import Path

import pytest

from bridge.convert.conversion import import_runs
from bridge.errors import PayloadError
from bridge.read.text.document import MAX_BYTES, Document
from tests.work import calls

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 8)}]" for level in range(1, 12)
)


def yaml_of(text: str):
    return Document.from_text(text, "team.yaml").content


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "bf16: true\nfp8: null\nbf16: false",
            "team.yaml, line 3: the key 'bf16' must not stand twice in one mapping. Keep one of the two.",
        ),
        (
            "a:\n  dtype: 1\n  dtype: 2",
            "team.yaml, line 3: the key 'dtype' must not stand twice in one mapping. Keep one of the two.",
        ),
        (
            "a: !!python/object/apply:os.system [touch ran]",
            "team.yaml, line 1: must be plain data, and the tag '!!python/object/apply:os.system' "
            "is not: it is refused and "
            "nothing was run. Write the value without the tag.",
        ),
        (
            "a: !secret x",
            "team.yaml, line 1: must be plain data, and the tag '!secret' is not: it is refused and "
            "nothing was run. Write the value without the tag.",
        ),
        (
            BOMB,
            "team.yaml, line 6: must not hold more than 200000 values, aliases written out. Anchors "
            "that multiply are refused.",
        ),
        ("[" * 5000, "team.yaml, line 1: nesting must not be deeper than 64. This is no configuration."),
        ("a: [1, 2", "team.yaml, line 2: must be YAML; did not find expected ',' or ']'. Correct it there."),
        ("a: *b", "team.yaml, line 1: the alias *b must follow its anchor. Define the anchor first."),
        ("&a [*a]", "team.yaml, line 1: the alias *a must follow its anchor. Define the anchor first."),
        ("? [a]\n: 1", "team.yaml, line 1: a key must be a word. Quote it, or write `key: value`."),
        ("a: " + "9" * 9000, "team.yaml, line 1: a number must have fewer digits. This is no configuration."),
        ("\t- a", "team.yaml, line 1: must be YAML; found character that cannot start any token. Correct it there."),
    ],
)
def test_bad_yaml_is_one_sentence_with_its_line(text: str, message: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PayloadError) as caught:
        yaml_of(text)
    assert str(caught.value) == message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"fp16": {"enabled": true,\n"enabled": false}}',
            "ds.json, line 2: the key 'enabled' must not stand twice in one mapping. Keep one of the two.",
        ),
        ('{"a": 1', "ds.json, line 2: must be JSON; did not find expected ',' or '}'. Correct it there."),
        ("[" * 100_000, "ds.json, line 1: nesting must not be deeper than 64. This is no configuration."),
        (
            '{"a": ' * 100 + "1" + "}" * 100,
            "ds.json, line 1: nesting must not be deeper than 64. This is no configuration.",
        ),
        ('{"a": ' + "9" * 9000 + "}", "ds.json, line 1: a number must have fewer digits. This is no configuration."),
    ],
)
def test_bad_json_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(PayloadError) as caught:
        _ = Document.from_text(text, "ds.json").content
    assert str(caught.value) == message


def test_a_key_that_bears_on_no_precision_may_stand_twice_and_is_noted() -> None:
    text = "MODEL_ARGS:\n  --bf16: true\n  --ffn-hidden-size: 1\n  --num-layers: 2\n  --ffn-hidden-size: 4\n"
    (run,) = import_runs(Document.from_text(text, "model_config.yaml"))
    assert run.imported.config.bf16
    (note,) = [entry for entry in run.imported.unmapped if entry.field == "--ffn-hidden-size"]
    assert (note.value, note.reason) == (4, "dead knob")
    assert note.detail == "line 5: the key stands twice in its mapping, and the last value counts"
    for key in ("--fp8-format", "--use-distributed-optimizer"):
        with pytest.raises(PayloadError, match=f"line 4: the key '{key}' must not stand twice"):
            import_runs(Document.from_text(f"MODEL_ARGS:\n  {key}: 1\n  --bf16: true\n  {key}: 2\n", "m.yaml"))


def test_what_people_write_is_read_as_their_tools_read_it() -> None:
    text = "a: 1e-5\nb: 010\nc: 1_000\nd: .5\ne: -.inf\nf: 04:30:00\ng: 2026-01-01\nh: ~\ni:\n"
    text += "j: 0x1F\nk: '1'\nl: on\nm: 1.e-5"
    assert yaml_of(text) == {
        "a": 1e-5,
        "b": 8,
        "c": 1000,
        "d": 0.5,
        "e": float("-inf"),
        "f": "04:30:00",
        "g": "2026-01-01",
        "h": None,
        "i": None,
        "j": 31,
        "k": "1",
        "l": True,
        "m": 1e-5,
    }
    assert yaml_of("base: &b {x: 1, y: 2}\nrun:\n  <<: *b\n  y: 3") == {
        "base": {"x": 1, "y": 2},
        "run": {"x": 1, "y": 3},
    }
    assert yaml_of("a: &x [1]\nb: *x") == {"a": [1], "b": [1]}


def test_json_with_comments_and_trailing_commas_is_taken() -> None:
    text = '{\n  // half\n  "fp16": {"enabled": true,}, # on\n  "url": "http://x//y", /* off */ "l": [1, 2,],\n}'
    assert Document.from_text(text, "ds.json").content == {"fp16": {"enabled": True}, "url": "http://x//y", "l": [1, 2]}


def test_windows_line_ends_and_a_byte_order_mark_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbfbf16: true\r\nfp8: hybrid\r\n")
    assert Document.load(tmp_path / "a.yaml").content == {"bf16": True, "fp8": "hybrid"}
    (tmp_path / "b.sh").write_bytes(b"torchrun pretrain_gpt.py \\\r\n  --bf16 \\\r\n  --num-layers 2\r\n")
    from bridge.read.launch.script_launches import read_launches

    (launch,) = read_launches(Document.load(tmp_path / "b.sh").text)
    assert launch.arguments == ("--bf16", "--num-layers", "2")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a: 1\nb: \xe9t\xe9", "x.yaml, line 2: must be UTF-8 text, and byte 8 is not. Save it as UTF-8."),
        (b"a: \0", "x.yaml, line 1: must be text, and holds a NUL. Give a text file."),
        (
            b"x" * (MAX_BYTES + 1),
            "x.yaml: a configuration must not be larger than 512 KiB. Give the part of it that sets the precision.",
        ),
    ],
)
def test_what_is_no_text_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(PayloadError) as caught:
        Document.from_bytes(data, "x.yaml")
    assert str(caught.value) == message


@pytest.mark.parametrize("path", ["missing.yaml", ".", "nul\0byte"])
def test_what_cannot_be_read_is_refused(path: str) -> None:
    with pytest.raises(PayloadError, match="Give the path of a file"):
        Document.load(path)


def test_several_yaml_documents_are_several_parts() -> None:
    document = Document.from_text("---\nbf16: true\n---\n---\nfp16: true\n", "runs.yaml")
    assert document.contents == ({"bf16": True}, None, {"fp16": True})
    assert [part.content for part in document.parts] == [{"bf16": True}, {"fp16": True}]
    assert [part.part for part in document.parts] == [1, 2]
    assert Document.from_text("a: 1", "one.yaml").parts[0].part is None


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("run.sh", "", "shell"),
        ("run.slurm", "", "shell"),
        (".env", "A=1", "env"),
        (".env.local", "A=1", "env"),
        ("launch", "#!/usr/bin/env bash\nls", "shell"),
        ("launch", "#SBATCH -N 1\nsrun python x.py", "shell"),
        ("launch", "ARGS=(\n --bf16\n)\n", "shell"),
        ("tool", "#!/usr/bin/env python3\n", "python"),
        ("config", '{"a": 1}', "json"),
        ("config", "a: 1\nb:\n  - c\n", "yaml"),
        ("settings", "export A=1\nB=2", "env"),
        ("pyproject.toml", "description = 'x'\nfor = 'y'\nARGS=(\n", "toml"),
        ("notes", "some words\nand more", "text"),
    ],
)
def test_the_kind_is_told_by_name_or_contents(name: str, text: str, kind: str) -> None:
    assert Document.from_text(text, name).kind == kind


def test_a_toml_that_no_system_reads_is_no_shell_script() -> None:
    text = '[tool.x]\ncommand = """\nfor\n"""\nARGS=(\nexport A=1\n'
    with pytest.raises(PayloadError, match=r"pyproject\.toml: must be TOML; Invalid value"):
        import_runs(Document.from_text(text, "pyproject.toml"))


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(f"key{i}: [1, 2.5, abc, {{a: b}}]" for i in range(14000)),
        BOMB,
        "- " * 200_000,
        "{" * 400_000,
        "a: 'x\n" * 80_000,
    ],
    ids=["long", "bomb", "dashes", "braces", "quotes"],
)
def test_a_large_file_is_read_or_refused_with_work_in_proportion_to_its_length(text: str) -> None:
    def read() -> None:
        with contextlib.suppress(PayloadError):
            _ = Document.from_text(text, "x.yaml").content

    assert calls(read) < 10_000 + 12 * len(text)


def test_a_named_pipe_is_refused_and_a_process_substitution_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(PayloadError, match=r"run\.yaml: must be a regular file, got a named pipe\. Give the path"):
        Document.load(tmp_path / "run.yaml")
    reading, writing = os.pipe()
    os.write(writing, b"bf16: true\n")
    os.close(writing)
    assert Document.load(f"/dev/fd/{reading}").text == "bf16: true\n"
    os.close(reading)


@pytest.mark.parametrize("key", ["a." * 20_000 + "a", "[" + '"x=". ' * 20_000 + "x]", "x = {" + "a . 'b'." * 100 + "a"])
def test_a_key_of_toml_with_more_parts_than_anybody_writes_is_refused_at_once(key: str) -> None:
    def read() -> None:
        with pytest.raises(PayloadError, match=r"x\.toml, line 2: a key must not have more than 64 parts, got more\. "):
            import_runs(Document.from_text(f"[job]\n{key} = 1\n", "x.toml"))

    assert calls(read) < 10_000
    assert Document.from_text(f"# {'.' * 200}\na = '{'.' * 200}'\n" + "a.b.c = 1\n" * 100, "x.toml").kind == "toml"


@pytest.mark.parametrize(
    "text", ["." * 400_000, "a." * 60 + "a" * 400_000, ('."' + "a" * 50) * 8_000, "'.' " * 100_000]
)
def test_looking_for_such_a_key_takes_no_work(text: str) -> None:
    def read() -> None:
        with contextlib.suppress(PayloadError):
            Document.from_text(text, "x.toml")

    assert calls(read) < 10_000
