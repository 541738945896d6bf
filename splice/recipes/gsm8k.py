"""GSM8K's reward."""

import re

NUMBER = re.compile(r"####\s*(-?[\d,]*\.?\d+)")


def final_number(text):
    """The last number after ####, without commas; None if there is none."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def right(row, completion):
    """1 for the right final number of a finished answer."""
    is_right = final_number(completion.text) == final_number(row["answer"])
    return float(completion.finish_reason == "stop" and is_right)
