"""Word lists that several regimes share, so that a small vocabulary covers them all."""

from __future__ import annotations


def listed(text: str) -> tuple[str, ...]:
    """Returns the items of a text that are separated by semicolons, or by spaces if it has none."""
    return tuple(" ".join(text.split()).split("; " if ";" in text else " "))


NAMES = listed("""
Ada Ben Clara David Emma Felix Grace Hugo Iris Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina
Victor Anna Boris Eva Tom
""")
THINGS = listed("""
apples pears plums lemons nuts eggs cakes books pens stamps coins cards shells stones beads roses
seeds candles cups plates toys balls kites keys
""")
COLORS = listed("""
red blue green yellow white black brown grey pink golden
""")
ANIMALS = listed("""
fox cat dog horse owl bear wolf rabbit mouse crow deer goat sheep duck frog
""")
PLACES = listed("""
river forest hill bridge lake garden barn mill valley village market meadow tower well road farm
""")
CITIES = listed("""
Paris Rome Oslo Madrid Lima Cairo Delhi Tokyo Berlin Vienna Dublin Boston
""")
JOBS = listed("""
baker doctor teacher farmer pilot painter sailor writer
""")
SEASONS = listed("""
January February March April May June July August September October November December spring
summer autumn winter
""")
CONTAINERS = (
    ("box", "boxes"),
    *((one, f"{one}s") for one in listed("bag basket jar crate drawer tray packet")),
)
