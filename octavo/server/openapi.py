"""The API described by its own records: /openapi.json, and /docs to read it.

The page is one file without anything from outside. Not for: checking requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from octavo import __version__
from octavo.server.errors import json_response
from octavo.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ResponsesRequest,
    ScoreRequest,
    TokenizeRequest,
)

BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/score": ScoreRequest,
    "/v1/rerank": RerankRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
REFERENCE = "#/components/schemas/{name}"

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "integer"},
            },
        }
    },
}


def document(operations: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """An OpenAPI 3.1 document. `operations`: path to method to its one-sentence summary."""
    _, components = msgspec.json.schema_components(BODIES.values(), ref_template=REFERENCE)
    components["Error"] = ERROR_SCHEMA
    paths = {
        path: {method: _operation(path, summary) for method, summary in methods.items()}
        for path, methods in operations.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(path: str, summary: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": REFERENCE.format(name="Error")}}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer."},
            "4XX": {"description": "The request cannot be served.", "content": error},
            "5XX": {"description": "The server cannot serve it now.", "content": error},
        },
    }
    if path in BODIES:
        reference = {"$ref": REFERENCE.format(name=BODIES[path].__name__)}
        content = {"application/json": {"schema": reference}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


async def openapi_json(request: Request) -> Response:
    """The OpenAPI document."""
    return json_response(request.app.state.openapi)


async def docs(request: Request) -> Response:
    """A page to read it."""
    return HTMLResponse(PAGE)


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Octavo API</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; padding: .4rem 0; border-top: 1px solid #8884; }
code, .method { font-family: ui-monospace, monospace; }
.method { display: inline-block; min-width: 4rem; font-weight: 600; text-transform: uppercase; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
td { border-top: 1px solid #8883; padding: .25rem .5rem; vertical-align: top; }
.what { color: #777; }
</style></head><body>
<h1>Octavo API</h1><p id="about">Reading the description &hellip;</p><div id="paths"></div>
<script>
const make = (tag, text, cls) => {
  const e = document.createElement(tag); e.textContent = text; if (cls) e.className = cls; return e;
};
const kind = (s) => (s.anyOf || [s]).map(
  (x) => x.enum ? x.enum.join(" | ") : x.type || (x.$ref || "any").split("/").pop()
).join(" or ");
fetch("openapi.json").then((r) => r.json()).then((api) => {
  document.getElementById("about").textContent = "Version " + api.info.version +
    ". Unknown fields are refused. A field that is null is unset.";
  const all = document.getElementById("paths");
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, op] of Object.entries(methods)) {
      const box = document.createElement("details"), line = document.createElement("summary");
      line.append(make("span", method, "method"), make("code", path),
        make("span", "  " + op.summary, "what"));
      box.append(line);
      if (op.requestBody) {
        const ref = op.requestBody.content["application/json"].schema.$ref.split("/").pop();
        const schema = api.components.schemas[ref], table = document.createElement("table");
        for (const [name, s] of Object.entries(schema.properties)) {
          const row = document.createElement("tr"), cell = document.createElement("td");
          cell.append(make("code", name));
          const need = (schema.required || []).includes(name) ? "required, " : "";
          row.append(cell, make("td", need + kind(s)), make("td", s.description || ""));
          table.append(row);
        }
        box.append(table);
      }
      all.append(box);
    }
}).catch((e) => { document.getElementById("about").textContent = "Cannot be read: " + e; });
</script></body></html>
"""
