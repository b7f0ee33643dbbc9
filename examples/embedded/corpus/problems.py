"""The word problems: for each its kind and how its numbers are drawn, questions ("?") that share a
solution, and the steps of that solution ("=").

Slots: n, m are people, x, y things in the plural, box/boxes a container; a, b, c, d are given
numbers, drawn as `reasoning.NUMBERS` says. s, u, t are computed by the steps, the last of which
gives the result. Every computation is written "a op b = c" with op one of + - x /.
"""

from __future__ import annotations

from typing import NamedTuple


class Problem(NamedTuple):
    """A form of problem: how its numbers are drawn, its questions, and its solution."""

    kind: str
    numbers: str
    questions: tuple[str, ...]
    solution: str


def _problem(text: str) -> Problem:
    head, *lines = text.split("\n")
    kind, numbers = head.split()
    questions, steps = ([line[2:] for line in lines if line[0] == mark] for mark in "?=")
    return Problem(kind, numbers, tuple(questions), "\n".join(steps))


_TEXT = """\
buy_give plus_minus
? {n} has {a} {x}. {n} buys {b} more and gives {c} to {m}. How many {x} does {n} have now?
? {n} had {a} {x}, bought {b} more and gave {m} {c}. How many {x} are left?
= {n} starts with {a} {x}.
= {n} buys {b}: {a} + {b} = {s}.
= {n} gives {c}: {s} - {c} = {t}.

find_lose plus_minus
? {n} finds {a} {x} in the morning and {b} in the evening, but loses {c}. How many {x} remain?
? {n} found {a} {x}, then {b} more, then lost {c}. How many {x} does {n} keep?
= {n} finds {a} and {b}: {a} + {b} = {s}.
= {n} loses {c}: {s} - {c} = {t}.

bus plus_minus
? A bus carries {a} people. {b} get on and {c} get off. How many people are on the bus?
? There are {a} people on a train. {b} enter and {c} leave. How many people are there?
= {b} people join: {a} + {b} = {s}.
= {c} people go: {s} - {c} = {t}.

three_days plus_plus
? {n} reads {a} pages on Monday, {b} on Tuesday and {c} on Friday. How many pages is that?
? On Monday {n} reads {a} pages, on Tuesday {b}, on Friday {c}. How many in all?
= Monday and Tuesday: {a} + {b} = {s} pages.
= With Friday: {s} + {c} = {t} pages.

work_time plus_plus
? {n} works {a} minutes, rests {b} minutes and works {c} minutes. How long does it all take?
? {n} cooks for {a} minutes, eats for {b} and cleans for {c}. How many minutes in all?
= The first two parts: {a} + {b} = {s} minutes.
= With the last: {s} + {c} = {t} minutes.

age_later plus_plus
? {n} is {a} years old. {m} is {b} years older. How old will {m} be in {c} years?
? {m} is {b} years older than {n}, who is {a}. What is the age of {m} in {c} years?
= {m} is now {a} + {b} = {s} years old.
= In {c} years: {s} + {c} = {t} years old.

eat_give minus_minus
? {n} has {a} {x}. {n} sells {b} and gives {c} to {m}. How many {x} are left?
? From {a} {x}, {n} sells {b} and gives {m} {c}. How many {x} does {n} still have?
= {n} sells {b}: {a} - {b} = {s}.
= {n} gives {c}: {s} - {c} = {t}.

rope minus_minus
? A rope is {a} metres long. {n} cuts off {b} metres, then {c} metres. How long is the rope now?
? {n} cuts {b} metres and then {c} metres from a rope of {a} metres. How much is left?
= After the first cut: {a} - {b} = {s} metres.
= After the second cut: {s} - {c} = {t} metres.

boxes_plus times_plus
? {n} has {a} {boxes} with {b} {x} in each, and {c} more {x}. How many {x} in all?
? There are {b} {x} in each {box}. {n} has {a} {boxes} and {c} single {x}. How many {x} is that?
= In the {boxes}: {a} x {b} = {s} {x}.
= With {c} more: {s} + {c} = {t} {x}.

save_daily times_plus
? {n} has {c} dollars and earns {b} dollars a day. How many dollars does {n} have after {a} days?
? Each day {n} earns {b} dollars. {n} starts with {c} dollars. How many after {a} days?
= In {a} days: {a} x {b} = {s} dollars.
= With the first {c}: {s} + {c} = {t} dollars.

drive_more times_plus
? {n} rides {b} km an hour for {a} hours and then walks {c} km. How far is that?
? For {a} hours {n} rides at {b} km an hour, then walks {c} km. How many km in all?
= The ride is {a} x {b} = {s} km.
= With the walk: {s} + {c} = {t} km.

number_rule times_plus
? Take {b}, multiply it by {a} and add {c}. What do you get?
? {n} thinks of {b}, multiplies by {a} and adds {c}. What is the result?
? What is {a} times {b}, plus {c}?
= Multiply: {a} x {b} = {s}.
= Add: {s} + {c} = {t}.

boxes_minus times_minus
? {n} fills {a} {boxes} with {b} {x} each and then sells {c} {x}. How many {x} remain?
? Each of {a} {boxes} holds {b} {x}. {n} sells {c} {x}. How many {x} are left?
= In the {boxes}: {a} x {b} = {s} {x}.
= {n} sells {c}: {s} - {c} = {t} {x}.

bakery times_minus
? {n} bakes {b} cakes an hour for {a} hours. {c} cakes are eaten. How many remain?
? For {a} hours {n} bakes {b} cakes an hour. People eat {c}. How many cakes are left?
= {n} bakes {a} x {b} = {s} cakes.
= {c} are eaten: {s} - {c} = {t} cakes.

seats times_minus
? A hall has {a} rows of {b} seats. {c} seats are taken. How many seats are free?
? There are {a} rows with {b} seats each, and {c} people sit down. How many seats are free?
= The hall has {a} x {b} = {s} seats.
= Free seats: {s} - {c} = {t}.

area_pond times_minus
? A garden is {a} metres by {b} metres. A pond covers {c} square metres. How much is left?
? {n} has a field of {a} by {b} metres with a pond of {c} square metres. How big is the rest?
= The area is {a} x {b} = {s} square metres.
= Without the pond: {s} - {c} = {t} square metres.

change minus_times
? {n} buys {a} {x} for {b} dollars each and pays with {c} dollars. How much change does {n} get?
? One of the {x} costs {b} dollars. {n} takes {a} and pays {c} dollars. What is the change?
= The cost is {a} x {b} = {s} dollars.
= The change is {c} - {s} = {t} dollars.

trip_left minus_times
? A trip is {c} km. {n} travels {a} hours at {b} km an hour. How many km are left?
? {n} walks {b} km an hour for {a} hours on a road of {c} km. How far is it still?
= {n} has gone {a} x {b} = {s} km.
= Left: {c} - {s} = {t} km.

read_left minus_times
? A book has {c} pages. {n} reads {b} pages a day for {a} days. How many pages remain?
? {n} reads {b} pages a day. After {a} days, how many of the {c} pages remain?
= {n} reads {a} x {b} = {s} pages.
= Pages that remain: {c} - {s} = {t}.

daily_walk plus_times
? Each day {n} walks {a} km in the morning and {b} km at night. How many km in {c} days?
? {n} walks {a} km to work and {b} km home each day. How far is that in {c} days?
= In one day: {a} + {b} = {s} km.
= In {c} days: {s} x {c} = {t} km.

sets plus_times
? {n} puts {a} {x} and {b} {y} in each {box}. How many things are in {c} {boxes}?
? Each {box} holds {a} {x} and {b} {y}. How many things do {c} {boxes} hold?
= In one {box}: {a} + {b} = {s}.
= In {c} {boxes}: {s} x {c} = {t}.

perimeter rectangle
? A garden is {a} metres long and {b} metres wide. How long is the fence around it?
? What is the perimeter of a room of {a} by {b} metres?
? {n} walks once around a field of {a} by {b} metres. How many metres is that?
= Length and width: {a} + {b} = {s} metres.
= All around: {s} x 2 = {t} metres.

share_plus divide_plus
? {n} shares {a} {x} equally among {b} friends. {m} is one of them and had {c}. \
How many {x} has {m} now?
? {b} friends share {a} {x} equally. {m}, one of them, had {c} before. How many {x} has {m} now?
= Each friend gets {a} / {b} = {s} {x}.
= {m} now has {s} + {c} = {t} {x}.

ticket_snack divide_plus
? {b} tickets cost {a} dollars. A lunch costs {c} dollars. How much are one ticket and one lunch?
? {n} pays {a} dollars for {b} tickets and {c} for a lunch. What do one ticket and the lunch cost?
= One ticket costs {a} / {b} = {s} dollars.
= With the lunch: {s} + {c} = {t} dollars.

unit_rate divide_times
? {n} makes {a} {x} in {b} hours. How many {x} does {n} make in {c} hours?
? In {b} hours {n} packs {a} {x}. How many {x} is that in {c} hours?
= In one hour: {a} / {b} = {s} {x}.
= In {c} hours: {s} x {c} = {t} {x}.

unit_price divide_times
? {b} {boxes} of {x} cost {a} dollars. How much do {c} {boxes} cost?
? {n} pays {a} dollars for {b} {boxes} of {x}. What is the price of {c} {boxes}?
= One {box} costs {a} / {b} = {s} dollars.
= {c} {boxes} cost {s} x {c} = {t} dollars.

pool_share plus_divide
? {n} has {a} {x} and {m} has {b}. They share them equally among {c} people. How many does each get?
? {n} brings {a} {x}, {m} brings {b}, and {c} people share them equally. How many for each?
= Together: {a} + {b} = {s} {x}.
= Each gets {s} / {c} = {t} {x}.

average_two average_of_two
? {n} scores {a} points and {m} scores {b}. What is the average?
? What is the average of {a} and {b}?
? {n} is {a} years old and {m} is {b}. What is the average age?
= The sum is {a} + {b} = {s}.
= The average is {s} / 2 = {t}.

average_three average_of_three
? {n} sells {a}, {b} and {c} {x} on three days. What is the average?
? What is the average of {a}, {b} and {c}?
= The first two: {a} + {b} = {s}.
= All three: {s} + {c} = {u}.
= The average is {u} / 3 = {t}.

pack_rest minus_divide
? {n} has {a} {x}. {b} are broken. The rest go equally into {c} {boxes}. How many in each {box}?
? Of {a} {x}, {n} keeps {b} and puts the rest equally in {c} {boxes}. How many are in each {box}?
= The rest: {a} - {b} = {s} {x}.
= In each {box}: {s} / {c} = {t} {x}.

two_kinds two_products
? {n} has {a} {boxes} of {b} {x} and {c} {boxes} of {d} {y}. How many things in all?
? There are {a} {boxes} with {b} {x} and {c} {boxes} with {d} {y}. How many things is that?
= {x}: {a} x {b} = {s}.
= {y}: {c} x {d} = {u}.
= Together: {s} + {u} = {t}.

two_prices two_products
? {n} buys {a} {x} at {b} dollars and {c} {y} at {d} dollars. What does {n} pay?
? What do {a} {x} at {b} dollars and {c} {y} at {d} dollars cost together?
= The {x} cost {a} x {b} = {s} dollars.
= The {y} cost {c} x {d} = {u} dollars.
= Together: {s} + {u} = {t} dollars.

more_than more_total
? {n} has {a} {x}. {m} has {b} more than {n}. How many {x} do they have together?
? {m} has {b} more {x} than {n}, who has {a}. How many {x} have both together?
= {m} has {a} + {b} = {s} {x}.
= Together: {a} + {s} = {t} {x}.

fewer_than fewer_total
? {n} has {a} {x}. {m} has {b} fewer than {n}. How many {x} do they have together?
? {m} has {b} fewer {x} than {n}, who has {a}. How many {x} have both together?
= {m} has {a} - {b} = {s} {x}.
= Together: {a} + {s} = {t} {x}.

times_as_many fold_total
? {n} has {a} {x}. {m} has {b} times as many. How many {x} do they have together?
? {m} has {b} times as many {x} as {n}, who has {a}. How many {x} have both together?
= {m} has {a} x {b} = {s} {x}.
= Together: {s} + {a} = {t} {x}.

age_difference fold_total
? {n} is {a} years old. {m} is {b} times as old. How many years older is {m}?
? {m} is {b} times as old as {n}, who is {a}. By how many years is {m} older?
= {m} is {a} x {b} = {s} years old.
= The difference is {s} - {a} = {u} years.

nested_boxes times_times
? {n} has {a} shelves with {b} {boxes} each. Each {box} holds {c} {x}. How many {x} are there?
? On each of {a} shelves stand {b} {boxes} with {c} {x} each. How many {x} in all?
= There are {a} x {b} = {s} {boxes}.
= They hold {s} x {c} = {t} {x}.

sequence steps_up
? A sequence starts at {a} and goes up by {b}. What is the fourth number?
? {n} starts with {a} {x} and gets {b} more on each of three days. How many at the end?
= First step: {a} + {b} = {s}.
= Second step: {s} + {b} = {u}.
= Third step: {u} + {b} = {t}."""

PROBLEMS: tuple[Problem, ...] = tuple(map(_problem, _TEXT.split("\n\n")))
