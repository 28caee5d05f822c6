"""The server's log: lines for people, or one JSON object per line for collectors.

In: the format's name. Out: a handler on the root logger that writes to stderr. Invariant: one record is one line of
JSON, tracebacks included.
"""

import json
import logging
import sys
from datetime import UTC, datetime

FORMATS = ("text", "json")
CALL = "tilefuse_call"
"""The attribute of a record that holds the fields of a call."""


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Time in UTC, level, logger, message, and what the record carries besides."""
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= getattr(record, CALL, {})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def set_up_logs(form: str) -> None:
    """Write records of INFO and above to stderr in the format `form`."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
