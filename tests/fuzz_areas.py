"""The areas of `tests.fuzz`: every case is bytes, read in this process by the code that reads a user's file.

An area has seeds (files of the tests and the docs), words to splice in, and a reader. The first bytes of a case choose
the file's name, the foreign system or the command; of an area of mappings the others edit the values of a known one, so
that no case ends in the parser.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from bridge.cli.described_logs import read_described_logs
from bridge.cli.main import main as command
from bridge.convert.conversion import to_plain_data
from bridge.convert.systems import SYSTEM_MODULES, get_system
from bridge.errors import MAX_LINE_LENGTH, BridgeError
from bridge.front.loader import load_run
from bridge.plan.planned_run import PlannedRun
from bridge.plan.precision_plan import precision_plan
from bridge.precision.precision_config import FIELDS_BY_SUBJECT
from bridge.precision.yaml_text import to_yaml
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from bridge.report.comparison import comparison_to_dict
from bridge.report.log_content import collect_log_content, make_log_view
from bridge.runtime.checkpoint.contents import Contents, Difference
from bridge.runtime.checkpoint.manifest import find_damage
from bridge.runtime.checkpoint.pickles import METADATA_FILE, find_pickle_fault
from bridge.runtime.compare.log_comparison import compare_logs
from tests.read.test_fuzz import KEYS, NAMES, SPLICES, survives

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = sorted(path for path in (ROOT / "tests" / "read" / "samples").rglob("*") if path.is_file())
SHOWN = sorted((ROOT / "docs" / "showcase").rglob("*.yaml"))
FIELDS = sorted({name for names in FIELDS_BY_SUBJECT.values() for name in names})
SECTIONS = ["model", "optimizer", "ddp", "mixed_precision", "train", "data", "checkpoint", "resume", "logging"]
RUN_WORDS = [
    *(*SECTIONS, "silence", "target", "until", "recipe", "recipes_from", "precision_schedule", "precision_backend"),
    *("defaults", "_target_", "_recipe_", "hydra", "modules", "match", "num_layers", "hidden_size", "vocab_size"),
]
VALUES: list[Any] = [None, True, False, 0, 1, -1, 2**70, 0.5, 1e300, float("nan"), float("-inf"), "", "x", "1", "auto"]
VALUES += ["true", "é\n", "a.b", "${a}", "???", "9" * 5000, "k" * 700, "bf16", "fp8", "hybrid", "torch.float16"]
YAML_SPLICES = [*SPLICES, b"!!set {}", b"- &a [*a]", b"{a: &a 1, b: *a}", b"\xe2\x80\xa8", b"9" * 400, b"${a}", b"???"]
OVERRIDE_SPLICES = [b"\n", b"+", b"++", b"~", b"=", b"@y", b".", b"model", b"optimizer.lr=", b"hydra.run.dir="]
OVERRIDE_SPLICES += [b"[1,2]", b"{a:1}", b"${a}", b"9" * 5000, b"e4m3", b"a,b", b"'", b'"', b"[", b"range(3)", b"null"]
PICKLE_SPLICES = [
    b"cposix\nsystem\n", b"\x8c\x05posix\x8c\x06system\x93", b"(S'touch ran'\ntR", b"R", b"b", b"0", b".", b"}", b"]",
    b"(", b"t", b"N", b"\x88", b"ctorch\nSize\n", b"c__builtin__\neval\n", b"\x94", b"h\x00", b"\x81", b"\x92", b"s",
    b"cbuiltins\ngetattr\n", b"\x80\x05", b"J\xff\xff\xff\xff", b"\x8a\xff", b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",
]  # fmt: skip
MODEL = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}


@dataclass(frozen=True, kw_only=True)
class Area:
    """A kind of input: files to begin with, texts to splice in, and the code that reads one case."""

    name: str
    seeds: list[bytes]
    words: list[bytes]
    read: Callable[[bytes], object]


def grown(numbers: Iterator[int], words: list[str], depth: int = 0) -> Any:
    """Return a value that bytes describe: one of `VALUES`, one of the words, a list or a mapping."""
    kind = next(numbers, 0)
    if kind < 110 or depth > 5:
        return VALUES[kind % len(VALUES)]
    if kind < 190:
        return words[(256 * next(numbers, 0) + next(numbers, 0)) % len(words)]
    size = kind % 4
    if kind < 215:
        return [grown(numbers, words, depth + 1) for _ in range(size)]
    named = (words[(256 * next(numbers, 0) + next(numbers, 0)) % len(words)] for _ in range(size))
    return {name: grown(numbers, words, depth + 1) for name in named}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) within a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((value, key), *places(inner))]


def edited(base: Any, numbers: Iterator[int], words: list[str]) -> Any:
    """Return a copy of plain data with values exchanged, keys added and keys taken away, as bytes describe."""
    changed = deepcopy(base)
    for high in numbers:
        known = places(changed)
        at = 256 * high + next(numbers, 0)
        if not known or at >= 2**15:
            holders = [changed, *(holder[key] for holder, key in known if isinstance(holder[key], dict))]
            holder, key = holders[at % len(holders)], words[(256 * next(numbers, 0) + next(numbers, 0)) % len(words)]
        else:
            holder, key = known[at % len(known)]
        if next(numbers, 0) > 240 and isinstance(holder, dict):
            holder.pop(key, None)
        elif isinstance(holder, dict) or isinstance(key, int):
            holder[key] = grown(numbers, words)
    return changed


def quietly(*words: str) -> None:
    """Run a command in this process; its own exits are answers."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            command(list(words))
        except SystemExit as ended:
            assert ended.code in (0, 1, 2), ended.code
    require_bounded(said.getvalue())


