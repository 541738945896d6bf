"""Sums and differences of two numbers of two digits: rows, and their reward."""

import random

HELD_OUT, TRAINING = 200, 2000


def problems():
    """Different problems, in a fixed order."""
    numbers, found = random.Random(1), {}
    while len(found) < HELD_OUT + TRAINING:
        a, b, sign = numbers.randint(10, 99), numbers.randint(10, 99), numbers.choice("+-")
        asked = f"State the final answer to the following arithmetic problem: {a} {sign} {b} ="
        found[asked] = str(a + b if sign == "+" else a - b)
    return [{"prompt": asked, "answer": answer} for asked, answer in found.items()]


def training():
    """Rows to train on."""
    return problems()[HELD_OUT:]


def solved():
    """Rows to train on, with their answers."""
    return [{**row, "completion": f" {row['answer']}."} for row in training()]


def held_out():
    """Rows to evaluate on."""
    return problems()[:HELD_OUT]


def right(row, completion):
    """1 for the right number and nothing else."""
    return float(completion.finish_reason == "stop" and completion.text.strip() == row["answer"])
