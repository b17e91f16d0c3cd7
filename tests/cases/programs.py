"""Programs as users of the reference write them, against its documented API; only their imports change to run here.

Each is a text; `LM_URL` in its environment is the model server's address.
"""

from __future__ import annotations

QUICKSTART = """
import os
import random
import string

from rlm import RLM
from rlm.logger import RLMLogger

rng = random.Random(11)
lines = ["".join(rng.choices(string.ascii_lowercase + " ", k=80)) for _ in range(20_000)]
lines.insert(rng.randrange(len(lines)), "THE CODE IS 493817256")
document = "\\n".join(lines)

rlm = RLM(
    backend="openai",
    backend_kwargs={
        "model_name": "gpt-5-nano",
        "api_key": os.getenv("OPENAI_API_KEY"),
        "base_url": os.environ["LM_URL"],
    },
    environment="local",
    max_iterations=10,
    logger=RLMLogger(log_dir=os.environ["LOGS"]),
    verbose=True,
)
result = rlm.completion("One line of this text holds a code. Which?\\n\\n" + document)
print("found:", result.response)
print("model:", result.root_model, "time:", result.execution_time > 0)
print("usage:", result.usage_summary.to_dict()["model_usage_summaries"]["gpt-5-nano"]["total_calls"])
print("logs:", len(os.listdir(os.environ["LOGS"])))
"""

TRAJECTORY = """
import json
import os

from rlm import RLM
from rlm.core.types import RLMChatCompletion
from rlm.logger import RLMLogger

rlm = RLM(
    backend="openai",
    backend_kwargs={"model_name": "gpt-5-nano", "api_key": "key", "base_url": os.environ["LM_URL"]},
    environment="local",
    environment_kwargs={},
    max_depth=1,
    logger=RLMLogger(),
)
result = rlm.completion(prompt={"numbers": [1, 2, 3, 4]}, root_prompt="What is the sum?")
assert isinstance(result, RLMChatCompletion)
print("response:", result.response)
trajectory = result.metadata
print("root model:", trajectory["run_metadata"]["root_model"])
for number, iteration in enumerate(trajectory["iterations"], start=1):
    for block in iteration["code_blocks"]:
        print(number, "code:", block["code"].strip().splitlines()[0])
        print(number, "stdout:", block["result"]["stdout"].strip())
        for call in block["result"]["rlm_calls"]:
            print(number, "sub-call:", call["prompt"], "->", call["response"])
    print(number, "final:", iteration["final_answer"])
json.dumps(trajectory)
again = RLMChatCompletion.from_dict(result.to_dict())
print("again:", again.response, again.usage_summary.total_input_tokens)
"""

RECURSION = """
import os

from rlm import RLM
from rlm.logger import RLMLogger

client = {"api_key": "key", "base_url": os.environ["LM_URL"]}
rlm = RLM(
    backend="openai",
    backend_kwargs={"model_name": "gpt-5", **client},
    other_backends=["openai"],
    other_backend_kwargs=[{"model_name": "gpt-5-nano", **client}],
    environment="local",
    max_depth=2,
    max_iterations=3,
    max_concurrent_subcalls=4,
    logger=RLMLogger(),
)

def walk(metadata, depth):
    for iteration in metadata["iterations"]:
        for block in iteration["code_blocks"]:
            for call in sorted(block["result"]["rlm_calls"], key=lambda c: str(c["prompt"])):
                nested = call.get("metadata")
                print("  " * depth + call["root_model"], call["prompt"], "->", call["response"], bool(nested))
                if nested:
                    walk(nested, depth + 1)

with rlm:
    result = rlm.completion("three questions", root_prompt="Which colours?")
    print("response:", result.response)
    walk(result.metadata, 0)
    for model, usage in sorted(result.usage_summary.model_usage_summaries.items()):
        print(model, usage.total_calls)
"""

