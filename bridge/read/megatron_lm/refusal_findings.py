"""`make_refused_option_findings`: the options with which Megatron-LM's parser does not start the run.

They are words that the parser refuses, and options that resemble an argument and are none.
"""

from __future__ import annotations

from bridge.errors import Finding
from bridge.preflight.file_reading import MEGATRON_LM
from bridge.read.megatron_lm.flags import TABLE, format_option
from bridge.read.megatron_lm.parsed_run import ParsedRun
from bridge.read.megatron_lm.parser_refusals import find_refusals
from bridge.read.megatron_lm.unread_options import find_misspelt_options

MISSPELT_OPTION_RULE = (
    "no known release of Megatron-LM has this argument, and its parser refuses to start; "
    "it is not read"
)


def make_refused_option_findings(parsed: ParsedRun) -> tuple[Finding, ...]:
    """Return a finding for each option that the parser refuses.

    There is none if the framework's parser drops words that it does not know.
    """
    framework = parsed.written.framework
    if framework is not None and framework.ignores:
        return ()
    return (*_make_refusal_findings(parsed), *_make_misspelling_findings(parsed))


def _make_refusal_findings(parsed: ParsedRun) -> list[Finding]:
    """Return the words that the parser refuses, as errors.

    They are warnings if the program may have a parser of its own.
    """
    severity = "error" if parsed.written.is_known else "warning"
    findings: list[Finding] = []
    for refusal in find_refusals(parsed.written):
        facts = {"system": MEGATRON_LM, **refusal.facts}
        sentence = TABLE.sentences[refusal.sentence_name].fill(facts)
        finding = Finding(
            path=refusal.setting,
            rule=sentence.detail,
            remedy=sentence.remedy.rstrip("."),  # as the remedies of rules
            value=refusal.value,
            severity=severity,
        )
        findings.append(finding)
    return findings


def _make_misspelling_findings(parsed: ParsedRun) -> list[Finding]:
    """Return a warning for each option that differs from an argument's name by a letter or two.

    It is no error, since a fork of Megatron-LM may have an option of this name.
    """
    arguments = parsed.values.all
    findings: list[Finding] = []
    for name, argument in find_misspelt_options(parsed.written, arguments).items():
        finding = Finding(
            path=format_option(name),
            rule=MISSPELT_OPTION_RULE,
            remedy=f"Write {format_option(argument)}",
            value=arguments[name],
            severity="warning",
        )
        findings.append(finding)
    return findings
