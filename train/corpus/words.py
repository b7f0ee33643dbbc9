"""Word lists that several regimes share, so that a small vocabulary covers them all."""

NAMES = (
    "Ada", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jack",
    "Kate", "Leo", "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor",
    "Anna", "Boris", "Eva", "Tom",
)  # fmt: skip

THINGS = (
    "apples", "pears", "plums", "lemons", "nuts", "eggs", "cakes", "books", "pens", "stamps",
    "coins", "cards", "shells", "stones", "beads", "roses", "seeds", "candles", "cups",
    "plates", "toys", "balls", "kites", "keys",
)  # fmt: skip

CONTAINERS = (
    ("box", "boxes"), ("bag", "bags"), ("basket", "baskets"), ("jar", "jars"),
    ("crate", "crates"), ("drawer", "drawers"), ("tray", "trays"), ("packet", "packets"),
)  # fmt: skip

COLORS = (
    "red", "blue", "green", "yellow", "white", "black", "brown", "grey", "pink", "golden",
)  # fmt: skip

ANIMALS = (
    "fox", "cat", "dog", "horse", "owl", "bear", "wolf", "rabbit", "mouse", "crow", "deer",
    "goat", "sheep", "duck", "frog",
)  # fmt: skip

PLACES = (
    "river", "forest", "hill", "bridge", "lake", "garden", "barn", "mill", "valley", "village",
    "market", "meadow", "tower", "well", "road", "farm",
)  # fmt: skip

CITIES = (
    "Paris", "Rome", "Oslo", "Madrid", "Lima", "Cairo", "Delhi", "Tokyo", "Berlin", "Vienna",
    "Dublin", "Boston",
)  # fmt: skip

JOBS = (
    "baker", "doctor", "teacher", "farmer", "pilot", "painter", "sailor", "writer",
)  # fmt: skip
