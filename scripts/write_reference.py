"""Write the reference pages that are made from tables: `python scripts/write_reference.py` (`--check` only compares).

`docs/reference/recipes.md` comes from the registered recipes, `docs/reference/fields.md` from the config's fields, the
routes and the schemes, `docs/reference/rules.md` from the rules of `precision-bridge check`, and
`docs/reference/support-matrix.md` from the schemes and GPU generations; `docs/reference/set-at-start.md` is made of
what other frameworks set at the start of a run. A test runs this script with `--check`, so the pages cannot fall behind
the code.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import warnings
from pathlib import Path

from bridge.cli.explain.field import explain_field
from bridge.cli.explain.rule import rule_to_dict
from bridge.cli.recipes.support import build_support_rows
from bridge.errors import BridgeWarning
from bridge.precision.mode import get_mode, get_scheme
from bridge.precision.precision_config import FIELDS_BY_SUBJECT, list_scheme_fields
from bridge.precision.schemes import SCHEMES, Scheme
from bridge.preflight.file_reading import MEGATRON_BRIDGE, MEGATRON_LM
from bridge.preflight.recipe_support import build_support_matrix
from bridge.read.megatron_bridge import start_rows as megatron_bridge_start
from bridge.read.megatron_lm import start_rows as megatron_lm_start
from bridge.registry.registry import REGISTRY, Recipe, Registry
from bridge.report.table import format_markdown
from bridge.rules.rule import EVIDENCE, SYNC_REACTIONS, Rule
from bridge.rules.rulebook import RULES, TOPICS
from bridge.rules.run_context import RunContext
from bridge.sync.field_routes import load_route_notes
from bridge.target.gpus import GPUS
from bridge.target.versions import format_dotted

PAGES = Path(__file__).resolve().parents[1] / "docs" / "reference"
NOTE = "<!-- Written by scripts/write_reference.py; change the tables or docstrings it reads, not this page. -->\n"
RECIPES = """# Recipes

| recipe | mode | scheme | format | weights stored in | layers kept | aliases |
|---|---|---|---|---|---|---|"""
FIELDS = """# Fields of MixedPrecisionConfig

What `precision-bridge explain FIELD` prints, for every field. *Verdicts* and *stated* are explained in
[Stated fields and the sync](../explain/stated-and-sync.md).

The first 31 fields are those of Megatron Bridge's class. The others have the names that Megatron's own
configs give them: unstated, they are not written, and the owner keeps what it has.
"""
SCHEMES_OF_FIELDS = """
# Scaling schemes

| scheme | set by | what it is | formats | settings it reads | keeps layers in BF16 |
|---|---|---|---|---|---|"""
RULES_PAGE = f"""# Rules

The {len(RULES)} rules of a precision. `precision-bridge check` asks all of them, `finalize()`
raises the errors that the precision alone shows, and a sync asks those whose line says so. The id and the
sentence are the same in each place. `precision-bridge explain ID` prints one.
[Check before you submit](../howto/check-before-you-submit.md) tells how to use and silence them.

*Error*: the run will not start, or is another run than the one asked for. *Warning*: it may. *Info*:
worth knowing. Where a rule holds for some versions only and the target does not say which one runs,
its finding is one step milder and says so.
"""
SUPPORT = """# Support matrix

Which recipe runs on which GPU generation. `TE 2.2 CUDA 12.1` are the least versions there; *emulated*
runs without units for that format, or as another one; *?* is not known. The same table, and a single
target's column with the reasons: `precision-bridge recipes --support [--target h100,te2.8,cuda12.9]`.
"""
GPU_TABLE = """
## GPU generations

| target | GPU | generation | compute capability | memory, GiB | formats |
|---|---|---|---|---|---|"""
START = """# Set at start

