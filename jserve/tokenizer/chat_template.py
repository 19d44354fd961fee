"""A model's chat template: Jinja in a sandbox, with the functions and variables that HF `transformers` gives templates.

Renders text; `Tokenizer.encode_chat` makes ids of it.  A template comes with the model and is not trusted.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.sandbox


_ROLES = ("system", "user", "assistant", "tool")


class ChatTemplateError(ValueError):
    """A conversation cannot be rendered; the message begins with the field at fault."""

    def __init__(self, message: str, field: str = "messages"):
        super().__init__(message)
        self.field = field


class ToolsRefused(ChatTemplateError):
    """The template shows no tools to the model, so giving some would have no effect."""


class ChatTemplate:
    """`source` renders a conversation; `tool_source`, where given, one with tools."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None):
        """`special_tokens`: the variables bos_token, eos_token, pad_token, unk_token, as far as the model has them."""
        self.source = source
        self.tool_source = tool_source
        self._variables = dict(special_tokens)

    def start(self, add_generation_prompt: bool) -> Callable[[list[dict], Sequence | None], str]:
        """A function from (messages, tools) to text, whose clock stands still: equal arguments give equal texts."""
        now = datetime.datetime.now()

        def render(messages: list[dict], tools: Sequence | None) -> str:
            template = self._tool_template if tools and self.tool_source is not None else self._template
            variables = {
                **self._variables,
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                "strftime_now": now.strftime,
            }
            try:
                return template.render(variables)
            except jinja2.TemplateError as error:  # among them what templates raise by raise_exception
                raise ChatTemplateError(f"messages: the model's chat template refuses them: {error}") from None
            except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise ChatTemplateError(f"messages: the model's chat template fails on them: {reason}") from None

        return render

    def knows_role(self, role: str) -> bool:
        """Whether the model was taught it: one of everybody's roles, or one that the template spells.  Most templates
        would write any other beside their control tokens too."""
        quoted = (f"'{role}'", f'"{role}"')
        return role in _ROLES or any(one in (self.source + (self.tool_source or "")) for one in quoted)

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        return _compile(self.source)

    @functools.cached_property
    def _tool_template(self) -> jinja2.Template:
        return _compile(self.tool_source)


def plain_messages(messages: Sequence[object]) -> list[dict]:
    """Messages as the dicts of JSON values that templates read; keys whose value is None are left out, as in HF."""
    if not messages:
        raise ChatTemplateError("messages is empty: give at least one")
    plain = []
    for index, message in enumerate(messages):
        if dataclasses.is_dataclass(message):
            message = dataclasses.asdict(message)
        if not isinstance(message, Mapping):
            raise ChatTemplateError(f"messages[{index}] = {message!r}: must have role and content")
        role = message.get("role")
        # Templates put the role beside control tokens, so it must not be able to spell one.
        if not isinstance(role, str) or not re.fullmatch(r"\w[\w .-]{0,63}", role):
            shown = repr(role) if len(repr(role)) <= 80 else repr(role)[:77] + "..."
            field = f"messages[{index}].role"
            raise ChatTemplateError(f"{field} = {shown}: must be a word, such as user", field)
        plain.append({key: value for key, value in message.items() if value is not None})
    return plain


def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"messages: the model's chat template is not valid: {error.message} (line {error.lineno}); "
            "send the text as prompt, or prompt_token_ids"
        ) from None


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`, which marks an assistant's text for training, renders what it holds."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str):
    raise jinja2.TemplateError(message)
