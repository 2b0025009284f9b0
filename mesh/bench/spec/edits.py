"""`repository-edit`: give back a file with one small change, as coding assistants do all day."""

from __future__ import annotations

from typing import Final

from mesh.bench.spec.workload import Workload, chat_question

_STACK: Final = '''\
class Stack:
    """Last in, first out."""

    def __init__(self) -> None:
        self.items = []

    def push(self, item) -> None:
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()

    def size(self) -> int:
        return len(self.items)
'''

_PRICES: Final = """\
TAX_RATE = 0.19


def net_price(order):
    total = 0
    for item in order:
        total += item.price * item.count
    return total


def gross_price(order):
    return net_price(order) * (1 + TAX_RATE)


def print_bill(order):
    for item in order:
        print(item.name, item.count, item.price)
    print("total", gross_price(order))
"""

_SETTINGS: Final = """\
server:
  host: 127.0.0.1
  port: 8080
  workers: 4
  timeout_seconds: 30
database:
  url: sqlite:///data/app.db
  pool_size: 5
  echo: false
logging:
  level: info
  format: json
  file: logs/app.log
"""

_TEXTS: Final = """\
def count_words(text):
    counts = {}
    for word in text.lower().split():
        word = word.strip(".,;:!?")
        if word:
            counts[word] = counts.get(word, 0) + 1
    return counts


def most_common(text, limit):
    counts = count_words(text)
    ordered = sorted(counts.items(), key=lambda pair: -pair[1])
    return ordered[:limit]
"""

_EDITS: Final = (
    ("stack", "stack.py", _STACK, "rename the method `size` to `length`"),
    ("prices", "prices.py", _PRICES, "change TAX_RATE to 0.21"),
    ("settings", "settings.yaml", _SETTINGS, "change the port to 9090"),
    ("texts", "texts.py", _TEXTS, "rename the function `count_words` to `word_counts`"),
)


def repository_edit() -> Workload:
    """Files of 12 to 19 lines, each with the change to make."""
    return Workload(
        "repository-edit",
        tuple(
            chat_question(
                label,
                f"This is the file {name}:\n\n```\n{content}```\n\n"
                f"In this file, {change}. Answer with the whole file after the change and nothing else.",
            )
            for label, name, content, change in _EDITS
        ),
    )
