"""The validator: every field is served or refused by name, and every refusal names field and value."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time

import pytest

from jserve.request import Code, EarlyStopping, GenerateRequest, Message, RequestError, Sampling, SamplingParams
from jserve.sampling import limits
from jserve.sampling.fields import FIELDS, SUPPORTED
from jserve.sampling.limits import ModelLimits
from jserve.sampling.validate import _REFUSED_WITH_BEAMS, generation_defaults, resolve, truncate_prompt, validate_request

SMOL = ModelLimits(
    context_length=8192, vocab_size=49152, eos_token_ids=(2,), encode_word=lambda word: [1000 + ord(one) for one in word]
)
NAN, INF = float("nan"), float("inf")
FLOAT_FIELDS = [field.name for field in dataclasses.fields(SamplingParams) if "float" in field.type]
INT_FIELDS = [field.name for field in dataclasses.fields(SamplingParams) if field.type == "int | None"]
BOOL_FIELDS = [field.name for field in dataclasses.fields(SamplingParams) if field.type == "bool | None"]

# One value a field that asks for something; a field added to SamplingParams must get one here.
EFFECTIVE = {
    "n": 2, "best_of": 2, "beam_width": 4, "length_penalty": 0.5, "early_stopping": EarlyStopping.FIRST,
    "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 7, "max_tokens": 9, "min_tokens": 3,
    "stop": ("x",), "stop_token_ids": (5,), "include_stop_str_in_output": True, "ignore_eos": True,
    "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {5: 1.0},
    "allowed_token_ids": (5,), "bad_words": ("x",), "logprobs": 3, "prompt_logprobs": 3, "skip_special_tokens": False,
    "truncate_prompt_tokens": 4, "json_schema": "{}", "json_object": True, "regex": "a+", "grammar": "start: 'a'",
    "choice": ("a", "b"),
}


def refusal(num_prompt_tokens: int = 10, model: ModelLimits = SMOL, **params) -> RequestError:
    with pytest.raises(RequestError) as caught:
        resolve(SamplingParams(**params), model, num_prompt_tokens)
    assert caught.value.code is Code.INVALID_ARGUMENT
    return caught.value


def resolved(num_prompt_tokens: int = 10, model: ModelLimits = SMOL, **params) -> Sampling:
    return resolve(SamplingParams(**params), model, num_prompt_tokens)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_every_field_is_served_or_refused_by_name(name):
    base = {"beam_width": 2} if name in ("beam_width", "length_penalty", "early_stopping") else {"seed": 1}
    base |= {"stop": ("x",)} if name == "include_stop_str_in_output" else {}
    plain = dataclasses.asdict(resolved(**base))
    if SUPPORTED[name]:
        changed = dataclasses.asdict(resolved(**{**base, name: EFFECTIVE[name]}))
        # truncate_prompt_tokens shows in how much room is left, every other field in its own value.
        assert changed != plain
    else:
        error = refusal(**{name: EFFECTIVE[name]})
        assert error.field == f"sampling_params.{name}" and "not supported" in error.message and name in error.message
        neutral = FIELDS[name].neutral
        if neutral is not None:
            neutral = {} if name == "logit_bias" else neutral
            assert dataclasses.asdict(resolved(seed=1, **{name: neutral})) == plain


def test_the_table_lists_exactly_the_fields():
    assert set(FIELDS) == set(SUPPORTED) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("name", FLOAT_FIELDS)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e308, -1e308, 10**400, "NaN", "0.5", True, [0.5]])
def test_float_fields_refuse_what_is_no_finite_number(name, value):
    error = refusal(**{name: {5: value} if name == "logit_bias" else value})
    assert error.field.startswith(f"sampling_params.{name}")
    assert len(error.message) < 300 and error.message.encode()


@pytest.mark.parametrize("name, value, served", [
    ("temperature", -0.0, 0.0), ("temperature", -1, None), ("temperature", 1e-45, 0.01), ("temperature", 0.005, 0.01),
    ("temperature", 0.01, 0.01), ("temperature", 1, 1.0), ("temperature", 0, 0.0),
    ("top_p", -0.0, None), ("top_p", 0, None), ("top_p", -1, None), ("top_p", 1.0001, None), ("top_p", 1, 1.0),
    ("top_p", 1e-45, 1e-45), ("min_p", -0.0, 0.0), ("min_p", -1, None), ("min_p", 1e-45, 1e-45), ("min_p", 1, 1.0),
    ("min_p", 1.01, None),
    ("top_k", -1, 0), ("top_k", 0, 0), ("top_k", 1, 1), ("top_k", -2, None), ("top_k", 49151, 49151),
    ("top_k", 49152, 0), ("top_k", 2**40, 0), ("top_k", 40.0, None), ("top_k", True, None),
    ("seed", 2**63 - 1, 2**63 - 1), ("seed", -(2**63), -(2**63)), ("seed", -1, -1), ("seed", 2**63, None),
    ("seed", 10**400, None), ("seed", 1.0, None), ("seed", False, None),
    ("logprobs", 0, 0), ("logprobs", 20, 20), ("logprobs", 21, None), ("logprobs", -1, None),
    ("logprobs", 50000, None), ("logprobs", True, None),
    ("prompt_logprobs", 0, 0), ("prompt_logprobs", 20, 20), ("prompt_logprobs", 21, None),
    ("prompt_logprobs", -1, None),
    ("max_tokens", -1, None), ("max_tokens", 1.5, None), ("max_tokens", 0, 0), ("min_tokens", -1, None),
    ("stop", ["a", "b"], ("a", "b")), ("stop", "ab", ("ab",)), ("stop", [""], None), ("stop", "", None),
    ("stop", [1], None), ("stop", ["\ud800"], None), ("stop", ["x"] * 65, None), ("stop", ["x"] * 10**5, None),
    ("stop", ["x" * 1024], ("x" * 1024,)), ("stop", ["x" * 1025], None), ("stop", b"x", None),
    ("stop_token_ids", [49151], frozenset([49151])), ("stop_token_ids", [49152], None), ("stop_token_ids", [-1], None),
    ("stop_token_ids", [2**40], None), ("stop_token_ids", [1.0], None), ("stop_token_ids", list(range(49)), None),
    ("stop_token_ids", "12", None), ("ignore_eos", 1, None), ("skip_special_tokens", "true", None),
])
def test_edge_values_of_served_fields(name, value, served):
    if served is None:
        error = refusal(**{name: value})
        assert error.field.startswith(f"sampling_params.{name}")
    else:
        assert getattr(resolved(**{name: value}), name) == served


@pytest.mark.parametrize("name", INT_FIELDS)
def test_int_fields_refuse_bools_floats_and_strings(name):
    for value in (True, 1.0, "1", [1]):
        assert "must be an integer" in refusal(**{name: value}).message


@pytest.mark.parametrize("name", BOOL_FIELDS)
def test_bool_fields_refuse_numbers_and_strings(name):
    for value in (1, 0, "true"):
        assert "must be true or false" in refusal(**{name: value}).message


@pytest.mark.parametrize("params", [
    {"n": 0}, {"n": -1}, {"n": 2**31}, {"n": 10**6}, {"best_of": 10**6}, {"beam_width": 0},
    {"logit_bias": {49152: 5}}, {"logit_bias": {-1: 5}}, {"logit_bias": {2**31: 1}}, {"logit_bias": {0: NAN}},
    {"logit_bias": {0: 1e9}}, {"logit_bias": {"a": 1}}, {"logit_bias": [1]}, {"allowed_token_ids": [-1]},
    {"bad_words": [""]}, {"bad_words": "word"}, {"early_stopping": True}, {"choice": ["a"] * 2000},
])
def test_fields_to_come_are_already_checked(params):
    (name,) = params
    assert refusal(**params).field.startswith(f"sampling_params.{name}")


@pytest.mark.parametrize("name, listed", [
    ("stop_token_ids", lambda token_id: [1, token_id]),
    ("allowed_token_ids", lambda token_id: [1, token_id]),
    ("logit_bias", lambda token_id: {1: 0.0, token_id: 1.0}),
])
@pytest.mark.parametrize("token_id", [49152, -1, 2**31, 2**40])
def test_every_list_of_ids_refuses_those_outside_the_vocabulary(name, listed, token_id):
    error = refusal(**{name: listed(token_id)})
    assert error.field.startswith(f"sampling_params.{name}") and str(token_id) in error.message
    assert "vocabulary" in error.message


def test_every_field_with_ids_is_checked_against_the_vocabulary():
    with_ids = {name for name, rule in FIELDS.items() if rule.token_ids is not None}
    assert with_ids == {name for name in FIELDS if "token_ids" in name or name == "logit_bias"}


def test_defaults_of_an_empty_request():
    sampling = resolved()
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.max_tokens, sampling.min_tokens) == (8182, 0)
    assert sampling.eos_token_ids == {2} and sampling.banned_below_min_tokens == ()
    assert sampling.skip_special_tokens and not sampling.include_stop_str_in_output
    assert sampling.logprobs is None and sampling.prompt_logprobs is None


def test_an_unset_seed_is_drawn_anew_each_time():
    seeds = {resolved().seed for _ in range(50)}
    assert len(seeds) == 50 and all(-(2**63) <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("length", [16, 8192])
def test_the_edge_of_the_context(length):
    model = dataclasses.replace(SMOL, context_length=length)
    for asked in (1, 2, None):
        assert resolved(length - 1, model, max_tokens=asked).max_tokens == 1
        error = refusal(length, model, max_tokens=asked)
        assert error.field == "prompt"
        numbers = [str(length), "unset" if asked is None else str(asked), f"context of {length}"]
        assert all(number in error.message for number in numbers)
    assert resolved(length, model, max_tokens=0, prompt_logprobs=1).max_tokens == 0
    refusal(length + 1, model, max_tokens=0)
    assert resolved(length + 100, model, truncate_prompt_tokens=length - 3).max_tokens == 3


def test_a_prompt_larger_than_the_pool_is_refused_with_the_numbers():
    model = dataclasses.replace(SMOL, max_pool_tokens=32)
    message = refusal(40, model).message
    assert "40 tokens" in message and "32 tokens" in message
    # 28 places taken, 4 left, and the last token needs none.
    assert resolved(28, model, max_tokens=20).max_tokens == 5


def test_min_tokens_masks_every_eos_and_stop_id():
    model = dataclasses.replace(SMOL, eos_token_ids=(2, 0))
    assert resolved(model=model, min_tokens=4, stop_token_ids=[7]).banned_below_min_tokens == (0, 2, 7)
    assert resolved(model=model, stop_token_ids=[7]).banned_below_min_tokens == ()
    ignoring = resolved(model=model, min_tokens=4, stop_token_ids=[7], ignore_eos=True)
    assert ignoring.banned_below_min_tokens == (0, 2, 7) and ignoring.eos_token_ids == frozenset()


def test_min_tokens_that_cannot_be_met_is_refused():
    assert "max_tokens (3)" in refusal(min_tokens=4, max_tokens=3).message
    assert resolved(min_tokens=3, max_tokens=3).min_tokens == 3
    assert "only 2 tokens" in refusal(8190, min_tokens=3).message
    tiny = ModelLimits(context_length=64, vocab_size=4, eos_token_ids=(3,), num_real_tokens=4)
    assert "no token" in refusal(model=tiny, min_tokens=1, stop_token_ids=[0, 1, 2]).message
    assert resolved(model=tiny, min_tokens=1, stop_token_ids=[0, 2]).banned_below_min_tokens == (0, 2, 3)
    padded = dataclasses.replace(tiny, vocab_size=8)
    assert "no token" in refusal(model=padded, min_tokens=1, stop_token_ids=[0, 1, 2]).message


def test_generation_config_fills_unset_fields_only():
    config = {"do_sample": False, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 7}
    defaults = generation_defaults(config)
    assert defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    model = dataclasses.replace(SMOL, generation_defaults=defaults)
    sampling = resolved(model=model, temperature=0, top_k=0)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 0, 0.95)
    assert resolved(model=model).top_k == 20


def test_do_sample_false_alone_leaves_the_temperature_at_one():
    model = dataclasses.replace(SMOL, generation_defaults=generation_defaults({"do_sample": False}))
    assert resolved(model=model).temperature == 1.0


def test_a_bad_generation_config_is_named():
    with pytest.raises(ValueError, match="generation_config.top_p = 2"):
        generation_defaults({"top_p": 2})


def test_a_model_may_set_the_repetition_penalty():
    model = dataclasses.replace(SMOL, generation_defaults=generation_defaults({"repetition_penalty": 1.05}))
    assert resolved(model=model).repetition_penalty == 1.05
    assert resolved(model=model, repetition_penalty=1.0).repetition_penalty == 1.0


@pytest.mark.parametrize("params, field", [
    (dict(allowed_token_ids=[2], min_tokens=1), "allowed_token_ids"),
    (dict(allowed_token_ids=[7, 8], min_tokens=1, stop_token_ids=[7, 8]), "allowed_token_ids"),
    (dict(allowed_token_ids=[1097], bad_words=["bba"]), "allowed_token_ids"),
])
def test_masks_that_leave_no_token_are_refused(params, field):
    assert refusal(**params).field == f"sampling_params.{field}"


def test_bad_words_are_spelled_at_the_start_and_after_a_blank():
    vocabulary = {"word": [5, 6], " word": [7], "blank": [8], " blank": [9, 8]}
    model = dataclasses.replace(SMOL, encode_word=lambda word: vocabulary.get(word, []))
    assert resolved(model=model, bad_words=["word", " blank", "word"]).bad_words == ((5, 6), (7,), (8,))
    assert refusal(model=model, bad_words=["word", "unheard"]).field == "sampling_params.bad_words[1]"


def test_truncation_keeps_the_last_tokens():
    assert truncate_prompt(SamplingParams(truncate_prompt_tokens=2), [1, 2, 3]) == [2, 3]
    assert truncate_prompt(SamplingParams(truncate_prompt_tokens=9), [1, 2, 3]) == [1, 2, 3]
    assert truncate_prompt(SamplingParams(), [1, 2, 3]) == [1, 2, 3]
    for keep in (0, -1, True, "1"):
        with pytest.raises(RequestError):
            truncate_prompt(SamplingParams(truncate_prompt_tokens=keep), [1, 2, 3])


@pytest.mark.parametrize("request_fields, field, shown", [
    ({}, "prompt", "unset"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "prompt", "prompt and prompt_token_ids"),
    ({"prompt": 5}, "prompt", "5"),
    ({"prompt": "a\ud800"}, "prompt", "character 1"),
    ({"prompt_token_ids": []}, "prompt_token_ids", "empty"),
    ({"prompt_token_ids": "12"}, "prompt_token_ids", "list"),
    ({"prompt_token_ids": [1, 49152]}, "prompt_token_ids[1]", "49152"),
    ({"prompt_token_ids": [-1]}, "prompt_token_ids[0]", "-1"),
    ({"prompt_token_ids": [1, 1, 2**40]}, "prompt_token_ids[2]", str(2**40)),
    ({"prompt_token_ids": [1, True]}, "prompt_token_ids[1]", "True"),
    ({"prompt_token_ids": [1.0]}, "prompt_token_ids[0]", "1.0"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "Message"),
    ({"messages": [Message("", "hi")]}, "messages[0].role", "empty"),
    ({"messages": [Message("user", None)]}, "messages[0].content", "None"),
    ({"messages": [Message("user", "x", name=5)]}, "messages[0].name", "5"),
    ({"messages": [Message("tool", "x", tool_call_id="\ud800")]}, "messages[0].tool_call_id", "character 0"),
    ({"messages": [Message("assistant", "x", tool_calls={"a": 1})]}, "messages[0].tool_calls", "list"),
    ({"messages": [Message("assistant", "x", tool_calls=["f"])]}, "messages[0].tool_calls[0]", "object"),
    ({"messages": [Message("user", "x")], "tools": "f"}, "tools", "list"),
    ({"messages": [Message("user", "x")], "tools": [5]}, "tools[0]", "5"),
    ({"prompt": "x", "tools": []}, "tools", "without messages"),
    ({"prompt": "a", "request_id": ""}, "request_id", "empty"),
    ({"prompt": "a", "request_id": "a b"}, "request_id", "a b"),
    ({"prompt": "a", "request_id": "a\n"}, "request_id", "a"),
    ({"prompt": "a", "request_id": "x" * 257}, "request_id", "257"),
    ({"prompt": "a", "lora_name": "sql"}, "lora_name", "sql"),
    ({"prompt": "a", "lora_name": ""}, "lora_name", "''"),
    ({"prompt": "a", "priority": 2**31}, "priority", str(2**31)),
    ({"prompt": "a", "priority": 0.5}, "priority", "0.5"),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt", "empty"),
    ({"prompt": "a", "cache_salt": "x" * 257}, "cache_salt", "257"),
    ({"prompt": "a", "bypass_prefix_cache": 1}, "bypass_prefix_cache", "1"),
    ({"prompt": "a", "sampling_params": {}}, "sampling_params", "{}"),
    ({"prompt": "a", "sampling_params": SamplingParams(top_p=7)}, "sampling_params.top_p", "7"),
])
def test_requests_that_are_refused_before_tokenising(request_fields, field, shown):
    with pytest.raises(RequestError) as caught:
        validate_request(GenerateRequest(**request_fields), SMOL)
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.field == field and shown in caught.value.message


@pytest.mark.parametrize("request_fields", [
    {"prompt": "hello"}, {"prompt_token_ids": [0, 49151]}, {"messages": [Message("user", "<|im_end|>")]},
    {"prompt": "a", "request_id": "cmpl-1/2:3", "priority": -(2**31), "cache_salt": "tenant"},
])
def test_good_requests_pass(request_fields):
    validate_request(GenerateRequest(**request_fields), SMOL)


def test_an_empty_prompt_is_refused_once_it_has_no_tokens():
    validate_request(GenerateRequest(prompt=""), SMOL)
    error = refusal(0)
    assert error.field == "prompt" and "empty prompt" in error.message
    assert resolved(1).max_tokens == 8191  # the BOS that some models add


def test_a_hopelessly_long_text_is_refused_before_it_is_tokenised():
    model = dataclasses.replace(SMOL, max_prompt_characters=10**6)
    for content in ({"prompt": "x" * 10**7}, {"messages": [Message("user", "x" * 10**7)]}):
        with pytest.raises(RequestError, match="10000000 characters"):
            validate_request(GenerateRequest(**content), model)
    truncating = SamplingParams(truncate_prompt_tokens=100)
    validate_request(GenerateRequest(prompt="x" * 10**7, sampling_params=truncating), model)


def test_an_integer_too_long_to_print_is_still_refused():
    assert refusal(seed=10**5000).field == "sampling_params.seed"
    assert refusal(top_p=10**5000).field == "sampling_params.top_p"


def test_refusing_a_huge_list_is_quick():
    start = time.thread_time()
    assert refusal(stop=["x"] * 10**6).message
    assert refusal(stop_token_ids=[1] * 10**6).message
    assert time.thread_time() - start < 0.1


def test_limits_of_a_model_are_checked_themselves():
    for wrong in ({"eos_token_ids": (49152,)}, {"context_length": 0}, {"num_real_tokens": 50000},
                  {"eos_token_ids": tuple(range(limits.MAX_EOS_TOKEN_IDS + 1))}):
        with pytest.raises(ValueError):
            dataclasses.replace(SMOL, **wrong)


def test_the_validator_pulls_in_no_jax():
    code = "import sys, jserve.sampling.validate; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sequences_of_one_request_must_fit_the_pool_together():
    pool = dataclasses.replace(SMOL, max_pool_tokens=80, block_size=16)
    assert resolved(37, pool, n=3).best_of == 3  # 2 full blocks and one each
    error = refusal(37, pool, n=4)
    assert error.field == "sampling_params.n" and "6 KV blocks" in error.message and "has 5" in error.message
    assert refusal(37, pool, n=1, best_of=4).field == "sampling_params.best_of"
    assert refusal(n=3, best_of=2).field == "sampling_params.best_of"


def test_beams_refuse_what_draws_and_what_cannot_be_held():
    for name in _REFUSED_WITH_BEAMS:
        assert refusal(beam_width=3, **{name: EFFECTIVE[name]}).field == f"sampling_params.{name}"
    assert refusal(beam_width=2, n=3).field == "sampling_params.n"
    assert refusal(beam_width=2, max_tokens=0).field == "sampling_params.max_tokens"
    assert refusal(length_penalty=0.5).field == "sampling_params.length_penalty"
    assert refusal(early_stopping=EarlyStopping.FIRST).field == "sampling_params.early_stopping"
    assert refusal(10, dataclasses.replace(SMOL, max_num_seqs=4), beam_width=5).field == "sampling_params.beam_width"
    small = dataclasses.replace(SMOL, max_pool_tokens=80, block_size=16)
    assert refusal(37, small, beam_width=4).field == "sampling_params.beam_width"
    drawn = dataclasses.replace(SMOL, generation_defaults={"temperature": 0.6, "top_k": 40})
    assert (resolved(10, drawn, beam_width=2).temperature, resolved(10, drawn, beam_width=2).top_k) == (0.0, 0)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_an_empty_value_asks_for_nothing_or_is_refused(name):
    """Empty lists and maps; never is one taken for another field's absence without having been looked at."""
    empty = {} if name == "logit_bias" else []
    if name in ("stop", "stop_token_ids", "bad_words", "logit_bias"):
        assert resolved(seed=1, **{name: empty}) == resolved(seed=1)
    else:
        assert refusal(**{name: empty}).field == f"sampling_params.{name}"


def test_fields_that_would_do_nothing_are_refused():
    assert refusal(include_stop_str_in_output=True).field == "sampling_params.include_stop_str_in_output"
    assert resolved(include_stop_str_in_output=True, stop_token_ids=(5,)).include_stop_str_in_output
    assert resolved(length_penalty=1.0).length_penalty == 1.0  # its default may be said


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
def test_nothing_but_the_grammar_ends_structured_output(name):
    assert refusal(regex="a+", **{name: EFFECTIVE[name]}).field == f"sampling_params.{name}"


@pytest.mark.parametrize("field", ["prompt", "prompt_token_ids", "messages"])
def test_a_prompt_without_room_is_refused_by_the_field_that_held_it(field):
    with pytest.raises(RequestError) as caught:
        resolve(SamplingParams(), SMOL, SMOL.context_length, field)
    assert caught.value.field == field and caught.value.message.startswith(field)
