"""Structured output through the engine: every completed text is what was asked for, whatever else runs beside it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re

import jsonschema
import pytest

from jserve.request import Code, FinishReason, RequestError
from tests.support.arrivals import force_preemptions
from tests.support.engines import answers, request, run, running_engine, token_ids, wait_idle
from tests.support.json_schemas import random_schema
from tests.support.random_languages import random_language
from tests.support.smollm2 import smollm2_gguf
from tests.support.tiny_models import random_gguf

NUM_SCHEMAS = int(os.environ.get("JSERVE_TEST_SCHEMAS", "30"))
SMALL = dict(kv={"num_blocks": 400, "memory_bytes": None, "block_size": 16}, scheduler={"max_num_seqs": 8})
PROMPT = [(7 * i) % 500 for i in range(20)]
EOS = 510


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = random_gguf(tmp_path_factory.mktemp("model") / "model.gguf", context_length=1024)
    with running_engine(path, **SMALL) as engine:
        yield engine


@pytest.fixture(scope="module")
def smollm2_vocabulary(tmp_path_factory):
    """A tiny engine whose tokens are a real model's: quotes, commas and braces come joined and inside others."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    random_gguf(path, context_length=1024, num_layers=1, tokenizer_from=smollm2_gguf())
    with running_engine(path, **SMALL) as engine:
        yield engine


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.5, "top_p": 0.9}], ids=str)
def test_random_schemas_validate(smollm2_vocabulary, sampling):
    schemas = [random_schema(random.Random(seed)) for seed in range(NUM_SCHEMAS)]
    requests = [
        request(PROMPT, 900, json_schema=json.dumps(schema), seed=seed, **sampling) for seed, schema in enumerate(schemas)
    ]
    num_complete = 0
    for schema, update in zip(schemas, answers(smollm2_vocabulary, requests)):
        [output] = update.outputs
        if output.finish_reason is FinishReason.STOP:
            assert output.matched_stop is None
            jsonschema.validate(json.loads(output.text), schema, format_checker=jsonschema.FormatChecker())
            num_complete += 1
    assert num_complete >= 0.9 * NUM_SCHEMAS


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}], ids=str)
def test_random_regexes_and_grammars_hold(smollm2_vocabulary, sampling):
    languages = [random_language(random.Random(seed)) for seed in range(NUM_SCHEMAS)]
    asked = []
    for seed, (regex, lark) in enumerate(languages):
        field = {"grammar": f"start: {lark}"} if seed % 2 else {"regex": regex}
        asked.append(request(PROMPT, 100, seed=seed, **field, **sampling))
    for (regex, _), update in zip(languages, answers(smollm2_vocabulary, asked)):
        [output] = update.outputs
        assert output.finish_reason is FinishReason.STOP and re.fullmatch(regex, output.text), (regex, output.text)


@pytest.mark.parametrize("pattern", [r"[A-Z]{3}-\d{2,5}", r"(yes|no|maybe){1,3}", r"\{\w{0,4}\}", "\u65e5{2}|caf\u00e9"])
def test_the_whole_output_matches_the_pattern(engine, pattern):
    requests = [request(PROMPT, 60, regex=pattern, temperature=float(seed > 0), seed=seed) for seed in range(4)]
    for update in answers(engine, requests):
        [output] = update.outputs
        assert output.finish_reason is FinishReason.STOP and re.fullmatch(pattern, output.text)


def test_choices_and_grammars(engine):
    choices = ("a", "ab", 'quo"te', "\u65e5\u672c")
    seeds = range(12)
    for update in answers(engine, [request(PROMPT, 20, choice=choices, temperature=3.0, seed=seed) for seed in seeds]):
        assert update.outputs[0].text in choices and update.outputs[0].finish_reason is FinishReason.STOP
    grammar = 'start: "(" start ")" | "x"'
    for update in answers(engine, [request(PROMPT, 80, grammar=grammar, temperature=1.0, seed=seed) for seed in seeds]):
        depth = update.outputs[0].text.count("(")
        if update.outputs[0].finish_reason is FinishReason.STOP:
            assert update.outputs[0].text == "(" * depth + "x" + ")" * depth


