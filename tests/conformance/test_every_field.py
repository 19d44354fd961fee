"""Every field of the proto's SamplingParams has a conformance test, and capabilities say what is served."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from jserve.proto_gen import sampling_pb2

pytestmark = pytest.mark.xdist_group("conformance")

FIELDS = [field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields]


def test_every_field_has_a_conformance_test():
    assert marked_fields() == set(FIELDS)


def marked_fields() -> set[str]:
    """The fields named by @conforms(...) on the tests beside this file."""
    marks = [
        mark
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        for mark in node.decorator_list
    ]
    return {
        argument.value
        for mark in marks
        if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "conforms"
        for argument in mark.args
    }


def test_capabilities_list_every_field_as_served(client):
    capabilities = dict(client.model_info().capabilities)
    assert capabilities.pop("deterministic") is False  # no field: what the server was started with
    assert capabilities == dict.fromkeys(FIELDS, True)
