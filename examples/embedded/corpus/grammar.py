"""The word choices of the prose regime: slot name to alternatives, which may contain slots.

An alternative that begins with a space is an optional clause; its slot stands directly after a
word. `{a}` and `{b}` are the two subjects that the prompt names, `{n}` and `{m}` two people.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from examples.embedded.corpus.words import listed

GRAMMAR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "adj": listed("""
old young small quiet clever gentle brave tired curious lonely happy hungry proud patient shy
strange kind careful
"""),
        "scene": listed("""
dark bright cold narrow wide silent green misty lovely distant ancient empty peaceful wild sunny
deep forgotten
"""),
        "adv": listed("""
slowly quickly softly gladly carefully suddenly calmly bravely happily sadly silently politely
"""),
        "when": listed("""
one morning; one evening; at dawn; late at night; in early spring; on a cold winter day;
after the rain; before sunrise; in the middle of summer; on the last day of autumn;
one windy afternoon; long ago
"""),
        "later": listed("""
after a while; soon; at last; in the end; before long; an hour later; the next day; that night;
when the sun went down; as the wind grew
"""),
        "weather": listed("""
the rain fell; snow covered the ground; a soft wind blew; the sun was warm; clouds hid the moon;
fog came in from the sea; the stars were out; thunder rolled far away; the air smelled of pine;
leaves drifted down
"""),
        "found": listed("""
a silver key; a broken lantern; a letter with no name; a trail of feathers; an open door;
a small boat; a ring of blue stones; a map drawn by hand; a basket of warm bread;
a bell that made no sound; a book full of songs; a single red glove; a nest of straw;
an old wooden box
"""),
        "friend": listed("""
a {adj} owl; a {adj} traveller; an old fisherman; a {adj} child; a {adj} mouse;
the miller's daughter; a {adj} hen; two {adj} brothers; a merchant from the south;
a {adj} shepherd
"""),
        "want": listed("""
see the sea; learn to sing; find a new home; make a friend; cross to the other side;
sleep without dreams; hear the old stories; follow the music; taste the first honey;
know what the stars were for; build something that lasts
"""),
        "moved": listed("walked wandered ran crept hurried came travelled strolled"),
        "felt": listed("""
felt {adj}; was afraid; could not stop smiling; began to wonder; was full of hope;
remembered home; wanted to stay; forgot the time; felt a little better; knew what to do
"""),
        "clause": (
            "",
            "",
            " while {weather}",
            " because {weather}",
            " without a word",
            " with great care",
            ", humming an old tune",
            ", thinking of home",
            " all alone",
        ),
        "advice": listed("""
Be patient; Follow the light; Do not look back; Share what you have; Listen before you speak;
Take the longer road; Trust your own feet; Come back before dark; Nothing good is lost;
Every door has a key
"""),
        "story_open": (
            "{when}, a {adj} {a} {moved} to the {scene} {b}{clause}.",
            "there was once a {adj} {a} who lived near a {scene} {b}.",
            "a {adj} {a} wanted to {want}, so it {moved} to the {b} {when}.",
            "{when} {weather}, and a {adj} {a} {moved} towards the {scene} {b}.",
            "nobody at the {scene} {b} had ever met such a {adj} {a}.",
        ),
        "story_mid": (
            "the {a} found {found} beside the {b}{clause}.",
            '{later} it met {friend}, who said: "{advice}."',
            "{later} the {a} {felt}{clause}.",
            "the {b} was {scene} and {scene}, and {weather}.",
            "{friend} came by and asked for {found}.",
            "the {a} looked {adv} at the {b} and {felt}.",
            '"I only want to {want}," said the {a} {adv}.',
            "there, under a {scene} tree, lay {found}.",
            "{weather}, but the {adj} {a} {moved} on{clause}.",
        ),
        "story_close": (
            "{later} the {a} went home and {felt}.",
            "from that day the {a} and the {b} were never {scene} again.",
            "{later} {weather}, and the {a} fell asleep.",
            "people still tell of the {a} who wanted to {want}.",
            "the {a} kept {found} and {felt}.",
            "and so the {b} became a {scene} place for everyone.",
        ),
        "place_open": (
            "the {b} is a {scene} place, above all {when}.",
            "not far from here lies a {scene}, {scene} {b}.",
            "few people know the {scene} {b} near {city}.",
            "I first saw the {b} {when}, when {weather}.",
        ),
        "place_mid": (
            "a {scene} path leads past {found} to the {b}.",
            "on some days {friend} sits there and sings {adv}.",
            "{weather}, and everything turns {scene} and {scene}.",
            "you may hear a {a} there, if you wait {adv}.",
            "the stones are {scene}, and the grass is {scene}.",
            "children go there to {want}{clause}.",
            "once {friend} left {found} by the gate.",
            "{when} the light is {scene}, and a {adj} {a} comes to drink.",
        ),
        "place_close": (
            "nobody leaves the {b} without wanting to {want}.",
            "I go back to the {b} whenever I can{clause}.",
            "it is the best place to {want}.",
            "{later} the {b} is {scene} again.",
        ),
        "letter_open": (
            "thank you for {found} that you sent me.",
            "I am writing to you from a {scene} {b}.",
            "it is {when} as I write, and {weather}.",
            "I have been {adj} since you left for {city}.",
        ),
        "letter_mid": (
            "yesterday I {moved} to the {b} with {friend}.",
            "do you remember how {weather} when we were {adj}?",
            "{friend} asked about you and {felt}.",
            "I found {found} behind the {scene} {b}.",
            "my {adj} {a} still sleeps by the fire{clause}.",
            "we hope to {want} before the year is over.",
            "the people here are {adj} and {adj}.",
            'they always say: "{advice}."',
        ),
        "letter_close": listed("""
please come to the {b} soon.; write to me when you can{clause}.;
I think of you {when} and {felt}.; bring {found} if you visit.; let us {want} together in {city}.
"""),
        "weather_open": (
            "{when} {weather} over {city}.",
            "the day began {scene} and {scene} in {city}.",
            "in {city} {weather}, as so often in {a}.",
            "it was a {scene} day in {a}.",
        ),
        "weather_mid": (
            "{later} {weather}, and the streets were {scene}.",
            "the sky above the {b} turned {scene}.",
            "{friend} {moved} home {adv}{clause}.",
            "by noon {weather}.",
            "a {adj} dog {moved} across the {scene} square.",
            "some people {felt}, others {moved} to the {b}.",
        ),
        "weather_close": listed("""
tomorrow will be {scene}, they say.; {later} {weather}.; it was a good day to {want}.;
at night the {b} was {scene} again.
"""),
        "greet": listed("""
Good morning; Hello; Good evening; There you are; Welcome back
"""),
        "ask": listed("""
have you seen the {a} at the {b}?; shall we go to the {scene} {b}?; what did you find at the {b}?;
why is the {a} so {adj} today?; do you want to {want} with me?
"""),
        "reply": listed("""
I only saw {found} there.; no, {weather}, so I stayed at home.; yes, and I {felt}.;
{friend} told me: {advice}.; perhaps the {a} wants to {want}.; I think it is {adj} and {adj}.;
the {b} is too {scene} for me.
"""),
        "turn": listed("""
then we must be {adj}.; let us go there {later}.; I did not know that.;
that sounds {scene} to me.; maybe {friend} can help.; I would rather {want}.;
look, {weather} again!; take {found} with you.
"""),
    }
)
