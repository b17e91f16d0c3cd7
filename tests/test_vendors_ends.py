"""How sandboxes of vendors end: given up, taken away, cut off, not renewed; see `test_vendors.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

from asyncrlm import AsyncRLM, Repl, SandboxLost

from .cases import covers
from .helpers import cell, scripted, submit
from .vendors import SDK_WARNINGS, Vendor, echo, fact, said, vendor

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["vendor"]

pytestmark = [pytest.mark.anyio, pytest.mark.soak, *SDK_WARNINGS]
asyncio_only = pytest.mark.parametrize("anyio_backend", ["asyncio"])


async def _cancelled_when(vendor: Vendor, so: Callable[[], Any]) -> None:
    async def use() -> None:
        async with Repl(environment=vendor.name, lm=echo) as r:
            await r.execute("print(1)")

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(use)
            await fact(so)
            group.cancel_scope.cancel()
            loop = vendor.server.loop  # in another thread
            loop.call_soon_threadsafe(loop.call_later, 0.2, lambda: loop.create_task(_let_go(vendor)))


async def _let_go(vendor: Vendor) -> None:
    vendor.server.held.clear()
    vendor.server.late.clear()
    await vendor.server._notify()


@asyncio_only
@pytest.mark.parametrize("when", ["held", "late"])
@pytest.mark.parametrize("stage", ["create", "execute"])
async def test_cancelled_at_any_stage_nothing_is_left(vendor: Vendor, stage: str, when: str) -> None:
    name = getattr(vendor.requests, stage)
    getattr(vendor.server, when).add(name)
    await _cancelled_when(vendor, lambda: vendor.server.waiting[name])
    assert vendor.leaked == []


@asyncio_only
async def test_a_maker_that_never_answers_is_found_by_its_name(vendor: Vendor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrlm.environments.remote_pumped.SETTLE_GRACE", 0.1)
    vendor.server.late.add(vendor.requests.create)
    with anyio.fail_after(20), pytest.raises(SandboxLost, match=r"not there within 0\.5 s"):
        async with Repl(environment=vendor.environment(start_timeout=0.5), lm=echo) as r:
            await r.execute("1")
    assert (len(vendor.server.made), vendor.leaked) == (1, [])
    vendor.server.release(vendor.requests.create)


@asyncio_only
async def test_cancelled_in_a_cell_it_is_destroyed(vendor: Vendor) -> None:
    async def cancel(messages: list[dict[str, str]]) -> str:
        group.cancel_scope.cancel()
        return await anyio.sleep_forever()

    with anyio.fail_after(20):
        async with anyio.create_task_group() as group, Repl(environment=vendor.name, lm=cancel) as r:
            await r.execute("llm_query('x')")
    assert (len(vendor.server.made), vendor.leaked) == (1, [])


ENDS = {"modal": {"terminated": "it was terminated", "timeout": "after its lifetime of"}}
ENDS["daytona"] = {"stopped": "says that it is stopped: out of credit", "gone": "says that it is gone"}
ENDS["e2b"] = {"gone": "was killed or reached its end of life", "died": "its keeper ended with status -9"}
ENDS["prime"] = {"ERROR": "says that it is error: out of credit", "gone": "says that it is gone"}


@asyncio_only
@pytest.mark.parametrize("which", [0, 1])
async def test_a_sandbox_that_ends_in_mid_cell_is_lost_with_the_vendors_word(vendor: Vendor, which: int) -> None:
    how, word = list(ENDS[vendor.name].items())[which]

    async def end(messages: list[dict[str, str]]) -> str:
        number = len(vendor.server.made) - 1
        arguments = (number, how) if vendor.name in ("modal", "e2b") else (number, how, "out of credit")
        await anyio.to_thread.run_sync(vendor.server.end, *arguments)  # type: ignore[attr-defined]
        if how == "gone":
            vendor.server.destroyed.append(vendor.server.made[number])
        return await anyio.sleep_forever()

    with anyio.fail_after(20):
        async with Repl(environment=vendor.name, lm=end) as r:
            assert word in said(await r.execute("llm_query('x')"))
            assert (await r.execute("print(1)")).stdout == "1\n"
    assert len(vendor.server.made) == 2


@asyncio_only
async def test_a_run_whose_sandboxes_end_keeps_its_partial_answer(vendor: Vendor) -> None:
    how = next(iter(ENDS[vendor.name]))

    async def end(which: str) -> str:
        if which == "last":
            vendor.server.failing[vendor.requests.create] = [vendor.refusals["quota"]] * 20
        await anyio.to_thread.run_sync(vendor.server.end, len(vendor.server.made) - 1, how)  # type: ignore[attr-defined]
        return await anyio.sleep_forever()

    so_far = cell("answer['content'] = 'so far'")
    root = scripted(so_far, cell("end('one')"), submit("'after all'"), so_far, cell("end('last')"), cell("pass"))
    async with AsyncRLM(root, environment=vendor.name, custom_tools={"end": end}) as rlm:
        with anyio.fail_after(30):
            completion = await rlm.acompletion("text")
            assert (completion.response, len(vendor.server.made)) == ("after all", 2)
            with pytest.raises(SandboxLost, match=vendor.refusals["quota"][1]) as caught:
                await rlm.acompletion("text")
    assert caught.value.partial_answer == "so far"


@asyncio_only
async def test_a_stream_that_is_cut_off_goes_on_where_it_was(vendor: Vendor) -> None:
    with anyio.fail_after(30):
        async with Repl(environment=vendor.environment(max_output=1_000_000), lm=echo) as r:
            await r.execute("x = 5")
            for _ in range(3):
                vendor.server.cut = 1  # type: ignore[attr-defined]
                result = await r.execute("print(''.join(f'{n:06}' for n in range(5000)))\nprint(llm_query('a'), x)")
                assert result.stdout == "".join(f"{n:06}" for n in range(5000)) + "\nre: a 5\n"
                assert vendor.server.cut == 0  # type: ignore[attr-defined]
    assert len(vendor.server.made) == 1


@asyncio_only
async def test_a_token_that_expired_and_a_refusal_in_passing_are_outlived(vendor: Vendor) -> None:
    server: Any = vendor.server
    if vendor.name not in ("modal", "prime"):
        pytest.skip("it has neither")
    with anyio.fail_after(30):
        async with Repl(environment=vendor.name, lm=echo) as r:
            await r.execute("x = 5")
            server.expire()
            server.failing[vendor.requests.send] = [vendor.refusals["passing"]]
            assert (await r.execute("print(llm_query('a'), x)")).stdout == "re: a 5\n"
            assert server.failing[vendor.requests.send] == []
    assert len(server.made) == 1


RENEWED = {
    "daytona": ("touch", {"auto_stop_interval": 1}, "stopped: no activity"),
    "e2b": ("timeout", {"timeout": 1}, "was killed or reached its end of life while the request was in flight."),
    "prime": ("probe", {"idle_timeout_minutes": 1}, "timeout: idle timeout exceeded"),
}


@covers("B10")
@asyncio_only
async def test_renewing_does_not_shorten_the_life_of_one_of_yours(vendor: Vendor) -> None:
    server: Any = vendor.server
    if vendor.name != "e2b":
        pytest.skip("nothing that renews shortens there")
    with anyio.fail_after(20):
        async with Repl(environment="e2b", lm=echo) as r:
            await r.execute("1")
            yours = vendor.environment(sandbox_id=server.made[0], timeout=1)
            async with Repl(environment=yours, lm=echo) as other:
                await other.execute("1")
                await fact(lambda: server.requests["connect"] + server.requests["timeout"] > 2)
            assert server.boxes[server.made[0]].until - server.loop.time() > 100


@asyncio_only
@pytest.mark.parametrize("renewed", [True, False])
async def test_it_is_renewed_while_a_run_waits(vendor: Vendor, renewed: bool, monkeypatch: Any) -> None:
    if vendor.name not in RENEWED:
        pytest.skip("Modal's sandboxes can't be renewed")
    request, settings, ends = RENEWED[vendor.name]
    monkeypatch.setattr(f"asyncrlm.environments.{vendor.name}.MINUTE", 0.6, raising=False)
    vendor.server.minute = 0.6  # type: ignore[attr-defined]

    async def slow(messages: list[dict[str, str]]) -> str:
        if not renewed:
            vendor.server.failing[request] = [(500, "no lease for you")] * 100
            await anyio.sleep_forever()
        await fact(lambda: vendor.server.requests[request] >= 6)
        return "late"

    with anyio.fail_after(20):
        async with Repl(environment=vendor.environment(**settings), lm=slow) as r:
            result = await r.execute("print(llm_query('x'))")
    if renewed:
        assert result.stdout == "late\n"
    else:
        assert f"{ends}; its lease could not be renewed" in said(result)
        assert "no lease for you" in said(result)


@asyncio_only
async def test_one_that_ends_while_it_is_renewed_is_lost_at_once(vendor: Vendor, monkeypatch: Any) -> None:
    if vendor.name not in RENEWED:
        pytest.skip("Modal's sandboxes can't be renewed")
    request, settings, _ = RENEWED[vendor.name]
    monkeypatch.setattr(f"asyncrlm.environments.{vendor.name}.MINUTE", 0.6, raising=False)

    async def end(messages: list[dict[str, str]]) -> str:
        vendor.server.held.add(request)
        await fact(lambda: vendor.server.waiting[request])
        await anyio.to_thread.run_sync(vendor.server.end, 0, next(iter(ENDS[vendor.name])))  # type: ignore[attr-defined]
        return await anyio.sleep_forever()

    with anyio.fail_after(20):
        async with Repl(environment=vendor.environment(**settings), lm=end) as r:
            assert said(await r.execute("llm_query('x')"))
            vendor.server.release(request)


@asyncio_only
async def test_a_lifetime_that_is_over_is_told(vendor: Vendor) -> None:
    if vendor.name != "prime":
        pytest.skip("above")
    vendor.server.minute = 0.5  # type: ignore[attr-defined]

    async def never(messages: list[dict[str, str]]) -> str:
        return await anyio.sleep_forever()

    with anyio.fail_after(20):
        async with Repl(environment=vendor.environment(timeout_minutes=4, idle_timeout_minutes=None), lm=never) as r:
            assert "timeout: maximum lifetime exceeded" in said(await r.execute("llm_query('x')"))
