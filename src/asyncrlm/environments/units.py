"""Sizes as people write them."""

from __future__ import annotations

import re

from ..errors import ConfigurationError

MOST = 1 << 50
"""Bytes; with more the kernel's own numbers come to an end."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_bytes(name: str, value: int | str | None) -> int | None:
    """`value` of the setting `name` in bytes: a number, or a str such as "512MB", "2GB", "1.5 GiB" (powers of 1024).

    Raises:
        ConfigurationError: if it is neither, or not positive.
    """
    if value is None:
        return None
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        size = int(min(float(match[1]), 2.0 * MOST) * 1024 ** _POWERS[match[2].upper()]) if match else 0
    else:
        size = value if isinstance(value, int) and not isinstance(value, bool) else 0  # pyright: ignore[reportUnnecessaryIsInstance]
    if size <= 0:
        raise ConfigurationError(f'{name}={value!r}: use a number of bytes or a size such as "2GB", or None')
    if size > MOST:
        raise ConfigurationError(f'{name}={value!r}: use "{MOST >> 40}TB" at most, or None')
    return size
