"""Sandboxes of vendors, by their own SDKs, on servers of ours that speak what theirs do; see `fakes/`."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from asyncrlm import AsyncRLM, ConfigurationError, Repl, SandboxLost
from asyncrlm.environments import environment

from .helpers import cell, scripted, submit
from .vendors import SDK_WARNINGS, Vendor, echo, fact, said, vendor

__all__ = ["vendor"]

pytestmark = [pytest.mark.anyio, pytest.mark.soak, *SDK_WARNINGS]
asyncio_only = pytest.mark.parametrize("anyio_backend", ["asyncio"])


@asyncio_only
async def test_cells_with_sub_calls_big_contexts_and_output_in_order(vendor: Vendor) -> None:
    context = {"bytes": bytes(range(256)) * 5000, "text": "\ud800é\0\x01\x01\x01\x02\x02\x02" * 200_000}
    with anyio.fail_after(30):
        async with Repl(environment=vendor.name, lm=echo, context=context) as r:
            result = await r.execute(
                "import os, sys, subprocess\nprint('a')\nos.write(1, b'b\\n')\nsubprocess.run(['echo', 'c'])\n"
                "print('err', file=sys.stderr)\nx = llm_query_batched([str(i) for i in range(500)])\nprint(x[499], 'é')"
            )
            assert (result.stdout, result.stderr) == ("a\nb\nc\nre: 499 é\n", "err\n")
            text = "'\\ud800é\\0\\x01\\x01\\x01\\x02\\x02\\x02' * 200_000"
            same = f"print(context['bytes'] == bytes(range(256)) * 5000, context['text'] == {text})"
            assert (await r.execute(same)).stdout == "True True\n"
            long = await r.execute("print(len(llm_query('é' * 2_000_000)), '\\x01\\x01\\x01 \\x02' * 3)")
            assert said(long) == ""
            assert long.stdout == "2000004 " + "\x01\x01\x01 \x02" * 3 + "\n"
            for number in range(20):
                assert (await r.execute(f"print({number}, x[{number}])")).stdout == f"{number} re: {number}\n"
    assert len(vendor.server.made) == 1


@asyncio_only
async def test_a_run_by_name_with_a_child_and_tools(vendor: Vendor) -> None:
    root = scripted(cell("x = rlm_query('sub') + shout('a')"), submit("'child '"), submit("x"))
    async with AsyncRLM(root, environment=vendor.name, max_depth=2, custom_tools={"shout": str.upper}) as rlm:
        with anyio.fail_after(30):
            assert (await rlm.acompletion("text")).response == "child A"
    assert len(vendor.server.made) == 2


@asyncio_only
async def test_interrupts_deaths_and_floods(vendor: Vendor) -> None:
    with anyio.fail_after(40):
        async with Repl(environment=vendor.environment(cell_timeout=0.3, max_output=1000), lm=echo) as r:
            flood = await r.execute("print('x' * 5_000_000 + 'end')")
            assert flood.stdout.endswith("xend\n")
            assert "cell_timeout" in said(await r.execute("x = 5\nwhile True: pass"))
            assert (await r.execute("print(x)")).stdout == "5\n"
            died = await r.execute("import os\nprint('last', flush=True)\nos._exit(3)")
            assert (died.stdout, "exited with code 3" in said(died)) == ("last\n", True)
            stubborn = await r.execute("print('before', flush=True)\nsum(range(10**13))")
            assert "did not stop" in said(stubborn)
            assert (await r.execute("print(1)")).stdout == "1\n"
    assert len(vendor.server.made) == 3


@asyncio_only
async def test_several_at_once_have_names_of_their_own(vendor: Vendor) -> None:
    async def one(number: int) -> None:
        async with Repl(environment=environment_, lm=echo) as r:
            assert (await r.execute(f"print(llm_query('{number}'))")).stdout == f"re: {number}\n"

    environment_ = vendor.environment()
    with anyio.fail_after(40):
        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(one, number)
    assert len(set(vendor.server.made)) == 10


@asyncio_only
@pytest.mark.parametrize("kind", ["quota", "broken"])
async def test_a_sandbox_that_is_refused_says_why(vendor: Vendor, kind: str) -> None:
    vendor.server.failing[vendor.requests.create] = [vendor.refusals[kind]] * 20
    with anyio.fail_after(20), pytest.raises(SandboxLost) as caught:
        async with Repl(environment=vendor.name, lm=echo) as r:
            await r.execute("1")
    assert vendor.refusals[kind][1] in str(caught.value)


@asyncio_only
async def test_a_key_that_is_refused_is_the_callers_to_mend(vendor: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODAL_TOKEN_SECRET", "DAYTONA_API_KEY", "E2B_API_KEY", "PRIME_API_KEY"):
        monkeypatch.setenv(name, "e2b_" + "1" * 40)
    with anyio.fail_after(20), pytest.raises(ConfigurationError, match="refuses the credentials"):
        async with Repl(environment=vendor.name, lm=echo) as r:
            await r.execute("1")
    assert vendor.server.made == []


@asyncio_only
async def test_without_a_key_its_variables_are_named(vendor: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", "DAYTONA_API_KEY", "E2B_API_KEY", "PRIME_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    wanted = {
        "modal": "MODAL_TOKEN_ID and MODAL_TOKEN_SECRET",
        "daytona": "DAYTONA_API_KEY",
        "e2b": "E2B_API_KEY",
        "prime": "PRIME_API_KEY, or run `prime login`",
    }[vendor.name]
    with anyio.fail_after(20), pytest.raises(ConfigurationError, match=wanted):
        async with Repl(environment=vendor.name, lm=echo) as r:
            await r.execute("1")


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_another_loop_is_told_that_it_can_not(vendor: Vendor) -> None:
    with pytest.raises(ConfigurationError, match=f"environment '{vendor.name}' runs on asyncio only"):
        async with Repl(environment=vendor.name, lm=echo) as r:
            await r.execute("1")


@asyncio_only
async def test_one_that_is_slow_to_start_is_waited_for(vendor: Vendor) -> None:
    server: Any = vendor.server
    server.held.add(vendor.requests.create)
    server.pending, server.first_state = 1, "creating"
    outputs: list[str] = []

    async def use() -> None:
        async with Repl(environment=vendor.name, lm=echo) as r:
            outputs.append((await r.execute("print(llm_query('a'))")).stdout)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(use)
            await fact(lambda: server.waiting[vendor.requests.create])
            server.release(vendor.requests.create)
    assert (outputs, len(server.made)) == (["re: a\n"], 1)


@asyncio_only
async def test_an_interpreter_that_is_not_there_is_named(vendor: Vendor) -> None:
    with anyio.fail_after(20), pytest.raises(SandboxLost, match="no-such-python"):
        async with Repl(environment=vendor.environment(python="no-such-python"), lm=echo) as r:
            await r.execute("1")


@asyncio_only
async def test_a_sandbox_of_yours_is_used_by_all_and_stays(vendor: Vendor) -> None:
    with anyio.fail_after(30):
        async with Repl(environment=vendor.name, lm=echo) as keeps:
            await keeps.execute("x = 1")
            theirs = vendor.environment(sandbox_id=vendor.server.made[0])
            async with Repl(environment=theirs, lm=echo) as one, Repl(environment=theirs, lm=echo) as two:
                assert (await one.execute("print(llm_query('a'))")).stdout == "re: a\n"
                assert (await two.execute("print(llm_query('b'))")).stdout == "re: b\n"
            assert (await keeps.execute("print(x)")).stdout == "1\n"
    assert len(vendor.server.made) == 1


@asyncio_only
async def test_settings_reach_the_vendor(vendor: Vendor) -> None:
    modal = {
        "cpu": 2.0,
        "memory": 512,
        "tags": {"team": "x"},
        "secrets": ["s"],
        "volumes": {"/data": "v"},
        "timeout": 60,
    }
    daytona = {"cpu": 2, "memory": 4, "labels": {"team": "x"}, "volumes": {"/data": "v"}, "timeout": 90}
    prime = {"cpu_cores": 2, "memory_gb": 4, "labels": ["x"], "volumes": {"/data": "v"}, "region": "eu"}
    prime |= {"secrets": {"S": "t"}, "timeout_minutes": 90, "image": "python:3.12"}
    e2b = {
        "template": "t",
        "metadata": {"team": "x"},
        "envs": {"A": "1"},
        "secrets": {"S": "2"},
        "volumes": {"/d": "v"},
    }
    settings = {"modal": modal, "daytona": daytona, "e2b": e2b, "prime": prime}[vendor.name]
    with anyio.fail_after(20):
        async with Repl(environment=vendor.environment(name="mine", **settings), lm=echo) as r:
            assert (await r.execute("print(1)")).stdout == "1\n"
            if vendor.name in ("e2b", "prime"):
                assert (await r.execute("import os\nprint(os.environ['S'])")).stdout == f"{settings['secrets']['S']}\n"
    [box] = vendor.server.seen
    if vendor.name == "modal":
        asked = box.definition
        assert asked.name.startswith("mine-")
        assert (asked.resources.milli_cpu, asked.resources.memory_mb, asked.timeout_secs) == (2000, 512, 60)
        assert [mount.mount_path for mount in asked.volume_mounts] == ["/data"]
        assert asked.network_access.network_access_type == asked.network_access.BLOCKED
        return
    if vendor.name == "e2b":
        wanted = {"templateID": "t", "envVars": {"A": "1", "S": "2"}, "allow_internet_access": False, "timeout": 300}
        assert {key: box.asked[key] for key in wanted} == wanted
        assert box.asked["metadata"]["team"] == "x"
        assert box.asked["metadata"]["asyncrlm"].startswith("mine-")
        assert [(v["name"], v["path"]) for v in box.asked["volumeMounts"]] == [("v", "/d")]
        return
    assert box.asked["name"].startswith("mine-")
    if vendor.name == "prime":
        wanted = {"cpu_cores": 2, "memory_gb": 4, "region": "eu", "secrets": {"S": "t"}, "network_allowlist": []}
        wanted |= {"timeout_minutes": 90, "idle_timeout_minutes": 15, "docker_image": "python:3.12"}
        assert {key: box.asked[key] for key in wanted} == wanted
        assert "x" in box.asked["labels"]
        assert [(v["name"], v["mount_path"]) for v in box.asked["volumes"]] == [("v", "/data")]
        return
    wanted = {"cpu": 2, "memory": 4, "ttlMinutes": 2, "networkBlockAll": True, "autoDeleteInterval": 0}
    assert {key: box.asked[key] for key in wanted} == wanted
    assert box.asked["labels"]["team"] == "x"
    assert "python:3.12-slim" in box.asked["buildInfo"]["dockerfileContent"]


def test_what_prime_can_not_have_is_told_without_what_may_be_secret() -> None:
    pytest.importorskip("prime_sandboxes", reason="the SDK of prime is not installed")
    made: Any = environment("prime", {"secrets": {"K": "word"}, "volumes": {"/data": 5}, "api_key": "hidden"})
    with pytest.raises(ConfigurationError, match="name Input should be") as caught:
        made.create_request("name")
    assert "hidden" not in repr(made) + str(caught.value)
    assert "word" not in str(caught.value)
