"""Published recipes of Megatron Bridge, saved and loaded by its own code: is the run that starts the same?

    python tests/recipes/round_trip.py PUBLISHED MEGATRON_BRIDGE/src MEGATRON_LM [part of a name]

Each recipe starts by Megatron Bridge's `runtime_config_update` three times, with its own precision and with ours: as it
is, saved and loaded before that, and saved and loaded after it. Every field of model, optimizer and DDP config is
compared. It prints a line per difference and, at the end, how many were equal.
"""

import copy
import csv
import dataclasses
import json
import logging
import os
import sys
import tarfile
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

OTHER = {
    ("model", "fp8_recipe"): "read under FP8 alone; the peer has one field for it and the optimizer's, which is None"
}
"""Field that is another one afterwards, in a run without FP8 -> why that changes no run."""


COMPUTED = {("model", "autocast_dtype"), ("optimizer", "use_precision_aware_optimizer_no_fp8_or_ds_fp8")}
"""Fields that Megatron computes when a run starts; a run that the peer refuses does not come to that."""


def fields_of(section: Any) -> dict[str, str]:
    """Return the fields of a config, those of a nested one too; functions by their names."""
    found = {}
    for name, value in vars(section).items():
        if name == "transformer" and dataclasses.is_dataclass(value):
            found |= fields_of(value)
        elif not name.startswith("_"):
            found[name] = getattr(value, "__qualname__", "") or repr(value).partition(" at 0x")[0]
    return found


def started(config: Any, start: Any) -> dict[tuple[str, str], str]:
    """Start a run, and return its fields; a run that the peer refuses has the reason as one more."""
    refused = ""
    try:
        start(config)
    except Exception as error:  # noqa: BLE001  the peer's checks raise whatever comes to hand
        refused = f"{type(error).__name__}: {error}"
    roles = ("model", "optimizer", "ddp")
    found = {(role, name): one for role in roles for name, one in fields_of(getattr(config, role)).items()}
    return {**found, ("run", "refused"): refused}


def differences(one: dict[Any, str], two: dict[Any, str], *, is_fp8: bool) -> dict[Any, tuple[str | None, str | None]]:
    """Return the fields in which two runs differ."""
    names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
    left_out = (() if is_fp8 else (*OTHER,)) + ((*COMPUTED,) if one["run", "refused"] else ())
    return {name: (one.get(name), two.get(name)) for name in names if name not in left_out}


def main(published: Path, sources: list[str], part: str = "") -> int:
    """Compare; return how many runs are not the same."""
    sys.path[:0] = [str(published / "peer"), *sources]
    import fakes

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    fakes.install(("datasets", "torchao"))
    fakes.patch_cuda()
    from megatron.bridge.training.config import ConfigContainer, runtime_config_update

    from bridge import get_mixed_precision_config
    from bridge.registry.nearest import nearest_recipe

    rows = {row["name"]: row for row in csv.DictReader((published / "index.tsv").open(), delimiter="\t")}
    folder = Path(tempfile.mkdtemp())
    with tarfile.open(published / "before.tar.xz") as archive:
        archive.extractall(folder, filter="data")

    def again(config: Any) -> Any:
        config.to_yaml(str(folder / "again.yaml"))
        return ConfigContainer.from_yaml(str(folder / "again.yaml"))

    counts = Counter({"equal": 0})
    for file in sorted(file for file in folder.rglob("*.yaml") if part in file.name):
        row = rows[file.stem]
        fakes.set_gpu(row["gpu"])
        os.environ |= {"WORLD_SIZE": row["num_gpus"], "RANK": "0"}
        try:
            theirs = ConfigContainer.from_yaml(str(file))
        except Exception:  # noqa: BLE001  as above
            counts["file that the peer does not read itself"] += 1
            continue
        ours = copy.deepcopy(theirs)
        ours.mixed_precision = nearest_recipe(get_mixed_precision_config(theirs.mixed_precision))
        if ours.mixed_precision is not None:
            ours.mixed_precision = get_mixed_precision_config(ours.mixed_precision)
        for whose, config in (("theirs", theirs), ("ours", ours)):
            before = again(config)
            expected = started(config, runtime_config_update)
            for when, loaded in (("before", before), ("after", again(config))):
                is_fp8 = bool(getattr(config.mixed_precision, "fp8", None))
                found = differences(expected, started(loaded, runtime_config_update), is_fp8=is_fp8)
                counts["different" if found else "equal"] += 1
                for name, (one, two) in found.items():
                    print(f"{file.stem} {whose} saved {when} the start: {'.'.join(name)}: {one} -> {two}")  # noqa: T201
    print(json.dumps(counts))  # noqa: T201
    return counts["different"]


if __name__ == "__main__":
    sys.exit(bool(main(Path(sys.argv[1]), sys.argv[2:4], *sys.argv[4:])))
