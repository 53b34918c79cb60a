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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

OTHER = {
    ("model", "fp8_recipe"): "read under FP8 alone; the peer has one field for it and the optimizer's, which is None"
}
"""Field that is another one afterwards, in a run without FP8 -> why that changes no run."""


COMPUTED = {("model", "autocast_dtype"), ("optimizer", "use_precision_aware_optimizer_no_fp8_or_ds_fp8")}
"""Fields that Megatron computes when a run starts; a run that the peer refuses does not come to that."""


ASSERTED = "reuse_grad_buf_for_mxfp8_param_ag"
"""Field of DDP that asks for FP8 weights when its class is made: before the precision is written they are not there."""


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


class Peer:
    """Megatron Bridge's own code, imported on a CPU."""

    def __init__(self, published: Path, sources: list[str], folder: Path) -> None:
        sys.path[:0] = [str(published / "peer"), *sources]
        import fakes

        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        fakes.install(("datasets", "torchao"))
        fakes.patch_cuda()
        from megatron.bridge.training.config import ConfigContainer, runtime_config_update

        self.set_gpu, self.container, self.start = fakes.set_gpu, ConfigContainer, runtime_config_update
        self.folder = folder

    def read(self, file: Path) -> Any:
        """Return a published run; None for one of another release.

        The peer does not read each file that it wrote: the set of an adapter is left out, `ASSERTED` stated afterwards.
        """
        try:
            return self.container.from_yaml(str(file))
        except Exception:  # noqa: BLE001  its loader raises whatever comes to hand
            values = yaml.safe_load(file.read_text(encoding="utf-8"))
        values["peft"] = None
        held = values["ddp"].pop(ASSERTED)
        (self.folder / "repaired.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        try:
            config = self.container.from_yaml(str(self.folder / "repaired.yaml"))
        except Exception:  # noqa: BLE001  as above
            return None
        setattr(config.ddp, ASSERTED, held)
        return config

    def again(self, config: Any) -> Any:
        """Save and load; None where the peer cannot do that."""
        try:
            config.to_yaml(str(self.folder / "again.yaml"))
            return self.container.from_yaml(str(self.folder / "again.yaml"))
        except Exception:  # noqa: BLE001  as above
            return None

    def found_after(self, config: Any) -> Iterator[tuple[str, dict[Any, Any] | None]]:
        """Start a run three times; yield when it was saved, and its differences; None: it was not read."""
        before = self.again(config)
        expected = started(config, self.start)
        is_fp8 = bool(getattr(config.mixed_precision, "fp8", None))
        for when, loaded in (("before", before), ("after", self.again(config))):
            found = None if loaded is None else differences(expected, started(loaded, self.start), is_fp8=is_fp8)
            yield f"saved {when} the start", found


def with_ours(config: Any) -> Any:
    """Return a copy of a run with our recipe of the same meaning, or else with our object of the same fields."""
    from bridge import get_mixed_precision_config
    from bridge.registry.nearest_recipe import find_nearest_recipe

    copied = copy.deepcopy(config)
    same = get_mixed_precision_config(config.mixed_precision)
    copied.mixed_precision = get_mixed_precision_config(find_nearest_recipe(same) or same)
    return copied


def main(published: Path, sources: list[str], part: str = "") -> int:
    """Compare; return how many runs are not the same."""
    folder = Path(tempfile.mkdtemp())
    peer = Peer(published, sources, folder)
    rows = {row["name"]: row for row in csv.DictReader((published / "index.tsv").open(), delimiter="\t")}
    with tarfile.open(published / "before.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    counts = Counter({"recipes": 0, "equal": 0, "different": 0})
    for file in sorted(file for file in folder.rglob("*.yaml") if part in file.name):
        peer.set_gpu(rows[file.stem]["gpu"])
        os.environ |= {"WORLD_SIZE": rows[file.stem]["num_gpus"], "RANK": "0"}
        theirs = peer.read(file)
        if theirs is None:
            counts["recipes of another release"] += 1
            continue
        counts["recipes"] += 1
        ours = with_ours(theirs)
        for (when, one), (_, two) in zip(peer.found_after(theirs), peer.found_after(ours), strict=True):
            for whose, found in (("theirs", one), ("ours", two)):
                if one is None:
                    counts["saved by the peer and not read by it"] += 1
                    continue
                counts["equal" if found == {} else "different"] += 1
                for name, (was, is_now) in (found or {}).items():
                    print(f"{file.stem} {whose} {when}: {'.'.join(name)}: {was} -> {is_now}")  # noqa: T201
                if found is None:
                    print(f"{file.stem} {whose} {when}: is not read")  # noqa: T201
    print(json.dumps(counts))  # noqa: T201
    return counts["different"]


if __name__ == "__main__":
    sys.exit(bool(main(Path(sys.argv[1]), sys.argv[2:4], *sys.argv[4:])))
