"""Prompts from which a model writes its own training text, drawn from small tables by a seed.

A drafter learns the choices of its model, so the answers matter and the prompts only have to be as
varied as what people ask: questions, advice, stories, letters, code, arithmetic, and texts to be
summarised or edited. None is in `benchmarks/assistant.jsonl`, which is for measuring.

    python -m examples.drafter.prompts 4000 > prompts.jsonl
"""

from __future__ import annotations

import json
import random
import sys

from examples.embedded.corpus.words import listed
from wedlm_jax.host.command_line import CommandParser, at_least_1, run_command
from wedlm_jax.host.signals import exit_process

TOPICS = listed("""
the moon; volcanoes; the Roman Empire; honey bees; electric cars; chess; coffee; the ocean tides;
vaccines; the printing press; jazz; earthquakes; penguins; solar panels; the human heart; bridges;
the French Revolution; bread; whales; computers; gravity; rivers; the stock market; dreams; trains;
photography; dinosaurs; the Internet; tea; forests; magnets; the Olympic Games; rainbows; clocks;
elections; glaciers; spiders; cheese; airplanes; the brain; libraries; rice; batteries; castles;
deserts; football; inflation; lightning; maps; the violin; recycling; mushrooms; soap; telescopes;
wolves; chocolate; the Silk Road; kites; plastic; sleep; robots; comets; elephants; gardens; salt;
museums; hurricanes; algebra; wine; satellites; owls; paper; the kidney; ballet; ships; silk; atoms;
lighthouses; parrots; democracy; steel; the Nile; cinema; ants; yoga; windmills; tunnels; poetry
""")
PEOPLE = listed("""
a curious child; a new manager; a tired nurse; a retired teacher; a student; a busy parent; a baker;
a farmer; a shy teenager; a taxi driver; a young engineer; an old sailor; a painter; a librarian
""")
GOALS = listed("""
learn a language; save money; run a first marathon; keep a garden in summer; write a good essay;
prepare for an interview; cook for six guests; sleep better; make friends in a new city; read more;
take better photographs; start a small business; learn to swim; stop procrastinating; fix a bicycle;
plan a holiday by train; keep a dog healthy; study for an exam; speak in public; tidy a small flat
""")
FUNCTIONS = listed("""
returns the sum of all even numbers in a list; reverses the words of a sentence; counts vowels in a
string; checks whether a number is prime; merges two sorted lists; returns the n-th Fibonacci
number; removes duplicates from a list; finds the largest value of a dictionary; converts Celsius to
Fahrenheit; checks whether a word is a palindrome; sorts a list of tuples by the second item; reads
a file and counts its lines; flattens a nested list; returns the factorial of a number; finds common
elements of two lists; counts words in a text; computes the average of a list; rotates a list by k
places; validates an e-mail address; transposes a matrix; generates a random password; groups words
by their first letter; finds the longest word of a sentence; returns the digits of a number
""")
LANGUAGES = ["Python", "Python", "Python", "JavaScript", "C"]
SUBJECTS = ["The town council", "A group of students", "The museum", "Our neighbour", "The company"]
DEEDS = listed("""
opened a new park beside the river; built a small bridge; found an old map in the cellar; planted
two hundred trees; repaired the clock of the station; started a weekly market; painted the school;
published a report about water; collected books for the hospital; bought three electric buses
""")
DETAILS = listed("""
It took almost two years; More than four hundred people came to see it; The weather was bad, but
nobody left early; The costs were lower than expected; Local newspapers wrote about it for weeks;
Some residents complained about the noise; Children were given free tickets; The mayor thanked all
volunteers; A second phase is planned for next spring; Nobody knows yet who will pay for it
""")
ORDERS = [
    "Summarize the following text in one sentence:",
    "Summarize the following text in two sentences:",
    "Rewrite the following text in the past tense, changing as little as possible:",
    "Correct any errors in the following text and return it:",
    "Rewrite the following text more formally:",
    "Make a bullet list of the main points of this text:",
    "Replace the first sentence of this text with a question and keep the rest:",
]


def prompt(draw: random.Random) -> str:
    """Draws one prompt."""
    pick = draw.choice
    topic, person, goal = pick(TOPICS), pick(PEOPLE), pick(GOALS)
    kind = draw.random()
    if kind < 0.45:
        a, b = draw.sample(TOPICS, 2)
        return pick(
            [
                f"Explain {topic} to {person}.",
                f"What should {person} know about {topic}?",
                f"Give me {draw.randint(3, 7)} facts about {topic}.",
                f"Why do people care about {topic}?",
                f"Describe the history of {topic} in a few sentences.",
                f"How can {person} {goal}?",
                f"Give {person} {draw.randint(3, 6)} tips to {goal}.",
                f"Make a plan for a week to {goal}.",
                f"Compare {a} and {b}.",
                f"What are the pros and cons of {topic}?",
                f"Write a quiz with {draw.randint(3, 5)} questions about {topic}.",
                f"What is the most common mistake when people try to {goal}?",
            ]
        )
    if kind < 0.6:
        return pick(
            [
                f"Write a short story about {person} and {topic}.",
                f"Write a poem about {topic}.",
                f"Write a polite e-mail in which {person} asks for help to {goal}.",
                f"Write a dialogue between {person} and {pick(PEOPLE)} about {topic}.",
                f"Write an advertisement for a book about {topic}.",
            ]
        )
    if kind < 0.75:
        return f"Write a {pick(LANGUAGES)} function that {pick(FUNCTIONS)}."
    if kind < 0.85:
        x, y, z = (draw.randint(2, 60) for _ in range(3))
        return pick(
            [
                f"What is {x} + {y} * {z}?",
                f"A box holds {x} apples. How many apples do {y} boxes hold? Show the steps.",
                f"{person[0].upper()}{person[1:]} has {x + y} coins and gives away {y}. Then "
                f"{z} more are found. How many are there now?",
                f"List the first {draw.randint(5, 12)} multiples of {x}.",
                f"Count from {x} to {x + draw.randint(8, 20)}.",
            ]
        )
    sentences = [f"{pick(SUBJECTS)} {pick(DEEDS)}."]
    sentences += [f"{one}." for one in draw.sample(DETAILS, draw.randint(2, 4))]
    return f"{pick(ORDERS)}\n\n{' '.join(sentences)}"


def prompts(count: int, seed: int = 0) -> list[str]:
    """Draws ``count`` different prompts."""
    draw, found = random.Random(seed), dict[str, None]()
    while len(found) < count:
        found[prompt(draw)] = None
    return list(found)


def main(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="python -m examples.drafter.prompts",
        description="Writes prompts as JSONL, for `wedlm generate --input`, to standard output.",
    )
    parser.add_argument("count", type=at_least_1, metavar="N", help="number of different prompts")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed for the draw [0]")
    options = parser.parse_args(arguments)
    for number, text in enumerate(prompts(options.count, options.seed)):
        print(json.dumps({"id": number, "messages": [{"role": "user", "content": text}]}))
    return 0


if __name__ == "__main__":
    exit_process(run_command("python -m examples.drafter.prompts", lambda: main(sys.argv[1:])))
