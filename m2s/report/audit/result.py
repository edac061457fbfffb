"""What `m2s audit` writes: how to read it, and the names of the four classes of scores.

C is the coordinate box, P the bridge polytope inside it: the scores that have a posterior.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from m2s.errors import UserError
from m2s.report.style import BAND, BOX, VERMILLION

AuditResult = Mapping[str, Any]  # the content of audit.json, or one of its steps
KEYS = {"checkpoint", "process", "head", "settings", "overall", "steps", "denoiser"}

NAMES = {
    "outside": "outside C",
    "material": "in C, not in P, material",
    "boundary": "in C, not in P, boundary",
    "realizable": "in P",
}
CLASS_LABELS = {
    "outside": "outside (out of range)",
    "material": "material (contradictory)",
    "boundary": "boundary (within 1e-6)",
    "realizable": "realizable (a posterior)",
}
CLASS_COLORS = {"outside": VERMILLION, "material": "#E69F00", "boundary": BOX, "realizable": BAND}


def read_audit(path: Path) -> AuditResult:
    """Read the audit.json that `m2s audit` wrote.

    Args:
        path: The file.

    Returns:
        Its content.

    Raises:
        UserError: The file cannot be read, or it is not an audit.
    """
    hint = "give the audit.json that m2s audit wrote"
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {hint}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): {hint}") from error
    if not isinstance(result, dict) or not result.keys() >= KEYS:
        raise UserError(f"{path} is no audit: {hint}")
    return result


def format_heading(audit: AuditResult) -> list[str]:
    """Return two lines about an audit: which checkpoint and head, and how it was sampled.

    Args:
        audit: The audit.

    Returns:
        The lines.
    """
    return [f"{audit['checkpoint']}: {audit['head']}", format_settings(audit)]


def format_settings(audit: AuditResult) -> str:
    """Return the number of position-steps and the settings of the sampler in one line.

    Args:
        audit: The audit.

    Returns:
        The line.
    """
    settings, overall = audit["settings"], audit["overall"]
    return (
        f"{overall['position_steps']:,} position-steps of {settings['n']:,} samples of {settings['length']:,} tokens; "
        f"{settings['steps']} steps, sampler {settings['sampler']}, grid {settings['grid']}, seed {settings['seed']}"
    )


def criteria(audit: AuditResult) -> dict[str, str]:
    """Return the criterion of each of the four classes, which depends on the process.

    Args:
        audit: The audit.

    Returns:
        One formula for each class, in ASCII. `mu~` is the signed posterior, `s` the score.
    """
    if audit["process"] == "Absorbing":
        return {
            "outside": "a score outside [0, c]",
            "material": "sum(s) is not c, or min mu~ < -1e-6",
            "boundary": "sum(s) = c, -1e-6 <= min mu~ < 0",
            "realizable": "s >= 0, sum(s) = c = alpha/(1-alpha)",
        }
    limits = "[rho, 1/rho]" if audit["process"] == "Uniform" else "the bounds of its coordinate"
    return {
        "outside": f"a score outside {limits}",
        "material": "min mu~ < -1e-6" if audit["process"] == "Uniform" else "no posterior within 1e-6",
        "boundary": "-1e-6 <= min mu~ < 0",
        "realizable": "mu~ is a posterior",
    }
