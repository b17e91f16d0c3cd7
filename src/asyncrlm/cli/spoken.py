"""What the library says of its arguments, in words of the command line."""

from __future__ import annotations

import re
from typing import Final

from ..errors import ConfigurationError, RLMError

_CURES: Final = {
    "model_name": ": give --model NAME",
    "base_url": ": give --base-url URL, such as http://127.0.0.1:8000/v1",
    "api_key": "; use a local server, --backend vllm --base-url http://127.0.0.1:8000/v1 --model NAME; "
    "or try --backend offline, no model",
    "default_headers": ": set OPENAI_BASE_URL to it and OPENAI_API_KEY to the key of that server",
    "default_query": "",
    "price": ": give it with --price IN,OUT (--sub-price for a --sub-model) in USD per million tokens, or leave "
    "max_budget out",
}
"""Argument that would cure it → what to do here."""
_PHRASES: Final = (
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


def spoken(error: RLMError) -> str:
    """The message of `error` with options where it names arguments."""
    cure = _CURES.get(error.argument or "") if isinstance(error, ConfigurationError) else None
    if not isinstance(error, ConfigurationError) or cure is None:
        return in_options(str(error))
    return in_options(error.problem + cure)


def in_options(message: str) -> str:
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