A framework changes some settings of a file when a run starts. With `--config` they are changed here in
the same order, and each answer lists those that are not as the file has them.
"""


def recipes_page(registry: Registry = REGISTRY) -> str:
    """Return the page of recipes: an overview table, then one section per recipe."""
    package = "precision_bridge_recipes."
    recipes = [recipe for recipe in registry.recipes() if recipe.function.__module__.startswith(package)]
    lines = [NOTE, RECIPES, *map(_overview, recipes)]
    for recipe in recipes:
        stated = recipe.function().to_dict()
        lines.append(f"\n## {recipe.name}\n")
        head, _, rest = inspect.getdoc(recipe.function).partition("\n\n")  # type: ignore[union-attr]
        lines.append(f"{head}\n")
        for row in rest.splitlines():
            name, _, text = row.partition(": ")
            lines.append(f"- **{name}:** {text}")
        lines.append("\nStates:\n\n```yaml")
        for field, value in stated.items():
            lines.append(f"{field}: {_yaml(value)}")
        lines.append("```")
    return "\n".join(lines) + "\n"


def _overview(recipe: Recipe) -> str:
    """Return the row of a recipe in the overview."""
    config = recipe.function()
    mode = get_mode(config)
    if config.autocast_enabled:
        mode = f"{mode}, BF16 autocast"
    stored = get_mode(config)
    if config.fp8_param_gather:
        stored = "fp8"
    elif config.fp4_param_gather:
        stored = "fp4"
    kept = ""
    if config.first_last_layers_bf16:
        kept = f"first {config.num_layers_at_start_in_bf16}, last {config.num_layers_at_end_in_bf16}"
    cells = (
        f"[{recipe.name}](#{recipe.name})",
        mode,
        get_scheme(config) or "",
        config.fp8 or config.fp4 or "",
        stored,
        kept,
        ", ".join(recipe.aliases),
    )
    return f"| {' | '.join(cells)} |"


def fields_page() -> str:
    """Return the page of fields: meaning, homes, when they act; then the schemes."""
    lines = [NOTE, FIELDS]
    for subject, names in FIELDS_BY_SUBJECT.items():
        lines.append(f"## {subject}\n")
        for field in names:
            facts = explain_field(field)
            lines.append(f"### {field}\n\n`{facts['type']} = {facts['default']!r}`. {facts['meaning']}\n")
            if facts["read_by_schemes"]:
                lines.append(f"Read under: {', '.join(facts['read_by_schemes'])}.\n")
            lines.extend(map(_home, facts["homes"]))
            lines.append("")
    lines.append("## Precision in Megatron's configs that no recipe states\n")
    for role, fields in load_route_notes()["not_routed"].items():
        for name, reason in fields.items():
            lines.append(f"- `{role}.{name}`: {reason}.")
    lines.append(SCHEMES_OF_FIELDS)
    lines.extend(map(_scheme, SCHEMES))
    return "\n".join(lines) + "\n"


def _scheme(scheme: Scheme) -> str:
    """Return the row of a scaling scheme."""
    settings = ", ".join(f"`{name}`" for name in list_scheme_fields(scheme)) or "none"
    kept = "no"
    if scheme.first_last_layers_bf16:
        kept = "yes"
    cells = (scheme.name, f"`{scheme.family}_recipe`", scheme.title, ", ".join(scheme.formats), settings, kept)
    return f"| {' | '.join(cells)} |"


def _home(home: dict[str, str | None]) -> str:
    """Return the line of an owner's field that a field of the precision is written to."""
    if home["attribute"] is None:
        return f"- **no home**: {home['note']}"
    since = note = source = ""
    if home["since_megatron_core"]:
        since = f", from megatron-core {home['since_megatron_core']}"
    if home["note"]:
        note = f" {home['note']}"
    if home["source"]:
        source = f" ({home['source']})"
    return (
        f"- **{home['owner']}.{home['attribute']}** ({home['class']}{since}), acts {home['acts']}: "
        f"{home['written']}.{note}{source}"
    )


def rules_page() -> str:
    """Return the page of rules: how to read it, a list, then every rule in full, by topic."""
    lines = [NOTE, RULES_PAGE]
    for name, meaning in EVIDENCE.items():
        lines.append(f"- **{name}**: {meaning}.")
    for topic, rules in TOPICS.items():
        lines.append(f"\n## {topic}\n")
        for rule in rules:
            lines.extend(_rule(rule))
    return "\n".join(lines) + "\n"


def _rule(rule: Rule[RunContext]) -> list[str]:
    """Return the lines of a rule."""
    facts = rule_to_dict(rule)
    lines = [f"### {rule.id}: {rule.title}\n"]
    if rule.explanation:
        lines.append(f"{rule.explanation}\n")
    for example in facts["examples"]:
        lines.append(f"> {_escaped(example)}\n")
    askers = "`check`"
    if rule.is_of_finalize:
        askers = "`finalize()` and `check`"
    if rule.sync is not None:
        askers = f"{askers}; {SYNC_REACTIONS[rule.sync]}"
    lines.append(f"- Asked by {askers}.")
    for versions in facts["holds_for"]:
        lines.append(f"- Holds for {versions}.")
    lines.append(f"- Source ({rule.evidence}): {_escaped(rule.source)}.\n")
    return lines


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("__", "\\_\\_").replace("*", "\\*")


def support_page() -> str:
    """Return the page of the support matrix and of the GPU generations behind it."""
    lines = [NOTE, SUPPORT, format_markdown(build_support_rows(build_support_matrix(REGISTRY.names()))), GPU_TABLE]
    for gpu in GPUS.values():
        capability = ""
        if gpu.capability:
            capability = format_dotted(gpu.capability)
        cells = (f"`{gpu.name}`", gpu.title, gpu.generation, capability, gpu.memory_gib or "", ", ".join(gpu.formats))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def start_page() -> str:
    """Return the page of the values that other frameworks set at the start of a run."""
    lines = [NOTE, START]
    for framework, rows in (
        (MEGATRON_BRIDGE, megatron_bridge_start.START_ROWS),
        (MEGATRON_LM, megatron_lm_start.START_ROWS),
    ):
        lines.append(f"## {framework}\n\n| setting | because of | value | source |\n|---|---|---|---|")
        for row in rows:
            value = f"`{row.value}`"
            if callable(row.value):
                value = "derived"
            lines.append(f"| `{row.path}` | {row.because} | {value} | {row.source} |")
        lines.append("")
    return "\n".join(lines)


def _yaml(value: object) -> str:
    """Return a value in the spelling of YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def main() -> int:
    """Write the pages, or compare them with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    check = parser.parse_args().check
    warnings.simplefilter("ignore", BridgeWarning)
    os.environ.pop("BRIDGE_RECIPES", None)
    stale = []
    pages = {
        "recipes.md": recipes_page(),
        "fields.md": fields_page(),
        "rules.md": rules_page(),
        "support-matrix.md": support_page(),
        "set-at-start.md": start_page(),
    }
    for name, text in pages.items():
        page = PAGES / name
        if not page.is_file() or page.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                page.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"docs/reference/{name}: {'out of date' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