def test_streams_of_split_characters_side_by_side_stay_whole(engine):
    """16 streams, each a text of its own whose characters take several tokens; ASCII comes with its token."""
    texts = [chr(start + index) * 3 + f" {index}" for index, start in zip(range(16), [0x1F600, 0x4F60, 0x10F, 0x1F923] * 4)]

    async def stream(text: str):
        pieces, asked = [], request(PROMPT, 40, choice=[text], logprobs=0)  # with logprobs no token is jumped over
        async for update in engine.generate(asked):
            pieces += [(output.token_ids, output.text) for output in update.outputs if output.token_ids]
        return pieces

    async def all_streams():
        return await asyncio.gather(*map(stream, texts))

    for text, pieces in zip(texts, run(all_streams())):
        assert "".join(piece for _, piece in pieces) == text
        for token_ids, piece in pieces:
            spelled = b"".join(engine.tokenizer.token_bytes(token_id) for token_id in token_ids if token_id != EOS)
            assert "\ufffd" not in piece and (not spelled.isascii() or piece == spelled.decode())


def test_any_object_is_json(engine):
    [update] = answers(engine, [request(PROMPT, 600, json_object=True, temperature=0.5, seed=3)])
    if update.outputs[0].finish_reason is FinishReason.STOP:
        assert isinstance(json.loads(update.outputs[0].text), dict)
    assert update.outputs[0].text.startswith("{")


@pytest.mark.parametrize("preempts", [False, True])
def test_neighbours_with_and_without_grammar_get_what_they_get_alone(engine, preempts):
    rng = random.Random(1)
    schema = json.dumps(random_schema(rng))
    mixed = []
    for seed in range(14):
        kind = [{}, {"regex": "[a-z]{20}"}, {"json_schema": schema}, {"presence_penalty": 1.0}][seed % 4]
        ends = {} if kind.keys() & {"regex", "json_schema"} else {"ignore_eos": True}
        mixed.append(request(PROMPT[seed:] + [seed], 30, temperature=float(seed % 3 > 0), seed=seed, **kind, **ends))
    alone = [token_ids(answers(engine, [one])[0]) for one in mixed]
    check = engine._loop.on_step
    try:
        if preempts:
            force_preemptions(engine)
        together = [token_ids(update) for update in answers(engine, mixed)]
        wait_idle(engine)
    finally:
        engine._loop.on_step = check
    assert together == alone


def test_logprobs_are_the_models_own_and_penalties_go_with_a_grammar(engine):
    asked = request(PROMPT, 30, regex="[ab]{24}", logprobs=1, presence_penalty=2.0, frequency_penalty=2.0)
    [update] = answers(engine, [asked])
    entries = update.outputs[0].logprobs
    assert len(entries) == len(token_ids(update)) and all(entry.chosen.logprob < 0 for entry in entries)
    assert any(entry.top[0].token_id != entry.chosen.token_id for entry in entries)  # the model wanted something else
    assert set(update.outputs[0].text) == {"a", "b"}


def test_several_outputs_have_grammars_of_their_own(engine):
    [update] = answers(engine, [request(PROMPT, 40, regex="[0-9]{5,30}", n=4, temperature=2.0, seed=1)])
    texts = [output.text for output in update.outputs]
    assert len(texts) == 4 and len(set(texts)) > 1 and all(re.fullmatch("[0-9]{5,30}", text) for text in texts)


def test_what_a_grammar_cannot_be_combined_with_is_refused(engine):
    for params, field in (
        (dict(regex="a", choice=("b",)), "choice"), (dict(regex="a", min_tokens=2), "min_tokens"),
        (dict(regex="a", ignore_eos=True), "ignore_eos"), (dict(regex="a", bad_words=["b"]), "bad_words"),
        (dict(json_object=True, allowed_token_ids=[5]), "allowed_token_ids"), (dict(regex="[a"), "regex"),
    ):
        with pytest.raises(RequestError) as caught:
            run(engine.generate_all(request(PROMPT, 5, **params)))
        assert caught.value.code is Code.INVALID_ARGUMENT and caught.value.field == f"sampling_params.{field}"