def require_bounded(text: str) -> None:
    """Fail for a text that is no list of sentences which a person reads."""
    assert "Traceback" not in text
    longest = max(text.splitlines(), key=len, default="")
    assert len(longest) <= MAX_LINE_LENGTH, f"{len(longest)} characters: {longest}"


def words_of(texts: list[bytes]) -> list[str]:
    """Return the words that stand in some texts."""
    return sorted({word.decode() for text in texts for word in re.findall(rb"[A-Za-z_][\w.-]{1,40}", text)})


def foreign_files(_folder: Path, more: Path | None) -> Area:
    """Files of other systems, read as `convert` does."""
    found = sorted(path for path in more.rglob("*") if path.is_file()) if more is not None else []
    files = [*SAMPLES, *(path for path in found if path.stat().st_size < 6000)]
    names = sorted({*NAMES, *(f"x{path.suffix}" for path in files)})
    chosen = [None] * 16 + list(SYSTEM_MODULES)

    def read(data: bytes) -> None:
        name, one = names[data[0] % len(names)], chosen[data[1] % len(chosen)]
        survives(data[2:], name, one)

    seeds = [bytes([names.index(f"x{path.suffix}"), 0]) + path.read_bytes() for path in files]
    words = [word.encode() for word in (*KEYS, *words_of([path.read_bytes() for path in SAMPLES]))]
    return Area(name="foreign files", seeds=seeds, words=[*SPLICES, *words], read=read)


def foreign_mappings(_folder: Path, _more: Path | None) -> Area:
    """Parsed configurations of other systems, handed to each importer."""
    files = [path for path in SAMPLES if path.suffix in (".yaml", ".json")]
    parsed: list[Any] = [{}, *(yaml.safe_load(path.read_text()) for path in files)]
    words = [*KEYS, *words_of([path.read_bytes() for path in SAMPLES])]
    systems = [name for name in SYSTEM_MODULES if name != "megatron-lm"]  # which takes launches

    def read(data: bytes) -> None:
        one = get_system(systems[data[0] % len(systems)])
        payload = edited(parsed[data[1] % len(parsed)], iter(data[2:]), words)
        imports = one.import_all(payload) if one.import_all else (one.import_(payload),)
        json.dumps([to_plain_data(imported.config.to_dict()) for imported in imports])

    return Area(name="foreign mappings", seeds=_choices(len(systems), len(parsed)), words=[], read=read)


def config_files(folder: Path, _more: Path | None) -> Area:
    """Files for `--config`, read, synchronised and planned."""
    file = folder / "run.yaml"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        assert PlannedRun(prediction=load_run(config_file=file, strict=False).prediction).plan.rows

    words = [word.encode() for word in (*FIELDS, *RUN_WORDS)]
    return Area(name="config files", seeds=_small(), words=[*YAML_SPLICES, *words], read=read)


