"""Prompts to tune a drafter on: `python prompts.py FOLDER [COUNT]`.

Two narrow kinds, statements of SQL and replies to customers, and general chat. Of each kind COUNT prompts
(300 unless given) are to be learned; 40 further ones, with other tables and values, or other products and
complaints, are to be measured. Lines are those of Spec-Bench, and the same each time.
"""

import json
import random
import sys
from pathlib import Path

NUM_LEARNED, NUM_MEASURED = 300, 40
# Columns: a name, a group, a number, a day.
TABLES = {
    "sales": ("article", "shop", "revenue", "sold_on"),
    "staff": ("full_name", "office", "wage", "joined_on"),
    "novels": ("headline", "publisher", "pages", "printed_on"),
    "buses": ("plate", "line", "seats", "inspected_on"),
    "pupils": ("nickname", "class", "marks", "enrolled_on"),
    "goods": ("label", "shelf", "price", "delivered_on"),
    "bills": ("customer", "city", "sum", "sent_on"),
    "films": ("caption", "studio", "length", "released_on"),
    "flats": ("street", "district", "rent", "built_on"),
    "runners": ("runner", "club", "points", "born_on"),
    "cases": ("subject", "agent", "priority", "opened_on"),
    "meals": ("dish", "kitchen", "calories", "cooked_on"),
    "meters": ("serial", "building", "reading", "read_on"),
    "tracks": ("song", "album", "seconds", "played_on"),
    "rides": ("driver", "zone", "fare", "started_on"),
    "lessons": ("topic", "teacher", "hours", "held_on"),
}
OTHER_TABLES = {
    "visitors": ("surname", "ward", "weight", "admitted_on"),
    "vessels": ("ship", "harbour", "tonnage", "arrived_on"),
    "canvases": ("motif", "painter", "height", "acquired_on"),
    "credits": ("borrower", "branch", "balance", "signed_on"),
    "oaks": ("species", "park", "girth", "planted_on"),
    "crates": ("sender", "depot", "grams", "scanned_on"),
}
VALUES, OTHER_VALUES = ("Weber", "Oslo", "blue", "closed", "Beta"), ("Tanaka", "Quito", "amber", "waiting")
TASKS = (
    "Count the rows of each {group}.",
    "Show the average {number} for every {group}, the highest first.",
    "List the {name} of all rows with a {number} above {limit}.",
    "Which {few} rows have the largest {number}?",
    "Find the {group} with the smallest total {number}.",
    "Delete all rows with a {day} before {year}.",
    "Set {number} to {limit} for the rows with {name} = '{value}'.",
    "Show every {group} once, sorted.",
    "Count the rows by month of {day} in {year}.",
    "Show {name} and {number} of the rows whose {group} starts with '{letter}'.",
    "Add a text column called remarks.",
    "Add one row with values of your choice.",
    "Find all {name} that occur more than once.",
    "Show each {name} with the share of its {number} in the total.",
    "List the rows of the last {few} days by {day}.",
)
PRODUCTS = (
    *("coffee grinder", "running jacket", "headset", "desk chair", "phone cover", "travel bag", "floor lamp"),
    *("drinking bottle", "mouse", "yoga block", "umbrella", "waffle maker", "tripod", "hose reel", "tablet"),
)
OTHER_PRODUCTS = ("tea kettle", "hammock", "radio", "bookcase", "ski gloves", "hand mixer")
COMPLAINTS = (
    *(
        "came ten days late",
        "broke after two days",
        "has the wrong colour",
        "lacks a screw",
        "was billed twice",
    ),
    *("was left at the neighbour's", "came in a torn box", "is too small", "was ordered by mistake"),
    *("came without a bill", "rattles when it is used", "went to an old address"),
)
OTHER_COMPLAINTS = (
    *("leaks at the lid", "was paid back only in part", "was exchanged for another model", "smells of glue"),
    *("has a manual in the wrong language",),
)
LETTERS = (
    "Write a short and friendly reply to a customer whose {product} {complaint}.",
    "A customer tells us that the {product} {complaint}. Answer for our service team in one paragraph.",
    'Answer this message: "My {product} {complaint}. What will you do about it?"',
    "Write an e-mail to a customer whose {product} {complaint}, and offer a way out.",
    "Apologise to the customer whose {product} {complaint}, and say what happens next.",
)
CHAT = (
    *("Write a short story about a lighthouse keeper.", "Describe a market square on a rainy morning."),
    *("Write a poem of two stanzas about autumn.", "Draft a speech for a friend's wedding."),
    *("Write a product text for a wooden toy.", "Write the first lines of a detective novel."),
    *("Describe an old tree so that a child can picture it.", "Write a letter to your future self."),
    *("Write a travel blog post about a week in Iceland.", "Invent a legend about a mountain lake."),
    *(
        "You are a pirate. Tell me about your last journey.",
        "You are a chef. Explain how to roast vegetables.",
    ),
    *("Pretend to be a guide in a museum and present a vase.", "Speak as a doctor to a patient with a cold."),
    *(
        "You are a librarian. Recommend me three books.",
        "Act as a job interviewer and ask me five questions.",
    ),
    *("You are a gardener. What should I plant in spring?", "Play a teacher who explains fractions."),
    *("You are a detective. How would you find a lost ring?", "Be a coach and motivate a tired runner."),
    *(
        "Anna is older than Ben, and Ben is older than Carl. Who is the youngest?",
        "How many days have 7 weeks?",
    ),
    *("A train leaves at nine and arrives at noon. How long does it travel?", "Why do ships float?"),
    *("I have three apples and eat one. How many are left, and why?", "Is a whale a fish? Give reasons."),
    *("Which is heavier, a kilogram of iron or of feathers?", "What comes next: 2, 4, 8, 16?"),
    *(
        "If all roses are flowers, are all flowers roses?",
        "A shirt costs 20 euros less 25 percent. What is it?",
    ),
    *("Add 17 and 26, then double the result.", "A room is 4 m by 5 m. What is its area?"),
    *("How many minutes are in three and a half hours?", "Explain how to compute the mean of five numbers."),
    *("Solve 3x + 5 = 20.", "What is 15 percent of 240?"),
    *(
        "A car drives 60 km in 45 minutes. How fast is it?",
        "What is the probability of two heads in two throws?",
    ),
    *(
        "Write a Python function that reverses a string.",
        "Write a Python program that counts words in a file.",
    ),
    *(
        "Explain what recursion is, with an example in Python.",
        "Write a function that finds the largest number.",
    ),
    *(
        "What is the difference between a list and a tuple in Python?",
        "Write a loop that prints even numbers.",
    ),
    *("Write an HTML page with a heading and a link.", "How do I sort a dictionary by its values in Python?"),
    *("Write a bash command that finds large files.", "What does a compiler do?"),
    *(
        "Name the people in: Maria met Paul and Ines in Rome.",
        "Extract the dates: from 3 May to 9 June 2021.",
    ),
    *(
        "List the colours in: a red car, a blue door and a green hat.",
        "Which cities are in: Lima, tree, Paris?",
    ),
    *("Summarise in one sentence: the meeting moved from Monday to Friday, as two speakers are ill.",),
    *("Turn into a table: Ann, 30, Berlin; Tom, 25, Madrid.", "Find the verb in: the dog chased a cat."),
    *("Explain photosynthesis to a pupil.", "What causes the tides?", "How does a battery work?"),
    *("What is the difference between weather and climate?", "How do vaccines work?", "What is gravity?"),
    *("Why is the sky blue?", "How does a refrigerator keep food cold?", "What is a black hole?"),
    *("What is DNA?", "Why do leaves change their colour in autumn?", "How is glass made?"),
    *(
        "What were the causes of the French Revolution?",
        "Who was Marie Curie?",
        "Why did the Roman Empire fall?",
    ),
    *("What is the meaning of democracy?", "Explain supply and demand.", "What did Kant write about?"),
    *(
        "How did the printing press change Europe?",
        "What is inflation?",
        "What is the use of a constitution?",
    ),
    *(
        "Translate into French: the house is near the sea.",
        "Translate into German: I would like a cup of tea.",
    ),
    *("Translate into Spanish: where is the station?", "How do you say thank you in five languages?"),
    *("How do I sleep better?", "Give me three tips to learn a language.", "How do I start to save money?"),
    *("Plan a day with children in a large city.", "What should I pack for a hike of two days?"),
    *(
        "Give me a simple recipe for lentil soup.",
        "How do I write a good application?",
        "How do I calm down?",
    ),
    *("Write a slogan for a bakery.", "Describe the sound of a city at night."),
    *("You are an astronaut. What do you see from your window?", "Be a judge and explain a fair trial."),
    *("Why do cats purr?", "What is the difference between a virus and a bacterium?", "How do planes fly?"),
    *("Who painted the Mona Lisa, and why is it famous?", "What is the purpose of the United Nations?"),
    *("Write a regular expression for a date and explain it.", "What is an index of a database?"),
    *("How can two people share a cake fairly?", "What should one know before buying a used bicycle?"),
    *("Explain how a mortgage works.", "Which is more: half of 30 or a third of 48?"),
)


