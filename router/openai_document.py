"""The OpenAPI document of the HTTP door, from the same schemas that its requests are checked by."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from router.openai_headers import DEADLINE, MAX_DEADLINE_S, MAX_ID_CHARACTERS, REQUEST_ID
from router.openai_requests import ChatBody, CompletionBody

_JSON, _EVENTS = "application/json", "text/event-stream"
_ANSWER_STATUSES = {
    "400": "the request is wrong: error.param says where",
    "401": "the key is not known",
    "403": "the key may not do this",
    "404": "another model is served",
    "408": "the body did not come in time",
    "409": "a request with this x-request-id is being answered",
    "413": "the body is too large",
    "415": "the body is no JSON by its content type",
    "429": "too much is asked for now: retry-after says when to come again",
    "500": "a defect of ours",
    "503": "nobody is there to answer now",
    "504": "x-request-timeout-s has passed",
}


@cache
def document() -> dict[str, Any]:
    _, schemas = models_json_schema(
        [(ChatBody, "validation"), (CompletionBody, "validation")], ref_template="#/components/schemas/{model}"
    )
    components: dict[str, Any] = {
        **schemas["$defs"],
        "Error": {
            "type": "object",
            "required": ["error"],
            "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "pdserve", "version": "1", "description": "OpenAI's interface to pdserve."},
        "paths": {
            "/v1/chat/completions": {"post": _answer("ChatBody", "Answers a conversation.")},
            "/v1/completions": {"post": _answer("CompletionBody", "Continues one prompt or several.")},
            "/v1/models": {"get": _look("The model served, as a list.", "401", "403")},
            "/v1/models/{model}": {"get": {**_look("The model served.", "401", "403", "404"), "parameters": [_MODEL]}},
            "/health": {"get": _look("Whether the process lives.")},
            "/ready": {"get": _look("Whether a request could be answered now.", "503")},
        },
        "components": {"schemas": components},
    }


_MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
_ID = {"type": "string", "minLength": 1, "maxLength": MAX_ID_CHARACTERS}
_TIMEOUT = {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DEADLINE_S}
_HEADERS = [
    {"name": REQUEST_ID, "in": "header", "schema": _ID},
    {"name": DEADLINE, "in": "header", "schema": _TIMEOUT},
]


def _answer(schema: str, summary: str) -> dict[str, Any]:
    body = {_JSON: {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    whole = {"description": "the answer", "content": {_JSON: {}, _EVENTS: {}}}
    return {
        "summary": summary,
        "parameters": _HEADERS,
        "requestBody": {"required": True, "content": body},
        "responses": {"200": whole, **{status: _problem(status) for status in _ANSWER_STATUSES}},
    }


def _look(summary: str, *statuses: str) -> dict[str, Any]:
    told = {"description": "what was asked for", "content": {_JSON: {}}}
    return {"summary": summary, "responses": {"200": told, **{status: _problem(status) for status in statuses}}}


def _problem(status: str) -> dict[str, Any]:
    content = {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {"description": _ANSWER_STATUSES[status], "content": content}
