"""Defaults of a script's variables: those on which the precision depends are named, and no others."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.convert.conversion import format_records, import_runs, to_plain_data
from bridge.errors import BridgeError
from bridge.read.launch.script_launches import read_launches
from bridge.read.megatron_lm import importer as megatron_lm
from bridge.read.text.document import Document
from tests.read.properties import reasons

SAMPLES = sorted(path for path in (Path(__file__).parents[1] / "samples").iterdir() if path.is_file())
RUN = "torchrun pretrain_gpt.py --num-layers 2 --bf16"


def defaults(script: str) -> list[set[str]]:
    """The defaults that each launch of a script depends on."""
    return [set(launch.variable_defaults) for launch in read_launches(script)]


@pytest.mark.parametrize(
    "script",
    [
        f'X=${{X:-1}}\nif [ "$X" = 1 ]; then A=--grad-reduce-in-bf16; fi\n{RUN} $A',
        f'X=${{X:-0}}\nif [ "$X" = 1 ]; then A=--grad-reduce-in-bf16; fi\n{RUN} $A',
        f'X=${{Y:-1}}\n[[ "$X" == 1 ]] && A="--fp8-format hybrid"\n{RUN} $A',
        f'X=${{X:-0}}\n[ "$X" = 1 ] || A="--fp8-format hybrid"\n{RUN} $A',
        f"X=${{X:-1}}\n[ $X -gt 0 ] && A=--fp8-param-gather\n{RUN} $A",
        f"case ${{X:-a}} in a) A=(--fp4-format e2m1);; b) A=();; esac\n{RUN} ${{A[@]}}",
        f'X=${{1:-fp8}}\nif [ $X = bf16 ]; then :; elif [ $X = fp8 ]; then A="--fp8-format e4m3"; fi\n{RUN} $A',
        f'if [ "${{X:-1}}" = 1 ]; then {RUN} --fp8-format e4m3; else {RUN}; fi',
        # through other variables
        f"X=${{X:-a}}\nM=$X\ncase $M in a) N=1;; *) N=2;; esac\n[ $N = 1 ] && A=--fp8-param-gather\n{RUN} $A",
        f'f() {{ if [ "$1" = fp8 ]; then A="--fp8-format e4m3"; fi; }}\nf ${{X:-bf16}}\n{RUN} $A',
    ],
)
def test_a_branch_behind_a_default_is_a_run_of_its_own(script: str) -> None:
    first, second = read_launches(script)
    assert sorted(bool(re.search("--fp|--grad", " ".join(one.arguments[3:]))) for one in (first, second)) == [
        False,
        True,
    ]
    assert first.decisions != second.decisions
    assert (first.variable_defaults, second.variable_defaults) == ({}, {})


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        # a flag's value
        (f"{RUN} --fp8-format ${{X:-hybrid}} --lr ${{LR:-1}}", {"X"}),
        (f"{RUN} --transformer-impl=${{X:-local}}", {"X"}),
        ("P=${X:-fp16}\ntorchrun pretrain_gpt.py --num-layers 2 --$P", {"X"}),
        (f'C="{RUN} --hysteresis ${{X:-2}} --lr ${{LR:-1}}"\n$C', {"X"}),
        (f'C="{RUN} --hysteresis ${{X:-2}}"\nbash -c "$C --seed ${{SEED:-1}}"', {"X"}),
        (f"export NVTE_FP8_DPA_BWD=${{X:-1}} SEED=${{SEED:-1}}\n{RUN}", {"X"}),
        ("accelerate launch --mixed_precision ${X:-bf16} train.py --lr ${LR:-1}", {"X"}),
        ("python train.py trainer.precision=${X:-16} seed=${SEED:-1}", {"X"}),
    ],
)
def test_a_default_that_decides_is_named(script: str, expected: set[str]) -> None:
    assert all(found == expected for found in defaults(script))


@pytest.mark.parametrize(
    "script",
    [
        f"DATA_CACHE_PATH=${{DATA_CACHE_PATH:-/x/fp4_matrix}}\n{RUN} --data-cache-path $DATA_CACHE_PATH",
        f'WANDB_PROJECT="${{WANDB_PROJECT:-fp8_paper}}"\n{RUN} --wandb-project "$WANDB_PROJECT"',
        f'N=${{N:-1}}\nif [ $N = 1 ]; then A="--lr 1"; else A="--lr 2"; fi\n{RUN} $A',
        f'N=${{N:-1}}\nif [ $N != 1 ]; then echo "N must be 1"; exit 1; fi\n{RUN}',
        f'OUT=${{OUT:-}}\nif [ -z "$OUT" ]; then OUT=out/bf16_run; fi\n{RUN} --save $OUT',
        f"FP8_FORMAT=${{FP8_FORMAT:-hybrid}}\n{RUN}",
        f'X=${{X:-1}}\nif [ $X = 1 ]; then E=a; else E=b; fi\n{RUN} --name "$E"',
        f"{RUN} --optimizer ${{OPTIMIZER:-adam}} ${{DATA_DIR:-}}",
        f"export CUDA_DEVICE_MAX_CONNECTIONS=${{CUDA_DEVICE_MAX_CONNECTIONS:-1}}\n{RUN}",
    ],
)
def test_a_default_that_decides_nothing_is_not_named(script: str) -> None:
    assert defaults(script) == [set()]


def test_a_default_is_a_default_of_the_launch_that_it_decides() -> None:
    assert defaults(f"{RUN}\n{RUN} --hysteresis ${{Y:-2}}") == [set(), {"Y"}]


def test_what_somebody_states_is_no_default() -> None:
    script = f'X=${{X:-1}}\nif [ "$X" = 1 ]; then A="--fp8-format e4m3"; fi\n{RUN} $A'
    (launch,) = read_launches(script, variables={"X": "0"})
    assert (launch.variable_defaults, "--fp8-format" in launch.arguments) == ({}, False)


def test_the_default_is_a_record_with_its_value() -> None:
    script = f'X="${{X:-$(pwd)/a}}"\n{RUN} --te-precision-config-file $X'
    (run,) = megatron_lm.import_all(Document.from_text(script, "run.sh"))
    assert [(loss.value, loss.reason) for loss in run.unmapped if loss.field == "$X"] == [
        ("$(pwd)/a", "implied default")
    ]


# -- what is passed through -------------------------------------------------------------------------------------------

PASSED = (
    'CKPT=${1:-"checkpoints/a"}\nEXTRA=()\nshift 1\nwhile [[ $# -gt 0 ]]; do\n  case $1 in\n'
    '    --save) EXTRA+=("--x" "$2"); shift 2 ;;\n    *) EXTRA+=("$1"); shift ;;\n  esac\ndone\n'
)


@pytest.mark.parametrize("last", ['--save "$CKPT"', '--tensorboard-dir "$CKPT"', "--data-path a", "--swiglu", ""])
def test_arguments_that_are_passed_through_may_hold_flags(last: str) -> None:
    (run,) = megatron_lm.import_all(Document.from_text(f"{PASSED}{RUN} {last} ${{EXTRA[@]}}", "run.sh"))
    assert reasons(run, "$1") == ["unsupported"]
    assert [loss.value for loss in run.unmapped if loss.field == "$1"] == [None]


# -- runs that are the same -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "labels"),
    [
        (f'if [ -z "$OUT" ]; then OUT=x/bf16_a; fi\n{RUN} --save $OUT/y', ["line 2, pretrain_gpt.py"]),
        (f'if [ "$LOG" = 1 ]; then\n{RUN} | tee x\nelse\n{RUN}\nfi', ["line 4, pretrain_gpt.py"]),
        (
            'if [ "$M" ]; then P=pretrain_t5.py; else P=pretrain_gpt.py; fi\ntorchrun $P --num-layers 2 --bf16',
            ["line 2, pretrain_gpt.py"],
        ),
        (f'if [ "$E" ]; then A="$EXTRA_ARGS"; fi\n{RUN} $A', ["line 2, pretrain_gpt.py"]),
        (f"{RUN}\n{RUN}", ["line 1, pretrain_gpt.py", "line 2, pretrain_gpt.py"]),
    ],
)
def test_runs_that_are_the_same_are_one(script: str, labels: list[str]) -> None:
    assert [launch.label for launch in read_launches(script)] == labels


@pytest.mark.parametrize("guard", ["if [ ! -f x ]; then echo no; exit 1; fi", "[ -f x ] || exit 1", "ls x || exit 1"])
def test_a_way_that_ends_the_script_is_no_way(guard: str) -> None:
    (launch,) = read_launches(f"{guard}\n{RUN}")
    assert launch.decisions == ()


# -- the marks of unknown pieces --------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        'X="${X:-$(pwd)/fp8}"',
        'P="${P:-$HOME}"',
        "read X",
        'A=("${A[@]}" --fp8-format "$X")',
        'A+=" --hysteresis $X"',
        'export NVTE_FP8_DPA="$X" ACCELERATE_MIXED_PRECISION=$P',
        'case "$X" in a$Y) A=--fp16 ;; *) A="--bf16 $P" ;; esac',
        'if [ "$X" = "$P" ]; then A="$A --loss-scale $X"; fi',
        '[[ $X == a ]] && A="--fp8-recipe $X"',
        'bash -c "if [ $X = 1 ]; then torchrun pretrain_gpt.py --num-layers 1 --fp16 $A; fi"',
        'f() { local -n r=$1; r="--fp8-format $X"; }; f A; f $P',
        "for p in $X a; do torchrun pretrain_gpt.py --num-layers 1 --$p $A; done",
        'cat > "$P/ds.json" <<EOF\n{"fp16": {"enabled": true, "loss_scale": $X, "$Y": "a$Y"}}\nEOF',
        'deepspeed pretrain_gpt.py --num-layers 1 --fp16 --deepspeed --deepspeed_config "$P/ds.json"',
        "deepspeed train.py --deepspeed --deepspeed_config $P/ds.json",
        'sed "s/a/$X/" $P/t.json > $P/ds.json',
        'accelerate launch --mixed_precision "$X" --config_file $P/c.yaml train.py $A',
        'python run.py --per_device_train_batch_size 1 --bf16 $X --deepspeed "$P/d.json" $A',
        'CONFIG_FILE="$P/x.toml" ./run_train.sh --model.converters=$X $A',
        "python nemo.py exp_manager.name=$X trainer.precision=$X ++model.fp8=$P",
        "torchrun pretrain_gpt.py --num-layers 1 --bf16 @$X ${EXTRA_ARGS:-$X} ${P%$X} ${!X}",
        "X=\ue0007\ue001 # \ue0001",
        "shift $X; set -- $X a",
        "echo $A | xargs torchrun pretrain_gpt.py --num-layers 1",
        'source "$X/fp8.sh"; . $P',
        "$A --fp8-format $X",
        "fairseq-train $X --fp16",
    ]
)


def is_plain(text: str, name: str) -> bool:
    """Whether everything that is said of a script is without private characters."""
    try:
        found = import_runs(Document.from_text(text, name))
    except BridgeError as error:
        said = str(error)
    else:
        said = json.dumps(
            [
                [run.source, to_plain_data(run.imported.config.to_dict()), format_records(run.imported.unmapped, "in")]
                for run in found
            ],
            ensure_ascii=False,
        )
    return not any("\ue000" <= char <= "\uf8ff" for char in said)


@given(lines=st.lists(PIECES, max_size=8))
def test_no_mark_of_an_unknown_piece_is_ever_shown(lines: list[str]) -> None:
    assert is_plain("\n".join(lines), "run.sh")


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_no_mark_is_shown_for_a_sample(path: Path) -> None:
    assert is_plain(path.read_text(), path.name)