def commands(folder: Path, _more: Path | None) -> Area:
    """Files for `--config`, and what a command prints of them."""
    file, names = folder / "run.yaml", ["check", "plan", "memory", "plan --align", "plan --modules"]

    def read(data: bytes) -> None:
        file.write_bytes(data[1:])
        quietly(*names[data[0] % len(names)].split(), "--config", str(file))

    seeds = [bytes([number]) + content for number in range(len(names)) for content in _small()]
    words = [word.encode() for word in (*FIELDS, *RUN_WORDS)]
    return Area(name="commands", seeds=seeds, words=[*YAML_SPLICES, *words], read=read)


def runs(folder: Path, _more: Path | None) -> Area:
    """Sections of a run as plain data, decoded and planned."""
    file, bases = folder / "run.yaml", [{}, *(yaml.safe_load(path.read_text()) for path in SHOWN)]
    words = [*FIELDS, *RUN_WORDS, *words_of([path.read_bytes() for path in SHOWN])]

    def read(data: bytes) -> None:
        sections = edited(bases[data[0] % len(bases)], iter(data[1:]), words)
        file.write_text(yaml.dump(sections, Dumper=yaml.CSafeDumper))
        run = load_run((), config_file=file, strict=bool(data[0] & 128))
        precision_plan(run.precision, run.model, optimizer=run.section("optimizer"), ddp=run.section("ddp"))

    return Area(name="runs", seeds=_choices(2, len(bases)), words=[], read=read)


def recipe_files(folder: Path, _more: Path | None) -> Area:
    """YAML recipes in the config tree of a team."""
    tree = folder / "tree"
    (tree / "mixed_precision").mkdir(parents=True)
    (tree / "config.yaml").write_text("defaults: [sections, mixed_precision: house, _self_]\n")

    def read(data: bytes) -> None:
        (tree / "mixed_precision" / "house.yaml").write_bytes(data)
        load_run(config_path=tree)

    recipes = [REGISTRY.get(name).to_dict() for name in REGISTRY.names()]
    seeds = [yaml.safe_dump(content, sort_keys=False).encode() for content in recipes]
    return Area(name="recipe files", seeds=seeds, words=[*YAML_SPLICES, *(name.encode() for name in FIELDS)], read=read)


def recipes(_folder: Path, _more: Path | None) -> Area:
    """Recipes as plain data, finalized, written and planned."""
    bases: list[Any] = [{}, *(REGISTRY.get(name).to_dict() for name in REGISTRY.names())]

    def read(data: bytes) -> None:
        config = MixedPrecisionConfig.from_dict(edited(bases[data[0] % len(bases)], iter(data[1:]), FIELDS))
        config.finalize()
        to_yaml(config)
        precision_plan(config, MODEL)

    return Area(name="recipes", seeds=[bytes([number]) for number in range(len(bases))], words=[], read=read)


def overrides_of_a_file(folder: Path, _more: Path | None) -> Area:
    """Words of a command line over a file."""
    plain_file = folder / "plain.yaml"
    plain_file.write_text("model: {num_layers: 2}\nmixed_precision: {bf16: true}\n")
    return _overrides("overrides of a file", functools.partial(load_run, config_file=plain_file))


def overrides_of_a_tree(_folder: Path, _more: Path | None) -> Area:
    """Words of a command line over the config tree."""
    return _overrides("overrides of a tree", lambda words: load_run(["model=gpt_tiny", *words]))


def _overrides(name: str, load: Callable[[list[str]], object]) -> Area:
    seeds = [b"mixed_precision=bf16_mixed", b"mixed_precision.fp8_margin=2\n++model.num_layers=4", b"~model.fp8"]
    seeds += [b"+optimizer.lr='1e-3'", b"target=h100x8", b"model={a:1,b:[2,3]}", b"silence.x=because\nrecipes_from=[]"]
    words = [*OVERRIDE_SPLICES, *(word.encode() for word in (*FIELDS, *RUN_WORDS))]
    return Area(
        name=name,
        seeds=seeds,
        words=words,
        read=lambda data: load(data.decode(errors="surrogateescape").splitlines()[:4]),
    )


