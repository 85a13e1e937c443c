"""JSON schemas of the bodies, for ``/openapi.json``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

Schema = dict[str, Any]


def schemas(kinds: Iterable[type]) -> dict[str, Schema]:
    """Name -> schema of each kind, as OpenAPI keeps them under ``components``."""
    ordered = sorted(set(kinds), key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    return components


def reference(kind: type) -> Schema:
    """A place where such a body stands."""
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
