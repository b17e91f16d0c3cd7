"""What the library says of its arguments, in words of the command line."""

from __future__ import annotations

import re
from typing import Final

_LOCAL: Final = "--backend vllm --base-url http://127.0.0.1:8000/v1 --model NAME"
_PHRASES: Final = (
    (r'needs backend_kwargs=\{"model_name": \.\.\.\}', "needs --model NAME"),
    (r'needs a model: ".*?", or model_name', "needs --model NAME"),
    (r'needs backend_kwargs=\{"base_url": \.\.\.\}', "needs --base-url URL"),
    (
        r"(needs an API key)\. Three ways to get going: (set .*?), or pass .*",
        r"\1. Three ways to get going: \2; use a local server, " + f"{_LOCAL}; or try --backend offline, no model",
    ),
    (
        r"(must not carry a user or password): .*",
        r"\1: set OPENAI_BASE_URL to it and OPENAI_API_KEY to the key of that server",
    ),
    (r"(must not carry a query): .*", r"\1"),
    (
        r"give it with backend_kwargs=.* in USD per million tokens \(other_backend_kwargs likewise\)",
        "give it with --price IN,OUT (--sub-price for a --sub-model) in USD per million tokens",
    ),
    (r"web=Web\(max_bytes=\.\.\.\)", "--max-download"),
    (r"web=Web\(allow_private=True\)", "--allow-private"),
    (r"model_name=", "--model "),
    (r" in backend_kwargs or in ([A-Z])", r" in \1"),
    (r" in backend_kwargs", ""),
    (r"\bmodel_name\b", "--model"),
    (r"\bapi_key\b", "the key"),
)
_CHOICE: Final = re.compile(r'\b(backend|environment|limits|on_limit|on_subcall_error)="(\w+)"')
_NAME: Final = re.compile(r"(?<![\w-])(base_url|max_[a-z_]+|on_limit|on_subcall_error|(?:subcall|tool)_timeout)\b(?!=)")
_NO_UTF_8: Final = re.compile(
    r"not UTF-8 text: byte \w+ at position ([\d,]+)|codec can't decode byte \w+ in position (\d+)"
)


def spoken(message: str) -> str:
    """`message` with options where it names arguments."""
    for pattern, words in _PHRASES:
        message = re.sub(pattern, words, message)
    message = _CHOICE.sub(lambda found: f"{_option(found[1])} {found[2]}", message)
    return _NAME.sub(lambda found: _option(found[1]), message)


def no_text(message: str) -> str | None:
    """What is wrong with a file that the library found to be no text; None if that is not what `message` says."""
    found = _NO_UTF_8.search(message)
    return None if found is None else f"not UTF-8 text (byte {found[1] or found[2]})"


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