def checkpoints(folder: Path, _more: Path | None) -> Area:
    """The files of a checkpoint, each changed in turn."""
    sound, checkpoint = saved(folder), folder / "checkpoint"
    shutil.copytree(sound, checkpoint)
    kept = {path.name: path.read_bytes() for path in sound.iterdir()}
    parts = [name for name in sorted(kept) if name.endswith((".json", ".pt")) or name == METADATA_FILE]

    def read(data: bytes) -> None:
        name = parts[data[0] % len(parts)]
        (checkpoint / name).write_bytes(data[1:])
        try:
            find_damage(checkpoint)
            find_pickle_fault(checkpoint)
            contents = Contents.read(checkpoint)
            json.dumps([contents.to_dict(), Difference.from_contents(contents, contents).to_dict()])
        finally:
            (checkpoint / name).write_bytes(kept[name])

    seeds = [bytes([number]) + kept[name] for number, name in enumerate(parts)]
    small = [pickle.dumps({"a": (1, 2.0, b"x", [None])}, protocol) for protocol in (0, 4)]
    seeds += [bytes([parts.index(METADATA_FILE)]) + data for data in small]
    return Area(name="checkpoints", seeds=seeds, words=[*PICKLE_SPLICES, *SPLICES], read=read)


LOG_SEEDS = [
    b"_step,lm loss,grad-norm\n1,3.0,1.5\n2,NaN,\n",
    b"Step,a - lm loss,a - lm loss__MIN,b - lm loss\n1,3.0,2.9,4.0\n",
    b"run_id,key,value,step,timestamp\na,lm loss,3.0,1,17\nb,lm loss,2.0,2,18\n",
    b'[{"_step": 1, "lm loss": 3.0}, {"_step": 2, "lm loss": "NaN"}]',
    b'{"lm loss": {"start_step": 1, "end_step": 2, "step_interval": 1, "values": {"1": 11.0, "2": "nan"}}}',
    "========================= Step 1/9 =========================\nTraining Results:\n  • Loss: 0.69\n".encode(),
]
LOG_SPLICES = [
    *SPLICES,
    b"nan",
    b"inf",
    b"1e999",
    b"-1",
    b"9" * 5000,
    b" | ",
    b": ",
    b",",
    b"\n",
    b"\x00",
    b"iteration",
]


def logs(folder: Path, _more: Path | None) -> Area:
    """Logs of other trainers, each compared with a sound one and reported."""
    samples = [path.read_bytes() for path in (ROOT / "tests" / "read" / "logs" / "samples").glob("*.log")]
    sound, path = folder / "sound.csv", folder / "case.log"
    sound.write_bytes(LOG_SEEDS[0])

    def read(data: bytes) -> None:
        path.write_bytes(data)
        described = read_described_logs([sound, path])
        comparison_to_dict(compare_logs([log.to_logged_run() for log in described]))
        for log in described:
            make_log_view(log.log)
            json.dumps(asdict(collect_log_content(log.log, name=log.name)))

    return Area(name="logs", seeds=[*LOG_SEEDS, *samples], words=LOG_SPLICES, read=read)


MAKERS = (
    *(foreign_files, foreign_mappings, config_files, runs, recipes, overrides_of_a_file, checkpoints, logs),
    *(commands, recipe_files, overrides_of_a_tree),
)
NAMES_OF_AREAS = [maker.__name__.replace("_", " ") for maker in MAKERS]


def made(name: str, folder: Path, more: Path | None) -> Area:
    """Return the area of a name; `folder` takes its files, `more` has other files to begin with."""
    return MAKERS[NAMES_OF_AREAS.index(name)](folder, more)


def _small() -> list[bytes]:
    return [path.read_bytes() for path in SHOWN]


def _choices(first: int, second: int) -> list[bytes]:
    return [bytes([one, other]) for one in range(first) for other in range(second)]


def saved(folder: Path) -> Path:
    """Return a checkpoint that one step of training wrote."""
    from bridge.training.loop import pretrain  # heavy
    from tests.training.loop_tiny import tiny

    with contextlib.redirect_stdout(io.StringIO()):
        pretrain(tiny(train={"train_iters": 1, "eval_iters": 0}, save=str(folder / "saved")), run_dir=folder / "run")
    return folder / "saved" / "iter_0000001"


def warm(area: Area) -> None:
    """Read some seeds once, which imports all that the readers need."""
    for case in area.seeds[:100]:
        with contextlib.suppress(Exception):  # a fault is found again as a case
            read_case(area, case)


def read_case(area: Area, case: bytes) -> None:
    """Read a case: a result or an error of ours whose sentences are bounded, and anything else is raised."""
    try:
        area.read(case.ljust(2, b"\0"))
    except BridgeError as error:
        require_bounded(str(error))
