"""Log lines of a server: for people, or one JSON object a line for what collects them."""

from __future__ import annotations

import json
import logging
import time
from typing import TextIO

from jserve.engine.request_log import FIELDS

FORMATS = ("text", "json")


class TextFormatter(logging.Formatter):
    """`time LEVEL logger: message key=value ...`"""

    def __init__(self):
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in getattr(record, FIELDS, {}).items() if name != "event"}
        return " ".join([super().formatMessage(record), *(f"{name}={value}" for name, value in fields.items())])


class JsonFormatter(logging.Formatter):
    """One object: time (UTC), level, logger, message, the structured fields, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up(stream: TextIO, *, as_json: bool, requests: bool, debug: bool) -> None:
    """The libraries' own talk stays out of the log, their warnings do not.  `requests`: a line for each that ended."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    logging.basicConfig(handlers=[handler])
    logging.getLogger("jserve").setLevel(logging.DEBUG if debug else logging.INFO)
    logging.getLogger("jserve.requests").setLevel(logging.INFO if requests else logging.WARNING)