def sql(draw: random.Random, *, is_other: bool) -> str:
    """A statement to write."""
    tables = OTHER_TABLES if is_other else TABLES
    table = draw.choice(sorted(tables))
    name, group, number, day = tables[table]
    task = draw.choice(TASKS).format(
        name=name,
        group=group,
        number=number,
        day=day,
        limit=draw.choice((5, 10, 20, 50, 100, 250)),
        few=draw.choice((3, 5, 10)),
        year=draw.choice((2020, 2022) if is_other else (2019, 2021, 2023)),
        value=draw.choice(OTHER_VALUES if is_other else VALUES),
        letter=draw.choice("CHRT" if is_other else "ABDKMS"),
    )
    return f"The table {table} has the columns id, {name}, {group}, {number} and {day}. {task} Answer in SQL."


def reply(draw: random.Random, *, is_other: bool) -> str:
    """A reply to a customer."""
    return draw.choice(LETTERS).format(
        product=draw.choice(OTHER_PRODUCTS if is_other else PRODUCTS),
        complaint=draw.choice(OTHER_COMPLAINTS if is_other else COMPLAINTS),
    )


def distinct(kind: str, count: int, *, is_other: bool) -> list[str]:
    """Different prompts of a kind, the same each time."""
    draw = random.Random(f"{kind} {is_other}")  # noqa: S311 - prompts, not secrets
    make = {"sql": sql, "replies": reply}[kind]
    found: dict[str, None] = {}
    while len(found) < count:
        found[make(draw, is_other=is_other)] = None
    return list(found)


def write(folder: Path, name: str, prompts: list[str]) -> None:
    """Write a file of prompts."""
    lines = [
        json.dumps({"question_id": number, "category": name, "turns": [prompt]})
        for number, prompt in enumerate(prompts)
    ]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(folder: str, count: str = str(NUM_LEARNED)) -> None:
    """Write all files."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    for kind in ("sql", "replies"):
        write(path, kind, distinct(kind, int(count), is_other=False))
        write(path, f"other_{kind}", distinct(kind, NUM_MEASURED, is_other=True))
    write(path, "chat", list(CHAT))


if __name__ == "__main__":
    main(*sys.argv[1:])
