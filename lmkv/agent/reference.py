"""The page at `/docs`: calls and their fields from the OpenAPI document, without scripts or other servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from lmkv.agent.page import source_of

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }
h2 { font: 600 1rem ui-monospace, monospace; margin: 2rem 0 .25rem; border-top: 1px solid #8884; padding-top: 1rem; }
p { margin: .25rem 0; white-space: pre-line; }
table { border-collapse: collapse; margin-top: .5rem; }
td { padding: .1rem 1.5rem .1rem 0; vertical-align: top; }
code { font-family: ui-monospace, monospace; }
"""
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {source_of(STYLE)}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}


def reference(document: Mapping[str, Any]) -> str:
    """The page of an OpenAPI document."""
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>lmkv</title><style>{STYLE}</style>"
    intro = "<h1>lmkv</h1><p>Each call but this page needs the header <code>Authorization: Bearer TOKEN</code>, "
    intro += 'where the server has a token. The same as OpenAPI: <a href="/openapi.json">/openapi.json</a></p>'
    return head + intro + "".join(_calls(document))


def _calls(document: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, call in methods.items():
            yield f"<h2>{escape(f'{method.upper()} {path}')}</h2><p>{escape(call.get('description', ''))}</p>"
            fields = [(each["name"], each["schema"]) for each in call.get("parameters", ())]
            body = call.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            if name := body.get("$ref", "").rpartition("/")[2]:
                schema = document["components"]["schemas"][name]
                yield f"<p>{escape(schema.get('description', ''))}</p>"
                fields += schema["properties"].items()
            if fields:
                yield f"<table>{''.join(_row(*each) for each in fields)}</table>"


def _row(name: str, schema: Mapping[str, Any]) -> str:
    kinds = [each.get("type", "") for each in schema.get("anyOf", [schema])]
    default = schema.get("default")
    shown = "" if default is None else f"default {default}"
    return f"<tr><td><code>{escape(name)}</code><td>{escape(' or '.join(filter(None, kinds)))}<td>{escape(shown)}"
