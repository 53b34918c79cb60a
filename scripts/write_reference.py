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

from bridge.cli.explain import explanation, rule_dict
from bridge.cli.recipes.support import support_rows
from bridge.errors import BridgeWarning
from bridge.precision.config import GROUPS, settings_of
from bridge.precision.mode import mode_of, scheme_of
from bridge.precision.schemes import SCHEMES
from bridge.preflight.auto import matrix
from bridge.preflight.file_reading import MEGATRON_BRIDGE, MEGATRON_LM
from bridge.read.megatron_bridge import start as megatron_bridge_start
from bridge.read.megatron_lm import start as megatron_lm_start
from bridge.registry.registry import REGISTRY, Recipe, Registry
from bridge.report.table import markdown
from bridge.rules.rule import EVIDENCE, SYNC, Rule
from bridge.rules.rulebook import RULES, TOPICS
from bridge.rules.run_context import RunContext
from bridge.sync.routes import notes
from bridge.target.gpus import GPUS
from bridge.target.versions import dotted

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
    own = "precision_bridge_recipes."
    recipes = [recipe for recipe in registry.recipes() if recipe.function.__module__.startswith(own)]
    lines = [NOTE, RECIPES, *map(_overview, recipes)]
    for recipe in recipes:
        stated = recipe.function().to_dict()
        lines.append(f"\n## {recipe.name}\n")
        head, _, rest = inspect.getdoc(recipe.function).partition("\n\n")  # type: ignore[union-attr]
        lines.append(f"{head}\n")
        lines.extend(f"- **{name}:** {text}" for name, _, text in (row.partition(": ") for row in rest.splitlines()))
        lines.append("\nStates:\n\n```yaml")
        lines.extend(f"{field}: {_yaml(value)}" for field, value in stated.items())
        lines.append("```")
    return "\n".join(lines) + "\n"


def _overview(recipe: Recipe) -> str:
    config = recipe.function()
    stored = next((family for family in ("fp8", "fp4") if getattr(config, f"{family}_param_gather")), mode_of(config))
    kept = (config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16)
    cells = (
        f"[{recipe.name}](#{recipe.name})",
        f"{mode_of(config)}, BF16 autocast" if config.autocast_enabled else mode_of(config),
        scheme_of(config) or "",
        config.fp8 or config.fp4 or "",
        stored,
        f"first {kept[0]}, last {kept[1]}" if config.first_last_layers_bf16 else "",
        ", ".join(recipe.aliases),
    )
    return f"| {' | '.join(cells)} |"


def fields_page() -> str:
    """Return the page of fields: meaning, homes, when they act; then the schemes."""
    lines = [NOTE, FIELDS]
    for subject, names in GROUPS.items():
        lines.append(f"## {subject}\n")
        for field in names:
            told = explanation(field)
            lines.append(f"### {field}\n\n`{told['type']} = {told['default']!r}`. {told['meaning']}\n")
            if told["read_by_schemes"]:
                lines.append(f"Read under: {', '.join(told['read_by_schemes'])}.\n")
            lines.extend(_home(home) for home in told["homes"])
            lines.append("")
    lines.append("## Precision in Megatron's configs that no recipe states\n")
    not_routed = notes()["not_routed"].items()
    lines.extend(f"- `{role}.{name}`: {reason}." for role, fields in not_routed for name, reason in fields.items())
    lines.append(SCHEMES_OF_FIELDS)
    for row in SCHEMES:
        settings = ", ".join(f"`{name}`" for name in settings_of(row)) or "none"
        kept = "yes" if row.first_last_layers_bf16 else "no"
        formats = ", ".join(row.formats)
        lines.append(f"| {row.name} | `{row.family}_recipe` | {row.title} | {formats} | {settings} | {kept} |")
    return "\n".join(lines) + "\n"


def _home(home: dict[str, str | None]) -> str:
    note = f" {home['note']}" if home["note"] else ""
    source = f" ({home['source']})" if home["source"] else ""
    if home["attribute"] is None:
        return f"- **no home**: {home['note']}"
    since = f", from megatron-core {home['since_megatron_core']}" if home["since_megatron_core"] else ""
    return (
        f"- **{home['owner']}.{home['attribute']}** ({home['class']}{since}), acts {home['acts']}: "
        f"{home['written']}.{note}{source}"
    )


def rules_page() -> str:
    """Return the page of rules: how to read it, a list, then every rule in full, by topic."""
    lines = [NOTE, RULES_PAGE]
    lines.extend(f"- **{name}**: {meaning}." for name, meaning in EVIDENCE.items())
    for topic, rules in TOPICS.items():
        lines.append(f"\n## {topic}\n")
        for rule in rules:
            lines.extend(_rule(rule))
    return "\n".join(lines) + "\n"


def _rule(rule: Rule[RunContext]) -> list[str]:
    told = rule_dict(rule)
    lines = [f"### {rule.id}: {rule.title}\n"]
    if rule.explanation:
        lines.append(f"{rule.explanation}\n")
    lines.extend(f"> {_escaped(example)}\n" for example in told["examples"])
    asked = "`finalize()` and `check`" if rule.is_of_finalize else "`check`"
    lines.append(f"- Asked by {asked}{f'; {SYNC[rule.sync]}' if rule.sync is not None else ''}.")
    lines.extend(f"- Holds for {versions}." for versions in told["holds_for"])
    lines.append(f"- Source ({rule.evidence}): {_escaped(rule.source)}.\n")
    return lines


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("__", "\\_\\_").replace("*", "\\*")


def support_page() -> str:
    """Return the page of the support matrix and of the GPU generations behind it."""
    lines = [NOTE, SUPPORT, markdown(support_rows(matrix(REGISTRY.names()))), GPU_TABLE]
    for gpu in GPUS.values():
        capability = dotted(gpu.capability) if gpu.capability else ""
        cells = (f"`{gpu.name}`", gpu.title, gpu.generation, capability, gpu.memory_gib or "", ", ".join(gpu.formats))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def start_page() -> str:
    """Return the page of the values that other frameworks set at the start of a run."""
    lines = [NOTE, START]
    for framework, rows in ((MEGATRON_BRIDGE, megatron_bridge_start.ROWS), (MEGATRON_LM, megatron_lm_start.ROWS)):
        lines.append(f"## {framework}\n\n| setting | because of | value | source |\n|---|---|---|---|")
        for row in rows:
            value = "derived" if callable(row.value) else f"`{row.value}`"
            lines.append(f"| `{row.path}` | {row.because} | {value} | {row.source} |")
        lines.append("")
    return "\n".join(lines)


def _yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
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
