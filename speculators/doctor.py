"""Checks before hours are spent. `speculators doctor` runs all of CHECKS, every training run those of BEFORE_TRAINING.

A check is one function in the table: it takes the facts and gives a finding, None where it does not apply. A sentence
that reading something raises is an error of that check.
"""

import sys
from collections.abc import Callable, Sequence

from speculators import doctor_states, doctor_text
from speculators.doctor_facts import Facts, Finding, gather
from speculators.errors import UserError
from speculators.schema import Strict

__all__ = ["BEFORE_TRAINING", "CHECKS", "Diagnosis", "Facts", "Finding", "check_before_training", "diagnose", "gather"]

Check = Callable[[Facts], Finding | None]

_CHEAP: tuple[Check, ...] = (
    doctor_states.manifest,
    doctor_text.template,
    doctor_text.thinking,
    doctor_text.loss_mask,
    doctor_text.mask_token,
    doctor_states.layer_ids,
    doctor_states.cached_states,
    doctor_text.rope,
    doctor_text.vocabulary,
    doctor_text.anchors,
    doctor_text.duplicates,
    doctor_states.disk,
    doctor_states.memory,
)
CHECKS: tuple[Check, ...] = (*_CHEAP, doctor_states.on_policy)
BEFORE_TRAINING: tuple[Check, ...] = (*_CHEAP, doctor_states.on_policy_briefly)


class Diagnosis(Strict):
    """All findings, in the order of the checks."""

    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Those that stop a run."""
        return tuple(finding for finding in self.findings if finding.level == "error")


def diagnose(facts: Facts, checks: Sequence[Check] = CHECKS) -> Diagnosis:
    """Run the checks."""
    findings = []
    for check in checks:
        try:
            finding = check(facts)
        except UserError as error:
            finding = Finding.error(check.__name__.replace("_", "-"), str(error))
        if finding:
            findings.append(finding)
    return Diagnosis(findings=tuple(findings))


def check_before_training(facts: Facts, talk: bool = True) -> None:
    """Run the cheap checks, and if `talk` a brief look at the on-policy share; warnings are then a line each on stderr.

    Raises:
        UserError: the first error found.
    """
    diagnosis = diagnose(facts, BEFORE_TRAINING if talk else _CHEAP)
    for finding in diagnosis.findings:
        if talk and finding.level == "warning":
            print(f"warning: {finding.check}: {finding.sentence}", file=sys.stderr)
    for finding in diagnosis.errors:
        raise UserError(finding.sentence)
