"""Answers over HTTP: `pip install fastapi uvicorn`, then `uvicorn fastapi_app:app` in this folder.

Ask it: `curl localhost:8000/ask -H 'content-type: application/json' -d '{"text": "…", "question": "…"}'`.

One `AsyncRLM` serves all requests: each has its own worker, its own limits and its own ledger.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel, Field

from asyncrlm import AsyncRLM, LimitError, RLMError


class Question(BaseModel):
    text: str
    question: str
    max_timeout: float = Field(default=60.0, gt=0, le=300.0)


class Answer(BaseModel):
    answer: str
    run_id: str | None
    model_calls: int


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    async with AsyncRLM(backend="offline", max_concurrent_requests=64) as rlm:
        app.state.rlm = rlm
        yield


app = FastAPI(lifespan=lifespan)


def engine(request: Request) -> AsyncRLM:
    return request.app.state.rlm


@app.post("/ask")
async def ask(asked: Question, rlm: Annotated[AsyncRLM, Depends(engine)]) -> Answer:
    try:
        completion = await rlm.acompletion(asked.text, asked.question, max_timeout=asked.max_timeout)
    except LimitError as error:
        raise HTTPException(504, detail=str(error)) from error
    except RLMError as error:
        raise HTTPException(502, detail=f"{type(error).__name__}: {error}") from error
    if not completion.response:  # all turns were used up
        raise HTTPException(502, detail=completion.error)
    calls = completion.usage_summary.total_calls
    return Answer(answer=completion.response, run_id=completion.run_id, model_calls=calls)