LIMITS = """
import os
import signal

from rlm import (
    RLM,
    BudgetExceededError,
    CancellationError,
    ErrorThresholdExceededError,
    TimeoutExceededError,
    TokenLimitExceededError,
)

def make(**limits):
    return RLM(
        backend="openai",
        backend_kwargs={"model_name": "gpt-5-nano", "api_key": "key", "base_url": os.environ["LM_URL"]},
        **limits,
    )

result = make(max_iterations=2).completion("turns")
print("turns", result.response)

try:
    make(max_timeout=2.0).completion("slow")
except TimeoutExceededError as e:
    print("timeout", e.elapsed >= 2.0, e.timeout, bool(e.partial_answer))

try:
    make(max_tokens=250_000).completion("tokens")
except TokenLimitExceededError as e:
    print("tokens", e.tokens_used > 200_000, e.token_limit, bool(e.partial_answer))

try:
    make(max_budget=0.012).completion("budget")
except BudgetExceededError as e:
    print("budget", e.spent > 0.01, e.budget)

try:
    make(max_errors=3).completion("errors")
except ErrorThresholdExceededError as e:
    print("errors", e.error_count, e.threshold, "ZeroDivisionError" in e.last_error, bool(e.partial_answer))

def interrupt(depth, iteration):
    if iteration == 2:
        os.kill(os.getpid(), signal.SIGINT)

try:
    make(on_iteration_start=interrupt).completion("slow")
except CancellationError as e:
    print("cancelled", bool(e.partial_answer))

try:
    make(max_depth=1, environment="nowhere")
except ValueError as e:
    print("refused")
"""

CALLBACKS = """
import os

from rlm import RLM

def iteration_start(depth, iteration_num):
    print("start", depth, iteration_num)

def iteration_complete(depth, iteration_num, duration):
    print("complete", depth, iteration_num, duration >= 0)

def subcall_start(depth, model, prompt_preview):
    print("sub-call", depth, model, prompt_preview)

def subcall_complete(depth, model, duration, error):
    print("sub-call done", depth, model, duration >= 0, error)

rlm = RLM(
    backend="openai",
    backend_kwargs={"model_name": "gpt-5", "api_key": "key", "base_url": os.environ["LM_URL"]},
    other_backends=["openai"],
    other_backend_kwargs=[{"model_name": "gpt-5-nano", "api_key": "key", "base_url": os.environ["LM_URL"]}],
    max_depth=2,
    on_iteration_start=iteration_start,
    on_iteration_complete=iteration_complete,
    on_subcall_start=subcall_start,
    on_subcall_complete=subcall_complete,
)
print("answer", rlm.completion("CTX", root_prompt="Anything?").response)
"""

CUSTOM_TOOLS = """
import os
from typing import Any

from rlm import RLM

PRICES = {"PEAR": 2.5, "PLUM": 0.75}

def price_of(name: str) -> dict[str, Any]:
    \"\"\"The price of a fruit.\"\"\"
    if name.upper() not in PRICES:
        return {"error": f"{name} is not sold here"}
    return {"price": PRICES[name.upper()], "unit": "piece"}

def total(basket: dict[str, int]) -> float:
    return sum(price_of(name)["price"] * count for name, count in basket.items())

rlm = RLM(
    backend="openai",
    backend_kwargs={"model_name": "gpt-5-nano", "api_key": "key", "base_url": os.environ["LM_URL"]},
    environment="local",
    environment_kwargs={"setup_code": "import math\\nSHOP = 'corner'"},
    custom_system_prompt=os.getenv("SYSTEM_PROMPT"),
    custom_tools={
        "price_of": {"tool": price_of, "description": "Looks up what one fruit costs (PEAR, PLUM)"},
        "total": {"tool": total, "description": "Adds up a basket {name: count}"},
        "shout": str.upper,
        "SETTINGS": {"tool": {"currency": "EUR", "decimals": 2}, "description": "How to write amounts"},
        "FRUITS": ["PEAR", "PLUM"],
    },
    custom_sub_tools={},
)
print("answer", rlm.completion("What do 4 pears and 2 plums cost?").response)
"""

PROGRAMS = {
    "quickstart": QUICKSTART,
    "trajectory": TRAJECTORY,
    "recursion": RECURSION,
    "limits": LIMITS,
    "callbacks": CALLBACKS,
    "custom tools": CUSTOM_TOOLS,
}


def here(program: str) -> str:
    """The program with only its imports changed."""
    for theirs in ("rlm.logger", "rlm.core.types", "rlm"):
        program = program.replace(f"from {theirs} import", "from asyncrlm import")
    return program
