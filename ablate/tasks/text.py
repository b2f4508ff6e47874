"""What the tasks share in reading a model's output: plain text out of any completion, numbers out of plain text.

Nothing here raises on model output, and nothing evaluates it: numbers are found by regular expressions and
compared as exact decimals.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

# A minus is a sign only where it cannot be an operator: "5-3" holds 5 and 3, "-3" and "= -3" hold -3.
NUMBER = re.compile(
    r"(?:(?<![\w.)])(?P<sign>-))?(?:\\?[$€£](?P<inner_sign>-)?)?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
)


def completion_text(completion: Any) -> str:
    """The text of a completion as TRL hands it to a reward function: a string, or a list of messages.

    Message contents may be a string, None or a list of typed blocks; whatever else comes gives "".
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, dict):
        content = completion.get("content")
        if isinstance(content, str):
            return content
        if isinstance(content, list):
            blocks = (block.get("text") for block in content if isinstance(block, dict))
            return "".join(text for text in blocks if isinstance(text, str))
        return ""
    if isinstance(completion, list):
        return "".join(completion_text(message) for message in completion)
    return ""


def ended(completion_ids: Sequence[int] | None, stop_token_ids: Sequence[int]) -> bool:
    """Whether the model itself ended the completion.

    The end-of-sequence token is lost in decoded text, so it is looked for in the token ids. Without ids it is
    unknown and counts as not seen.
    """
    if completion_ids is None or len(completion_ids) == 0:
        return False
    return int(completion_ids[-1]) in stop_token_ids


def numbers(text: str) -> list[Decimal]:
    """Every number in `text`, in order: thousands commas, decimals, signs and currency marks understood.

    Units, percent signs and words around a number are skipped. Only ASCII digits count.
    """
    found = []
    for match in NUMBER.finditer(text.replace("\u2212", "-")):
        negative = match["sign"] or match["inner_sign"]
        found.append(Decimal(("-" if negative else "") + match["digits"].replace(",", "")))
    return found


def the_number(text: str) -> Decimal | None:
    """The one number an answer states, or None.

    "18", "$1,080.50", "18 dollars" and "5 + 13 = 18" (what follows the last "=") state one; a list of guesses
    states none, so that naming many numbers does not pay.
    """
    found = numbers(text.rsplit("=", 1)[-1])
    return found[0] if len(found) == 1 else None
