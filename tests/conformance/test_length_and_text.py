"""Fields that decide how long an output is, when it ends, and what of it is shown as text."""

from __future__ import annotations

import pytest

from jserve.request import Code, FinishReason, GenerateRequest, Message, RequestError, SamplingParams
from tests.support.conformance import PROMPT, alone, conforms, ids, only

pytestmark = pytest.mark.xdist_group("conformance")

EOS = 2
ALWAYS_EOS = {"logit_bias": {EOS: 100.0}}


@conforms("max_tokens")
def test_max_tokens(ask):
    for count in (1, 3):
        update = ask(max_tokens=count)
        assert len(ids(update)) == update.usage.completion_tokens == count
        assert only(update).finish_reason is FinishReason.LENGTH
    assert ask(max_tokens=0, prompt_logprobs=0).usage.completion_tokens == 0


@conforms("min_tokens")
def test_min_tokens(ask):
    assert ids(ask(**ALWAYS_EOS)) == [EOS]
    held_back = ask(**ALWAYS_EOS, min_tokens=4)
    assert ids(held_back).index(EOS) == 4 and only(held_back).finish_reason is FinishReason.STOP


@conforms("ignore_eos")
def test_ignore_eos(ask):
    update = ask(**ALWAYS_EOS, ignore_eos=True, max_tokens=5)
    assert ids(update) == [EOS] * 5 and only(update).finish_reason is FinishReason.LENGTH


@conforms("stop")
def test_stop(ask):
    text = only(ask()).text
    stop = text[6:9]
    stopped = only(ask(stop=["no such text", stop]))
    assert stopped.text == text[: text.index(stop)]
    assert (stopped.finish_reason, stopped.matched_stop) == (FinishReason.STOP, stop)


@conforms("stop_token_ids")
def test_stop_token_ids(ask):
    plain = ids(ask())
    stop = plain[3]
    stopped = ask(stop_token_ids=[stop])
    assert ids(stopped) == plain[: plain.index(stop) + 1] and only(stopped).matched_stop == stop


@conforms("include_stop_str_in_output")
def test_include_stop_str_in_output(ask):
    text = only(ask()).text
    stop = text[6:9]
    assert only(ask(stop=[stop], include_stop_str_in_output=True)).text == text[: text.index(stop)] + stop


@conforms("skip_special_tokens")
def test_skip_special_tokens(ask):
    params = dict(**ALWAYS_EOS, ignore_eos=True, max_tokens=2)
    assert only(ask(**params)).text == ""
    assert only(ask(**params, skip_special_tokens=False)).text == "<|im_end|>" * 2


@conforms("truncate_prompt_tokens")
def test_truncate_prompt_tokens(ask, client):
    prompt = client.tokenize(PROMPT)
    truncated = ask(PROMPT, truncate_prompt_tokens=2)
    assert truncated.usage.prompt_tokens == 2 and ids(truncated) == ids(ask(prompt[-2:])) != ids(ask())


@alone
def test_tools_are_refused_where_the_template_has_no_place_for_them(client, surrounding):
    """As SmolLM2's has none."""
    tool = {"type": "function", "function": {"name": "f"}}
    asked = GenerateRequest(messages=[Message("user", "x")], tools=[tool], sampling_params=SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="has no place for tools") as caught:
        client.generate_unary(asked)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "tools")


@conforms("logprobs")
def test_logprobs(ask):
    assert only(ask()).logprobs is None
    for k in (0, 2, 20):
        output = only(ask(logprobs=k, temperature=1.0, seed=2))
        assert len(output.logprobs) == len(output.token_ids)
        for token_id, entry in zip(output.token_ids, output.logprobs):
            assert entry.chosen.token_id == token_id and token_id in {top.token_id for top in entry.top}
            assert len(entry.top) == (k if entry.chosen.rank <= k else k + 1)
            assert all(top.rank == place for place, top in enumerate(entry.top[:k], 1))
        total = sum(entry.chosen.logprob for entry in output.logprobs)
        assert output.cumulative_logprob == pytest.approx(total, abs=1e-4)
    with pytest.raises(RequestError, match="logprobs = 21"):
        ask(logprobs=21)


@conforms("prompt_logprobs")
def test_prompt_logprobs(ask, client):
    """Scores of the prompt's own tokens: those that generation gives them."""
    assert ask().prompt_logprobs is None
    generated = ask(max_tokens=2, logprobs=2)
    scored = ask(client.tokenize(PROMPT) + ids(generated), max_tokens=1, prompt_logprobs=2)
    assert len(scored.prompt_logprobs) == scored.usage.prompt_tokens and scored.prompt_logprobs[0] is None
    for entry, wanted in zip(scored.prompt_logprobs[-2:], only(generated).logprobs):
        assert entry.chosen.token_id == wanted.chosen.token_id and entry.chosen.rank == 1
        assert entry.chosen.logprob == pytest.approx(wanted.chosen.logprob, abs=1e-3)
