"""Grammars over a real tokenizer: what is refused, where it says it fails, how long that takes, what a matcher allows."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from jserve.grammar import GrammarCompiler
from jserve.request import Code, RequestError, StructuredOutput
from jserve.tokenizer import from_gguf
from jserve.weights.gguf import read_gguf
from tests.support.smollm2 import smollm2_gguf

EOS = 2


@pytest.fixture(scope="module")
def tokenizer():
    return from_gguf(read_gguf(smollm2_gguf()).fields)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, (EOS,))


def allowed(matcher, tokenizer) -> np.ndarray:
    row = np.full(-(-tokenizer.vocab_size // 32) + 1, -1, np.int32)  # one word of padding rows
    matcher.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def follows(compiler, tokenizer, asked: StructuredOutput, text: str) -> bool:
    """Whether the grammar accepts the whole text and may then end."""
    matcher = compiler.compile(asked).start()
    for token_id in tokenizer.encode(text, add_special=False):
        if token_id not in allowed(matcher, tokenizer) or not matcher.consume([token_id]):
            return False
    return EOS in allowed(matcher, tokenizer)


PERSON = json.dumps({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                     "required": ["name", "age"], "additionalProperties": False})


@pytest.mark.parametrize("field, value, text, fits", [
    ("json_schema", PERSON, '{"name": "Ada", "age": 36}', True),
    ("json_schema", PERSON, '{\n  "name": "Ada",\n  "age": 36\n}', True),
    ("json_schema", PERSON, '{"name": "Ada"}', False),
    ("json_schema", PERSON, '{"name": "Ada",' + 40 * " " + '"age": 36}', False),  # blanks have an end
    ("json_object", True, '{"a": [1, {"b": null}]}', True),
    ("json_object", True, "[1]", False),
    ("regex", r"\d{3}-[a-c]+", "123-abc", True),
    ("regex", r"\d{3}-[a-c]+", "x123-abc", False),  # the whole output, not a part of it
    ("choice", ("yes", 'n\u00e9"\\\n', "\u65e5\u672c"), 'n\u00e9"\\\n', True),
    ("choice", ("yes", 'n\u00e9"\\\n', "\u65e5\u672c"), "\u65e5\u672c", True),
    ("choice", ("yes", "no"), "yesno", False),
    ("grammar", 'start: "a" start "b" | "c"', "aacbb", True),
    ("grammar", 'start: "a" start "b" | "c"', "aacb", False),
    ("grammar", 'root ::= "x" [0-9]+', "x42", True),
], ids=range(14))
def test_a_matcher_accepts_what_the_grammar_says(compiler, tokenizer, field, value, text, fits):
    assert follows(compiler, tokenizer, StructuredOutput(field, value), text) == fits


@pytest.mark.parametrize("field, value, place", [
    ("json_schema", '{"type": ', "line 1 column 10"),
    ("json_schema", "5", "object or a boolean"),
    ("json_schema", '{"type": "objekt"}', "#/type"),
    ("json_schema", '{"items": [{}, {"type": "integer", "minimun": 3}]}', "#/items/1/minimun; did you mean minimum?"),
    ("json_schema", '{"$defs": {"a~b": {"nullable": true}}}', "#/$defs/a~0b/nullable"),
    ("json_schema", '{"properties": {"a/b": {"type": "array", "contains": {}}}}', "#/properties/a~1b/contains"),
    ("json_schema", '{"x-guidance": {"lenient": true}, "type": "array", "uniqueItems": true}', "#/uniqueItems"),
    ("json_schema", '{"$defs": {"a": {"nullable": true}}}', 'JSON Schema says "type": [..., "null"]'),
    ("json_schema", '{"properties": {"a": {"items": {"oneOf": [{"type": "string", "pattern": "a.*"}, {"type": "string"}]}}}}',
     "#/properties/a/items/oneOf"),
    ("json_schema", '{"properties": {"a": {}, "b": {"$ref": "http://example.com/x"}}}', "fetch resources at #/properties/b/$ref"),
    ("json_schema", '{"properties": {"b": {"$ref": "#/$defs/none"}}, "$defs": {"a": {}}}', "#/properties/b/$ref"),
    ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{}, {"type": "strin"}]}}}', 
     "strin at #/$defs/a/anyOf/1/type"),
    ("json_schema", '{"properties": {"a": {"type": "string", "pattern": "ab(?=c)d"}}}',
     "#/properties/a/pattern, at character 3"),
    ("json_schema", '{"properties": {"a": {"type": "number", "minimum": "3"}}}', "#/properties/a/minimum"),
    ("json_schema", '{"properties": {"a": {"type": "number", "multipleOf": 0}}}', "#/properties/a/multipleOf"),
    ("json_schema", '{"properties": {"default": {"uniqueItems": true}}, "default": {"contains": 1}}',
     "#/properties/default/uniqueItems"),
    ("json_schema", "false", "false"),
    ("json_schema", '{"$ref": "#"}', "no text"),
    ("json_schema", '{"type": "array", "items": ' * 500 + "{}" + "}" * 500, "recursion"),
    ("regex", "x[a-z", "unclosed character class at character 2"),
    ("regex", "a/\n\u00e9(?=a)b", "is not supported at character 5"),
    ("regex", r"(a)\1", "backreferences are not supported at character 4"),
    ("regex", r"ab\bc", r"\b is not supported at character 3"),
    ("grammar", "start: foo", "1(8)"),
    ("grammar", 'start: "a" /b(?!c)/', "is not supported at character 2 of the regex"),
    ("grammar", 'root ::= b\nb ::= "x" item', "Rule 'item' not found at line 2 column 11"),
    ("grammar", 'start: "a', "1(10)"),
    ("regex", "(a?){500}a{500}", "too much work"),
], ids=range(28))
def test_a_refusal_names_field_and_place(compiler, field, value, place):
    began = time.process_time()
    with pytest.raises(RequestError) as caught:
        compiler.compile(StructuredOutput(field, value))
    assert caught.value.code is Code.INVALID_ARGUMENT and caught.value.field == f"sampling_params.{field}"
    assert place in caught.value.message and len(caught.value.message) < 600
    assert time.process_time() - began < 1


def wide(depth: int) -> dict:
    inner = {"type": "string"} if depth == 0 else wide(depth - 1)
    return {"type": "object", "properties": {f"k{i}": inner for i in range(8)}}


EXPLODING = {
    "a million properties": ("json_schema", json.dumps(wide(5))),
    "products of unions": ("json_schema", json.dumps({"allOf": [
        {"anyOf": [{"type": "object", "properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(6)]} for i in range(8)
    ]})),
    "nested repetitions": ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "a set of positions": ("regex", "(a|b)*a(a|b){2000}"),
    "a pattern in an array": ("json_schema", json.dumps({
        "type": "array", "maxItems": 10**8, "items": {"type": "string", "pattern": "(a|b)*a(a|b){1000}"}})),
    "ambiguity": ("grammar", "start: start start | \"a\" | "),
}


@pytest.mark.parametrize("name", EXPLODING)
def test_what_would_explode_is_bounded(compiler, tokenizer, name):
    """Refused, or followed with little work a token, or given up with a word why."""
    began = time.process_time()
    try:
        matcher = compiler.compile(StructuredOutput(*EXPLODING[name])).start()
    except RequestError as error:
        assert error.code is Code.INVALID_ARGUMENT
    else:
        for _ in range(20):
            ids = allowed(matcher, tokenizer)
            if matcher.error is not None:
                assert len(matcher.error) > 5
                break
            matcher.consume([int(ids[-1])])
    assert time.process_time() - began < 1


@pytest.mark.parametrize("field, value, why", [
    ("regex", r"a[^\s\S]", "no text satisfies it"),
    ("grammar", r'start: "a" /[^\s\S]/', "no text satisfies it"),
    ("grammar", "start: start", "no text satisfies it"),
    ("grammar", r'start: ((/[\w-]/){1,5} | ("a" "a" "é")){2,2}', "needs too much work a token"),
    ("grammar", 'start: "a" x\nx: "b" x', "needs too much work a token"),
])
def test_what_nothing_satisfies_is_told_from_what_is_too_much_work(compiler, field, value, why):
    with pytest.raises(RequestError, match=why):
        compiler.compile(StructuredOutput(field, value))


def test_where_nothing_can_follow_the_output_ends_with_a_word_why(compiler, tokenizer):
    matcher = compiler.compile(StructuredOutput("grammar", r'start: /[0-9]{40}/ /[^\s\S]/ | "a"')).start()
    for _ in range(40):
        assert matcher.error is None
        matcher.consume(tokenizer.encode("7", add_special=False))
    allowed(matcher, tokenizer)
    assert matcher.error == "no text that satisfies it goes on from there"


def test_a_compiled_grammar_is_kept(compiler):
    asked = StructuredOutput("json_schema", PERSON)
    assert compiler.compile(asked) is compiler.compile(StructuredOutput("json_schema", PERSON))


def test_outputs_of_one_grammar_are_apart(compiler, tokenizer):
    grammar = compiler.compile(StructuredOutput("choice", ("yes", "no")))
    first, second = grammar.start(), grammar.start()
    first.consume(tokenizer.encode("yes", add_special=False))
    assert allowed(first, tokenizer).tolist() == [EOS] and EOS not in allowed(second, tokenizer)
    assert not second.consume(tokenizer.encode("maybe", add_special=False)) and "grammar" in second.error


def test_a_model_without_eos_cannot_end_an_output(tokenizer):
    with pytest.raises(RequestError, match="no EOS"):
        GrammarCompiler(tokenizer, ()).compile(StructuredOutput("regex", "a+"))


def test_annotations_and_names_of_properties_are_no_keywords(compiler):
    schema = {"title": "t", "x-order": 1, "$comment": "c", "type": "object", "default": {"minimun": 1},
              "properties": {"minimun": {"const": {"nullable": True}}, "enum": {"enum": [{"a": 1}]}}}
    compiler.compile(StructuredOutput("json_schema", json.dumps(schema)))


def test_keywords_that_ask_for_nothing_are_taken_where_they_could_not_be_kept(compiler, tokenizer):
    schema = {"type": "array", "uniqueItems": False, "unevaluatedItems": True, "items": {
        "type": "object", "propertyNames": {}, "dependentRequired": {}, "nullable": False, "additionalProperties": False}}
    asked = StructuredOutput("json_schema", json.dumps(schema))
    assert follows(compiler, tokenizer, asked, "[{},{}]") and not follows(compiler, tokenizer, asked, "[null]")


def test_formats_that_json_schema_does_not_define_bind_nothing(compiler):
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": "binary"}, "key": {
        "anyOf": [{"type": "string", "format": "password"}, {"type": "string", "format": "ipvanyaddress"}]}},
        "errorMessage": "no", "strict": True}  # fmt: skip
    compiler.compile(StructuredOutput("json_schema", json.dumps(schema)))


def test_formats_that_json_schema_defines_are_kept_or_refused_with_their_place(compiler, tokenizer):
    date = compiler.compile(StructuredOutput("json_schema", '{"type": "string", "format": "date"}')).start()
    assert not date.consume(tokenizer.encode('"no date"', add_special=False))
    schema = json.dumps({"properties": {"where": {"type": "string", "format": "uri-reference"}}})
    with pytest.raises(RequestError, match="'uri-reference' at #/properties/where/format"):
        compiler.compile(StructuredOutput("json_schema", schema))
    with pytest.raises(RequestError, match="json_schema"):
        compiler.compile(StructuredOutput("json_schema", '{"type": "string", "format": {}}'))
