"""Hides what looks like a secret among a run's settings, which pages and commands show."""

import json
import re
from typing import Any, Final

HIDDEN: Final = "(hidden: looks like a secret)"

# Words in names of settings. A number under the second kind is a size or an index: num_tokens, key_dim.
_SECRET_NAME: Final = re.compile(
    r"passw|passphrase|pwd|secret|credential|api_?key|access_?key|private_?key|signing_?key|encryption_?key|dsn"
    r"|auth_?token|access_?token|refresh_?token|bearer|cookie|webhook|connection_?string"
)
_MAYBE_SECRET_NAME: Final = re.compile(
    r"token(?!iz)|(?<![a-z])keys?(?![a-z])|(?<![a-z])(auth|authorization|pat|sas)(?![a-z])"
)
_HASH_NAME: Final = re.compile(r"commit|sha|hash|revision|digest|checksum|git|version")

# The forms of well-known tokens, and names with values inside of a text, such as a command line. What may repeat before
# a match fails has a limit: otherwise the search would take quadratic time.
_SECRET_VALUE: Final = re.compile(
    r"\b(sk|rk|pk)[-_][A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic, Stripe
    r"|\bgh[oprsu]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bhf_[A-Za-z0-9]{16,}|\bnpm_[A-Za-z0-9]{30,}"
    r"|\bxox[a-z]-[\w-]{8,}|\bwandb_v\d_\w{16,}|\blocal-[0-9a-f]{40}\b|\bdop_v1_\w{20,}|\bpypi-[\w-]{20,}"
    r"|\b(AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b|\bAIza[\w-]{30,}|\bya29\.[\w-]{10,}|\bSG\.[\w-]{16,}\.[\w-]{16,}"
    r"|\beyJ[\w-]{8,300}\.[\w-]{8,}|-----BEGIN [A-Z ]{0,40}PRIVATE KEY|(hooks\.slack\.com/|discord(app)?\.com/api/web)"
    r"|://[^/\s:@]{0,200}:[^/\s@]{1,200}@|\b(Bearer|Basic)\s+[\w+/.=~-]{8,}|[?&](sig|signature|X-Amz-Signature)="
    r"""|(?i:(passw(or)?d|passphrase|pwd|secret|credential|token|(api|access)[_-]?key)\w{0,40}["']?\s{0,5}[=:]\s{0,5}["']?)"""
    r"""(?![\d.]+\b)[^\s"',}]+|--[\w-]{0,40}(?i:key|token|secret|passw)[\w-]{0,40}\s{1,5}\S{6,}"""
)
_HEXADECIMAL: Final = re.compile(r"\b([0-9a-f]{40}|[0-9a-f]{32}|[0-9a-f]{64})\b", re.IGNORECASE)  # as W&B's keys


def redacted(key: str, value: Any) -> Any:
    """Return a setting's value, or HIDDEN if its name or its value looks like a secret. None stays: it is not set.

    Args:
        key: the name of the setting, nested ones joined by dots.
        value: what JSON can express.

    Examples:
        >>> redacted("wandb_api_key", "3f2a"), redacted("model.num_tokens", 2048), redacted("tokenizer", "gpt2")
        ('(hidden: looks like a secret)', 2048, 'gpt2')
        >>> redacted("database", "postgres://me:hunter2@host/runs")
        '(hidden: looks like a secret)'
    """
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", key).lower()
    is_number = isinstance(value, (bool, int, float))
    if value is None or (is_number and not _SECRET_NAME.search(name)):
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    is_secret = (
        _SECRET_NAME.search(name)
        or _MAYBE_SECRET_NAME.search(name)
        or _SECRET_VALUE.search(text)
        or (_HEXADECIMAL.search(text) and not _HASH_NAME.search(name))
    )
    return HIDDEN if is_secret else value
